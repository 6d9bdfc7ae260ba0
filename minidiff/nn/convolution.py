"""Convolutions and pooling: functions of the windows of an array.

Arrays are `[..., *space, channels]`, kernels `[*taps, channels, features]`: JAX's NHWC and HWIO. The windows are a view
of the array (`windows_p`), so a convolution is one product of matrices, for which NumPy copies them (im2col). Its
transposes are the product's and that of the view, which adds what windows share.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops.base import in_float32
from minidiff.ops.einsum import einsum
from minidiff.ops.rearranging import pairs_per_axis, unwindows_p, windows_p, windows_shape

Sizes = int | Sequence[int]  # one for all dimensions of space, or one for each


def conv(
    x: Value,
    kernel: Value,
    stride: Sizes = 1,
    padding: str | int | Sequence = "same",
    dilation: Sizes = 1,
    groups: int = 1,
) -> Value:
    """Convolve arrays with a kernel, as the layers of networks do: it is not flipped.

    x `[..., *space, channels]`, kernel `[*taps, channels / groups, features]` -> `[..., *places, features]`, where
    space has 1 to 3 dimensions. Places are `stride` apart, and taps `dilation`. `padding` is the count of zeros around:
    'same' as many as make n / stride places of n, rounded up; 'valid' none; a number, a pair (before, after), or a pair
    for each dimension of space. Of several `groups` of channels, each makes a group of features. Raise ValueError for
    shapes and options that do not fit.

    >>> conv(numpy.array([[1.0], [2.0], [3.0], [4.0]]), numpy.ones((3, 1, 1))).ravel()
    array([3., 6., 9., 7.])
    >>> conv(numpy.ones((8, 32, 32, 3)), numpy.ones((5, 5, 3, 16)), stride=2).shape
    (8, 16, 16, 16)

    Source: Chellapilla et al., "High performance convolutional neural networks for document processing", 2006.
    """
    t, of_kernel = check_operands("conv", x, kernel, groups)
    *taps, each, features = of_kernel.shape
    x, axes, steps, dilations = _prepare("conv", x, taps, stride, padding, dilation)
    windows = windows_p.bind(x, axes=axes, sizes=(*taps,), steps=steps, dilations=dilations)
    windows = numpy.moveaxis(windows, t.ndim - 1, -1)  # channels last: NumPy copies them in one piece
    labels = "uvw"[: len(taps)]
    if groups == 1:
        return einsum(f"...{labels}c,{labels}cf->...f", windows, kernel)
    windows = numpy.reshape(windows, (*typeof(windows).shape[:-1], groups, each))
    kernel = numpy.reshape(kernel, (*taps, each, groups, features // groups))
    out = einsum(f"...{labels}gc,{labels}cgf->...gf", windows, kernel)
    return numpy.reshape(out, (*typeof(out).shape[:-2], features))


@in_float32
def conv_transpose(
    x: Value,
    kernel: Value,
    stride: Sizes = 1,
    padding: str = "same",
    dilation: Sizes = 1,
    transpose_kernel: bool = False,
) -> Value:
    """Transpose a convolution with a stride: it makes `stride` places of each, as `jax.lax.conv_transpose` does.

    x `[..., *space, channels]`, kernel `[*taps, channels, features]` -> `[..., *places, features]`. Of n, 'same' makes
    n * stride places, and 'valid' as many more as a kernel is larger than the stride. With `transpose_kernel` the
    kernel is `[*taps, features, channels]`, that of the `conv` whose transpose this is; otherwise it is flipped. Raise
    ValueError for shapes and options that do not fit.

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
    shown = f"conv_transpose of {t} and {of_kernel}, stride={stride!r}, padding={padding!r}, dilation={dilation!r}"
    if padding not in ("same", "valid", "SAME", "VALID"):
        raise ValueError(f"{shown}: padding is 'same' or 'valid'")
    axes, steps, dilations = _along_space(shown, t, taps, stride, dilation)
    more = [max(d * (k - 1) + 1 - s, 0) for k, d, s in zip(taps, dilations, steps)]  # places, of 'valid'
    places = [t.shape[a] * s for a, s in zip(axes, steps)]
    labels = "uvw"[: len(taps)]
    windows = einsum(f"...c,{labels}cf->...f{labels}", x, kernel)
    shape = (*t.shape[: axes[0]], *map(operator.add, places, more), features)
    out = unwindows_p.bind(windows, axes=axes, sizes=(*taps,), steps=steps, dilations=dilations, shape=shape)
    if padding.lower() == "valid":
        return out
    return out[(..., *(slice(m // 2, m // 2 + n) for m, n in zip(more, places)), slice(None))]


def check_operands(caller: str, x: Value, kernel: Value, groups: int) -> tuple[ShapedArray, ShapedArray]:
    """Return the types of an array and a kernel. Raise ValueError unless they can be convolved."""
    t, of_kernel = typeof(x), typeof(kernel)
    space = of_kernel.ndim - 2
    if not 1 <= space <= min(3, t.ndim - 1) or t.shape[-1] != groups * of_kernel.shape[-2]:
        raise ValueError(
            f"{caller}: x is {t} and the kernel {of_kernel}, with groups={groups}; write them as "
            "[..., *space, channels] and [*taps, channels / groups, features], with as many dimensions of space as of "
            "taps, 1 to 3"
        )
    if of_kernel.shape[-1] % groups:
        raise ValueError(f"{caller}: the features of the kernel {of_kernel} cannot be split into {groups} groups")
    return t, of_kernel


def max_pool(x: Value, window: Sequence[int], stride: Sizes | None = None, padding: Any = "valid") -> Value:
    """Return the maximum of each window: `[..., *space, channels]` -> `[..., *places, channels]`.

    `window` has a size for each dimension of space, and windows are `stride` apart, by default their size. `padding` is
    that of `conv`; what is around x is never the maximum. Raise ValueError for sizes that do not fit.

    >>> max_pool(numpy.array([[1.0], [3.0], [2.0], [0.0]]), (2,)).ravel()
    array([3., 2.])
    """
    lowest = -numpy.inf if typeof(x).dtype.kind == "f" else numpy.iinfo(typeof(x).dtype).min
    return functools.reduce(numpy.maximum, _elements("max_pool", x, window, stride, padding, lowest))


@in_float32
def avg_pool(x: Value, window: Sequence[int], stride: Sizes | None = None, padding: Any = "valid") -> Value:
    """Return the mean of each window, where zeros around x count. See `max_pool`.

    >>> avg_pool(numpy.array([[1.0], [3.0], [2.0], [0.0]]), (2,)).ravel()
    array([2., 1.])
    """
    return functools.reduce(operator.add, _elements("avg_pool", x, window, stride, padding, 0.0)) / math.prod(window)


def _elements(
    caller: str, x: Value, sizes: Sequence[int], stride: Any, padding: Any, padding_value: float
) -> list[Value]:
    """Return, for each place in a window, the elements of all windows there: slices, which compile to one loop."""
    x, axes, steps, _ = _prepare(caller, x, sizes, sizes if stride is None else stride, padding, 1, padding_value)
    shape = windows_shape(typeof(x), axes, sizes, steps, (1,) * len(axes))[0]
    ends = [step * (shape[a] - 1) + 1 for a, step in zip(axes, steps)]
    return [
        x[(..., *(slice(k, k + end, step) for k, end, step in zip(offset, ends, steps)), slice(None))]
        for offset in numpy.ndindex(*sizes)
    ]


def _prepare(
    caller: str,
    x: Value,
    sizes: Sequence[int],
    stride: Sizes,
    padding: Any,
    dilation: Sizes,
    padding_value: float = 0.0,
) -> tuple[Value, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return x with its padding, the axes of space, and the stride and dilation along each."""
    t, space = typeof(x), len(sizes)
    shown = f"{caller} of {t} with windows {(*sizes,)}, stride={stride!r}, padding={padding!r}, dilation={dilation!r}"
    axes, steps, dilations = _along_space(shown, t, sizes, stride, dilation)
    widths = pad_widths(shown, [t.shape[a] for a in axes], sizes, steps, padding, dilations)
    if any(map(any, widths)):
        x = numpy.pad(x, [(0, 0)] * axes[0] + widths + [(0, 0)], constant_values=padding_value)
    if min(windows_shape(typeof(x), axes, sizes, steps, dilations)[0][axes[0] : -1 - space]) < 1:
        raise ValueError(f"{shown}: a window is larger than the array with what is around it, {typeof(x)}")
    return x, axes, steps, dilations


def _along_space(
    shown: str, t: ShapedArray, sizes: Sequence[int], stride: Sizes, dilation: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the axes of space, and the stride and dilation along each."""
    space = len(sizes)
    steps, dilations = ((n,) * space if isinstance(n, int) else tuple(n) for n in (stride, dilation))
    if not len(steps) == len(dilations) == space < t.ndim or min((*sizes, *steps, *dilations)) < 1:
        raise ValueError(
            f"{shown}: x is [..., *space, channels], and stride and dilation are a number, or one for each dimension "
            "of space; all are at least 1"
        )
    return tuple(range(t.ndim - 1 - space, t.ndim - 1)), steps, dilations


def pad_widths(
    shown: str, space: Sequence[int], sizes: Sequence[int], steps: Sequence[int], padding: Any, dilations: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the widths of the padding before and after each dimension of space, by the `padding` of `conv`."""
    if isinstance(padding, str):
        if padding.lower() not in ("same", "valid"):
            raise ValueError(f"{shown}: padding is 'same', 'valid', a number, or pairs (before, after)")
        if padding.lower() == "valid":
            return [(0, 0)] * len(sizes)
        missing = [-(-n // s) * s - s + d * (k - 1) + 1 - n for n, k, s, d in zip(space, sizes, steps, dilations)]
        return [(max(n, 0) // 2, max(n, 0) - max(n, 0) // 2) for n in missing]
    pairs = [(int(before), int(after)) for before, after in pairs_per_axis(padding, len(sizes))]
    if min(map(min, pairs)) < 0:
        raise ValueError(f"{shown}: padding is at least 0")
    return pairs
