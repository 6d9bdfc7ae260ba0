"""Arrays made from traced numbers, or like traced arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import promotion_argument
from minidiff.ops.arrays import as_array, list_as_array
from minidiff.ops.base import convert
from minidiff.ops.elementwise import copy, floor, power, where
from minidiff.ops.shape import as_shape, broadcast_to, moveaxis, reshape
from minidiff.values.aliasing import uniform
from minidiff.values.dtypes import result_type


@implements(numpy.linspace)
def linspace(
    start: Value, stop: Value, num: int = 50, endpoint=True, retstep=False, dtype: Any = None, axis: int = 0
) -> Value:
    """`numpy.linspace`: `num` evenly spaced points; with `retstep`, also the step."""
    start, stop, num = list_as_array(start), list_as_array(stop), operator.index(num)
    steps = num - 1 if endpoint else num
    weights = numpy.arange(num) / steps if steps > 0 else numpy.zeros(num)
    work = result_type(*map(promotion_argument, (start, stop)), float(num))
    weights = weights.astype(work).reshape(num, *(1,) * max(numpy.ndim(start), numpy.ndim(stop)))
    points = start * (1 - weights) + stop * weights  # exact at both ends
    if dtype is not None and numpy.issubdtype(dtype, numpy.integer):
        points = floor(points)
    points = moveaxis(convert(points, work if dtype is None else dtype), 0, axis)
    return (points, (stop - start) / (steps if steps > 0 else numpy.nan)) if retstep else points


@implements(numpy.logspace)
def logspace(
    start: Value, stop: Value, num: int = 50, endpoint=True, base: Value = 10.0, dtype: Any = None, axis: int = 0
) -> Value:
    """`numpy.logspace`: powers of `base` with evenly spaced exponents."""
    start, stop, base = list_as_array(start), list_as_array(stop), list_as_array(base)
    if numpy.ndim(base):
        shape = numpy.broadcast_shapes(*[numpy.shape(x) for x in (start, stop, base)])
        start, base = numpy.broadcast_to(start, shape), numpy.expand_dims(numpy.broadcast_to(base, shape), axis)
    points = numpy.power(base, numpy.linspace(start, stop, num, endpoint, axis=axis))
    return points if dtype is None else convert(points, dtype)


@implements(numpy.geomspace)
def geomspace(start: Value, stop: Value, num: int = 50, endpoint=True, dtype: Any = None, axis: int = 0) -> Value:
    """`numpy.geomspace`: points from `start` to `stop` with a constant ratio."""
    start, stop = list_as_array(start), list_as_array(stop)
    # NumPy computes in double precision, whatever the precision of the end points.
    work = result_type(*map(promotion_argument, (start, stop)), numpy.dtype(float))
    start, stop = convert(start, work), convert(stop, work)
    size = numpy.absolute(start)
    direction = start / size if typeof(start).dtype.kind == "c" else numpy.sign(start)
    exponents = numpy.linspace(numpy.log(size), numpy.log(stop / direction), num, endpoint, axis=axis)
    points = (numpy.expand_dims(direction, axis) if numpy.ndim(direction) else direction) * numpy.exp(exponents)
    return points if dtype is None else convert(points, dtype)


# ---------------------------------------------------------------- matrices


def _triangle(triangle: Callable, indices_from: Callable, indices: Callable) -> None:
    """Declare `numpy.tril` or `numpy.triu`, which keep a triangle of a matrix, and the indices of that triangle."""

    def function(m: Value, k: int = 0) -> Value:
        t = typeof(m)
        if not t.ndim:
            raise ValueError(f"{triangle.__name__}: an array of at least one dimension is needed, got {t}")
        return where(triangle(numpy.ones((t.shape[-2:] * 2)[:2], bool), k), m, numpy.zeros(1, t.dtype))

    def function_of_shape(arr: Value, k: int = 0) -> tuple[numpy.ndarray, numpy.ndarray]:
        if typeof(arr).ndim != 2:
            raise ValueError(f"{indices_from.__name__}: a matrix is needed, got {typeof(arr)}")
        rows, columns = typeof(arr).shape
        return indices(rows, k, columns)

    implements(triangle)(function)
    implements(indices_from)(function_of_shape)


_triangle(numpy.tril, numpy.tril_indices_from, numpy.tril_indices)
_triangle(numpy.triu, numpy.triu_indices_from, numpy.triu_indices)


@implements(numpy.diag_indices_from)
def diag_indices_from(arr: Value) -> tuple[numpy.ndarray, ...]:
    """`numpy.diag_indices_from`: main diagonal of an array with equal axes."""
    t = typeof(arr)
    if t.ndim < 2 or len(set(t.shape)) != 1:
        raise ValueError(f"diag_indices_from: at least two axes, all of equal size, are needed, got {t}")
    return numpy.diag_indices(t.shape[0], t.ndim)


@implements(numpy.vander)
def vander(x: Value, N: int | None = None, increasing: bool = False) -> Value:
    """`numpy.vander`: a matrix whose columns are powers of a vector."""
    x = as_array(x)
    if typeof(x).ndim != 1:
        raise ValueError(f"vander: a vector is needed, got {typeof(x)}")
    powers = numpy.arange(typeof(x).size if N is None else N)
    return power(reshape(x, (-1, 1)), powers if increasing else powers[::-1])


# ---------------------------------------------------------------- full_like and the like


def _like(like: Callable, value: float) -> None:
    """Declare a function of shape and dtype alone, whose result is a plain array."""

    def function(a, dtype=None, order="K", subok=True, shape=None, *, device=None):
        t = typeof(a)
        shape = t.shape if shape is None else as_shape(shape)
        return uniform(value, shape, dtype or t.dtype)

    implements(like)(function)


_like(numpy.zeros_like, 0)
_like(numpy.ones_like, 1)
_like(numpy.empty_like, 0)


@implements(numpy.full_like)
def full_like(
    a: Value, fill_value: Value, dtype: Any = None, order="K", subok=True, shape: Any = None, *, device: Any = None
) -> Value:
    """`numpy.full_like`, differentiable in the fill value."""
    t = typeof(a)
    value = convert(as_array(fill_value), dtype or t.dtype)
    return copy(broadcast_to(value, t.shape if shape is None else shape))
