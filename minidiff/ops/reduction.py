"""Operations that reduce axes: sums, means, maxima."""

from __future__ import annotations

import math
from typing import Any

import numpy

from minidiff.core import Primitive, ShapedArray, Value, implements, typeof
from minidiff.ops import elementwise
from minidiff.ops.kinds import Linear
from minidiff.ops.shape import broadcast_to, normalize_axes, reshape, shift


def _reduced_shape(x: ShapedArray, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(x.shape) if i not in axes)


def _kept_shape(x: ShapedArray, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


def _unreduce(y: Value, x: ShapedArray, axes: tuple[int, ...]) -> Value:
    """A reduced value, repeated along the axes that were reduced."""
    return broadcast_to(reshape(y, _kept_shape(x, axes)), x.shape)


# ---------------------------------------------------------------- sum, mean

sum_p = Linear(
    "sum",
    lambda x, axes: numpy.sum(x, axis=axes),
    lambda x, axes: (_reduced_shape(x, axes), numpy.sum(numpy.zeros(1, x.dtype)).dtype),
    lambda ct, operands, axes: [_unreduce(ct, operands[0], axes)],
    lambda primitive, args, batched, axes: primitive.bind(args[0], axes=shift(axes)),
)


@implements(numpy.sum)
def sum(x: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.sum` over one axis, several, or all."""
    t = typeof(x)
    axes = normalize_axes(axis, t.ndim, "sum")
    y = sum_p.bind(x, axes=axes)
    return reshape(y, _kept_shape(t, axes)) if keepdims else y


@implements(numpy.mean)
def mean(x: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.mean` over one axis, several, or all."""
    t = typeof(x)
    count = math.prod(t.shape[a] for a in normalize_axes(axis, t.ndim, "mean"))
    return elementwise.divide(sum(x, axis, keepdims=keepdims), count)


# ---------------------------------------------------------------- max, min


class Extremum(Primitive):
    """`max` and `min`: the derivative is shared equally among the elements that attain it."""

    def __init__(self, name: str, impl):
        super().__init__(name, impl, lambda x, axes: (_reduced_shape(x, axes), x.dtype))

    def jvp(self, primals, tangents, params):
        (x,), (t,), axes = primals, tangents, params["axes"]
        out = self.bind(x, axes=axes)
        attained = elementwise.convert(elementwise.equal(x, _unreduce(out, typeof(x), axes)), t.dtype)
        share = elementwise.divide(attained, _unreduce(sum_p.bind(attained, axes=axes), typeof(x), axes))
        return out, sum_p.bind(elementwise.multiply(share, t), axes=axes)

    def batch(self, args, batched, params):
        return self.bind(args[0], axes=shift(params["axes"]))


max_p = Extremum("max", lambda x, axes: numpy.max(x, axis=axes))
min_p = Extremum("min", lambda x, axes: numpy.min(x, axis=axes))


@implements(numpy.max)
def max(x: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.max` over one axis, several, or all; elements that tie share the derivative."""
    return _extremum(max_p, x, axis, keepdims)


@implements(numpy.min)
def min(x: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.min` over one axis, several, or all; elements that tie share the derivative."""
    return _extremum(min_p, x, axis, keepdims)


def _extremum(primitive: Extremum, x: Value, axis: Any, keepdims: bool) -> Value:
    t = typeof(x)
    axes = normalize_axes(axis, t.ndim, primitive.name)
    y = primitive.bind(x, axes=axes)
    return reshape(y, _kept_shape(t, axes)) if keepdims else y


# ---------------------------------------------------------------- argmax, argmin


class Position(Primitive):
    """`argmax` and `argmin`: integers, so no derivative."""

    def __init__(self, name: str, impl):
        super().__init__(name, impl, lambda x, axis: (_reduced_shape(x, (axis,)), numpy.dtype(numpy.intp)))

    def jvp(self, primals, tangents, params):
        return self.bind(*primals, **params), None

    def batch(self, args, batched, params):
        return self.bind(args[0], axis=params["axis"] + 1)


argmax_p = Position("argmax", lambda x, axis: numpy.argmax(x, axis))
argmin_p = Position("argmin", lambda x, axis: numpy.argmin(x, axis))


@implements(numpy.argmax)
def argmax(x: Value, axis: int | None = None) -> Value:
    """`numpy.argmax`."""
    return _position(argmax_p, x, axis)


@implements(numpy.argmin)
def argmin(x: Value, axis: int | None = None) -> Value:
    """`numpy.argmin`."""
    return _position(argmin_p, x, axis)


def _position(primitive: Position, x: Value, axis: int | None) -> Value:
    x, axis = (reshape(x, (-1,)), 0) if axis is None else (x, axis)
    return primitive.bind(x, axis=normalize_axes(axis, typeof(x).ndim, primitive.name)[0])
