"""`scipy.signal`, differentiable: convolution and correlation of arrays of any number of dimensions."""

from __future__ import annotations

import functools

import numpy
import scipy.signal

from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.ops.arrays import as_array
from minidiff.ops.linalg import conj, convolution, reverse
from minidiff.scipy.closures import over_stacks

__all__ = ["convolve", "correlate"]


def _impl(x: numpy.ndarray, y: numpy.ndarray, mode: str, method: str, ndim: int) -> numpy.ndarray:
    if mode == "valid":  # a correlation
        y = numpy.flip(y, range(-ndim, 0))
    core = [",".join(f"{name}{d}" for d in range(ndim)) for name in "xyz"]
    return over_stacks(scipy.signal.convolve, "({}),({})->({})".format(*core), ndim)(x, y, mode=mode, method=method)


_convolve_p = convolution(_impl)


def convolve(in1: Value, in2: Value, mode: str = "full", method: str = "auto") -> Value:
    """`scipy.signal.convolve`: convolve two arrays.

    Args:
        in1: an array.
        in2: an array with the same number of dimensions.
        mode: "full"; "same", of the shape of in1; or "valid", where one array is at least as large as the other along
            every axis.
        method: "direct", "fft" or "auto", the faster of these.

    Returns:
        An array, whose shape the mode determines.

    Raises:
        ValueError: for an unknown mode, or operands that do not match it.

    >>> convolve(numpy.ones((2, 2)), numpy.array([[1.0, 2.0]]))
    array([[1., 3., 2.],
           [1., 3., 2.]])
    """
    return _convolve(as_array(in1), as_array(in2), mode, method, correlates=False)


def _convolve(in1: Value, in2: Value, mode: str, method: str, correlates: bool) -> Value:
    a, b = typeof(in1), typeof(in2)
    fits = [all(n >= m for n, m in zip(one.shape, two.shape)) for one, two in ((a, b), (b, a))]
    if a.ndim != b.ndim or mode not in ("full", "same", "valid") or (mode == "valid" and not any(fits)):
        raise ValueError(
            f"convolve: {a} and {b} do not match for mode={mode!r}: mode must be 'full', 'same' or 'valid'; both must "
            "have as many dimensions, and with 'valid' one must be at least as large as the other along every axis"
        )
    if a.ndim == 0 or a.size == 0 or b.size == 0:
        return in1 * in2
    bind = functools.partial(_convolve_p.bind, mode="valid" if mode == "valid" else "full", method=method, ndim=a.ndim)
    if mode == "valid" and fits[0]:
        return bind(in1, in2 if correlates else reverse(in2, a.ndim))
    if mode == "valid":
        return reverse(bind(in2, in1), a.ndim) if correlates else bind(in2, reverse(in1, a.ndim))
    out = bind(in1, reverse(in2, a.ndim) if correlates else in2)
    if mode == "full":
        return out
    return out[tuple(slice((m - 1) // 2, (m - 1) // 2 + n) for n, m in zip(a.shape, b.shape))]


def correlate(in1: Value, in2: Value, mode: str = "full", method: str = "auto") -> Value:
    """`scipy.signal.correlate`: `convolve` with in2 reversed along all axes, and conjugated.

    Args:
        in1: an array.
        in2: an array with the same number of dimensions.
        mode: as for `convolve`.
        method: as for `convolve`.

    Returns:
        An array, whose shape the mode determines.

    >>> correlate(numpy.array([1.0, 2.0, 3.0]), numpy.array([0.0, 1.0]), mode="valid")
    array([2., 3.])
    """
    return _convolve(as_array(in1), conj(as_array(in2)), mode, method, correlates=True)
