"""Hold gathered arrays, unsummed gradients, and what updates a parameter only while they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collectives.passes.order import dependencies, list_schedule
from minidiff.control_flow.checkpoint import recompute_p
from minidiff.control_flow.dead_code import has_effects
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var
from minidiff.ops.shape import concatenate_p

SCATTER, COMPUTE, UPDATE = range(3)  # priorities, each followed by a place


def gather_just_in_time(tape: Tape, *_: Any) -> Tape:
    """Gather an array just before its first use; sum and split gradients as soon as they are ready.

    What only rearranges operands of these collectives, or gathered arrays, moves with them. What follows the last sum
    on the way to a result, such as the update of a parameter, is done result by result. So a program whose parameters
    are split over ranks holds one layer's at a time, whatever the order in which it was written.
    """
    sending = [eqn for eqn in tape.equations if _grows(eqn) is not None and eqn.primitive.sends(eqn.params)]
    if not any(map(_grows, sending)):
        return tape
    return with_equations(tape, list_schedule(tape.equations, _Dependencies(tape).priorities(sending)))


def _grows(eqn: Equation) -> int | None:
    """Return whether the collective of an equation gathers (1), scatters (-1) or neither (0); None for others."""
    return eqn.params["collective"].growth if "collective" in eqn.params else None


def _rearranges(eqn: Equation) -> bool:
    primitive = eqn.primitive
    if primitive.is_higher_order or has_effects(eqn):
        return False
    if _grows(eqn) is not None:
        return not primitive.sends(eqn.params)  # a cast, or a local slice
    return primitive.shares_memory or primitive in (concatenate_p, recompute_p)


class _Dependencies:
    """The equations of a tape, with those whose results each takes, and those that take its results."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.producers, self.users = dependencies(tape.equations)

    def priorities(self, sending: Sequence[Equation]) -> dict[Equation, tuple]:
        """Return the priorities of the equations, of which `sending` are collectives."""
        gathers = {eqn for eqn in sending if _grows(eqn) == 1}
        scatters = {eqn for eqn in sending if _grows(eqn) == -1}
        moved = self._predecessors({*gathers, *scatters}, _rearranges) | self._with_successors(gathers, _rearranges)
        moved |= self._updates([eqn for eqn in sending if eqn not in gathers])
        results = self._results()
        priorities: dict[Equation, tuple] = {}
        for k, eqn in reversed([*enumerate(self.tape.equations)]):
            if eqn in scatters:
                priorities[eqn] = SCATTER, k
            elif eqn not in moved:
                priorities[eqn] = COMPUTE, k
            else:  # just before its first user
                uses = [priorities[user] for user in self.users[eqn]]
                priorities[eqn] = min([*uses, (UPDATE, results.get(eqn, len(results)))])
        return priorities

    def _results(self) -> dict[Equation, int]:
        """Return the order of the equations of the results: last, those that lead to others."""
        by_result = {v: eqn for eqn in self.tape.equations for v in eqn.outputs}
        outputs = [a for a in self.tape.outputs if isinstance(a, Var) and a in by_result]
        results = dict.fromkeys(by_result[a] for a in outputs)
        inner = self._predecessors({p for eqn in results for p in self.producers[eqn]}, lambda eqn: True)
        return {eqn: k for k, eqn in enumerate(sorted(results, key=inner.__contains__))}

    def _with_successors(self, equations: Iterable[Equation], along: Callable[[Equation], bool]) -> set[Equation]:
        """Return these equations, and those that need their results `along` such equations."""
        followers = set(equations)
        for eqn in self.tape.equations:
            if along(eqn) and not followers.isdisjoint(self.producers[eqn]):
                followers.add(eqn)
        return followers

    def _predecessors(self, equations: set[Equation], along: Callable[[Equation], bool]) -> set[Equation]:
        """Return these equations, and those whose results they need `along` such equations."""
        leading, stack = set(equations), [*equations]
        while stack:
            new = {producer for producer in self.producers[stack.pop()] if along(producer)} - leading
            leading |= new
            stack += new
        return leading

    def _updates(self, sums: Sequence[Equation]) -> set[Equation]:
        """Return what follows the last sums, and what is computed for it alone from the program's arguments."""
        effects = {eqn for eqn in self.tape.equations if has_effects(eqn)}
        earlier = self._predecessors({*sums, *effects}, lambda eqn: True)
        updates = self._with_successors(sums, lambda eqn: eqn not in earlier) - {*sums}
        used_only_there: set[Equation] = set()
        for eqn in self.tape.equations:
            if eqn not in earlier and used_only_there.issuperset(self.producers[eqn]):
                used_only_there.add(eqn)
        for eqn in reversed(self.tape.equations):
            if eqn in used_only_there and self.users[eqn] and updates.issuperset(self.users[eqn]):
                updates.add(eqn)
        return updates
