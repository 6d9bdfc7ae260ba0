"""Normalizations, computed in float32 at least; the result has the dtype of x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.control_flow.checkpoint import recomputed_selectively
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.ops.base import convert
from minidiff.values.dtypes import accumulator_dtype


def standardize(
    x: Value, axis: Any = -1, mean: Value | None = None, variance: Value | None = None, epsilon: float = 1e-5
) -> Value:
    """`(x - mean) / sqrt(variance + epsilon)`, of the shape of x; by default the moments of x along axes.

    >>> numpy.round(standardize(numpy.array([1.0, 3.0])), 3)
    array([-1.,  1.])
    """

    return _normalize(x, axis, (mean, variance), epsilon)


def _normalize(
    x: Value, axis: Any, moments: tuple, epsilon: float, scale: Value | None = None, bias: Value | None = None
) -> Value:
    def of_moments(x: Value, mean: Any, variance: Any, scale: Any, bias: Any) -> Value:
        wide = _widen(x)
        centered = wide - (numpy.mean(wide, axis=axis, keepdims=True) if mean is None else mean)
        if variance is None:
            variance = numpy.mean(centered * centered, axis=axis, keepdims=True)
        y = convert(centered / numpy.sqrt(variance + epsilon), typeof(x).dtype)
        y = y if scale is None else y * scale
        return y if bias is None else y + bias

    return recomputed_selectively(of_moments)(x, *moments, scale, bias)


def layer_norm(
    x: Value, scale: Value | None = None, bias: Value | None = None, *, axis: Any = -1, epsilon: float = 1e-6
) -> Value:
    """`standardize(x) * scale + bias` of each example: along the axis of its features, or several.

    Here and below, a scale or a bias of None is left out.

    >>> numpy.round(layer_norm(numpy.array([1.0, 3.0]), scale=2.0, bias=1.0), 3)
    array([-1.,  3.])

    Source: Ba, Kiros and Hinton, "Layer normalization".
    """
    return _normalize(x, axis, (None, None), epsilon, scale, bias)


def rms_norm(x: Value, scale: Value | None = None, *, axis: Any = -1, epsilon: float = 1e-6) -> Value:
    """`x / sqrt(mean(x**2) + epsilon) * scale`: `layer_norm` of features that are not centered.

    >>> numpy.round(rms_norm(numpy.array([1.0, 7.0])), 3)
    array([0.2, 1.4])

    Source: Zhang and Sennrich, "Root mean square layer normalization".
    """
    return _normalize(x, axis, (0.0, None), epsilon, scale)


def group_norm(
    x: Value, groups: int, scale: Value | None = None, bias: Value | None = None, *, epsilon: float = 1e-6
) -> Value:
    """`standardize` of groups of channels: [batch, *space, channels] -> same.

    The moments are those of an example and a group of consecutive channels. Raise ValueError if the groups do not
    divide the channels.

    >>> numpy.round(group_norm(numpy.array([[1.0, 3.0, 10.0, 30.0]]), groups=2), 3)
    array([[-1.,  1., -1.,  1.]])

    Source: Wu and He, "Group normalization".
    """
    t = typeof(x)
    if t.ndim < 2 or groups < 1 or t.shape[-1] % groups:
        raise ValueError(f"group_norm: x is [batch, *space, channels], channels a multiple of {groups} groups, got {t}")
    parts = numpy.reshape(x, (*t.shape[:-1], groups, t.shape[-1] // groups))
    axes = (*range(1, t.ndim - 1), t.ndim)
    scale, bias = (x if x is None else numpy.reshape(x, typeof(parts).shape[-2:]) for x in (scale, bias))
    return numpy.reshape(_normalize(parts, axes, (None, None), epsilon, scale, bias), t.shape)


def batch_norm(
    x: Value,
    scale: Value | None = None,
    bias: Value | None = None,
    statistics: tuple[Value, Value] | None = None,
    average: Callable[[Value], Value] | None = None,
    *,
    epsilon: float = 1e-5,
) -> tuple[Value, tuple[Value, Value]]:
    """`standardize` of each channel over the batch and space, [..., channels], and the mean and variance used.

    In training the moments are those of x. If ranks have parts of the batch, `average` takes the mean over ranks of
    an array [2, channels]: `lambda m: pmean(m, 'batch')` makes them those of the whole batch, by one psum. (The
    variance is then a difference of moments, and loses digits if a mean is much larger than the deviations.) For
    inference, give `statistics` (mean, variance), such as running means of those that training returned.

    >>> y, (mean, variance) = batch_norm(numpy.array([[1.0], [3.0]]))
    >>> numpy.round(y.ravel(), 3), mean, variance
    (array([-1.,  1.]), array([2.]), array([1.]))
    >>> batch_norm(numpy.array([[4.0]]), statistics=(mean, variance))[0].round(3)
    array([[2.]])

    Source: Ioffe and Szegedy, "Batch normalization: Accelerating deep network training by reducing internal covariate
    shift".
    """
    if statistics is None:
        wide, axes = _widen(x), tuple(range(typeof(x).ndim - 1))
        mean, variance = numpy.mean(wide, axis=axes), numpy.var(wide, axis=axes)
        if average is not None:
            mean, square = average(numpy.stack([mean, variance + mean * mean]))
            variance = numpy.maximum(square - mean * mean, 0.0)
        statistics = mean, variance
    return _normalize(x, None, statistics, epsilon, scale, bias), statistics


def _widen(x: Value) -> Value:
    return convert(x, accumulator_dtype(typeof(x).dtype))
