"""The typing rules: operands agree along mesh axes. The errors say which cast to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core.ranks import cast_like
from minidiff.core.states import ALL_INVARIANT, common_states
from minidiff.core.tracer import Tracer, Value, states_of
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import VarianceError, list_items, show_axes
from minidiff.inputs.arguments import disagreement

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_operands(name: str, types: Sequence[ShapedArray | None]) -> None:
    """Raise VarianceError if the operands of operation `name` disagree along a mesh axis.

    A type of None is that of a constant, which agrees with anything.
    """
    states = tuple(t.states for t in types if t is not None)
    if len(set(states)) > 1 and common_states(states) != [*states]:
        numbers = [f"the {_ORDINALS[i]}" if i < len(_ORDINALS) else f"number {i + 1}" for i in range(len(types))]
        labeled = {label: t for label, t in zip(numbers, types) if t is not None}
        raise disagreement(f"{name}: operands {list_items([*labeled.values()])}", [*labeled], [*labeled.values()])


def check_unreduced(primitive: Any, types: Sequence[Any]) -> None:
    """Raise VarianceError if an operation is not linear in its unreduced operands together.

    Operands are given by their types, or as Python numbers. Zeros may be unreduced: their sum is zero.
    """
    zeros = {i for i, t in enumerate(types) if not isinstance(t, ShapedArray) and t == 0}
    states = [t.states if isinstance(t, ShapedArray) else ALL_INVARIANT for t in types]
    for axis in sorted(frozenset().union(*[s.unreduced for s in states])):
        parts = {i for i, s in enumerate(states) if axis in s.unreduced}
        linear = any(primitive.is_linear_in(positions, len(types)) for positions in (parts, parts | zeros))
        varies = any(axis in other.varying for other in states)
        if linear and not varies:
            continue
        outside = any(isinstance(t, ShapedArray) and t.sharding is not None for t in types)
        advice = "write spmd.reshard(x, P()) first" if outside else f"write psum(x, {axis!r}) first, or psum_scatter"
        if not outside and parts != {*range(len(types))} and primitive.is_linear_in({*range(len(types))}, len(types)):
            part = "x" if varies else "np.zeros(...)"
            advice += f"; or make all operands partial sums, with unreduced({part}, {axis!r})"
        raise VarianceError(
            f"{primitive.name} of {list_items(types)}: the ranks along {axis!r} hold partial sums; {advice}"
        )


def cast_cotangent(ct: Value, type: ShapedArray) -> Value:
    """Cast a cotangent along mesh axes to its primal's cotangent type, or raise VarianceError."""
    states, wanted = states_of(ct), type.states.cotangent()
    if states == wanted:
        return ct
    extra = states.varying - wanted.varying - wanted.unreduced
    if extra:
        axes = show_axes(extra)
        raise VarianceError(
            f"a cotangent of type {typeof(ct)} for a value of type {type} varies along {axes}, where the value does "
            f"not: sum it, psum(ct, {axes}), if each rank has a partial sum; or, if each has its own cotangent, let "
            f"the value vary too: compute it from pbroadcast(x, {axes})"
        )
    same = wanted.unreduced - states.varying_or_unreduced
    if same and (isinstance(ct, Tracer) or numpy.any(ct)):
        axes = show_axes(same)
        raise VarianceError(
            f"the value of type {type} has a cotangent of type {typeof(ct)}, the same on all ranks along {axes}, where "
            f"it must be unreduced: in the body, differentiate pmean(pbroadcast(x, {axes}), {axes}) in place of "
            "x, which is the same number and invariant there; or, to give a cotangent, one that varies or is unreduced"
        )
    return cast_like(ct, type.cotangent)
