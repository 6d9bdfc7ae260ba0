"""The operands of collectives: leaves of trees, cast to the states that an operation takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from collectives.axes import CollectiveAxes, rank_count
from collectives.checks import checks
from collectives.collective import Collective, grouped_collective
from minidiff import tree
from minidiff.core.interpreter import current_interpreter, lift
from minidiff.core.ranks import cast_to
from minidiff.core.states import UNREDUCED, VARYING, AxisStates
from minidiff.core.tracer import Tracer, Value, WeakTracer, states_of
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import VarianceError
from minidiff.inputs.arguments import as_value, normalize_axis
from minidiff.ops import elementwise
from minidiff.ops.shape import expand_dims, squeeze
from minidiff.values.dtypes import is_scalar_constant


def array_of(x: Any) -> Value:
    """Convert a leaf to a value of the running body."""
    if not isinstance(x, Tracer):
        return as_value(x)
    return x if x.interpreter is current_interpreter() and type(x) is not WeakTracer else lift(x)


def each_leaf(collective: Callable[..., Value], x: Any, *options: Any) -> Any:
    """Apply a collective, with these options, to each leaf of a tree; a VarianceError names the leaf."""
    if isinstance(x, Tracer):
        return collective(x, *options)
    leaves, structure = tree.flatten(x)
    results: list[Value] = []
    try:
        for leaf in leaves:
            results.append(collective(leaf, *options))
    except VarianceError as error:
        path = tree.paths(structure, "x")[len(results)]
        if path == "x":
            raise
        raise VarianceError(f"{path}: {error}") from None
    return tree.unflatten(structure, results)


def make_varying(x: Value, group: CollectiveAxes) -> Value:
    """Insert a pbroadcast of `x` along the axes it does not vary along, unless the user writes those."""
    return _cast_over(x, group, VARYING)


def parts_over(x: Value, group: CollectiveAxes) -> Value:
    """Cast the operand of a sum: to unreduced if it is unreduced along one of the axes, else to varying."""
    partial = group.groups is None and not states_of(x).unreduced.isdisjoint(group.axes)
    return _cast_over(x, group, UNREDUCED if partial else VARYING)


def _cast_over(x: Value, group: CollectiveAxes, state: str) -> Value:
    scope, axes, _ = group
    states = states_of(x)
    if getattr(states, state).issuperset(axes) or not scope.typed or (scope.checks and not is_scalar_constant(x)):
        return x
    return cast_to(x, states.with_state(axes, state))


def varying_axes(x: Value, group: CollectiveAxes) -> tuple[str, ...]:
    """Return the axes of `group` that `x` varies, or is unreduced, along: all if untyped, or if casts are explicit."""
    if not group.scope.typed or (group.scope.checks and not is_scalar_constant(x)):
        return group.axes
    return _varying_among(states_of(x), group.axes)


@functools.lru_cache(maxsize=4096)
def _varying_among(states: AxisStates, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if a in states.varying_or_unreduced)


def convert_booleans(x: Value) -> Value:
    """Convert booleans to integers, so that sums count them."""
    if not isinstance(x, Tracer) and is_scalar_constant(x):
        return as_value(int(x)) if isinstance(x, (bool, numpy.bool_)) else x
    return elementwise.convert(x, int) if x.dtype.kind == "b" else x


def sum_copies(x: Value, copies: int) -> Value:
    """Sum `copies` copies of `x`, by a multiplication."""
    return x if copies == 1 else x * as_factor(copies, x)


def as_factor(copies: int, x: Value | ShapedArray) -> int:
    """Convert a count to a factor for `x`; small integers wrap around, as in sums."""
    dtype = getattr(x, "dtype", None)  # Python numbers have none
    return int(numpy.asarray(copies).astype(dtype)) if dtype is not None and dtype.kind in "iu" else copies


def bind_over(primitive: Collective, x: Value, group: CollectiveAxes, **params: Any) -> Value:
    """Bind a collective of `x` over the axes and groups of `group`."""
    primitive = primitive if group.groups is None else grouped_collective(primitive)
    return primitive.bind(x, **group.params, **params)


def gather_over(
    name: str, step: Callable, leaf: Any, axis_groups: Sequence[CollectiveAxes], axis: int, tiled: bool
) -> Value:
    """Gather blocks over several axis groups by `step`, the last one first."""
    leaf = array_of(leaf)
    at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), name)
    if len(axis_groups) != 1 and not tiled:  # add the new axis once, then let each group concatenate along it
        leaf, tiled = expand_dims(leaf, at), True
    for group in reversed(axis_groups):
        leaf = step(leaf, group, at, tiled)
    return leaf


def scatter_over(
    name: str, step: Callable, leaf: Any, axis_groups: Sequence[CollectiveAxes], axis: int, tiled: bool
) -> Value:
    """Split a dimension over several axis groups by `step`, the first one first."""
    leaf = array_of(leaf)
    at = normalize_axis(axis, typeof(leaf).ndim, name)
    checks.split(name, leaf, at, rank_count(axis_groups), tiled)
    cut = tiled or len(axis_groups) != 1
    for group in axis_groups:
        leaf = step(leaf, group, at, cut)
    return leaf if cut == tiled else squeeze(leaf, at)
