"""Differences of neighbors, and slopes and integrals computed from them."""

from __future__ import annotations

from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import elementwise
from minidiff.ops.arrays import as_array
from minidiff.ops.base import in_float32
from minidiff.ops.indexing import slice_along
from minidiff.ops.reduction import as_inexact, sum
from minidiff.ops.shape import broadcast_to, concatenate, normalize_axes, ravel, reshape, resized_shape


@implements(numpy.diff)
def diff(a: Value, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Value:
    """`numpy.diff`: the differences of neighbors along an axis, taken n times."""
    if n < 0:
        raise ValueError(f"diff: n must not be negative, got {n}")
    if n == 0:
        return a
    a = as_array(a)
    axis = normalize_axis(axis, len(a.shape), "diff")
    if prepend is not None or append is not None:
        parts = [as_array(x) for x in (prepend, a, append) if x is not None]
        a = concatenate([x if x.shape else broadcast_to(x, resized_shape(a, axis, 1)) for x in parts], axis)
    minus = elementwise.not_equal if a.dtype.kind == "b" else elementwise.subtract
    for _ in range(n):
        a = minus(slice_along(a, axis, 1, None), slice_along(a, axis, None, -1 if a.shape[axis] else None))
    return a


@implements(numpy.ediff1d)
def ediff1d(ary: Value, to_end: Any = None, to_begin: Any = None) -> Value:
    """`numpy.ediff1d`: flattened differences between `to_begin` and `to_end`."""
    d = diff(ravel(ary))
    return concatenate([elementwise.convert(ravel(x), d.dtype) for x in (to_begin, d, to_end) if x is not None])


@implements(numpy.trapezoid)
@in_float32
def trapezoid(y: Value, x: Value | None = None, dx: Any = 1.0, axis: int = -1) -> Value:
    """`numpy.trapezoid`: the integral of values at points `x`, or spaced by `dx`."""
    y = as_array(y)
    of_y = normalize_axis(axis, len(y.shape), "trapezoid")  # x may have more axes; `axis` counts its own
    if x is not None:
        x = as_array(x)
        dx = diff(x, axis=axis if len(x.shape) > 1 else -1)
        if len(x.shape) == 1:
            dx = reshape(dx, [-1 if i == of_y else 1 for i in range(len(y.shape))])
    return sum(dx * (slice_along(y, of_y, 1, None) + slice_along(y, of_y, None, -1)) / 2.0, axis)


@implements(numpy.gradient)
def gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """`numpy.gradient`: central differences along axes, one-sided at the ends."""
    f = as_inexact(as_array(f))
    axes = normalize_axes(axis, len(f.shape), "gradient")
    spacings = list(varargs) or [1.0]
    if len(spacings) == 1 and not len(as_array(spacings[0]).shape):
        spacings = spacings * len(axes)
    if len(spacings) != len(axes):
        raise TypeError(f"gradient: {len(varargs)} spacings for {len(axes)} axes; give one for all, or one for each")
    if edge_order not in (1, 2):
        raise ValueError(f"gradient: edge_order is 1 or 2, got {edge_order}")
    out = tuple(_slope(f, i, _steps(h, f.shape[i]), edge_order) for i, h in zip(axes, spacings))
    return out[0] if len(out) == 1 else out


def _steps(spacing: Any, n: int) -> Value:
    """The `n - 1` distances between coordinates, or one number."""
    h = as_array(spacing)
    if not h.shape:
        return spacing
    if h.shape != (n,):
        raise ValueError(f"gradient: coordinates of shape {h.shape} for an axis of size {n}")
    return diff(as_inexact(h))


def _slope(f: Value, axis: int, h: Value, edge_order: int) -> Value:
    n = f.shape[axis]
    if n < edge_order + 1:
        raise ValueError(f"gradient: axis {axis} of {typeof(f)} needs at least {edge_order + 1} elements")
    uniform = not len(as_array(h).shape)

    def at(*bounds: int | None) -> Value:
        return slice_along(f, axis, *bounds)

    def step(i: int) -> Value:
        return h if uniform else h[i]

    if uniform:
        middle = (at(2, None) - at(None, -2)) / (2.0 * h)
    else:
        shape = [-1 if i == axis else 1 for i in range(len(f.shape))]
        left, right = reshape(h[:-1], shape) if n > 2 else 1.0, reshape(h[1:], shape) if n > 2 else 1.0
        middle = (
            at(2, None) * (left / (right * (left + right)))
            + at(1, -1) * ((right - left) / (left * right))
            - at(None, -2) * (right / (left * (left + right)))
        )
    if edge_order == 1:
        first, last = (at(1, 2) - at(0, 1)) / step(0), (at(n - 1, n) - at(n - 2, n - 1)) / step(-1)
    else:
        first = _one_sided_slope(at(0, 1), at(1, 2), at(2, 3), step(0), step(1))
        last = -_one_sided_slope(at(n - 1, n), at(n - 2, n - 1), at(n - 3, n - 2), step(-1), step(-2))
    return elementwise.convert(concatenate([first, middle, last], axis), f.dtype)


def _one_sided_slope(f0: Value, f1: Value, f2: Value, h1: Value, h2: Value) -> Value:
    """The slope at f0 of the parabola through values with spacings h1 and h2."""
    return f1 * ((h1 + h2) / (h1 * h2)) - f0 * ((2.0 * h1 + h2) / (h1 * (h1 + h2))) - f2 * (h1 / (h2 * (h1 + h2)))
