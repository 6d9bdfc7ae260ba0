"""Neural network functions, with the API of `jax.nn`; convolutions, pooling and normalizations.

Values and derivatives are finite wherever the mathematics is: at large numbers, infinities and ties.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy

from minidiff import random
from minidiff.control_flow.checkpoint import recomputed_selectively
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.other_libraries import finish_module
from minidiff.inputs.arguments import normalize_axis
from minidiff.nn import layers
from minidiff.nn.layers import *  # noqa: F403
from minidiff.ops import dimensions, elementwise, reduction
from minidiff.ops.base import Elementwise, General, in_float32, reduced_shape
from minidiff.ops.composed import clip
from minidiff.ops.einsum import einsum
from minidiff.ops.elementwise import exp, expm1, log, logaddexp, stop_gradient, where
from minidiff.ops.shape import normalize_axes
from minidiff.ops.special import erf_p, erfc_of, erfc_p
from minidiff.values.dtypes import is_differentiable

__all__ = [
    *layers.__all__, "celu", "dot_product_attention", "dropout", "elu", "erf", "erfc", "gelu", "glu", "hard_sigmoid",
    "hard_silu", "hard_swish", "hard_tanh", "initializers", "leaky_relu", "log_sigmoid", "log_softmax", "logsumexp",
    "mish", "one_hot", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax", "softplus", "squareplus",
    "swish",
]  # fmt: skip

# ---------------------------------------------------------------- the error function


def erf(x: Value) -> Value:
    """Compute the error function of real numbers.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> round(float(erf(0.5)), 12)
    0.520499877813
    """
    return erf_p.bind(x)


def erfc(x: Value) -> Value:
    """Compute `1 - erf(x)` of real numbers, accurate even where it is small.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> bool(1 - erf(10.0) == 0.0), bool(0 < erfc(10.0) < 1e-40)
    (True, True)
    """
    return erfc_p.bind(x)


# ---------------------------------------------------------------- activations

# gelu, silu and mish are x times a gate from 0 to 1. Clip x where the gate has reached 0 or 1, to avoid 0 * inf.
_LIMIT = 40.0  # for gelu; its cube is finite in half precision, too
_FAR = 1e4  # for silu and mish


def _apply(primitive: Elementwise, impl: Callable, x: Value) -> Value:
    return primitive.bind(x) if isinstance(x, Tracer) else impl(x)


def _gate(x: numpy.ndarray) -> numpy.ndarray:
    return 0.5 * (1 + numpy.tanh(x))


#: (1 + tanh(x)) / 2, which is the sigmoid of 2x: NumPy's tanh takes less time, and the sigmoid in loops.
gate_p = Elementwise(
    "gate",
    _gate,
    (lambda out, x: 2 * out * (1 - out),),
    decomposed=lambda x: elementwise.sigmoid(2 * x),
)


def _tanh_gate(x: Value) -> Value:
    return _apply(gate_p, _gate, math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _gelu_tanh_slope(out: Value, x: Value) -> Value:
    x = clip(x, -_LIMIT, _LIMIT)
    gate = _tanh_gate(x)
    return gate + x * gate * (1 - gate) * (math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x))


def _gelu_erf_slope(out: Value, x: Value) -> Value:
    x = clip(x, -_LIMIT, _LIMIT)
    return 0.5 * erfc(x * -math.sqrt(0.5)) + x * exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _silu_slope(out: Value, x: Value) -> Value:
    gate = elementwise.sigmoid(x)
    return gate * (1 + clip(x, -_FAR, _FAR) * (1 - gate))


def _mish_slope(out: Value, x: Value) -> Value:
    gate = numpy.tanh(logaddexp(x, 0.0))
    return gate + clip(x, -_FAR, _FAR) * (1 - gate) * (1 + gate) * elementwise.sigmoid(x)


def _activation(name: str, formula: Callable, slope: Callable) -> Elementwise:
    """Declare an elementwise operation that is composed of others."""
    return Elementwise(name, formula, (slope,), decomposed=formula)


relu_p = _activation("relu", lambda x: numpy.maximum(x, 0), lambda out, x: elementwise.greater(out, 0))
gelu_tanh_p = _activation(
    "gelu_tanh",
    lambda x: numpy.maximum(x, -_LIMIT) * _tanh_gate(numpy.clip(x, -_LIMIT, _LIMIT)),
    _gelu_tanh_slope,
)
gelu_erf_p = _activation(
    "gelu_erf",
    lambda x: numpy.maximum(x, -_LIMIT) * (0.5 * _apply(erfc_p, erfc_of, x * -math.sqrt(0.5))),
    _gelu_erf_slope,
)
silu_p = _activation(
    "silu",
    lambda x: numpy.maximum(x, -_FAR) * _apply(elementwise.sigmoid.primitive, elementwise.sigmoid_of, x),
    _silu_slope,
)
mish_p = _activation("mish", lambda x: numpy.maximum(x, -_FAR) * numpy.tanh(numpy.logaddexp(x, 0)), _mish_slope)
soft_sign_p = _activation(
    "soft_sign", lambda x: x / (1 + numpy.absolute(x)), lambda out, x: (1 / (1 + elementwise.absolute(x))) ** 2
)


def relu(x: Value) -> Value:
    """Compute `max(x, 0)`; at 0 its derivative is 0.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> import minidiff as md
    >>> x = numpy.array([-1.0, 0.0, 2.0])
    >>> relu(x), md.vmap(md.grad(relu))(x)
    (array([0., 0., 2.]), array([0., 0., 1.]))

    Source: Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines".
    """
    return relu_p.bind(x)


def gelu(x: Value, approximate: bool = True) -> Value:
    """Compute x times the standard normal CDF of x, or by default its tanh approximation.

    Args:
        x: real numbers, of any shape.
        approximate: whether to use the approximation `0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`.

    Returns:
        An array of the shape of x.

    >>> round(float(gelu(1.0, approximate=False)), 12)
    0.841344746069

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)".
    """
    return (gelu_tanh_p if approximate else gelu_erf_p).bind(x)


def sigmoid(x: Value) -> Value:
    """Compute `1 / (1 + exp(-x))` of real numbers.

    It does not overflow, and its derivative is finite everywhere.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> sigmoid(numpy.array([-1000.0, 0.0, 1000.0]))
    array([0. , 0.5, 1. ])
    """
    return elementwise.sigmoid(x)


def softplus(x: Value) -> Value:
    """Compute `log(1 + exp(x))` without overflow.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> softplus(numpy.array([-1000.0, 1000.0]))
    array([   0., 1000.])
    """
    return logaddexp(x, 0.0)


def log_sigmoid(x: Value) -> Value:
    """Compute `log(sigmoid(x))`, finite even where the sigmoid rounds to 0.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> log_sigmoid(numpy.array([-1000.0, 1000.0]))
    array([-1000.,    -0.])
    """
    return elementwise.negative(softplus(elementwise.negative(x)))


def silu(x: Value) -> Value:
    """Compute `x * sigmoid(x)`; `swish` is another name of it.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> silu(numpy.array([0.0, 1000.0]))
    array([   0., 1000.])

    Source: Elfwing et al., "Sigmoid-weighted linear units for neural network function approximation in reinforcement
    learning"; Ramachandran et al., "Searching for activation functions" (swish).
    """
    return silu_p.bind(x)


swish = silu


def mish(x: Value) -> Value:
    """Compute `x * tanh(softplus(x))`.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> round(float(mish(1.0)), 12)
    0.865098388267

    Source: Misra, "Mish: A self regularized non-monotonic activation function".
    """
    return mish_p.bind(x)


def glu(x: Value, axis: int = -1) -> Value:
    """Compute `a * sigmoid(b)`, where a and b are the two halves of x along an axis.

    Args:
        x: real numbers, of any shape.
        axis: the axis along which x is split.

    Returns:
        An array like x, half as long along the axis.

    Raises:
        ValueError: for an odd length along the axis.

    >>> glu(numpy.array([1.0, 2.0, 0.0, 0.0]))
    array([0.5, 1. ])

    Source: Dauphin et al., "Language modeling with gated convolutional networks".
    """
    t = typeof(x)
    axis = normalize_axis(axis, t.ndim, "glu")
    if t.shape[axis] % 2:
        raise ValueError(f"glu: {t} has no two equal halves along axis {axis}: its length there must be even")
    a, b = numpy.split(x, 2, axis)
    return elementwise.multiply(a, sigmoid(b))


def elu(x: Value, alpha: Value = 1.0) -> Value:
    """Compute `where(x > 0, x, alpha * (exp(x) - 1))`.

    Args:
        x: real numbers, of any shape.
        alpha: minus the limit at -inf.

    Returns:
        An array of the shape of x.

    >>> elu(numpy.array([-1000.0, 0.0, 2.0]), alpha=0.5)
    array([-0.5,  0. ,  2. ])

    Source: Clevert et al., "Fast and accurate deep network learning by exponential linear units (ELUs)".
    """
    positive = elementwise.greater(x, 0)
    return where(positive, x, elementwise.multiply(alpha, expm1(where(positive, 0.0, x))))


def celu(x: Value, alpha: Value = 1.0) -> Value:
    """Compute `where(x > 0, x, alpha * (exp(x / alpha) - 1))`, with derivative 1 at 0.

    Args:
        x: real numbers, of any shape.
        alpha: minus the limit at -inf; it must not be 0.

    Returns:
        An array of the shape of x.

    >>> round(float(celu(-1.0, alpha=2.0)), 12)
    -0.786938680575

    Source: Barron, "Continuously differentiable exponential linear units".
    """
    positive = elementwise.greater(x, 0)
    powers = expm1(elementwise.divide(where(positive, 0.0, x), alpha))
    return where(positive, x, elementwise.multiply(alpha, powers))


def leaky_relu(x: Value, negative_slope: Value = 0.01) -> Value:
    """Compute `where(x >= 0, x, negative_slope * x)`.

    Args:
        x: real numbers, of any shape.
        negative_slope: the slope below 0.

    Returns:
        An array of the shape of x.

    >>> leaky_relu(numpy.array([-2.0, 0.0, 3.0]))
    array([-0.02,  0.  ,  3.  ])
    """
    return where(elementwise.greater_equal(x, 0), x, elementwise.multiply(negative_slope, x))


def selu(x: Value) -> Value:
    """Compute `1.0507 * elu(x, 1.6733)`: layers with it keep the mean 0 and the variance 1 of their inputs.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> round(float(selu(-1000.0)), 6)
    -1.758099

    Source: Klambauer et al., "Self-normalizing neural networks".
    """
    return elementwise.multiply(1.0507009873554805, elu(x, 1.6732632423543772))


def relu6(x: Value) -> Value:
    """Compute `min(max(x, 0), 6)`.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> relu6(numpy.array([-1.0, 2.0, 9.0]))
    array([0., 2., 6.])
    """
    return numpy.minimum(numpy.maximum(x, 0.0), 6.0)


def hard_sigmoid(x: Value) -> Value:
    """Compute `relu6(x + 3) / 6`, a piecewise linear sigmoid.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> hard_sigmoid(numpy.array([-3.0, 0.0, 3.0]))
    array([0. , 0.5, 1. ])
    """
    return elementwise.multiply(relu6(elementwise.add(x, 3.0)), 1 / 6)


def hard_silu(x: Value) -> Value:
    """Compute `x * hard_sigmoid(x)`; `hard_swish` is another name of it.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> hard_silu(numpy.array([-3.0, 1.5, 3.0]))
    array([-0.   ,  1.125,  3.   ])

    Source: Howard et al., "Searching for MobileNetV3".
    """
    return elementwise.multiply(x, hard_sigmoid(x))


hard_swish = hard_silu


def hard_tanh(x: Value) -> Value:
    """Compute `min(max(x, -1), 1)`.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> hard_tanh(numpy.array([-2.0, 0.5]))
    array([-1. ,  0.5])
    """
    return numpy.minimum(numpy.maximum(x, -1.0), 1.0)


def soft_sign(x: Value) -> Value:
    """Compute `x / (1 + abs(x))`.

    Args:
        x: real numbers, of any shape.

    Returns:
        An array of the shape of x.

    >>> soft_sign(numpy.array([-1.0, 3.0]))
    array([-0.5 ,  0.75])
    """
    return soft_sign_p.bind(x)


def squareplus(x: Value, b: Value = 4.0) -> Value:
    """Compute `(x + sqrt(x**2 + b)) / 2`: like softplus, without exponentials.

    Args:
        x: real numbers, of any shape.
        b: the number under the root; at 0 the result is `sqrt(b) / 2`.

    Returns:
        An array of the shape of x.

    >>> squareplus(numpy.array([0.0, 1.5]))
    array([1., 2.])
    """
    return 0.5 * (x + numpy.sqrt(elementwise.multiply(x, x) + b))


# ---------------------------------------------------------------- softmax


def _subtract_maximum(x: numpy.ndarray, axes: tuple[int, ...]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the maximum of x along axes, and x minus it (0 at the maximum, even if inf)."""
    largest = numpy.max(x, axis=axes, keepdims=True, initial=-numpy.inf)
    if isinstance(x, Tracer):
        largest = stop_gradient(largest)
        return largest, elementwise.difference(x, largest)
    return largest, elementwise.difference_of(x, largest)


def _softmax(x: numpy.ndarray, axes: tuple[int, ...]) -> numpy.ndarray:
    powers = numpy.exp(_subtract_maximum(x, axes)[1])
    return powers * (1 / numpy.sum(powers, axis=axes, keepdims=True))  # one division for a row


def _log_softmax(x: numpy.ndarray, axes: tuple[int, ...]) -> numpy.ndarray:
    shifted = _subtract_maximum(x, axes)[1]
    return shifted - numpy.log(numpy.sum(numpy.exp(shifted), axis=axes, keepdims=True))


def _logsumexp(x: numpy.ndarray, axes: tuple[int, ...]) -> numpy.ndarray:
    largest, shifted = _subtract_maximum(x, axes)
    with numpy.errstate(divide="ignore"):  # the sum over an empty axis is 0
        total = numpy.log(numpy.sum(numpy.exp(shifted), axis=axes, keepdims=True)) + largest
    return numpy.squeeze(total, axes)[()]


def _along_axes(impl: Callable, tangent: Callable, reduces: bool = False, **traits: Any) -> General:
    """Declare an operation on one operand along axes, by `tangent(out, x, t, axes)`."""
    return General(
        impl.__name__.strip("_"),
        impl,
        lambda x, axes: (reduced_shape(x, axes) if reduces else x.shape, x.dtype),
        lambda out, primals, tangents, params: tangent(out, *primals, *tangents, **params),
        sharding=dimensions.reduction(None) if reduces else dimensions.axiswise("axes"),
        decomposed=impl,
        accumulates=True,
        **traits,
    )


def _softmax_tangent(out: Value, x: Value, t: Value, axes: tuple[int, ...]) -> Value:
    t = elementwise.multiply(out, t)
    return t - elementwise.multiply(out, reduction.sum(t, axes, keepdims=True))


softmax_p = _along_axes(_softmax, _softmax_tangent)
log_softmax_p = _along_axes(
    _log_softmax,
    lambda out, x, t, axes: t - reduction.sum(elementwise.multiply(exp(out), t), axes, keepdims=True),
    exponential=softmax_p,
)
logsumexp_p = _along_axes(
    _logsumexp,
    lambda out, x, t, axes: reduction.sum(elementwise.multiply(softmax_p.bind(x, axes=axes), t), axes),
    reduces=True,
)


def softmax(x: Value, axis: Any = -1, where: Value | None = None) -> Value:
    """Compute `exp(x) / sum(exp(x))` along axes.

    Infinities share the total of 1: softmax([inf, inf, 0]) is [0.5, 0.5, 0].

    Args:
        x: real numbers; integers become float64.
        axis: an axis, a tuple of axes, or None for all.
        where: a mask that broadcasts with x; where it is False, the result is 0, and x is left out of the sum.

    Returns:
        An array of the shape of x.

    Raises:
        AxisError: for an axis that x does not have.

    >>> softmax(numpy.array([1e3, 1e3, -1e3]))
    array([0.5, 0.5, 0. ])
    """
    return _along(softmax_p, x, axis, where, 0.0)


@in_float32
def log_softmax(x: Value, axis: Any = -1, where: Value | None = None) -> Value:
    """Compute `log(softmax(x))` along axes, without overflow.

    Args:
        x: real numbers; integers become float64.
        axis: an axis, a tuple of axes, or None for all.
        where: a mask that broadcasts with x; where it is False, the result is -inf, and x is left out of the sum.

    Returns:
        An array of the shape of x.

    Raises:
        AxisError: for an axis that x does not have.

    >>> log_softmax(numpy.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    return _along(log_softmax_p, x, axis, where, -numpy.inf)


@in_float32
def logsumexp(
    a: Value,
    axis: Any = None,
    b: Value | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Value | None = None,
) -> Any:
    """Compute `log(sum(b * exp(a)))` along axes, without overflow.

    Args:
        a: real numbers; integers become float64.
        axis: an axis, a tuple of axes, or None for all.
        b: factors that broadcast with a; None for 1.
        keepdims: whether the result keeps the axes, with size 1.
        return_sign: whether to return the logarithm of the sum's absolute value, and its sign.
        where: a mask that broadcasts with a; where it is False, a is left out of the sum.

    Returns:
        An array of the shape of a without the axes; with `return_sign`, the pair of it and the signs.

    Raises:
        AxisError: for an axis that a does not have.

    >>> round(float(logsumexp(numpy.array([1000.0, 1000.0]))), 6)
    1000.693147
    """
    a = _as_floating(a, where)
    if b is None and not return_sign:
        axes = normalize_axes(axis, typeof(a).ndim, "logsumexp")
        results = [logsumexp_p.bind(a, axes=axes)]
    else:
        b = 1.0 if b is None else b
        masked = elementwise.where(elementwise.equal(b, 0), -numpy.inf, a)
        axes = normalize_axes(axis, typeof(masked).ndim, "logsumexp")
        largest = stop_gradient(reduction.max(masked, axes, keepdims=True, initial=-numpy.inf))
        # An element with the factor 0 has a derivative in it; it is left out if it is too large for exp, or NaN.
        limit = math.log(numpy.finfo(typeof(a).dtype).max)
        a = elementwise.where(elementwise.less(elementwise.difference(a, largest), limit), a, masked)
        total = reduction.sum(elementwise.multiply(b, exp(elementwise.difference(a, largest))), axes)
        size = elementwise.absolute(total) if return_sign else total
        results = [log(size) + numpy.reshape(largest, typeof(total).shape), elementwise.sign(total)]
    y, *sign = [numpy.expand_dims(x, axes) for x in results] if keepdims else results
    return (y, *sign) if return_sign else y


def _as_floating(x: Value, mask: Value | None = None) -> Value:
    """Convert x to floating point, and set it to -inf where the mask is False."""
    x = x if is_differentiable(typeof(x).dtype) else elementwise.convert(x, float)
    return x if mask is None else reduction.apply_mask(x, mask, -numpy.inf)


def _along(primitive: General, x: Value, axis: Any, mask: Value | None, masked: float) -> Value:
    """Apply an operation along axes to the elements where the mask is True; the result is `masked` elsewhere."""
    x = _as_floating(x, mask)
    y = primitive.bind(x, axes=normalize_axes(axis, typeof(x).ndim, primitive.name))
    return y if mask is None else where(mask, y, masked)


def one_hot(x: Any, num_classes: int, *, dtype: Any = float, axis: int = -1) -> Value:
    """Make one-hot vectors of integers, along a new axis.

    Args:
        x: integers, of any shape; one that is not in [0, num_classes) gives zeros.
        num_classes: the length of the new axis.
        dtype: the dtype of the result.
        axis: the position of the new axis in the result.

    Returns:
        An array of the shape of x, with the new axis.

    >>> one_hot(numpy.array([0, 2]), 3)
    array([[1., 0., 0.],
           [0., 0., 1.]])
    """
    x = numpy.asarray(x) if isinstance(x, (int, list, tuple)) else x
    ndim = typeof(x).ndim
    axis = normalize_axis(axis, ndim + 1, "one_hot")
    classes = numpy.arange(num_classes).reshape(-1, *[1] * (ndim - axis))
    return (numpy.expand_dims(x, axis) == classes).astype(dtype)


# ---------------------------------------------------------------- dropout


def dropout(key: Value, x: Value, rate: float, shape: random.Shape | None = None) -> Value:
    """Set numbers of `x` to 0, each with probability `rate`, and divide the others by `1 - rate`.

    Args:
        key: a key of `minidiff.random`, u32[2].
        x: an array.
        rate: the probability, in [0, 1).
        shape: the shape of the draw, by default that of x. Along a dimension of size 1, numbers are dropped together. A
            `Block` drops the same numbers as a draw for the whole array.

    Returns:
        An array of the shape of x.

    Raises:
        ValueError: for a rate that is not in [0, 1).

    >>> import minidiff as md
    >>> dropout(md.random.key(0), numpy.ones(5), 0.5)
    array([2., 2., 0., 0., 0.])

    Source: Srivastava et al., "Dropout: A simple way to prevent neural networks from overfitting".
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: the rate must be a probability in [0, 1), got {rate}")
    if rate == 0:
        return x
    mask = random.bernoulli(key, 1 - rate, typeof(x).shape if shape is None else shape)
    return elementwise.where(mask, elementwise.multiply(x, 1 / (1 - rate)), 0.0)


# ---------------------------------------------------------------- attention


@functools.lru_cache(maxsize=1)
def _band(queries: int, keys: int, left: float, right: float) -> numpy.ndarray:
    """Return a mask of the keys that each query attends to. The last mask is cached, since all layers need the same."""
    distance = numpy.arange(keys) - numpy.arange(queries)[:, None]
    mask = (distance >= -left) & (distance <= right)
    mask.flags.writeable = False
    return mask


def dot_product_attention(
    query: Value,
    key: Value,
    value: Value,
    bias: Value | None = None,
    mask: Value | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
) -> Value:
    """Compute scaled dot-product attention: `softmax(query @ key.T * scale + bias) @ value`.

    It is computed for each batch and head. B is the batch size, T the number of queries, S of keys, N and K of heads, H
    of features. N is a multiple of K: each head of `key` and `value` serves N / K consecutive heads of `query`.

    Args:
        query: an array (B, T, N, H); it, key and value may all lack B.
        key: an array (B, S, K, H).
        value: an array (B, S, K, H).
        bias: numbers that are added to the products; they broadcast to (B, N, T, S).
        mask: booleans that broadcast to (B, N, T, S): a query attends to the keys where they are True.
        scale: the factor of the products; None is 1 / sqrt(H).
        is_causal: whether a query attends only to the keys up to its own position.
        local_window_size: a number or a pair (before, after): a query attends to keys at most that far from it.

    Returns:
        An array (B, T, N, H), without B if the query lacks it.

    Raises:
        TypeError: for a mask that is not boolean.
        ValueError: for shapes that do not match.

    >>> x = numpy.arange(8.0).reshape(1, 4, 1, 2)
    >>> dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]  # the first query attends to the first key alone
    array([0., 1.])

    Source: Vaswani et al., "Attention is all you need".
    """
    types = [typeof(x) for x in (query, key, value)]
    if types[0].ndim == 3:
        query, key, value = (numpy.expand_dims(x, 0) for x in (query, key, value))
        bias, mask = (x if x is None or typeof(x).ndim < 4 else numpy.expand_dims(x, 0) for x in (bias, mask))
        options: dict = {"scale": scale, "is_causal": is_causal, "local_window_size": local_window_size}
        return dot_product_attention(query, key, value, bias, mask, **options)[0]
    _check_attention(*types)
    (_, _, n, h), (_, _, k, _) = types[0].shape, types[1].shape
    if n != k:
        key, value = numpy.repeat(key, n // k, axis=2), numpy.repeat(value, n // k, axis=2)
    if mask is not None and typeof(mask).dtype != bool:
        raise TypeError(f"dot_product_attention: mask must be boolean, got {typeof(mask)}; pass numbers as bias=")
    reach = (math.inf, math.inf) if local_window_size is None else local_window_size
    left, right = (reach, reach) if isinstance(reach, int) else reach
    right = min(right, 0) if is_causal else right
    if min(left, right) < math.inf:
        band = _band(types[0].shape[1], types[1].shape[1], left, right)
        mask = band if mask is None else elementwise.logical_and(mask, band)
    core = functools.partial(_attend, scale=1 / math.sqrt(h) if scale is None else scale)
    return recomputed_selectively(core)(query, key, value, bias, mask)


def _attend(query: Value, key: Value, value: Value, bias: Value | None, mask: Value | None, scale: float) -> Value:
    """`dot_product_attention` of as many heads of keys as of queries."""
    types = [typeof(x) for x in (query, key, value)]
    # Large sums of products would overflow in half precision.
    wide = numpy.result_type(types[0].dtype, types[1].dtype, numpy.float32)
    logits = numpy.einsum("btnh,bsnh->bnts", elementwise.convert(query, wide), elementwise.convert(key, wide))
    logits = elementwise.multiply(logits, scale)
    if bias is not None:
        logits = elementwise.add(logits, bias)
    if mask is not None:
        # Finite, so that a query that attends to no key gets the mean of the values, not a NaN.
        logits = reduction.apply_mask(logits, mask, -0.7 * float(numpy.finfo(wide).max), "mask")
    weights = elementwise.convert(softmax(logits), numpy.result_type(types[0].dtype, types[2].dtype))
    return einsum("bnts,bsnh->btnh", weights, value)


def _check_attention(query: ShapedArray, key: ShapedArray, value: ShapedArray) -> None:
    """Raise ValueError unless shapes are (B, T, N, H), (B, S, K, H), (B, S, K, H)."""
    if query.ndim == key.ndim == 4 and key.shape == value.shape:
        (b, _, n, h), (key_batch, _, k, key_size) = query.shape, key.shape
        if (b, h) == (key_batch, key_size) and k and n % k == 0:
            return
    raise ValueError(
        f"dot_product_attention: query {query}, key {key} and value {value} do not match: they must be (B, T, N, H), "
        "(B, S, K, H) and (B, S, K, H), where N is a multiple of K"
    )


# ---------------------------------------------------------------- initial weights

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
        shown = f"mode must be one of {', '.join(_FANS)}, and distribution one of {', '.join(_DRAWS)}"
        raise ValueError(f"variance_scaling: {shown}; got {mode!r} and {distribution!r}")

    def draw(key: Value, shape: Any, dtype: Any = float) -> Value:
        if len(shape) < 2:
            raise ValueError(f"variance_scaling: weights must be [*taps, inputs, outputs], got the shape {(*shape,)}")
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


finish_module(globals())
