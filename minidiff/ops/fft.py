"""Fourier transforms, whose transposes are Fourier transforms too.

Cotangents and tangents are paired by Re(sum(ct * t)). The matrix of `fft` is symmetric, so `fft` is its own transpose,
and so is `ifft`. The transforms between n real numbers and half of their spectrum (which determines the other half) are
transposes of each other, if each number of the half that represents two of the whole spectrum is multiplied by 2 or
1/2. `rfft` and `hfft` share one sign of the exponent, `ihfft` and `irfft` the other; no conjugation is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import dimensions
from minidiff.ops.base import Linear, axes_fit, convert
from minidiff.ops.indexing import slice_p, unslice_p
from minidiff.ops.rearranging import roll
from minidiff.ops.shape import as_several, normalize_axes, resized_shape


@functools.cache
def _complex(dtype: numpy.dtype) -> numpy.dtype:
    """Return the dtype of the spectrum of an array of `dtype`."""
    return numpy.fft.fft(numpy.zeros(1, dtype)).dtype


@functools.cache
def _real(dtype: numpy.dtype) -> numpy.dtype:
    """Return the dtype of the real array whose half spectrum has `dtype`."""
    return numpy.fft.irfft(numpy.zeros(1, dtype), 1).dtype


def _scales(norm: dict) -> bool:
    """Return whether these are valid scaling parameters of a transform; see `_norm`."""
    return norm in ({}, {"norm": "ortho"}, {"norm": "forward"})


# ---------------------------------------------------------------- whole spectra


def _whole_transform(one: Callable, several: Callable) -> Linear:
    """Return a transform that is its own transpose; a real operand becomes complex."""
    primitive = Linear(
        one.__name__,
        lambda x, axes, **norm: several(x, axes=axes, **norm),
        lambda x, axes, **norm: (x.shape, _complex(x.dtype)),
        lambda ct, operands, **params: [convert(primitive.bind(ct, **params), operands[0].dtype)],
        fits=lambda x, axes, **norm: (
            axes_fit(x, axes=axes) and len(axes) > 0 and all(x.shape[a] for a in axes) and _scales(norm)
        ),
        sharding=dimensions.axiswise("axes"),
    )
    return primitive


fft_p, ifft_p = _whole_transform(numpy.fft.fft, numpy.fft.fftn), _whole_transform(numpy.fft.ifft, numpy.fft.ifftn)

# ---------------------------------------------------------------- half spectra


def _weight_half(x: numpy.ndarray, n: int, axis: int, weight: float) -> numpy.ndarray:
    """Scale by `weight` the numbers of a half spectrum that represent two of the n."""
    weights = numpy.full(n // 2 + 1, weight, x.real.dtype)
    weights[0] = weights[(n + 1) // 2 :] = 1
    return x * weights.reshape(-1, *(1,) * (x.ndim - 1 - axis))


def _halves(to_half: Callable, from_half: Callable) -> tuple[Linear, Linear]:
    """Return the transform of n real numbers to half their spectrum, and the one back.

    Each is the transpose of the other with `weighted`, a parameter that is present only where it is true.
    """

    def halved(x, axis, weighted=False, **norm):
        y = to_half(x, None, axis, **norm)
        return _weight_half(y, x.shape[axis], axis, 2.0) if weighted else y

    def unhalved(x, n, axis, weighted=False, **norm):
        return from_half(_weight_half(x, n, axis, 0.5) if weighted else x, n, axis, **norm)

    def transpose(other, ct, operands, weighted=False, **params):
        params |= {} if weighted else {"weighted": True}
        return [convert(other.bind(ct, **params), operands[0].dtype)]

    to_half_p = Linear(
        to_half.__name__,
        halved,
        lambda x, axis, **params: (resized_shape(x, axis, x.shape[axis] // 2 + 1), _complex(x.dtype)),
        lambda ct, operands, **params: transpose(
            from_half_p, ct, operands, n=operands[0].shape[params["axis"]], **params
        ),
        fits=lambda x, axis, weighted=False, **norm: (
            axes_fit(x, axis=axis) and x.dtype.kind != "c" and x.shape[axis] > 0 and _scales(norm)
        ),
        sharding=dimensions.axiswise("axis"),
    )
    from_half_p = Linear(
        from_half.__name__,
        unhalved,
        lambda x, n, axis, **params: (resized_shape(x, axis, n), _real(x.dtype)),
        lambda ct, operands, n, **params: transpose(to_half_p, ct, operands, **params),
        fits=lambda x, n, axis, weighted=False, **norm: (
            axes_fit(x, axis=axis) and x.shape[axis] == n // 2 + 1 and _scales(norm)
        ),
        sharding=dimensions.axiswise("axis"),
    )
    return to_half_p, from_half_p


rfft_p, hfft_p = _halves(numpy.fft.rfft, numpy.fft.hfft)
ihfft_p, irfft_p = _halves(numpy.fft.ihfft, numpy.fft.irfft)

# ---------------------------------------------------------------- arguments


def _norm(norm: str | None) -> dict:
    """Return the scaling as parameters of a transform; none for the default."""
    if norm not in (None, "backward", "ortho", "forward"):
        raise ValueError(f"fft: norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    return {} if norm in (None, "backward") else {"norm": norm}


def _fit(x: Value, sizes: dict[int, int], name: str) -> Value:
    """Crop x at the end of some axes, or pad it there with zeros, to the given sizes."""
    shape = typeof(x).shape
    for axis, n in sizes.items():
        if n < 1:
            raise ValueError(f"{name}: a transform needs at least one point, got {n} along axis {axis} of {typeof(x)}")
    cut = tuple(slice(0, min(n, sizes.get(a, n))) for a, n in enumerate(shape))
    if any(part.stop != n for part, n in zip(cut, shape)):
        x = slice_p.bind(x, index=cut)
    target = tuple(sizes.get(a, n) for a, n in enumerate(shape))
    return x if target == x.shape else unslice_p.bind(x, index=cut, shape=target)


def _points(a: Value, s: Any, axes: Any, name: str, half: bool = False) -> tuple[list[int], tuple[int, ...]]:
    """Return the points per axis, and the axes; with `half`, the last axis holds half."""
    t = typeof(a)
    s = None if s is None else as_several(s)
    if axes is None:
        axes = range(t.ndim) if s is None else range(t.ndim - len(s), t.ndim)
    axes = tuple(normalize_axis(axis, t.ndim, name) for axis in as_several(axes))
    if s is not None and len(s) != len(axes):
        raise ValueError(f"{name}: the shape s={tuple(s)} and the axes {axes} differ in number")
    sizes = [t.shape[axis] if n is None or n == -1 else int(n) for n, axis in zip(s or [None] * len(axes), axes)]
    if half and not axes:
        raise ValueError(f"{name}: a transform of real numbers needs at least one axis")
    if half and name.startswith("ir") and s is None:
        sizes[-1] = 2 * (t.shape[axes[-1]] - 1)
    return sizes, axes


def _transform(primitive: Linear, a: Value, sizes: Sequence[int], axes: Sequence[int], norm: Any, name: str) -> Value:
    """Apply a transform to whole spectra along several axes at once."""
    if not axes:
        return a
    if len(set(axes)) == len(axes):
        return primitive.bind(_fit(a, dict(zip(axes, sizes)), name), axes=tuple(axes), **_norm(norm))
    for n, axis in zip(sizes[::-1], axes[::-1]):  # an axis that is named twice is transformed twice
        a = _transform(primitive, a, [n], [axis], norm, name)
    return a


# ---------------------------------------------------------------- NumPy's functions


def _of_whole(one: Callable, two: Callable, several: Callable, primitive: Linear) -> None:
    """Declare the transform along one axis, along two, and along several."""
    name = one.__name__

    @implements(several)
    def along_several(a: Value, s: Any = None, axes: Any = None, norm: str | None = None) -> Value:
        return _transform(primitive, a, *_points(a, s, axes, name), norm, name)

    @implements(one)
    def along_one(a: Value, n: int | None = None, axis: int = -1, norm: str | None = None) -> Value:
        return along_several(a, None if n is None else (n,), (axis,), norm)

    _along_two(two, along_several)


def _along_two(numpy_function: Callable, along_several: Callable) -> None:
    implements(numpy_function)(lambda a, s=None, axes=(-2, -1), norm=None: along_several(a, s, axes, norm))


def _to_half(numpy_function: Callable, primitive: Linear) -> Callable:
    """Declare the transform of n real numbers to n // 2 + 1 points of their spectrum."""
    name = primitive.name

    def to_half(a: Value, n: int | None = None, axis: int = -1, norm: str | None = None) -> Value:
        t = typeof(a)
        if t.dtype.kind == "c":
            raise TypeError(f"{name} transforms real numbers, got {t}; use np.fft.fft, or take the .real part")
        axis = normalize_axis(axis, t.ndim, name)
        return primitive.bind(_fit(a, {axis: t.shape[axis] if n is None else n}, name), axis=axis, **_norm(norm))

    return implements(numpy_function)(to_half)


def _from_half(numpy_function: Callable, primitive: Linear) -> Callable:
    """Declare the transform of half a spectrum to n real numbers (default: even n)."""
    name = primitive.name

    def from_half(a: Value, n: int | None = None, axis: int = -1, norm: str | None = None) -> Value:
        t = typeof(a)
        axis = normalize_axis(axis, t.ndim, name)
        n = 2 * (t.shape[axis] - 1) if n is None else n
        if n < 1:
            raise ValueError(f"{name}: a transform needs at least one point, got n={n} for {t}")
        return primitive.bind(_fit(a, {axis: n // 2 + 1}, name), n=n, axis=axis, **_norm(norm))

    return implements(numpy_function)(from_half)


_of_whole(numpy.fft.fft, numpy.fft.fft2, numpy.fft.fftn, fft_p)
_of_whole(numpy.fft.ifft, numpy.fft.ifft2, numpy.fft.ifftn, ifft_p)
rfft, ihfft = _to_half(numpy.fft.rfft, rfft_p), _to_half(numpy.fft.ihfft, ihfft_p)
irfft, hfft = _from_half(numpy.fft.irfft, irfft_p), _from_half(numpy.fft.hfft, hfft_p)


@implements(numpy.fft.rfftn)
def rfftn(a: Value, s: Any = None, axes: Any = None, norm: str | None = None) -> Value:
    """`numpy.fft.rfftn`: the spectrum of real numbers on axes, half on the last."""
    sizes, axes = _points(a, s, axes, "rfft", half=True)
    return _transform(fft_p, rfft(a, sizes[-1], axes[-1], norm), sizes[:-1], axes[:-1], norm, "rfft")


@implements(numpy.fft.irfftn)
def irfftn(a: Value, s: Any = None, axes: Any = None, norm: str | None = None) -> Value:
    """`numpy.fft.irfftn`: the inverse of `rfftn`."""
    sizes, axes = _points(a, s, axes, "irfft", half=True)
    return irfft(_transform(ifft_p, a, sizes[:-1], axes[:-1], norm, "irfft"), sizes[-1], axes[-1], norm)


_along_two(numpy.fft.rfft2, rfftn)
_along_two(numpy.fft.irfft2, irfftn)


def _shift(numpy_function: Callable, sign: int) -> None:
    """Declare the shift of frequency 0 from the start to the middle (sign 1), or back (-1)."""

    def shift(x: Value, axes: Any = None) -> Value:
        shape = typeof(x).shape
        axes = normalize_axes(axes, len(shape), numpy_function.__name__)
        return roll(x, [sign * (shape[a] // 2) for a in axes], axes)

    implements(numpy_function)(shift)


_shift(numpy.fft.fftshift, 1)
_shift(numpy.fft.ifftshift, -1)
