"""Operations that move numbers without changing them: all linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core import ShapedArray, Value, implements, typeof
from minidiff.ops import indexing
from minidiff.ops.kinds import Linear, match


def normalize_axis(axis: int, ndim: int, what: str) -> int:
    """A non-negative axis, or an error that names the operation."""
    if not -ndim <= axis < ndim:
        raise numpy.exceptions.AxisError(f"{what}: axis {axis} is out of bounds for an array of {ndim} dimensions")
    return int(axis) % ndim


def normalize_axes(axis: Any, ndim: int, what: str) -> tuple[int, ...]:
    """A tuple of non-negative axes out of None (all of them), an int, or a tuple."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple(normalize_axis(a, ndim, what) for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{what}: an axis is named twice in {axis}")
    return axes


def shift(axes: Sequence[int]) -> tuple[int, ...]:
    """Axes, after a batch axis has been put in front."""
    return tuple(a + 1 for a in axes)


implements(numpy.shape)(lambda x: typeof(x).shape)
implements(numpy.ndim)(lambda x: typeof(x).ndim)
implements(numpy.size)(lambda x: typeof(x).size)

# ---------------------------------------------------------------- reshape

reshape_p = Linear(
    "reshape",
    lambda x, shape: numpy.reshape(x, shape),
    lambda x, shape: (shape, x.dtype),
    lambda ct, operands, shape: [reshape_p.bind(ct, shape=operands[0].shape)],
    lambda primitive, args, batched, shape: primitive.bind(args[0], shape=(args[0].shape[0], *shape)),
)


@implements(numpy.reshape)
def reshape(x: Value, shape: Any) -> Value:
    """`numpy.reshape`; one entry of `shape` may be -1."""
    t = typeof(x)
    shape = tuple(int(n) for n in shape) if isinstance(shape, (tuple, list)) else (int(shape),)
    if shape.count(-1) == 1:
        known = math.prod(n for n in shape if n != -1)
        if known and t.size % known == 0:
            shape = tuple(t.size // known if n == -1 else n for n in shape)
    if math.prod(shape) != t.size or -1 in shape:
        raise ValueError(f"reshape: {t} has {t.size} elements, which do not fill the shape {shape}")
    return x if shape == t.shape else reshape_p.bind(x, shape=shape)


@implements(numpy.ravel)
def ravel(x: Value) -> Value:
    """`numpy.ravel`: all elements in one dimension."""
    return reshape(x, (-1,)) if typeof(x).size else reshape(x, (0,))


@implements(numpy.expand_dims)
def expand_dims(x: Value, axis: Any) -> Value:
    """`numpy.expand_dims`: axes of size 1 put in at `axis`, an int or a tuple."""
    shape = typeof(x).shape
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = normalize_axes(axes, len(shape) + len(axes), "expand_dims")
    old = iter(shape)
    return reshape(x, tuple(1 if i in axes else next(old) for i in range(len(shape) + len(axes))))


@implements(numpy.squeeze)
def squeeze(x: Value, axis: Any = None) -> Value:
    """`numpy.squeeze`: axes of size 1 taken out."""
    shape = typeof(x).shape
    if axis is None:
        axes = tuple(i for i, n in enumerate(shape) if n == 1)
    else:
        axes = normalize_axes(axis, len(shape), "squeeze")
    for a in axes:
        if shape[a] != 1:
            raise ValueError(f"squeeze: axis {a} has size {shape[a]}, not 1, in {typeof(x)}")
    return reshape(x, tuple(n for i, n in enumerate(shape) if i not in axes))


# ---------------------------------------------------------------- transpose

transpose_p = Linear(
    "transpose",
    lambda x, axes: numpy.transpose(x, axes),
    lambda x, axes: (tuple(x.shape[a] for a in axes), x.dtype),
    lambda ct, operands, axes: [transpose_p.bind(ct, axes=tuple(int(a) for a in numpy.argsort(axes)))],
    lambda primitive, args, batched, axes: primitive.bind(args[0], axes=(0, *shift(axes))),
)


@implements(numpy.transpose)
def transpose(x: Value, axes: Sequence[int] | None = None) -> Value:
    """`numpy.transpose`: axes permuted, reversed by default."""
    ndim = typeof(x).ndim
    axes = tuple(reversed(range(ndim))) if axes is None else normalize_axes(tuple(axes), ndim, "transpose")
    if len(axes) != ndim:
        raise ValueError(f"transpose: axes {axes} do not name each of the {ndim} axes of {typeof(x)}")
    return x if axes == tuple(range(ndim)) else transpose_p.bind(x, axes=axes)


@implements(numpy.moveaxis)
def moveaxis(x: Value, source: Any, destination: Any) -> Value:
    """`numpy.moveaxis`, of one axis or several."""
    ndim = typeof(x).ndim
    sources, places = normalize_axes(source, ndim, "moveaxis"), normalize_axes(destination, ndim, "moveaxis")
    if len(sources) != len(places):
        raise ValueError(f"moveaxis: axes {source} and their places {destination} differ in number")
    axes = [i for i in range(ndim) if i not in sources]
    for place, axis in sorted(zip(places, sources)):
        axes.insert(place, axis)
    return transpose(x, axes)


@implements(numpy.swapaxes)
def swapaxes(x: Value, axis1: int, axis2: int) -> Value:
    """`numpy.swapaxes`: two axes exchanged."""
    axes = list(range(typeof(x).ndim))
    axis1, axis2 = normalize_axis(axis1, len(axes), "swapaxes"), normalize_axis(axis2, len(axes), "swapaxes")
    axes[axis1], axes[axis2] = axis2, axis1
    return transpose(x, axes)


# ---------------------------------------------------------------- broadcast_to


def _batch_broadcast_to(primitive, args, batched, shape):
    (x,) = args
    padded = (x.shape[0],) + (1,) * (len(shape) + 1 - len(x.shape)) + tuple(x.shape[1:])
    return primitive.bind(reshape(x, padded), shape=(x.shape[0], *shape))


broadcast_to_p = Linear(
    "broadcast_to",
    lambda x, shape: numpy.broadcast_to(x, shape),
    lambda x, shape: (shape, x.dtype),
    lambda ct, operands, shape: [match(ct, operands[0])],
    _batch_broadcast_to,
)


@implements(numpy.broadcast_to)
def broadcast_to(x: Value, shape: Any) -> Value:
    """`numpy.broadcast_to`."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    t = typeof(x)
    if len(t.shape) > len(shape) or any(n not in (1, m) for n, m in zip(t.shape[::-1], shape[::-1])):
        raise ValueError(f"broadcast_to: {t} cannot be broadcast to the shape {shape}")
    return x if shape == t.shape else broadcast_to_p.bind(x, shape=shape)


for _p in (reshape_p, transpose_p, broadcast_to_p):
    _p.is_view = _p.shares_memory = True

# ---------------------------------------------------------------- concatenate


def _concatenate_shape(*types: ShapedArray, axis: int):
    first, size = types[0], sum(t.shape[axis] for t in types)
    return (*first.shape[:axis], size, *first.shape[axis + 1 :]), numpy.result_type(*[t.dtype for t in types])


def _concatenate_transpose(ct, operands, axis):
    cts, start = [], 0
    for x in operands:
        stop = start + x.shape[axis]
        if isinstance(x, ShapedArray):
            part = (slice(None),) * axis + (slice(start, stop),)
            cts.append(match(indexing.getitem(ct, part), x))
        else:
            cts.append(None)
        start = stop
    return cts


def _concatenate_batch(primitive, args, batched, axis):
    size = next(x.shape[0] for x, b in zip(args, batched) if b)
    args = [x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(args, batched)]
    return primitive.bind(*args, axis=axis + 1)


concatenate_p = Linear(
    "concatenate",
    lambda *arrays, axis: numpy.concatenate(arrays, axis),
    _concatenate_shape,
    _concatenate_transpose,
    _concatenate_batch,
)


@implements(numpy.concatenate)
def concatenate(arrays: Sequence[Value], axis: int | None = 0) -> Value:
    """`numpy.concatenate`: arrays joined along an existing axis."""
    arrays = list(arrays)
    if axis is None:
        arrays, axis = [ravel(x) for x in arrays], 0
    types = [typeof(x) for x in arrays]
    axis = normalize_axis(axis, types[0].ndim, "concatenate")
    for t in types[1:]:
        if t.ndim != types[0].ndim or any(n != m for i, (n, m) in enumerate(zip(t.shape, types[0].shape)) if i != axis):
            raise ValueError(f"concatenate: shapes {types[0].shape} and {t.shape} differ outside axis {axis}")
    return concatenate_p.bind(*arrays, axis=axis)


@implements(numpy.stack)
def stack(arrays: Sequence[Value], axis: int = 0) -> Value:
    """`numpy.stack`: arrays of one shape joined along a new axis."""
    arrays = list(arrays)
    shapes = {typeof(x).shape for x in arrays}
    if len(shapes) != 1:
        raise ValueError(f"stack: all arrays must have one shape, got {sorted(shapes)}")
    return concatenate([expand_dims(x, axis) for x in arrays], axis)
