"""Overlap communication and computation.

`overlap_communication` starts all-reduces and permutations as soon as their operands are ready, and waits where a
result is first used. An equation that needs a result in flight, and leads to no other collective, lets all others go
first. So the program computes while MPI communicates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from collectives.exact import Exact
from collectives.lowering import Lowered, progress_p, start_p, wait_p
from collectives.ops import ppermute_p
from collectives.passes.fuse_psums import PSUMS
from collectives.passes.order import list_schedule
from minidiff.control_flow.dead_code import has_effects
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var, typeof
from minidiff.ops.einsum import einsum_p
from minidiff.ops.linalg import convolve_p, matmul_p
from minidiff.values.dtypes import accumulator_dtype

PRODUCTS = (matmul_p, einsum_p, convolve_p)  # they take a while

#: The collectives that a backend can start and wait for separately; not an exact sum, for which ranks agree first.
OVERLAPPED = (*PSUMS, ppermute_p)

START, COMPUTE, WAIT = range(3)  # priorities, each followed by a place on the tape
LAST = WAIT, math.inf


def overlap_communication(tape: Tape, *_: Any) -> Tape:
    """Start all-reduces and permutations early; wait where a result is first used.

    A collective starts as soon as its operands are ready. An equation that needs a result in flight, and leads to no
    other collective, lets all others go first. A collective is not split if nothing can be computed while it runs.
    After each matrix product that is computed then, MPI is called once, so that it makes progress.
    """
    collectives = {eqn: _split(eqn) for eqn in tape.equations if _can_overlap(eqn)}
    if not collectives:
        return tape
    early = _needed_early(tape, collectives)
    first_use: dict[Any, tuple] = {}  # the priority of the wait for a value
    for k, eqn in enumerate(tape.equations):
        for a in (a for a in eqn.inputs if isinstance(a, Var)):
            first_use[a] = min(first_use.get(a, LAST), (COMPUTE if eqn in early else WAIT, k))
    priorities: dict[Equation, tuple] = {}
    for k, eqn in enumerate(tape.equations):
        if eqn in collectives:
            start, wait = collectives[eqn]
            priorities[start], priorities[wait] = (START, k), min(first_use.get(v, LAST) for v in eqn.outputs)
        else:
            priorities[eqn] = COMPUTE, k
    ordered = list_schedule([*priorities], priorities)
    return with_equations(tape, [*_with_progress(ordered, collectives)])


def _can_overlap(eqn: Equation) -> bool:
    primitive, params = eqn.primitive, eqn.params
    if not isinstance(primitive, Lowered):
        return False
    collective, dtype = params["collective"].per_operand or params["collective"], typeof(eqn.inputs[0]).dtype
    if collective in PSUMS and accumulator_dtype(dtype) != dtype:
        return False  # while it is in flight, a sum of 16-bit floats takes a buffer of twice their bytes
    return collective in OVERLAPPED and primitive.sends(params) and not isinstance(collective, Exact)


def _needed_early(tape: Tape, collectives: Collection[Equation]) -> set[Equation]:
    """Return the collectives and the equations with effects, with all that they need."""
    early: set[Equation] = set()
    needed: set[Any] = set()
    for eqn in reversed(tape.equations):
        if eqn in collectives or has_effects(eqn) or not needed.isdisjoint(eqn.outputs):
            early.add(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    return early


def _split(eqn: Equation) -> tuple[Equation, Equation]:
    """Return the equations that start a collective and wait for it."""
    collective, ranks = eqn.params["collective"], eqn.params["ranks"]
    sends_operands = (collective.per_operand or collective) is ppermute_p and not ranks.at_once
    start_of = start_p(collective, sends_operands)
    (type,) = start_of.typecheck([typeof(a) for a in eqn.inputs], eqn.params)
    start = Equation(start_of, eqn.inputs, eqn.params, (Var(type),), eqn.source)
    params = {"ranks": ranks, "types": tuple(v.type for v in eqn.outputs)}
    return start, Equation(wait_p(collective), start.outputs, params, eqn.outputs, eqn.source)


def _with_progress(
    ordered: Sequence[Equation], collectives: Mapping[Equation, tuple[Equation, Equation]]
) -> Iterator[Equation]:
    """Yield equations, with calls of MPI after products; a collective that is waited for at once is not split."""
    waits = {start: (wait, eqn) for eqn, (start, wait) in collectives.items()}
    in_flight: dict[Equation, Equation] = {}  # by wait, the start
    unsplit: Equation | None = None  # the wait that the collective before it includes
    for eqn, following in zip(ordered, [*ordered[1:], None]):
        if eqn is unsplit:
            continue
        if eqn in waits:
            wait, collective = waits[eqn]
            if following is wait:
                unsplit = wait
                yield collective
            else:
                in_flight[wait] = eqn
                yield eqn
            continue
        yield eqn
        in_flight.pop(eqn, None)
        if in_flight and eqn.primitive in PRODUCTS:
            start = next(iter(in_flight.values()))
            if not start.params["ranks"].at_once:
                yield Equation(progress_p, start.outputs, {"ranks": start.params["ranks"]}, [], eqn.source)
