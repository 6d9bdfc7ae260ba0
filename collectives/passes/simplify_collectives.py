"""Fewer collectives for the same result: what a tape with collectives may be simplified to.

============================================== ==================================
psum, psum_scatter of pbroadcast, along        a multiplication (of a part)
one axis
all_gather of pbroadcast                       copies
all_gather_invariant, then this rank's part    nothing
pscatter, then all_gather                      nothing
psums that do not depend on each other         one psum of several values
============================================== ==================================

psums that are added up, or of which a part is taken, are one: `delay_psums.py`.
All are declared by the decorators of `minidiff/compiler/simplify.py`, and can be left out by name: that of the
function, in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import collectives.passes.delay_psums  # noqa: F401  (its pass is to come before those here)
from collectives.ops import (
    all_gather_invariant_p,
    all_gather_p,
    as_factor,
    pbroadcast_p,
    pscatter_p,
    psum_p,
    psum_scatter_p,
    untyped_psum_p,
)
from collectives.primitives import grouped, variadic
from minidiff.compiler.fusion import Groups
from minidiff.compiler.simplify import Program, rewrites_tapes, simplifies, with_equations
from minidiff.core import Scope
from minidiff.location import joined, parted
from minidiff.ops.elementwise import multiply
from minidiff.ops.shape import broadcast_to_p, reshape_p
from minidiff.tape import Atom, Equation, Tape, Var, atom_type

PSUMS = (psum_p, untyped_psum_p, grouped(untyped_psum_p))
VARIADIC = tuple(map(variadic, PSUMS))

#: How many bytes at most are summed in one call, unless one array alone has more: enough for the network to be busy
#: with, few enough for the sum to begin before the last gradient is there.
BUCKET_BYTES = 25 << 20

# ---------------------------------------------------------------- of what all ranks have


@simplifies(psum_p, psum_scatter_p)
def _sum_of_copies(program: Program, eqn: Equation) -> Equation | None:
    before = program.made_by(eqn.inputs[0], pbroadcast_p)
    if before is None or set(before.params["axes"]) != set(eqn.params["axes"]):
        return None
    (x,), t = before.inputs, eqn.outputs[0].type
    if eqn.primitive is psum_scatter_p:
        x = program.add(pscatter_p, [x], eqn.params)
    return Equation(multiply.primitive, [x, as_factor(eqn.params["size"], t)], {}, eqn.outputs)


# ---------------------------------------------------------------- cutting and joining


def _undoes(eqn: Equation, before: Equation | None) -> bool:
    """Whether the one cuts along the axes along which the other joins, or the reverse.

    One of them may do so along an array axis that is there, and the other along a new one: that is a reshape.
    """
    return before is not None and all(before.params[k] == eqn.params[k] for k in ("axes", "axis"))


def _reshaped(program: Program, a: Atom, eqn: Equation) -> Atom | None:
    """A value in the place of an equation's result, which has its entries in their order."""
    t, own = eqn.outputs[0].type, atom_type(a)
    if t.variance != own.variance:
        return None
    return a if t.shape == own.shape else program.add(reshape_p, [a], {"shape": t.shape})


@simplifies(pscatter_p)
def _local_slice_of_gathered(program: Program, eqn: Equation) -> Atom | None:
    before = program.made_by(eqn.inputs[0], all_gather_invariant_p)
    return _reshaped(program, before.inputs[0], eqn) if _undoes(eqn, before) else None


@simplifies(all_gather_p, all_gather_invariant_p)
def _gathered_local_slices(program: Program, eqn: Equation) -> Any:
    before = program.made_by(eqn.inputs[0], pscatter_p)
    return _as_result_of(program, eqn, before.inputs[0]) if _undoes(eqn, before) else None


@simplifies(all_gather_p, all_gather_invariant_p)
def _gathered_copies(program: Program, eqn: Equation) -> Any:
    """What is the same on all ranks, as often as there are ranks: each has it."""
    before = program.made_by(eqn.inputs[0], pbroadcast_p)
    if before is None or set(before.params["axes"]) != set(eqn.params["axes"]):
        return None
    (x,), axis, size = before.inputs, eqn.params["axis"], eqn.params["size"]
    shape = atom_type(x).shape
    x = program.add(reshape_p, [x], {"shape": (*shape[:axis], 1, *shape[axis:])})
    x = program.add(broadcast_to_p, [x], {"shape": (*shape[:axis], size, *shape[axis:])})
    return _as_result_of(program, eqn, x)


def _as_result_of(program: Program, eqn: Equation, a: Atom) -> Any:
    """An invariant value in the place of a gathered one, which may be typed as varying."""
    if eqn.primitive is all_gather_invariant_p:
        return _reshaped(program, a, eqn)
    shape = eqn.outputs[0].type.shape
    if atom_type(a).shape != shape:
        a = program.add(reshape_p, [a], {"shape": shape})
    return Equation(pbroadcast_p, [a], {k: eqn.params[k] for k in ("axes", "size")}, eqn.outputs)


# ---------------------------------------------------------------- several in one call


def _variadic_psum(parts: Sequence[Equation]) -> Equation:
    """One call for sums of one value each."""
    first, *others = parts
    if not others:
        return first
    inputs, outputs = [e.inputs[0] for e in parts], [e.outputs[0] for e in parts]
    return Equation(variadic(first.primitive), inputs, first.params, outputs, joined([e.source for e in parts]))


@rewrites_tapes(first=True)
def take_psums_apart(tape: Tape) -> Tape:
    """psums of several values as psums of one: rules speak of those, and those can be put together otherwise."""
    if not any(eqn.primitive in VARIADIC for eqn in tape.equations):
        return tape
    return with_equations(tape, [part for eqn in tape.equations for part in _apart(eqn)])


def _apart(eqn: Equation) -> list[Equation]:
    if eqn.primitive not in VARIADIC:
        return [eqn]
    parts = zip(eqn.inputs, eqn.outputs, parted(eqn.source, len(eqn.inputs)))
    return [Equation(eqn.primitive.each, [a], eqn.params, [v], source) for a, v, source in parts]


@rewrites_tapes(in_scope=True, bucket_bytes=BUCKET_BYTES)
def fuse_psums(tape: Tape, bucket_bytes: int, scope: Scope | None = None) -> Tape:
    """psums over the same axes, of one dtype, that do not depend on each other: in one call, as many as a bucket holds.

    They come into buckets in the order of the tape, in which they become ready, and a bucket is summed where its last
    one was: what uses its results comes after.
    """
    if sum(eqn.primitive in PSUMS for eqn in tape.equations) < 2:
        return tape
    if scope is not None and 1 in scope.axes.values():
        tape = with_equations(tape, [part for eqn in tape.equations for part in _axes_apart(eqn, scope)])
    buckets = Groups(tape, _summed_alike, _size, bucket_bytes)
    if all(len(members) == 1 for members in buckets.members):
        return tape
    return with_equations(tape, [_variadic_psum(part) for part in buckets.in_order()])


def _axes_apart(eqn: Equation, scope: Scope) -> list[Equation]:
    """A psum as one along the axes of several ranks, which can be one with others, and one that costs nothing."""
    alone = tuple(a for a in eqn.params["axes"] if scope.axes[a] == 1) if eqn.primitive is psum_p else ()
    rest = tuple(a for a in eqn.params["axes"] if a not in alone) if alone else ()
    if not rest:
        return [eqn]
    (x,), t = eqn.inputs, atom_type(eqn.inputs[0])
    between = Var(t.update(variance=t.variance.difference(rest)))
    return [
        Equation(psum_p, [x], {**eqn.params, "axes": rest}, [between], eqn.source),
        Equation(psum_p, [between], {**eqn.params, "axes": alone, "size": 1}, eqn.outputs, eqn.source),
    ]


def _over(eqn: Equation) -> Any:
    """What is summed over: of all ranks along axes the order does not matter."""
    axes, groups = eqn.params["axes"], eqn.params.get("groups")
    return eqn.primitive, frozenset(axes) if groups is None else axes, groups


def _summed_alike(eqn: Equation) -> Any:
    """What psums that can be one have in common; None for what is no psum, or one that costs nothing."""
    if eqn.primitive not in PSUMS or not eqn.primitive.sends(eqn.params):
        return None
    return _over(eqn), atom_type(eqn.inputs[0]).dtype


def _size(eqn: Equation) -> int:
    return atom_type(eqn.inputs[0]).nbytes
