"""Slices of a known size that start where a value says: `dynamic_slice` and its like, as `jax.lax` names them.

`x[i : i + n]` needs to know i when a program is written down; here i may be traced: it may be computed on the way,
differ from rank to rank (`axis_index`) or from element to element of a `vmap`. A start that is known is an ordinary
slice; any other becomes indices, `i + arange(n)`, and what is done with them are gathers and scatters as of `x[…]` and
`x.at[…]`, which have all the rules.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core import ShapedArray, Tracer, Value, typeof
from minidiff.ops.elementwise import add, convert, less, maximum, minimum, where
from minidiff.ops.indexing import getitem
from minidiff.ops.shape import as_array, expand_dims, moveaxis, normalize_axis, squeeze
from minidiff.ops.updates import at

__all__ = [
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
]


def dynamic_slice(operand: Value, start_indices: Sequence[Value] | Value, slice_sizes: Sequence[int]) -> Value:
    """The part of `operand`, of shape `slice_sizes`, that begins at `start_indices`: an integer for each axis.

    The sizes are known; the starts may be traced. A negative start counts from the end; then a start is moved so far
    that the slice lies within the array (nothing is ever out of bounds). Differentiable in `operand`.

    Raises ValueError where a slice is larger than the array or numbers of axes disagree, TypeError for a start
    that is no integer.

    >>> import numpy as np
    >>> x = np.arange(12.0).reshape(3, 4)
    >>> dynamic_slice(x, (1, 2), (2, 2))
    array([[ 6.,  7.],
           [10., 11.]])
    >>> dynamic_slice(x, (2, -1), (2, 2))
    array([[ 6.,  7.],
           [10., 11.]])

    Source: `jax.lax.dynamic_slice`.
    """
    what, operand = "dynamic_slice", as_array(operand)
    starts, sizes = _starts(what, operand, start_indices), [operator.index(n) for n in slice_sizes]
    if len(sizes) != len(starts):
        raise ValueError(f"{what}: {len(sizes)} sizes for the {len(starts)} axes of a value of type {typeof(operand)}")
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        operand = _slice(what, operand, start, size, axis)
    return operand


def dynamic_update_slice(operand: Value, update: Value, start_indices: Sequence[Value] | Value) -> Value:
    """`operand`, with `update` in place of its part of that shape that begins at `start_indices`.

    The starts are those of :func:`dynamic_slice`. `update` has as many axes as `operand`, and takes its dtype.
    Differentiable in both.

    >>> import numpy as np
    >>> dynamic_update_slice(np.zeros((2, 4)), np.ones((2, 2)), (0, 1))
    array([[0., 1., 1., 0.],
           [0., 1., 1., 0.]])

    Source: `jax.lax.dynamic_update_slice`.
    """
    what, operand, update = "dynamic_update_slice", as_array(operand), as_array(update)
    starts = _starts(what, operand, start_indices)
    _check_update(what, update, operand)
    return _update(what, operand, update, list(enumerate(starts)))


def dynamic_slice_in_dim(operand: Value, start_index: Value, slice_size: int, axis: int = 0) -> Value:
    """`operand[start_index : start_index + slice_size]`, along an axis; the start may be traced.

    It is moved as :func:`dynamic_slice` says, so that the slice lies within the array.

    >>> import numpy as np
    >>> dynamic_slice_in_dim(np.arange(5), 3, 2), dynamic_slice_in_dim(np.arange(5), 4, 2)
    (array([3, 4]), array([3, 4]))

    Source: `jax.lax.dynamic_slice_in_dim`; shard_map tutorial, "Example 1: all-gather on one side".
    """
    what, operand = "dynamic_slice_in_dim", as_array(operand)
    axis = normalize_axis(axis, typeof(operand).ndim, what)
    return _slice(what, operand, _start(what, start_index), operator.index(slice_size), axis)


def dynamic_update_slice_in_dim(operand: Value, update: Value, start_index: Value, axis: int) -> Value:
    """`operand`, with `update` in place of its part that begins at `start_index` along an axis.

    Along the other axes that part begins at 0.

    >>> import numpy as np
    >>> dynamic_update_slice_in_dim(np.zeros(5), np.ones(2), 3, 0)
    array([0., 0., 0., 1., 1.])

    Source: `jax.lax.dynamic_update_slice_in_dim`.
    """
    what, operand, update = "dynamic_update_slice_in_dim", as_array(operand), as_array(update)
    axis = normalize_axis(axis, typeof(operand).ndim, what)
    _check_update(what, update, operand)
    starts = [_start(what, start_index) if k == axis else 0 for k in range(typeof(operand).ndim)]
    return _update(what, operand, update, list(enumerate(starts)))


def dynamic_index_in_dim(operand: Value, index: Value, axis: int = 0, keepdims: bool = True) -> Value:
    """The element of `operand` at `index` along an axis, which stays, of size 1, unless `keepdims` is false.

    >>> import numpy as np
    >>> dynamic_index_in_dim(np.eye(2), 1), dynamic_index_in_dim(np.eye(2), 1, keepdims=False)
    (array([[0., 1.]]), array([0., 1.]))

    Source: `jax.lax.dynamic_index_in_dim`.
    """
    part = dynamic_slice_in_dim(operand, index, 1, axis)
    return part if keepdims else squeeze(part, axis)


def dynamic_update_index_in_dim(operand: Value, update: Value, index: Value, axis: int) -> Value:
    """`operand`, with `update` in place of its element at `index` along an axis.

    `update` has as many axes as `operand`, that one of size 1; or it lacks it.

    >>> import numpy as np
    >>> dynamic_update_index_in_dim(np.zeros((2, 3)), np.ones(3), 1, 0)
    array([[0., 0., 0.],
           [1., 1., 1.]])

    Source: `jax.lax.dynamic_update_index_in_dim`.
    """
    ndim, update = typeof(as_array(operand)).ndim, as_array(update)
    axis = normalize_axis(axis, ndim, "dynamic_update_index_in_dim")
    if typeof(update).ndim == ndim - 1:
        update = expand_dims(update, axis)
    elif typeof(update).ndim == ndim and typeof(update).shape[axis] != 1:
        raise ValueError(
            f"dynamic_update_index_in_dim: one element along axis {axis} is updated, but the update has type "
            f"{typeof(update)}; dynamic_update_slice_in_dim updates several"
        )
    return dynamic_update_slice_in_dim(operand, update, index, axis)


# ---------------------------------------------------------------- along one axis


def _slice(what: str, x: Value, start: Value, size: int, axis: int) -> Value:
    t = typeof(x)
    if not 0 <= size <= t.shape[axis]:
        raise ValueError(f"{what}: a slice of size {size} does not lie in axis {axis} of a value of type {t}")
    return getitem(x, (slice(None),) * axis + (_places(start, size, t.shape[axis]),))


def _update(what: str, x: Value, update: Value, starts: list[tuple[int, Value]]) -> Value:
    """x, with `update` at the starts, which stand with their axes: along those that are not named it is whole."""
    shape, sizes = typeof(x).shape, typeof(update).shape
    starts = [(axis, start) for axis, start in starts if sizes[axis] != shape[axis]]
    if not starts:
        return at(x)[...].set(update)
    (axis, start), *others = starts
    if others:  # of the slice along this axis, what the other axes leave stays
        update = _update(what, _slice(what, x, start, sizes[axis], axis), update, others)
    places = _places(start, sizes[axis], shape[axis])
    if isinstance(places, slice):
        return at(x)[(slice(None),) * axis + (places,)].set(update)
    rows = at(moveaxis(x, axis, 0))[places].set(moveaxis(update, axis, 0))
    return moveaxis(rows, 0, axis)


def _places(start: Value, size: int, length: int) -> Any:
    """Where a slice of this size lies on an axis: as a slice, or as indices where its start is traced."""
    last = length - size
    if size == length:
        return slice(None)
    if not isinstance(start, Tracer):
        first = min(max(start + length if start < 0 else start, 0), last)
        return slice(first, first + size)
    start = convert(start, numpy.dtype(numpy.intp))
    start = where(less(start, 0), add(start, length), start)
    return add(minimum(maximum(start, 0), last), numpy.arange(size))


# ---------------------------------------------------------------- what they are given


def _start(what: str, start: Value) -> Any:
    """A start as a plain number, or as a traced one."""
    t = typeof(start)
    if t.shape or t.dtype.kind not in "iu":
        raise TypeError(f"{what}: a start is one integer, got a value of type {t}")
    return start if isinstance(start, Tracer) else operator.index(start)


def _starts(what: str, operand: Value, starts: Sequence[Value] | Value) -> list:
    """A start for each axis, from a sequence of numbers or an array of them."""
    t: ShapedArray = typeof(operand)
    if not isinstance(starts, (list, tuple)):
        starts = as_array(starts)
        if typeof(starts).ndim != 1:
            raise TypeError(f"{what}: start_indices is an integer for each axis, got a value of type {typeof(starts)}")
        starts = [starts[k] for k in range(typeof(starts).shape[0])]
    if len(starts) != t.ndim:
        raise ValueError(f"{what}: {len(starts)} starts for the {t.ndim} axes of a value of type {t}")
    return [_start(what, s) for s in starts]


def _check_update(what: str, update: Value, operand: Value) -> None:
    own, whole = typeof(update), typeof(operand)
    if own.ndim != whole.ndim or any(m > n for m, n in zip(own.shape, whole.shape)):
        raise ValueError(f"{what}: an update of type {own} does not lie in a value of type {whole}")
