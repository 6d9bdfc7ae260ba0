"""Hold gathered arrays, gradients that are not summed yet, and what updates a parameter only while they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collectives.ops import all_gather_invariant_p, all_gather_p, all_gather_reduced_p, psum_scatter_p
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var
from minidiff.higher_order.checkpoint import recompute_p
from minidiff.higher_order.effects import has_effects
from minidiff.ops.shape import concatenate_p

#: The collectives whose results are larger than their operands, and those whose results are smaller.
GROWING = (all_gather_p, all_gather_invariant_p, all_gather_reduced_p)
SHRINKING = (psum_scatter_p,)


def gather_just_in_time(tape: Tape, *_: Any) -> Tape:
    """Gather an array just before its first use; sum and split gradients as soon as they are ready.

    What only rearranges operands of these collectives, or gathered arrays, moves with them. What follows the last sum
    on the way to a result, such as the update of a parameter, is done result by result. So a program whose parameters
    are split over ranks holds one layer's at a time, whatever the order in which it was written.
    """
    sending = [eqn for eqn in tape.equations if _collective_of(eqn) is not None and eqn.primitive.sends(eqn.params)]
    if not any(_collective_of(eqn) in (*GROWING, *SHRINKING) for eqn in sending):
        return tape
    return with_equations(tape, _Ordered(tape, sending).equations)


def _collective_of(eqn: Equation) -> Any:
    """The collective that an equation on a backend's data runs; None for other equations."""
    return eqn.params.get("collective")


def _rearranges(eqn: Equation) -> bool:
    primitive = eqn.primitive
    if primitive.is_higher_order or has_effects(eqn):
        return False
    if _collective_of(eqn) is not None:
        return not primitive.sends(eqn.params)  # a cast, or a local slice
    return primitive.shares_memory or primitive in (concatenate_p, recompute_p)


class _Ordered:
    """The equations of a tape in another order; `sending` are its collectives."""

    def __init__(self, tape: Tape, sending: Sequence[Equation]):
        self.maker = {v: eqn for eqn in tape.equations for v in eqn.outputs}
        growing = {eqn for eqn in sending if _collective_of(eqn) in GROWING}
        shrinking = [eqn for eqn in sending if _collective_of(eqn) in SHRINKING]
        moved = self._leading_to({*growing, *shrinking}, _rearranges)
        waiting = self._with_followers(tape, growing, _rearranges) | moved  # until something needs them
        waiting |= self._updates(tape, [eqn for eqn in sending if eqn not in growing])
        #: sum that runs early -> the equations, of those that do not wait, whose results it needs
        missing = {eqn: self._needs(eqn, waiting) for eqn in shrinking}
        self.equations: list[Equation] = []
        self.done: set[Equation] = set()
        for eqn in [*(e for e in shrinking if not missing[e]), *(e for e in tape.equations if e not in waiting)]:
            self._run(eqn)
            for ready in [other for other in shrinking if missing[other] == {eqn}]:
                self._run(ready)
            for others in missing.values():
                others.discard(eqn)
        results = dict.fromkeys(self.maker[a] for a in tape.outputs if isinstance(a, Var) and a in self.maker)
        inner = self._leading_to({made for eqn in results for made in self._makers(eqn)}, lambda eqn: True)
        for eqn in sorted(results, key=inner.__contains__):  # the last first: they lead to the others
            self._run(eqn)

    def _makers(self, eqn: Equation) -> Iterable[Equation]:
        return (self.maker[a] for a in eqn.inputs if isinstance(a, Var) and a in self.maker)

    def _with_followers(
        self, tape: Tape, equations: Iterable[Equation], along: Callable[[Equation], bool]
    ) -> set[Equation]:
        """These equations, and those that need their results `along` such equations."""
        found = set(equations)
        for eqn in tape.equations:
            if along(eqn) and any(made in found for made in self._makers(eqn)):
                found.add(eqn)
        return found

    def _leading_to(self, equations: set[Equation], along: Callable[[Equation], bool]) -> set[Equation]:
        """These equations, and those whose results they need `along` such equations."""
        found, stack = set(equations), [*equations]
        while stack:
            new = {made for made in self._makers(stack.pop()) if along(made)} - found
            found |= new
            stack += new
        return found

    def _updates(self, tape: Tape, sums: Sequence[Equation]) -> set[Equation]:
        """What follows the last sums, and what is computed for it alone from the program's arguments."""
        effects = {eqn for eqn in tape.equations if has_effects(eqn)}
        earlier = self._leading_to({*sums, *effects}, lambda eqn: True)
        found = self._with_followers(tape, sums, lambda eqn: eqn not in earlier) - {*sums}
        users: dict[Equation, set[Equation]] = {}
        for eqn in tape.equations:
            for made in self._makers(eqn):
                users.setdefault(made, set()).add(eqn)
        alone: set[Equation] = set()
        for eqn in tape.equations:
            if eqn not in earlier and all(made in alone for made in self._makers(eqn)):
                alone.add(eqn)
        for eqn in reversed(tape.equations):
            if eqn in alone and users.get(eqn) and users[eqn] <= found:
                found.add(eqn)
        return found

    def _needs(self, eqn: Equation, waiting: set[Equation]) -> set[Equation]:
        chain = self._leading_to({eqn}, waiting.__contains__)
        return {made for member in chain for made in self._makers(member)} - waiting

    def _run(self, eqn: Equation) -> None:
        """Append an equation, after what it still needs."""
        stack = [eqn]
        while stack:
            if stack[-1] in self.done:
                stack.pop()
                continue
            needed = [made for made in self._makers(stack[-1]) if made not in self.done]
            if needed:
                stack += reversed(needed)
            else:
                self.equations.append(made := stack.pop())
                self.done.add(made)
