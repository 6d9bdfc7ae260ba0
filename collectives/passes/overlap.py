"""Overlap communication and computation.

`overlap_communication` starts all-reduces and permutations as soon as their operands are ready, and waits where a
result is first used. An equation that needs a result in flight, and leads to no other collective, lets all others go
first. So the program computes while MPI communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.lowering import Lowered, progress_p, start_p, wait_p
from collectives.ops import ppermute_p
from collectives.passes.fuse_psums import PSUMS
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var, typeof
from minidiff.higher_order.effects import has_effects
from minidiff.ops.convolution import convolve_p
from minidiff.ops.einsum import einsum_p
from minidiff.ops.linalg import matmul_p
from minidiff.values.dtypes import accumulator_dtype

PRODUCTS = (matmul_p, einsum_p, convolve_p)  # what takes a while

#: The collectives that a backend can start and wait for separately.
OVERLAPPED = (*PSUMS, ppermute_p)


def overlap_communication(tape: Tape, *_: Any) -> Tape:
    """Start all-reduces and permutations early; wait where a result is first used.

    A collective starts as soon as its operands are ready. What needs a result in flight, and leads to no other
    collective, lets everything else go first. A collective is not split if nothing can be computed meanwhile. After
    each matrix product that is computed meanwhile, MPI is called once, so that what is in flight goes on.
    """
    found = [eqn for eqn in tape.equations if _can_overlap(eqn)]
    return with_equations(tape, _Overlapped(tape, found).equations) if found else tape


def _can_overlap(eqn: Equation) -> bool:
    primitive, params = eqn.primitive, eqn.params
    if not isinstance(primitive, Lowered):
        return False
    collective, dtype = params["collective"].each or params["collective"], typeof(eqn.inputs[0]).dtype
    if collective in PSUMS and accumulator_dtype(dtype) != dtype:
        return False  # while it is under way, a sum of 16-bit floats takes a buffer of twice their bytes
    return collective in OVERLAPPED and primitive.sends(params)


def _needed_early(tape: Tape, collectives: set[Equation]) -> set[Equation]:
    """The collectives, and the equations with effects, with all that they need."""
    early: set[Equation] = set()
    needed: set[Any] = set()
    for eqn in reversed(tape.equations):
        if eqn in collectives or has_effects(eqn) or not needed.isdisjoint(eqn.outputs):
            early.add(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    return early


class _Overlapped:
    """A tape's equations, with the collectives `found` split into `Start` and `Wait`."""

    def __init__(self, tape: Tape, found: Sequence[Equation]):
        self.equations: list[Equation] = []
        self.split = split = set(found)
        #: collective that has not started -> the operands it still needs
        self.missing = {eqn: {a for a in eqn.inputs if isinstance(a, Var)} for eqn in found}
        self.under_way: dict[Var, tuple[Equation, Equation]] = {}  # result -> the collective, and its `Start`
        self.arrived = 0  # how many collectives have been waited for
        self.unknown: set[Var] = set()  # the results of delayed equations
        self._make_available(tape.inputs)
        early = _needed_early(tape, split)
        self.delayed: list[Equation] = []
        for eqn in tape.equations:
            arrived = self.arrived
            self._compute(eqn, delay=eqn not in early)
            if self.arrived > arrived:
                self._compute_delayed()
        self._compute_delayed(delay=False)
        self._need(tape.outputs)

    def _waits(self, eqn: Equation) -> bool:
        """Whether an equation needs a value in flight, or one that is computed later."""
        return any(isinstance(a, Var) and (a in self.under_way or a in self.unknown) for a in eqn.inputs)

    def _compute(self, eqn: Equation, delay: bool) -> None:
        """Append an equation, or `delay` it if it waits."""
        if delay and self._waits(eqn):
            self.delayed.append(eqn)
            self.unknown.update(eqn.outputs)
            return
        self._need(eqn.inputs)
        if eqn not in self.split:
            self.equations.append(eqn)
            self._make_progress(eqn)
            self._make_available(eqn.outputs)

    def _make_progress(self, eqn: Equation) -> None:
        """After a product, which takes a while, let collectives in flight go on."""
        if self.under_way and eqn.primitive in PRODUCTS:
            collective, start = next(iter(self.under_way.values()))
            if not collective.params["ranks"].at_once:
                params = {"ranks": collective.params["ranks"]}
                self.equations.append(Equation(progress_p, start.outputs, params, [], eqn.source))

    def _compute_delayed(self, delay: bool = True) -> None:
        """Compute the delayed equations, by default those that need nothing in flight any more."""
        equations, self.delayed, self.unknown = self.delayed, [], set()
        for eqn in equations:
            self._compute(eqn, delay)

    def _make_available(self, names: Sequence[Var]) -> None:
        """Start the collectives whose last missing operands are among these names."""
        for eqn, atoms in list(self.missing.items()):
            atoms.difference_update(names)
            if not atoms:
                self._start(eqn)

    def _start(self, eqn: Equation) -> None:
        del self.missing[eqn]
        collective = eqn.params["collective"]
        sends_operands = (collective.each or collective) is ppermute_p and not eqn.params["ranks"].at_once
        primitive = start_p(collective, sends_operands)
        (type,) = primitive.typecheck([typeof(a) for a in eqn.inputs], eqn.params)
        start = Equation(primitive, eqn.inputs, eqn.params, (Var(type),), eqn.source)
        self.equations.append(start)
        self.under_way.update((v, (eqn, start)) for v in eqn.outputs)

    def _need(self, atoms: Sequence[Any]) -> None:
        """Wait for those of these values that are in flight."""
        for a in atoms:
            if isinstance(a, Var) and a in self.under_way:
                self._finish(*self.under_way[a])

    def _finish(self, eqn: Equation, start: Equation) -> None:
        self.arrived += 1
        for v in eqn.outputs:
            del self.under_way[v]
        if self.equations[-1] is start:
            self.equations[-1] = eqn
        else:
            wait = wait_p(eqn.params["collective"])
            params = {"ranks": eqn.params["ranks"], "types": tuple(v.type for v in eqn.outputs)}
            self.equations.append(Equation(wait, start.outputs, params, eqn.outputs, eqn.source))
        self._make_available(eqn.outputs)
