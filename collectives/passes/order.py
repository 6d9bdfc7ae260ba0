"""Orders of equations: in groups, by priorities, in buckets."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from minidiff.control_flow.dead_code import has_effects
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import Var

Item = TypeVar("Item")


def _no_key(*args: Any) -> int:
    return 0


def group_equations(
    tape: Tape,
    key: Callable[[Equation], Any],
    size: Callable[[Equation], int] = _no_key,
    limit: int = 0,
    inside: Callable[[Equation, Atom, Equation], Any] = _no_key,
) -> Iterator[list[Equation]]:
    """Yield a tape's equations in an order in which those with equal keys are together.

    Equations without a key (None) run as soon as they can, each by itself. When there are no more of them, the
    equations with one key that can run form a group, while the sum of their sizes is at most `limit`. The key is the
    one with the fewest equations that cannot run yet.

    No member of a group depends on another, unless `inside(maker, a, user)` says that the value `a` may pass within
    the group, from the equation that makes it to the one that uses it. Equations with effects keep their order.
    """
    place = {eqn: k for k, eqn in enumerate(tape.equations)}
    missing, users = dependencies(tape.equations)
    keys = {eqn: group_key for eqn in tape.equations if (group_key := key(eqn)) is not None}
    waiting = Counter(keys.values())  # by key: how many equations cannot run yet
    ready: dict[Any, list[Equation]] = {}  # by key: those that can, in the order of the tape
    keyless: list[int] = []  # the places of those without a key

    def mark_ready(eqn: Equation) -> None:
        if eqn in keys:
            waiting[keys[eqn]] -= 1
            ready.setdefault(keys[eqn], []).append(eqn)
        else:
            heapq.heappush(keyless, place[eqn])

    for eqn in [eqn for eqn in tape.equations if not missing[eqn]]:
        mark_ready(eqn)
    while keyless or ready:
        if keyless:
            group = [tape.equations[heapq.heappop(keyless)]]
        else:
            chosen = min(ready, key=lambda k: (waiting[k], place[ready[k][0]]))
            group, remaining = split_by_limit(sorted(ready.pop(chosen), key=place.__getitem__), size, limit)
            if remaining:
                ready[chosen] = remaining
            for member in group:  # which grows
                for eqn in users[member]:
                    if keys.get(eqn) == chosen and eqn not in group and _passes(eqn, group, missing[eqn], inside):
                        waiting[chosen] -= 1
                        group.append(eqn)
        yield group
        for member in group:
            for eqn in users[member]:
                missing[eqn].discard(member)
                if not missing[eqn] and eqn not in group:
                    mark_ready(eqn)


def dependencies(
    equations: Sequence[Equation],
) -> tuple[dict[Equation, set[Equation]], dict[Equation, list[Equation]]]:
    """Return for each equation those that it depends on, and those that depend on it."""
    producers: dict[Var, Equation] = {}
    missing: dict[Equation, set[Equation]] = {}
    users: dict[Equation, list[Equation]] = {eqn: [] for eqn in equations}
    effect = None
    for eqn in equations:
        missing[eqn] = {producers[a] for a in eqn.inputs if isinstance(a, Var) and a in producers}
        if has_effects(eqn):
            missing[eqn].update([effect] if effect is not None else [])
            effect = eqn
        for producer in missing[eqn]:
            users[producer].append(eqn)
        producers.update((v, eqn) for v in eqn.outputs)
    return missing, users


def list_schedule(equations: Sequence[Equation], priorities: Mapping[Equation, Any]) -> list[Equation]:
    """Return equations in another order: of those that can run, the one of least priority comes next."""
    ranks = {eqn: (priorities[eqn], k) for k, eqn in enumerate(equations)}
    missing, users = dependencies(equations)
    ready = [(ranks[eqn], eqn) for eqn in equations if not missing[eqn]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, eqn = heapq.heappop(ready)
        ordered.append(eqn)
        for user in users[eqn]:
            missing[user].remove(eqn)
            if not missing[user]:
                heapq.heappush(ready, (ranks[user], user))
    return ordered


def split_into_buckets(items: list[Item], key: Callable, nbytes: Callable, limit: int) -> Iterator[list[Item]]:
    """Yield items that share a key, the last first, in buckets of at most `limit` bytes; take them from the list."""
    groups: dict[Any, list[Item]] = {}
    while items:
        groups.setdefault(key(items[-1]), []).append(items.pop())
    for group_key in [*groups]:
        remaining = groups.pop(group_key)
        while remaining:
            bucket, remaining = split_by_limit(remaining, nbytes, limit)
            yield bucket


def split_by_limit(eqns: list[Item], size: Callable[[Item], int], limit: int) -> tuple[list[Item], list[Item]]:
    """Split off the first items, as many as fit into `limit` but at least one."""
    total = size(eqns[0])
    for k, eqn in enumerate(eqns[1:], 1):
        total += size(eqn)
        if total > limit:
            return eqns[:k], eqns[k:]
    return eqns, []


def _passes(
    eqn: Equation, group: list[Equation], missing: set[Equation], inside: Callable[[Equation, Atom, Equation], Any]
) -> bool:
    """Return True if an equation needs nothing but what passes to it within a group."""
    producers = {v: e for e in group for v in e.outputs}
    operands = [a for a in eqn.inputs if isinstance(a, Var) and a in producers]
    return missing <= {*group} and all(inside(producers[a], a, eqn) for a in operands)
