"""Arrays made from traced end points."""

from __future__ import annotations

import operator
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.promotion import promotion_argument
from minidiff.ops.arrays import list_as_array
from minidiff.ops.base import convert
from minidiff.ops.elementwise import floor
from minidiff.ops.shape import moveaxis
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
