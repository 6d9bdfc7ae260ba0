"""Slices of static size at dynamic starts, with the API of `jax.lax`.

`x[i : i + n]` needs a concrete i when the program is recorded. Here i may be traced: the program may compute it, and it
may differ between ranks (`axis_index`) or elements of a `vmap`. A concrete start makes an ordinary slice, `x[…]` or
`x.at[…]`. A traced start is an operand, of one operation per axis. If the starts differ along a batch, the slice
becomes a gather at the indices `i + arange(n)`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Linear, axes_fit, convert
from minidiff.ops.dimensions import axiswise
from minidiff.ops.elementwise import add, equal, less, maximum, minimum, subtract, where
from minidiff.ops.indexing import gather_p, getitem, scatter_add_p
from minidiff.ops.shape import broadcast_to, expand_dims, moveaxis, reshape, resized_shape, squeeze
from minidiff.ops.updates import at, scatter_set_p

__all__ = [
    "dynamic_index_in_dim", "dynamic_slice", "dynamic_slice_in_dim", "dynamic_update_index_in_dim",
    "dynamic_update_slice", "dynamic_update_slice_in_dim",
]  # fmt: skip


# ---------------------------------------------------------------- along one axis: the operations


def slice_of(start: Any, size: int, x: Any, axis: int) -> tuple:
    """Return the index of a slice; a negative start counts from the end, then is clamped."""
    start, length = int(start), x.shape[axis]
    first = min(max(start + length if start < 0 else start, 0), length - size)
    return (slice(None),) * axis + (slice(first, first + size),)


def _unslice_impl(x: numpy.ndarray, start: numpy.ndarray, axis: int, length: int) -> numpy.ndarray:
    out = numpy.zeros(resized_shape(x, axis, length), x.dtype)
    out[slice_of(start, x.shape[axis], out, axis)] = x
    return out


def write_along(x: numpy.ndarray, v: numpy.ndarray, start: numpy.ndarray, axis: int) -> numpy.ndarray:
    """Write into x itself from `start` on along an axis, and return it."""
    x[slice_of(start, v.shape[axis], x, axis)] = v
    return x


def _update_transpose(ct, operands, axis):
    x, v, start = operands
    return [
        dynamic_update_p.bind(ct, zeros_like(v), start, axis=axis) if isinstance(x, ShapedArray) else None,
        dynamic_slice_p.bind(ct, start, axis=axis, size=v.shape[axis]) if isinstance(v, ShapedArray) else None,
    ]


def first_place(start: Value, size: int, length: int) -> Value:
    """Return the place at which a slice starts; a negative start counts from the end, then is clamped."""
    start = convert(start, numpy.dtype(numpy.intp))
    return minimum(maximum(where(less(start, 0), add(start, length), start), 0), length - size)


def _indices(start: Value, size: int, length: int) -> list[Value]:
    """Gather indices of a batch of slices: along the batch, and along the axis."""
    many = typeof(start).shape[0]
    first = reshape(first_place(start, size, length), (many, 1))
    return [numpy.arange(many)[:, None], add(first, numpy.arange(size))]


def _batching(indexed: Callable) -> Callable:
    """Return the batching rule: if starts differ, `indexed(*arrays, start, **params)` works along axis 1 of a batch."""

    def rule(primitive, args, batched, axis, **params):
        *arrays, start = args
        many = next(a.shape[0] for a, b in zip(args, batched) if b)
        arrays = [a if b else broadcast_to(a, (many, *a.shape)) for a, b in zip(arrays, batched)]
        if not batched[-1]:
            return primitive.bind(*arrays, start, axis=axis + 1, **params)
        return moveaxis(indexed(*[moveaxis(a, axis + 1, 1) for a in arrays], start, **params), 1, axis + 1)

    return rule


def _axis_fits(*types: ShapedArray, axis: int, **params: Any) -> bool:
    """Return whether all operands but the start have the axis."""
    return axes_fit(*types[:-1], axis=axis)


def _slice_by_gather(x: Value, start: Value, axis: int, size: int) -> Value:
    """`dynamic_slice` as a gather of its places."""
    places = add(first_place(start, size, x.shape[axis]), numpy.arange(size))
    return moveaxis(gather_p.bind(moveaxis(x, axis, 0), places), 0, axis)


def _update_by_select(x: Value, v: Value, start: Value, axis: int) -> Value:
    """`dynamic_update` as an elementwise select: the written value, or the old one."""
    n, size = x.shape[axis], v.shape[axis]
    source = subtract(numpy.arange(n), first_place(start, size, n))
    nearest = minimum(maximum(source, 0), size - 1)
    written = moveaxis(gather_p.bind(moveaxis(v, axis, 0), nearest), 0, axis)
    return where(reshape(equal(source, nearest), (n, *[1] * (len(x.shape) - axis - 1))), written, x)


#: The `size` elements of x from `start` on, along an axis.
dynamic_slice_p = Linear(
    "dynamic_slice",
    lambda x, start, axis, size: x[slice_of(start, size, x, axis)],
    lambda x, start, axis, size: (resized_shape(x, axis, size), x.dtype),
    lambda ct, operands, axis, size: [
        dynamic_unslice_p.bind(ct, operands[1], axis=axis, length=operands[0].shape[axis])
    ],
    _batching(lambda x, start, size: gather_p.bind(x, *_indices(start, size, x.shape[1]))),
    linear_operands=1,
    fits=_axis_fits,
    sharding=axiswise("axis"),
    decomposed=_slice_by_gather,
    shares_memory=True,
    moves="copies",
)


#: The transpose of `dynamic_slice`: zeros of the given `length` along the axis, with x at `start`.
dynamic_unslice_p = Linear(
    "dynamic_unslice",
    _unslice_impl,
    lambda x, start, axis, length: (resized_shape(x, axis, length), x.dtype),
    lambda ct, operands, axis, length: [dynamic_slice_p.bind(ct, operands[1], axis=axis, size=operands[0].shape[axis])],
    _batching(
        lambda x, start, length: scatter_add_p.bind(
            x, *_indices(start, x.shape[1], length), shape=resized_shape(x, 1, length)
        )
    ),
    linear_operands=1,
    fits=_axis_fits,
    sharding=axiswise("axis"),
    moves="copies",
)

#: x, with its elements from `start` on along an axis replaced by v.
dynamic_update_p = Linear(
    "dynamic_update",
    lambda x, v, start, axis: write_along(numpy.array(x), v, start, axis),
    lambda x, v, start, axis: (x.shape, x.dtype),
    _update_transpose,
    _batching(lambda x, v, start: scatter_set_p.bind(x, v, *_indices(start, v.shape[1], x.shape[1]))),
    linear_operands=2,
    fits=_axis_fits,
    sharding=axiswise("axis"),
    decomposed=_update_by_select,
    moves="copies",
)

# ---------------------------------------------------------------- public functions


def dynamic_slice(operand: Value, start_indices: Sequence[Value] | Value, slice_sizes: Sequence[int]) -> Value:
    """Return the slice of `operand` of shape `slice_sizes` that starts at `start_indices`.

    Args:
        operand: The array; the slice is differentiable in it.
        start_indices: An integer for each axis, which may be traced. A negative one counts from the end. Starts are
            then clamped so that the slice is within bounds.
        slice_sizes: The static size of the slice along each axis.

    Returns:
        An array of shape `slice_sizes`.

    Raises:
        ValueError: If a slice is larger than the array, or the numbers of axes differ.
        TypeError: If a start is not an integer.

    >>> import numpy as np
    >>> x = np.arange(12.0).reshape(3, 4)
    >>> dynamic_slice(x, (1, 2), (2, 2))
    array([[ 6.,  7.],
           [10., 11.]])
    >>> dynamic_slice(x, (2, -1), (2, 2))
    array([[ 6.,  7.],
           [10., 11.]])
    """
    name, operand = "dynamic_slice", as_array(operand)
    starts, sizes = _starts(name, operand, start_indices), [operator.index(n) for n in slice_sizes]
    if len(sizes) != len(starts):
        raise ValueError(f"{name}: {len(sizes)} sizes for the {len(starts)} axes of a value of type {typeof(operand)}")
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        operand = _slice(name, operand, start, size, axis)
    return operand


def dynamic_update_slice(operand: Value, update: Value, start_indices: Sequence[Value] | Value) -> Value:
    """Replace the slice of `operand` that starts at `start_indices` by `update`.

    Args:
        operand: The array, which is not changed.
        update: The new elements, with as many axes as `operand`; they are cast to its dtype.
        start_indices: An integer for each axis, as in `dynamic_slice`.

    Returns:
        An array like `operand`, differentiable in both arrays.

    >>> import numpy as np
    >>> dynamic_update_slice(np.zeros((2, 4)), np.ones((2, 2)), (0, 1))
    array([[0., 1., 1., 0.],
           [0., 1., 1., 0.]])
    """
    name, operand, update = "dynamic_update_slice", as_array(operand), as_array(update)
    starts = _starts(name, operand, start_indices)
    return _update(name, operand, _cast_update(name, update, operand), dict(enumerate(starts)))


def dynamic_slice_in_dim(operand: Value, start_index: Value, slice_size: int, axis: int = 0) -> Value:
    """`operand[start_index : start_index + slice_size]`, along an axis.

    Args:
        operand: The array.
        start_index: An integer, which may be traced; it is clamped as in `dynamic_slice`.
        slice_size: The static size of the slice.
        axis: The axis along which to slice.

    >>> import numpy as np
    >>> dynamic_slice_in_dim(np.arange(5), 3, 2), dynamic_slice_in_dim(np.arange(5), 4, 2)
    (array([3, 4]), array([3, 4]))

    Source: shard_map tutorial, "Example 1: all-gather on one side".
    """
    name, operand = "dynamic_slice_in_dim", as_array(operand)
    axis = normalize_axis(axis, typeof(operand).ndim, name)
    return _slice(name, operand, _start(name, start_index), operator.index(slice_size), axis)


def dynamic_update_slice_in_dim(operand: Value, update: Value, start_index: Value, axis: int) -> Value:
    """Replace the slice of `operand` at `start_index` along an axis by `update`.

    Args:
        operand: The array, which is not changed.
        update: The new elements, with as many axes as `operand`. Along the other axes they start at 0.
        start_index: An integer, which may be traced; it is clamped as in `dynamic_slice`.
        axis: The axis along which the update starts there.

    >>> import numpy as np
    >>> dynamic_update_slice_in_dim(np.zeros(5), np.ones(2), 3, 0)
    array([0., 0., 0., 1., 1.])
    """
    name, operand, update = "dynamic_update_slice_in_dim", as_array(operand), as_array(update)
    axis = normalize_axis(axis, typeof(operand).ndim, name)
    starts = {**dict.fromkeys(range(typeof(operand).ndim), 0), axis: _start(name, start_index)}
    return _update(name, operand, _cast_update(name, update, operand), starts)


def dynamic_index_in_dim(operand: Value, index: Value, axis: int = 0, keepdims: bool = True) -> Value:
    """Return the element of `operand` at `index` along an axis.

    Args:
        operand: The array.
        index: An integer, which may be traced; it is clamped as in `dynamic_slice`.
        axis: The axis of the index.
        keepdims: Whether the result has that axis, with size 1.

    >>> import numpy as np
    >>> dynamic_index_in_dim(np.eye(2), 1), dynamic_index_in_dim(np.eye(2), 1, keepdims=False)
    (array([[0., 1.]]), array([0., 1.]))
    """
    part = dynamic_slice_in_dim(operand, index, 1, axis)
    return part if keepdims else squeeze(part, axis)


def dynamic_update_index_in_dim(operand: Value, update: Value, index: Value, axis: int) -> Value:
    """Replace the element of `operand` at `index` along an axis by `update`.

    Args:
        operand: The array, which is not changed.
        update: The new element, in which the axis has size 1 or is missing.
        index: An integer, which may be traced; it is clamped as in `dynamic_slice`.
        axis: The axis of the index.

    Raises:
        ValueError: If the update has another size along the axis.

    >>> import numpy as np
    >>> dynamic_update_index_in_dim(np.zeros((2, 3)), np.ones(3), 1, 0)
    array([[0., 0., 0.],
           [1., 1., 1.]])
    """
    ndim, update = typeof(as_array(operand)).ndim, as_array(update)
    axis = normalize_axis(axis, ndim, "dynamic_update_index_in_dim")
    if typeof(update).ndim == ndim - 1:
        update = expand_dims(update, axis)
    elif typeof(update).ndim == ndim and typeof(update).shape[axis] != 1:
        raise ValueError(
            f"dynamic_update_index_in_dim: it updates one element along axis {axis}, but the update has type "
            f"{typeof(update)}; dynamic_update_slice_in_dim updates several"
        )
    return dynamic_update_slice_in_dim(operand, update, index, axis)


# ---------------------------------------------------------------- one axis after the other


def _slice(name: str, x: Value, start: Value, size: int, axis: int) -> Value:
    t = typeof(x)
    if not 0 <= size <= t.shape[axis]:
        raise ValueError(f"{name}: a slice of size {size} does not fit axis {axis} of a value of type {t}")
    if size == t.shape[axis]:
        return x
    if isinstance(start, Tracer):
        return dynamic_slice_p.bind(x, start, axis=axis, size=size)
    return getitem(x, slice_of(start, size, x, axis))


def _update(name: str, x: Value, update: Value, starts: dict[int, Value]) -> Value:
    """Write `update` into x at a start for each axis; it spans the axes that have none."""
    shape, sizes = typeof(x).shape, typeof(update).shape
    starts = {axis: start for axis, start in starts.items() if sizes[axis] != shape[axis]}
    if not starts:
        return at(x)[...].set(update)
    axis = min(starts)
    start = starts.pop(axis)
    if starts:  # read the slice along this axis, and update it along the other axes
        update = _update(name, _slice(name, x, start, sizes[axis], axis), update, starts)
    if isinstance(start, Tracer):
        return dynamic_update_p.bind(x, update, start, axis=axis)
    return at(x)[slice_of(start, sizes[axis], x, axis)].set(update)


# ---------------------------------------------------------------- validation of arguments


def _start(name: str, start: Value) -> Any:
    """Validate a start: return an int or a tracer."""
    t = typeof(start)
    if t.shape or t.dtype.kind not in "iu":
        raise TypeError(f"{name}: a start must be one integer, got a value of type {t}")
    return start if isinstance(start, Tracer) else operator.index(start)


def _starts(name: str, operand: Value, starts: Sequence[Value] | Value) -> list:
    """Validate the starts: one per axis, from a sequence or a 1-d array."""
    t = typeof(operand)
    if not isinstance(starts, (list, tuple)):
        starts = as_array(starts)
        if typeof(starts).ndim != 1:
            raise TypeError(f"{name}: start_indices must be an integer for each axis, got {typeof(starts)}")
        starts = [starts[k] for k in range(typeof(starts).shape[0])]
    if len(starts) != t.ndim:
        raise ValueError(f"{name}: {len(starts)} starts for the {t.ndim} axes of a value of type {t}")
    return [_start(name, s) for s in starts]


def _cast_update(name: str, update: Value, operand: Value) -> Value:
    """Cast an update to the dtype of `operand`; raise an error if it does not fit."""
    small, large = typeof(update), typeof(operand)
    if small.ndim != large.ndim or any(m > n for m, n in zip(small.shape, large.shape)):
        raise ValueError(f"{name}: an update of type {small} does not fit in a value of type {large}")
    if not numpy.can_cast(small.dtype, large.dtype, "same_kind"):
        raise TypeError(
            f"{name}: an update of type {small} cannot go into a value of type {large} without loss; convert one of "
            "them with .astype"
        )
    return convert(update, large.dtype)
