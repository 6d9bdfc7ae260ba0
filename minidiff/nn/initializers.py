"""Random initial weights, with the names of `jax.nn.initializers`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy

from minidiff import random
from minidiff.core.tracer import Value

Initializer = Callable[..., Value]  # of a key, a shape, and a dtype

#: Numbers of mean 0 and variance 1. (Between -2 and 2, normal numbers have a deviation of 0.88.)
_DRAWS: dict[str, Initializer] = {
    "normal": random.normal,
    "truncated_normal": lambda key, shape, dtype: (
        random.truncated_normal(key, -2.0, 2.0, shape, dtype) * numpy.asarray(1 / 0.87962566103423978, dtype)
    ),
    "uniform": lambda key, shape, dtype: random.uniform(key, shape, dtype, -math.sqrt(3), math.sqrt(3)),
}
_FANS = {"fan_in": (1.0, 0.0), "fan_out": (0.0, 1.0), "fan_avg": (0.5, 0.5)}


def _constant(value: Value) -> Initializer:
    return lambda key, shape, dtype=float: numpy.full(shape, value, dtype)


def _normal(stddev: float = 0.01) -> Initializer:
    return lambda key, shape, dtype=float: random.normal(key, shape, dtype) * numpy.asarray(stddev, dtype)


def _of_variance(scale: float, mode: str, distribution: str, in_axis: int = -2, out_axis: int = -1) -> Initializer:
    if mode not in _FANS or distribution not in _DRAWS:
        shown = f"mode is one of {', '.join(_FANS)}, and distribution one of {', '.join(_DRAWS)}"
        raise ValueError(f"variance_scaling: {shown}; got {mode!r} and {distribution!r}")

    def draw(key: Value, shape: Any, dtype: Any = float) -> Value:
        if len(shape) < 2:
            raise ValueError(f"variance_scaling: weights are [*taps, inputs, outputs], got the shape {(*shape,)}")
        inputs, outputs = shape[in_axis], shape[out_axis]
        fan = sum(w * n for w, n in zip(_FANS[mode], (inputs, outputs))) * math.prod(shape) / (inputs * outputs)
        return _DRAWS[distribution](key, shape, dtype) * numpy.asarray(math.sqrt(scale / fan), dtype)

    return draw


class initializers:
    """Functions that make initializers, `f(key, shape, dtype=float)`; `zeros` and `ones` are initializers.

    `variance_scaling(scale, mode, distribution)` draws weights `[*taps, inputs, outputs]` of mean 0 and variance
    scale / fan. The fan is the number of inputs of a neuron (`mode` is 'fan_in'), of outputs ('fan_out') or their mean
    ('fan_avg'); the distribution is 'normal', 'truncated_normal' or 'uniform'. `lecun_*`, `glorot_*` and `he_*` are
    such, `*` being `normal` (truncated) or `uniform`. `constant(value)` and `normal(stddev)` have one distribution for
    all shapes. Raise ValueError for other names, and for weights of one dimension.

    >>> import minidiff as md
    >>> w = initializers.he_normal()(md.random.key(0), (3, 3, 64, 128))
    >>> w.shape, round(float(w.std() / numpy.sqrt(2 / (9 * 64))), 2)
    ((3, 3, 64, 128), 1.0)

    Source: LeCun et al., "Efficient BackProp"; Glorot and Bengio, "Understanding the difficulty of training deep
    feedforward neural networks"; He et al., "Delving deep into rectifiers".
    """

    constant, variance_scaling = staticmethod(_constant), staticmethod(_of_variance)
    zeros, ones = staticmethod(_constant(0.0)), staticmethod(_constant(1.0))
    normal = staticmethod(_normal)
    lecun_normal, lecun_uniform, glorot_normal, glorot_uniform, he_normal, he_uniform = (
        staticmethod(functools.partial(_of_variance, scale, mode, distribution))
        for scale, mode in ((1.0, "fan_in"), (1.0, "fan_avg"), (2.0, "fan_in"))
        for distribution in ("truncated_normal", "uniform")
    )
