"""Fewer psums for the same result: fuse those that do not wait for each other.

A psum of copies, of a pbroadcast over the same axes, is a multiplication. `delay_psums.py` fuses psums that are added,
and psums with a local slice taken of them; `collectives/passes/__init__.py` lists all passes in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collectives.ops import as_factor, pbroadcast_p, psum_p, untyped_psum_p
from collectives.primitives import grouped_collective, variadic
from minidiff.compiler.fusion import group_equations
from minidiff.compiler.simplify import Program
from minidiff.core.scope import Scope
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import typeof
from minidiff.diagnostics.location import fuse_locations, split_location
from minidiff.ops.elementwise import multiply

PSUMS = (psum_p, untyped_psum_p, grouped_collective(untyped_psum_p))
VARIADIC = tuple(map(variadic, PSUMS))

#: `bucket_bytes`: the most bytes summed in one call, unless a single array has more: enough to keep the network busy,
#: few enough for the first sum to begin before the last gradient is ready.
SETTINGS = {"bucket_bytes": 25 << 20}

# ---------------------------------------------------------------- psums of invariant values


def sum_of_copies(program: Program, eqn: Equation) -> Equation | None:
    before = program.made_by(eqn.inputs[0], pbroadcast_p)
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
    return [Equation(eqn.primitive.each, [a], eqn.params, [v], source) for a, v, source in parts]


def fuse_psums(tape: Tape, _: Scope | None, settings: Mapping[str, Any]) -> Tape:
    """Fuse independent psums over the same axes and of one dtype, by bucket.

    Buckets are filled in tape order, the order in which operands become ready. What does not wait for a bucket's call
    moves before it.
    """
    if sum(eqn.primitive in PSUMS for eqn in tape.equations) < 2:
        return tape
    buckets = list(
        group_equations(tape, _fusion_key, lambda eqn: typeof(eqn.inputs[0]).nbytes, settings["bucket_bytes"])
    )
    if len(buckets) == len(tape.equations):
        return tape
    return with_equations(tape, [_variadic_psum(bucket) for bucket in buckets])


def _fusion_key(eqn: Equation) -> Any:
    """The key that psums must share to be fused; None for others and free ones."""
    if eqn.primitive not in PSUMS or not eqn.primitive.sends(eqn.params):
        return None
    axes, groups = eqn.params["axes"], eqn.params.get("groups")
    over = frozenset(axes) if groups is None else axes  # groups count ranks in the order of the axes
    return eqn.primitive, over, groups, typeof(eqn.inputs[0]).dtype
