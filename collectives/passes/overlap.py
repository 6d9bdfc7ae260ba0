"""Lowered collectives, on a backend's data, and their overlap with computation.

The tape of a `shard_map` body says what each rank does. To compile it, a recorder runs it on a backend, which yields a
tape of what this process does to its data: the blocks of all simulated ranks, or this rank's block under MPI. In that
tape a collective is an ordinary operation that happens to communicate.

`overlap_communication` starts all-reduces and permutations as soon as their operands are ready, and waits where a
result is first used. What needs a result in flight, and leads to no other collective, lets everything else go first.
So the program computes while MPI communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from collectives.backends.base import Axes, Backend
from collectives.ops import ppermute_p
from collectives.passes.fuse_psums import PSUMS
from collectives.primitives import Collective
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.higher_order.effects import has_effects
from minidiff.ops.base import Specialized
from minidiff.ops.linalg import convolve_p, einsum_p, matmul_p
from minidiff.values.dtypes import accumulator_dtype


class Lowered(Specialized):
    """A collective, of one value or several, on a backend's data.

    Parameters: the `collective`, its own `params`, the backend `ranks`, and `held`, the axes each operand varies along.
    """

    def __init__(self, collective: Collective, shares_memory: bool):
        super().__init__(collective.name)
        self.multiple_results = collective.multiple_results
        self.shares_memory = shares_memory

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        collective, own = params["collective"], params["params"]
        given = list(zip(operands, params["held"]))
        prepare, how = params["ranks"].prepare, (self.multiple_results, params.get("in_place", False))
        return prepare(collective.name, given, collective.sends(own), own, *how)

    def writes(self, eqn: Equation) -> bool:
        ranks, own, x = eqn.params["ranks"], eqn.params["params"], typeof(eqn.inputs[0])
        sums = self.name == "psum" and not self.multiple_results and self.sends(eqn.params) and "groups" not in own
        return sums and ranks.sums_in_place(x, own["size"]) and accumulator_dtype(x.dtype) == x.dtype

    def simulated(self, params: dict) -> Callable[..., Any]:
        """What simulated ranks do with their data: operations, which can be recorded."""
        given, several = [(None, held) for held in params["held"]], params["collective"].multiple_results
        return params["ranks"].prepare(params["collective"].name, given, False, params["params"], several)

    def sends(self, params):
        return params["collective"].sends(params["params"])

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        ranks, rest = params["ranks"], (params["collective"], params["params"])
        return [_result_type(x, held, ranks, *rest) for x, held in zip(types, params["held"])]

    def show_params(self, params: dict) -> str:
        return params["collective"].show_params(params["params"])


def _result_type(x: ShapedArray, held: Axes, ranks: Backend, collective: Collective, params: dict) -> ShapedArray:
    block = ShapedArray(ranks.block_shape(x, held), x.dtype)
    shape, dtype = collective.shape_rule(block, **params)
    return ShapedArray(ranks.data_shape(shape, ranks.held_after(collective.name, held, params)), dtype)


class Start(Lowered):
    """Start a collective. `Wait` takes its result, which represents data in flight.

    If it sends the operands themselves, not copies, the result shares memory with them, so that nothing writes into
    these before the collective completes.
    """

    def __init__(self, collective: Collective, shares_memory: bool):
        super().__init__(collective, shares_memory)
        self.name, self.multiple_results = f"{collective.name}_start", False

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        given = list(zip(operands, params["held"]))
        return params["ranks"].prepare_start(params["collective"].name, given, params["params"])

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray((sum(x.size for x in types),), types[0].dtype)]


class Wait(Specialized):
    """Wait for a started collective. Parameters: the backend `ranks`, and the `types` of the results."""

    shares_memory = True  # the results are views of one buffer
    multiple_results = True

    def __init__(self, collective: Collective):
        super().__init__(f"{collective.name}_wait")

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        return params["ranks"].wait

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return list(params["types"])

    def show_params(self, params: dict) -> str:
        return ""


class Progress(Specialized):
    """Let MPI go on with what is in flight. Many MPI libraries do so only while the program calls them."""

    has_effect = True
    multiple_results = True

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        return params["ranks"].progress

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return []

    def show_params(self, params: dict) -> str:
        return ""


class Index(Specialized):
    """Each rank's index along some axes; no constant: all ranks share the program."""

    shares_memory = True

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        index, _ = params["ranks"].axis_index(params["axes"])
        return index.copy

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        return [ShapedArray(params["ranks"].data_shape((), params["held"]), int)]


lowered_p, start_p, wait_p = map(functools.cache, (Lowered, Start, Wait))
progress_p = Progress("progress")
index_p = Index("axis_index")


def run_lowered(
    collective: Collective, operands: Sequence[tuple[Any, Axes]], ranks: Backend, params: dict
) -> list[tuple[Any, Axes]]:
    """Bind a lowered collective, unless it moves nothing: the results, each with the axes it varies along."""
    helds = tuple(held for _, held in operands)
    if all(ranks.moves_nothing(collective.name, typeof(x), held, params) for x, held in operands):
        outs = [x for x, _ in operands]
    else:
        may_be_operand = (
            collective.shares_memory or ranks.at_once or not collective.sends(params) or "groups" in params
        )  # of single ranks
        found = lowered_p(collective, may_be_operand).bind(
            *[x for x, _ in operands], collective=collective, params=params, ranks=ranks, held=helds
        )
        outs = found if collective.multiple_results else [found]
    return [(out, ranks.held_after(collective.name, held, params)) for out, held in zip(outs, helds)]


def bind_index(axes: Axes, ranks: Backend) -> tuple[Any, Axes]:
    """Bind `Index`: each rank's index along `axes`, and the axes it varies along."""
    held = ranks.sort_axes(axes)
    return index_p.bind(axes=axes, ranks=ranks, held=held), held


# ---------------------------------------------------------------- overlap of communication and computation

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
