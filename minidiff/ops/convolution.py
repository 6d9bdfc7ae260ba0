"""Convolutions and correlations along last axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.base import Multilinear, bind_aligned, unbroadcast
from minidiff.ops.dimensions import gather
from minidiff.ops.indexing import getitem
from minidiff.ops.linalg import conj


def _convolve_impl(x: numpy.ndarray, y: numpy.ndarray, mode: str) -> numpy.ndarray:
    if x.ndim == y.ndim == 1:
        return numpy.convolve(x, y, mode)
    if mode == "full":
        return _full_convolution(x, y)
    windows = numpy.lib.stride_tricks.sliding_window_view(x, y.shape[-1], axis=-1)
    return numpy.matmul(windows, y[..., ::-1, None])[..., 0]


def _full_convolution(x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """Add shifted multiples of the longer: zeros around it would turn infinities of the shorter into NaN."""
    if x.shape[-1] < y.shape[-1]:
        x, y = y, x
    n, m = x.shape[-1], y.shape[-1]
    dtype = numpy.result_type(x, y)
    batch = numpy.broadcast_shapes(x.shape[:-1], y.shape[:-1])
    total = numpy.zeros((*batch, n + m - 1), dtype)
    for k in range(m):
        total[..., k : k + n] += x * y[..., k : k + 1]
    return total


def reverse(x: Value, ndim: int = 1) -> Value:
    """Reverse an array along its last axes."""
    return getitem(x, (..., *[slice(None, None, -1)] * ndim))


def convolution(impl: Callable) -> Multilinear:
    """Declare a convolution along the last `ndim` axes; leading axes broadcast.

    Its `mode` is "full" or "valid", and y is then the smaller.
    """

    def shape(x: ShapedArray, y: ShapedArray, mode: str, ndim: int = 1, **params: Any):
        batch, sign = numpy.broadcast_shapes(x.shape[:-ndim], y.shape[:-ndim]), 1 if mode == "full" else -1
        core = [n + sign * (m - 1) for n, m in zip(x.shape[-ndim:], y.shape[-ndim:])]
        return (*batch, *core), numpy.result_type(x.dtype, y.dtype)

    def left(ct: Value, operands: Sequence, mode: str, **params: Any) -> Value:
        y, mode = reverse(operands[1], params.get("ndim", 1)), "valid" if mode == "full" else "full"
        return unbroadcast(primitive.bind(ct, y, mode=mode, **params), operands[0])

    def right(ct: Value, operands: Sequence, mode: str, **params: Any) -> Value:
        x = reverse(operands[0], params.get("ndim", 1))
        return unbroadcast(
            primitive.bind(*((ct, x) if mode == "full" else (x, ct)), mode="valid", **params), operands[1]
        )

    primitive = Multilinear("convolve", impl, shape, (left, right), bind_aligned, sharding=gather, accumulates=True)
    return primitive


convolve_p = convolution(_convolve_impl)


@implements(numpy.convolve)
def convolve(a: Value, v: Value, mode: str = "full") -> Value:
    """`numpy.convolve` of two vectors; `mode` is "full", "same" or "valid"."""
    n, m = _lengths("convolve", a, v, mode)
    return _convolve(a, v, mode, (min(n, m) - 1) // 2)


@implements(numpy.correlate)
def correlate(a: Value, v: Value, mode: str = "valid") -> Value:
    """`numpy.correlate`, the second conjugated; `mode` "full", "same" or "valid"."""
    n, m = _lengths("correlate", a, v, mode)
    return _convolve(a, reverse(conj(v)), mode, (m - 1) // 2 if n >= m else n // 2)


def _lengths(name: str, a: Value, v: Value, mode: str) -> tuple[int, int]:
    ta, tv = typeof(a), typeof(v)
    if ta.ndim != 1 or tv.ndim != 1 or not ta.size or not tv.size:
        raise ValueError(f"{name}: operands are non-empty vectors, got {ta} and {tv}")
    if mode not in ("full", "same", "valid"):
        raise ValueError(f"{name}: mode is 'full', 'same' or 'valid', got {mode!r}")
    return ta.size, tv.size


def _convolve(x: Value, y: Value, mode: str, start: int) -> Value:
    """Convolve, x being the longer; "same" is a slice of "full" from `start`."""
    if typeof(x).size < typeof(y).size:
        x, y = y, x
    if mode != "same":
        return convolve_p.bind(x, y, mode=mode)
    return getitem(convolve_p.bind(x, y, mode="full"), slice(start, start + typeof(x).size))
