"""A list scheduler: of the equations that can run, the one of least priority comes next."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from minidiff.core.tape import Equation
from minidiff.core.types import Var


def list_schedule(equations: Sequence[Equation], priorities: Mapping[Equation, Any]) -> list[Equation]:
    """Return the equations in another order, in which each comes after those whose results it takes."""
    ranks = {eqn: (priorities[eqn], k) for k, eqn in enumerate(equations)}
    producers = producers_of(equations)
    missing = {eqn: len(producers[eqn]) for eqn in equations}
    users = defaultdict(list)
    for eqn in equations:
        for producer in producers[eqn]:
            users[producer].append(eqn)
    ready = [(ranks[eqn], eqn) for eqn in equations if not missing[eqn]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, eqn = heapq.heappop(ready)
        ordered.append(eqn)
        for user in users[eqn]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (ranks[user], user))
    return ordered


def producers_of(equations: Sequence[Equation]) -> dict[Equation, list[Equation]]:
    """Return for each equation those whose results it takes, each once."""
    by_result = {v: eqn for eqn in equations for v in eqn.outputs}
    operands = {eqn: [a for a in eqn.inputs if isinstance(a, Var) and a in by_result] for eqn in equations}
    return {eqn: [*dict.fromkeys(by_result[a] for a in atoms)] for eqn, atoms in operands.items()}
