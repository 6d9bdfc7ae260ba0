"""Layers of networks: convolutions and pooling, which are functions of the windows of an array, and normalizations.

Arrays are `[..., *space, channels]`, kernels `[*taps, channels, features]`: JAX's NHWC and HWIO. The windows are a view
of the array (`windows_p`), so a convolution is one product of matrices, for which NumPy copies them (im2col). Its
transposes are that of the product and that of the view, which adds up overlapping windows.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.control_flow.checkpoint import recomputed_selectively
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.base import convert, in_float32
from minidiff.ops.einsum import einsum
from minidiff.ops.elementwise import safe_denominator
from minidiff.ops.rearranging import pairs_per_axis, unwindows_p, windows_p, windows_shape
from minidiff.ops.reduction import apply_mask, count_of
from minidiff.values.dtypes import accumulator_dtype

__all__ = [
    "avg_pool", "batch_norm", "conv", "conv_transpose", "group_norm", "layer_norm", "max_pool", "rms_norm",
    "standardize",
]  # fmt: skip

Sizes = int | Sequence[int]  # one for all dimensions of space, or one for each


def conv(
    x: Value,
    kernel: Value,
    stride: Sizes = 1,
    padding: str | int | Sequence = "same",
    dilation: Sizes = 1,
    groups: int = 1,
) -> Value:
    """Convolve arrays with a kernel, without flipping it, as the layers of networks do.

    Args:
        x: an array `[..., *space, channels]`, where space has 1 to 3 dimensions.
        kernel: an array `[*taps, channels / groups, features]`.
        stride: the distance of places, one number, or one for each dimension of space.
        padding: the zeros around x: with 'same', n elements give n / stride results, rounded up; 'valid' adds none; or
            a number, a pair (before, after), or a pair for each dimension of space.
        dilation: the distance of taps, one number, or one for each dimension of space.
        groups: the number of groups of channels, each of which makes a group of features.

    Returns:
        An array `[..., *places, features]`.

    Raises:
        ValueError: for shapes and options that do not match.

    >>> conv(numpy.array([[1.0], [2.0], [3.0], [4.0]]), numpy.ones((3, 1, 1))).ravel()
    array([3., 6., 9., 7.])
    >>> conv(numpy.ones((8, 32, 32, 3)), numpy.ones((5, 5, 3, 16)), stride=2).shape
    (8, 16, 16, 16)

    Source: Chellapilla et al., "High performance convolutional neural networks for document processing", 2006.
    """
    t, of_kernel = check_operands("conv", x, kernel, groups)
    *taps, each, features = of_kernel.shape
    places = places_of("conv", t, taps, stride, dilation)
    x = _pad("conv", x, places, padding)
    if each == 1:
        return _conv_of_channels(x, kernel, places)
    windows = windows_p.bind(x, **places._asdict())
    windows = numpy.moveaxis(windows, t.ndim - 1, -1)  # channels last: NumPy copies them in one piece
    labels = "uvw"[: len(taps)]
    if groups == 1:
        return einsum(f"...{labels}c,{labels}cf->...f", windows, kernel)
    windows = numpy.reshape(windows, (*typeof(windows).shape[:-1], groups, each))
    kernel = numpy.reshape(kernel, (*taps, each, groups, features // groups))
    out = einsum(f"...{labels}gc,{labels}cgf->...gf", windows, kernel)
    return numpy.reshape(out, (*typeof(out).shape[:-2], features))


@in_float32
def _conv_of_channels(x: Value, kernel: Value, places: Places) -> Value:
    """Convolve each channel with its features' kernels: a sum over taps, which compiles to one loop."""
    features, channels = typeof(kernel).shape[-1], typeof(x).shape[-1]
    x = x if features == channels else numpy.repeat(x, features // channels, -1)
    return functools.reduce(operator.add, [e * kernel[(*tap, 0)] for tap, e in _elements(x, places).items()])


@in_float32
def conv_transpose(
    x: Value,
    kernel: Value,
    stride: Sizes = 1,
    padding: str = "same",
    dilation: Sizes = 1,
    transpose_kernel: bool = False,
) -> Value:
    """Transpose a convolution with a stride: each position becomes `stride` positions, as in JAX.

    Args:
        x: an array `[..., *space, channels]`, where space has 1 to 3 dimensions.
        kernel: an array `[*taps, channels, features]`, which is flipped.
        stride: the distance of places, one number, or one for each dimension of space.
        padding: with 'same', n elements give n * stride results; 'valid' adds max(taps - stride, 0) of them.
        dilation: the distance of taps, one number, or one for each dimension of space.
        transpose_kernel: whether the kernel is `[*taps, features, channels]`, that of the `conv` whose transpose this
            is, and not flipped.

    Returns:
        An array `[..., *places, features]`.

    Raises:
        ValueError: for shapes and options that do not match.

    >>> conv_transpose(numpy.array([[1.0], [2.0]]), numpy.array([[[3.0]], [[1.0]]]), stride=2).ravel()
    array([1., 3., 2., 6.])
    >>> conv_transpose(numpy.ones((8, 16, 16, 3)), numpy.ones((4, 4, 3, 16)), stride=2).shape
    (8, 32, 32, 16)

    Source: Zeiler et al., "Deconvolutional networks", 2010.
    """
    flipped = tuple(range(typeof(kernel).ndim - 2))
    kernel = numpy.swapaxes(kernel, -1, -2) if transpose_kernel else numpy.flip(kernel, flipped)
    t, of_kernel = check_operands("conv_transpose", x, kernel, 1)
    *taps, _, features = of_kernel.shape
    if padding not in ("same", "valid", "SAME", "VALID"):
        raise ValueError(f"conv_transpose of {t} and {of_kernel}: padding must be 'same' or 'valid', got {padding!r}")
    places = places_of("conv_transpose", t, taps, stride, dilation)
    more = [max(n - s, 0) for n, s in zip(places.reach, places.steps)]  # those of 'valid'
    counts = [t.shape[a] * s for a, s in zip(places.axes, places.steps)]
    labels = "uvw"[: len(taps)]
    windows = einsum(f"...c,{labels}cf->...f{labels}", x, kernel)
    shape = (*t.shape[: places.axes[0]], *map(operator.add, counts, more), features)
    out = unwindows_p.bind(windows, **places._asdict(), shape=shape)
    if padding.lower() == "valid":
        return out
    return out[(..., *(slice(m // 2, m // 2 + n) for m, n in zip(more, counts)), slice(None))]


def check_operands(caller: str, x: Value, kernel: Value, groups: int) -> tuple[ShapedArray, ShapedArray]:
    """Return the types of an array and a kernel. Raise ValueError unless they can be convolved."""
    t, of_kernel = typeof(x), typeof(kernel)
    space = of_kernel.ndim - 2
    if not 1 <= space <= min(3, t.ndim - 1) or t.shape[-1] != groups * of_kernel.shape[-2]:
        raise ValueError(
            f"{caller}: x is {t} and the kernel {of_kernel}, with groups={groups}; they must be "
            "[..., *space, channels] and [*taps, channels / groups, features], with as many dimensions of space as of "
            "taps, 1 to 3"
        )
    if of_kernel.shape[-1] % groups:
        raise ValueError(f"{caller}: the features of the kernel {of_kernel} cannot be split into {groups} groups")
    return t, of_kernel


def max_pool(x: Value, window: Sequence[int], stride: Sizes | None = None, padding: Any = "valid") -> Value:
    """Return the maximum of each window.

    Args:
        x: an array `[..., *space, channels]`.
        window: a size for each dimension of space.
        stride: the distance of windows, one number, or one for each dimension of space; None is their size.
        padding: as for `conv`; the padding is never the maximum.

    Returns:
        An array `[..., *places, channels]`.

    Raises:
        ValueError: for sizes that do not match.

    >>> max_pool(numpy.array([[1.0], [3.0], [2.0], [0.0]]), (2,)).ravel()
    array([3., 2.])
    """
    lowest = -numpy.inf if typeof(x).dtype.kind == "f" else numpy.iinfo(typeof(x).dtype).min
    return functools.reduce(numpy.maximum, _pooled("max_pool", x, window, stride, padding, lowest))


@in_float32
def avg_pool(x: Value, window: Sequence[int], stride: Sizes | None = None, padding: Any = "valid") -> Value:
    """Return the mean of each window, counting the zeros around x.

    Args:
        x: an array `[..., *space, channels]`.
        window: a size for each dimension of space.
        stride: the distance of windows, one number, or one for each dimension of space; None is their size.
        padding: as for `conv`.

    Returns:
        An array `[..., *places, channels]`.

    Raises:
        ValueError: for sizes that do not match.

    >>> avg_pool(numpy.array([[1.0], [3.0], [2.0], [0.0]]), (2,)).ravel()
    array([2., 1.])
    """
    return functools.reduce(operator.add, _pooled("avg_pool", x, window, stride, padding, 0.0)) / math.prod(window)


def _pooled(
    caller: str, x: Value, sizes: Sequence[int], stride: Any, padding: Any, padding_value: float
) -> list[Value]:
    """Return the elements of all windows at each place in a window."""
    places = places_of(caller, typeof(x), sizes, sizes if stride is None else stride, 1)
    return [*_elements(_pad(caller, x, places, padding, padding_value), places).values()]


def _elements(x: Value, places: Places) -> dict[tuple[int, ...], Value]:
    """Return, for each place in a window, the elements of all windows there: slices, which compile to one loop."""
    shape = windows_shape(typeof(x), **places._asdict())[0]
    ends = [step * (shape[a] - 1) + 1 for a, step in zip(places.axes, places.steps)]

    def at(offset: Sequence[int]) -> Value:
        starts = map(operator.mul, offset, places.dilations)
        return x[(..., *(slice(k, k + end, step) for k, end, step in zip(starts, ends, places.steps)), slice(None))]

    return {offset: at(offset) for offset in numpy.ndindex(*places.sizes)}


class Places(NamedTuple):
    """The places of windows: the axes of space, and along each the size, the stride and the dilation of windows."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def reach(self) -> list[int]:
        """The number of elements from the first of a window to its last."""
        return [d * (k - 1) + 1 for k, d in zip(self.sizes, self.dilations)]


def places_of(caller: str, t: ShapedArray, sizes: Sequence[int], stride: Sizes, dilation: Sizes) -> Places:
    """Return the places of windows of these sizes in an array of type t. Raise ValueError if they do not fit."""
    space = len(sizes)
    steps, dilations = ((n,) * space if isinstance(n, int) else tuple(n) for n in (stride, dilation))
    if not len(steps) == len(dilations) == space < t.ndim or min((*sizes, *steps, *dilations)) < 1:
        raise ValueError(
            f"{caller} of {t} with windows {(*sizes,)}, stride={stride!r}, dilation={dilation!r}: x must be "
            "[..., *space, channels], and stride and dilation a number, or one for each dimension of space, all at "
            "least 1"
        )
    return Places(tuple(range(t.ndim - 1 - space, t.ndim - 1)), tuple(sizes), steps, dilations)


def _pad(caller: str, x: Value, places: Places, padding: Any, padding_value: float = 0.0) -> Value:
    """Return x with its padding along space, of this value. Raise ValueError if a window is larger."""
    t, (first, *_), space = typeof(x), places.axes, len(places.axes)
    widths = pad_widths(caller, t, places, padding)
    if any(map(any, widths)):
        x = numpy.pad(x, [(0, 0)] * first + widths + [(0, 0)], constant_values=padding_value)
    if min(windows_shape(typeof(x), **places._asdict())[0][first : -1 - space]) < 1:
        raise ValueError(
            f"{caller} of {t} with windows {places.sizes}, stride={places.steps}, padding={padding!r}, "
            f"dilation={places.dilations}: a window is larger than the padded array, {typeof(x)}"
        )
    return x


def pad_widths(caller: str, t: ShapedArray, places: Places, padding: Any) -> list[tuple[int, int]]:
    """Return the widths of the padding before and after each dimension of space, by the `padding` of `conv`."""
    if not isinstance(padding, str):
        pairs = [(int(before), int(after)) for before, after in pairs_per_axis(padding, len(places.axes))]
        if min(map(min, pairs)) < 0:
            raise ValueError(f"{caller} of {t}: padding must be at least 0, got {padding!r}")
        return pairs
    if padding.lower() not in ("same", "valid"):
        raise ValueError(f"{caller} of {t}: padding must be 'same', 'valid', a number, or pairs (before, after)")
    if padding.lower() == "valid":
        return [(0, 0)] * len(places.axes)
    lengths = [t.shape[a] for a in places.axes]
    missing = [-(-n // s) * s - s + reach - n for n, s, reach in zip(lengths, places.steps, places.reach)]
    return [(max(n, 0) // 2, max(n, 0) - max(n, 0) // 2) for n in missing]


# ---------------------------------------------------------------- normalizations, computed in float32 at least


def standardize(
    x: Value, axis: Any = -1, mean: Any = None, variance: Any = None, epsilon: float = 1e-5, where: Any = None
) -> Value:
    """Compute `(x - mean) / sqrt(variance + epsilon)`.

    Args:
        x: an array of floating-point numbers.
        axis: the axis or axes of the moments.
        mean: the mean; None is that of x along the axes.
        variance: the variance; None is that of x along the axes.
        epsilon: a number added to the variance.
        where: a mask that broadcasts with x; where it is False, x is left out of the moments, and the result is 0.

    Returns:
        An array of the shape and dtype of x.

    >>> numpy.round(standardize(numpy.array([1.0, 3.0])), 3)
    array([-1.,  1.])
    >>> numpy.round(standardize(numpy.array([1.0, 3.0, numpy.nan]), where=numpy.array([True, True, False])), 3)
    array([-1.,  1.,  0.])
    """
    return _normalize(x, axis, (mean, variance), epsilon, where=where)


def _normalize(
    x: Value, axis: Any, moments: tuple, epsilon: float, affine: tuple = (None, None), where: Any = None
) -> Value:
    def of_moments(x: Value, mean: Any, variance: Any, scale: Any, bias: Any, where: Any) -> Value:
        wide = _zero_outside(where, _widen(x))
        centered = wide - (_mean(wide, axis, where) if mean is None else mean)
        has_variance = variance is not None
        if not has_variance:
            variance = _mean(centered * centered, axis, where)
        factor = 1 / numpy.sqrt(variance + epsilon)  # one division for a row
        if has_variance and scale is not None:  # both are numbers of channels: the backward pass needs one array less
            factor, scale = factor * scale, None
        y = convert(centered * factor, typeof(x).dtype)
        y = y if scale is None else y * scale
        return _zero_outside(where, y if bias is None else y + bias)

    return recomputed_selectively(of_moments)(x, *moments, *affine, where)


def _zero_outside(mask: Value | None, x: Value) -> Value:
    return x if mask is None else apply_mask(x, mask, 0.0)


def _mean(x: Value, axis: Any, mask: Value | None, keepdims: bool = True) -> Value:
    """Return the mean where the mask is True; 0 if it is nowhere."""
    if mask is None:
        return numpy.mean(x, axis=axis, keepdims=keepdims)
    count = convert(count_of(x, axis, mask, keepdims, "mean"), typeof(x).dtype)
    return numpy.sum(x, axis=axis, keepdims=keepdims, where=mask) / safe_denominator(count)


def layer_norm(
    x: Value, scale: Any = None, bias: Any = None, *, axis: Any = -1, epsilon: float = 1e-6, where: Any = None
) -> Value:
    """Compute `standardize(x) * scale + bias` of each example.

    Args:
        x: an array of floating-point numbers.
        scale: factors that broadcast with the result; None for 1.
        bias: numbers to add, which broadcast with the result; None for 0.
        axis: the axis or axes of the features of an example.
        epsilon: a number added to the variance.
        where: a mask that broadcasts with x; where it is False, x is left out of the moments, and the result is 0.

    Returns:
        An array of the shape of x.

    >>> numpy.round(layer_norm(numpy.array([1.0, 3.0]), scale=2.0, bias=1.0), 3)
    array([-1.,  3.])

    Source: Ba, Kiros and Hinton, "Layer normalization".
    """
    return _normalize(x, axis, (None, None), epsilon, (scale, bias), where)


def rms_norm(x: Value, scale: Any = None, *, axis: Any = -1, epsilon: float = 1e-6, where: Any = None) -> Value:
    """Compute `x / sqrt(mean(x**2) + epsilon) * scale`: `layer_norm` of features that are not centered.

    Args:
        x: an array of floating-point numbers.
        scale: factors that broadcast with the result; None for 1.
        axis: the axis or axes of the features of an example.
        epsilon: a number added to the mean.
        where: a mask that broadcasts with x; where it is False, x is left out of the mean, and the result is 0.

    Returns:
        An array of the shape of x.

    >>> numpy.round(rms_norm(numpy.array([1.0, 7.0])), 3)
    array([0.2, 1.4])

    Source: Zhang and Sennrich, "Root mean square layer normalization".
    """
    return _normalize(x, axis, (0.0, None), epsilon, (scale, None), where)


def group_norm(
    x: Value, groups: int, scale: Any = None, bias: Any = None, *, epsilon: float = 1e-6, where: Any = None
) -> Value:
    """Standardize groups of consecutive channels, each with the mean and variance of its example and group.

    Args:
        x: an array `[batch, *space, channels]`.
        groups: the number of groups.
        scale: factors [channels]; None for 1.
        bias: numbers [channels] to add; None for 0.
        epsilon: a number added to the variance.
        where: a mask that broadcasts with x; where it is False, x is left out of the moments, and the result is 0.

    Returns:
        An array of the shape of x.

    Raises:
        ValueError: if the groups do not divide the channels.

    >>> numpy.round(group_norm(numpy.array([[1.0, 3.0, 10.0, 30.0]]), groups=2), 3)
    array([[-1.,  1., -1.,  1.]])

    Source: Wu and He, "Group normalization".
    """
    t = typeof(x)
    if t.ndim < 2 or groups < 1 or t.shape[-1] % groups:
        raise ValueError(f"group_norm: x must be [batch, *space, channels], channels a multiple of {groups}, got {t}")
    parts = numpy.reshape(x, (*t.shape[:-1], groups, t.shape[-1] // groups))
    axes = (*range(1, t.ndim - 1), t.ndim)
    affine = tuple(x if x is None else numpy.reshape(x, typeof(parts).shape[-2:]) for x in (scale, bias))
    if where is not None:
        where = numpy.reshape(numpy.broadcast_to(where, t.shape), typeof(parts).shape)
    return numpy.reshape(_normalize(parts, axes, (None, None), epsilon, affine, where), t.shape)


def batch_norm(
    x: Value,
    scale: Value | None = None,
    bias: Value | None = None,
    statistics: tuple[Value, Value] | None = None,
    average: Callable[[Value], Value] | None = None,
    *,
    epsilon: float = 1e-5,
    where: Any = None,
) -> tuple[Value, tuple[Value, Value]]:
    """Standardize each channel over the batch and space.

    In training the moments are those of x.

    Args:
        x: an array `[..., channels]`.
        scale: factors [channels]; None for 1.
        bias: numbers [channels] to add; None for 0.
        statistics: for inference, the pair (mean, variance), such as running means of those that training returned.
        average: if the batch is split over ranks, the mean over ranks of an array [2, channels]: `lambda m: pmean(m,
            'batch')` gives the moments of the whole batch, with one psum. (The variance is then a difference of
            moments, and loses digits if a mean is much larger than the deviations.) With a mask the array is [3,
            channels], since ranks may count different numbers of elements.
        epsilon: a number added to the variance.
        where: a mask that broadcasts with x; where it is False, x is left out of the moments, and the result is 0.

    Returns:
        An array of the shape of x, and the pair (mean, variance) that was used.

    >>> y, (mean, variance) = batch_norm(numpy.array([[1.0], [3.0]]))
    >>> numpy.round(y.ravel(), 3), mean, variance
    (array([-1.,  1.]), array([2.]), array([1.]))
    >>> batch_norm(numpy.array([[4.0]]), statistics=(mean, variance))[0].round(3)
    array([[2.]])

    Source: Ioffe and Szegedy, "Batch normalization: Accelerating deep network training by reducing internal covariate
    shift".
    """
    if statistics is None:
        statistics = _batch_statistics(x, average, where)
    return _normalize(x, None, statistics, epsilon, (scale, bias), where), statistics


def _batch_statistics(x: Value, average: Callable[[Value], Value] | None, where: Any) -> tuple[Value, Value]:
    """Return the mean and variance of each channel, with `average` those of all ranks' examples."""
    wide, axes = _zero_outside(where, _widen(x)), tuple(range(typeof(x).ndim - 1))
    mean = _mean(wide, axes, where, False)
    variance = numpy.var(wide, axis=axes) if where is None else _mean((wide - mean) ** 2, axes, where, False)
    if average is None:
        return mean, variance
    moments = numpy.stack([mean, variance + mean * mean])
    if where is None:
        mean, square = average(moments)
    else:
        count = convert(count_of(wide, axes, where, False, "batch_norm"), wide.dtype)
        count, *sums = average(numpy.concatenate([count[None], count * moments]))
        mean, square = (total / safe_denominator(count) for total in sums)
    return mean, numpy.maximum(square - mean * mean, 0.0)


def _widen(x: Value) -> Value:
    return convert(x, accumulator_dtype(typeof(x).dtype))
