"""Fewer psums for the same result: fuse those that do not wait for each other.

A psum of copies, of a pbroadcast over the same axes, is a multiplication. `delay_psums.py` fuses psums that are added,
and psums with a local slice taken of them; `collectives/passes/__init__.py` lists all passes in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collectives.collective import Collective, grouped_collective
from collectives.exact import exact
from collectives.operands import as_factor
from collectives.ops import pbroadcast_p, psum_p, untyped_psum_p
from collectives.passes.order import group_equations
from collectives.passes.variadic import variadic
from minidiff.compiler.simplify import Program
from minidiff.core.ranks import Scope
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import typeof
from minidiff.errors.location import fuse_locations, split_location
from minidiff.ops.elementwise import multiply

_PSUMS = (psum_p, untyped_psum_p, grouped_collective(untyped_psum_p))
PSUMS: tuple[Collective, ...] = (*_PSUMS, *map(exact, _PSUMS))
VARIADIC = tuple(map(variadic, PSUMS))

#: `bucket_bytes`: the most bytes summed in one call, unless a single array has more; None for `bucket_size`.
SETTINGS: dict[str, int | None] = {"bucket_bytes": None}

#: A bucket is enough to keep the network busy, and few enough for the first sum to begin before the last gradient is
#: ready: a part of the model, within these bounds. So the buffers of a step are a small part of what a rank holds.
PART_OF_MODEL, MIN_BUCKET, MAX_BUCKET = 16, 256 << 10, 25 << 20


def bucket_size(nbytes: int) -> int:
    """Return the most bytes of a bucket, for arrays of `nbytes` together.

    >>> bucket_size(1000), bucket_size(16 << 20), bucket_size(16 << 30)
    (262144, 1048576, 26214400)
    """
    return min(max(-(-nbytes // PART_OF_MODEL), MIN_BUCKET), MAX_BUCKET)


# ---------------------------------------------------------------- psums of invariant values


def sum_of_copies(program: Program, eqn: Equation) -> Equation | None:
    before = program.producer_of(eqn.inputs[0], pbroadcast_p)
    if before is None or set(before.params["axes"]) != set(eqn.params["axes"]):
        return None
    factor = as_factor(eqn.params["size"], eqn.outputs[0].type)
    return Equation(multiply.primitive, [before.inputs[0], factor], {}, eqn.outputs)


# ---------------------------------------------------------------- variadic psums


def _variadic_psum(parts: Sequence[Equation]) -> Equation:
    """Fuse psums of one value each into one variadic psum."""
    first, *others = parts
    if not others:
        return first
    inputs, outputs = [e.inputs[0] for e in parts], [e.outputs[0] for e in parts]
    return Equation(variadic(first.primitive), inputs, first.params, outputs, fuse_locations([e.source for e in parts]))


def split_variadic_psums(tape: Tape, *_: Any) -> Tape:
    """Split variadic psums into psums of one value, which rewrites match; `fuse_psums` regroups them."""
    if not any(eqn.primitive in VARIADIC for eqn in tape.equations):
        return tape
    return with_equations(tape, [part for eqn in tape.equations for part in _split_variadic(eqn)])


def _split_variadic(eqn: Equation) -> list[Equation]:
    if eqn.primitive not in VARIADIC:
        return [eqn]
    parts = zip(eqn.inputs, eqn.outputs, split_location(eqn.source, len(eqn.inputs)))
    return [Equation(eqn.primitive.per_operand, [a], eqn.params, [v], source) for a, v, source in parts]


def fuse_psums(tape: Tape, _: Scope | None, settings: Mapping[str, Any]) -> Tape:
    """Fuse independent psums over the same axes and of one dtype, by bucket.

    Buckets are filled in tape order, the order in which operands become ready. What does not wait for a bucket's call
    moves before it.
    """
    nbytes = {eqn: typeof(eqn.inputs[0]).nbytes for eqn in tape.equations if eqn.primitive in PSUMS}
    if len(nbytes) < 2:
        return tape
    limit = settings["bucket_bytes"] or bucket_size(sum(nbytes.values()))
    buckets = list(group_equations(tape, _fusion_key, nbytes.__getitem__, limit))
    if len(buckets) == len(tape.equations):
        return tape
    return with_equations(tape, [_variadic_psum(bucket) for bucket in buckets])


def _fusion_key(eqn: Equation) -> Any:
    """Return the key that psums must share to be fused; None for others and free ones."""
    if eqn.primitive not in PSUMS or not eqn.primitive.sends(eqn.params):
        return None
    axes, groups = eqn.params["axes"], eqn.params.get("groups")
    over = frozenset(axes) if groups is None else axes  # groups count ranks in the order of the axes
    return eqn.primitive, over, groups, eqn.params.get("axis"), typeof(eqn.inputs[0]).dtype
