"""Activations, softmax and attention where a table of modest numbers cannot say enough: infinities, ties, masks."""

import functools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import nn
from tests.checks.samples import each

INF = np.inf
exact_gelu = functools.partial(nn.gelu, approximate=False)

#: (function, x, value, derivative), exactly or to the last digits.
FAR = [
    *((exact_gelu, x, max(x, 0), float(x > 0)) for x in (1e3, 1e200, INF, -1e3, -1e200, -INF)),
    (nn.relu, 0.0, 0, 0),
    (nn.relu, -INF, 0, 0),
    (nn.relu, INF, INF, 1),
    *((f, x, x, 1) for f in (nn.relu, nn.gelu, nn.silu, nn.mish, nn.softplus) for x in (1e3, 1e200, INF)),
    *((f, x, x, 1) for f in (nn.elu, nn.celu, nn.leaky_relu) for x in (1e3, 1e200, INF)),
    *((f, x, 0, 0) for f in (nn.relu, nn.gelu, nn.silu, nn.mish, nn.softplus) for x in (-1e3, -1e200, -INF)),
    *((f, x, -1, 0) for f in (nn.elu, nn.celu) for x in (-1e3, -INF)),
    *((nn.sigmoid, x, float(x > 0), 0) for x in (1e3, -1e3, INF, -INF)),
    *((nn.log_sigmoid, x, min(x, 0), float(x < 0)) for x in (1e3, -1e3, INF, -INF)),
    *((nn.erf, x, math.copysign(1, x), 0) for x in (1e3, -1e3, INF, -INF)),
    (nn.erfc, INF, 0, 0),
    (nn.erfc, 20.0, math.erfc(20), -2 / math.sqrt(math.pi) * math.exp(-400)),
    (nn.leaky_relu, -INF, -INF, 0.01),
    (nn.leaky_relu, 0.0, 0, 1),
    (nn.elu, 0.0, 0, 1),
    (nn.celu, 0.0, 0, 1),
    (nn.mish, 0.0, 0, 0.6),
    (nn.silu, 0.0, 0, 0.5),
    (nn.gelu, 0.0, 0, 0.5),
    (nn.softplus, 0.0, math.log(2), 0.5),
    (nn.sigmoid, -40.0, math.exp(-40), math.exp(-40)),
    (nn.log_sigmoid, -40.0, -40, 1),
    (nn.softplus, -40.0, math.exp(-40), math.exp(-40)),
]


@each("dtype", [np.float64, np.float32])
@each("f, x, value, slope", FAR)
def test_far_out(f, x, value, slope, dtype):
    if dtype == np.float32 and 1e3 < abs(x) < INF:
        x = math.copysign(1e30, x)
        value, slope = (v if abs(v) < 1e3 else x for v in (value, slope))
    tolerance = 1e-14 if dtype == np.float64 else 1e-5
    x = dtype(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "underflow")
        np.testing.assert_allclose(f(x), value, rtol=tolerance, atol=1e-35)
        _, pullback = md.vjp(f, x)
        np.testing.assert_allclose(pullback(dtype(1))[0], slope, rtol=tolerance, atol=1e-35)
        np.testing.assert_allclose(md.jvp(f, (x,), (dtype(1),))[1], slope, rtol=tolerance, atol=1e-35)
    assert f in (nn.erf, nn.erfc) or np.isfinite(md.grad(md.grad(f))(x))


FORMULAS = {
    nn.softplus: lambda x: math.log1p(math.exp(x)),
    nn.silu: lambda x: x / (1 + math.exp(-x)),
    nn.swish: nn.silu,
    nn.mish: lambda x: x * math.tanh(math.log1p(math.exp(x))),
    exact_gelu: lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    functools.partial(nn.elu, alpha=0.3): lambda x: x if x > 0 else 0.3 * math.expm1(x),
    functools.partial(nn.celu, alpha=0.3): lambda x: x if x > 0 else 0.3 * math.expm1(x / 0.3),
    functools.partial(nn.leaky_relu, negative_slope=0.3): lambda x: x if x > 0 else 0.3 * x,
}


@given(st.floats(-30, 30))
@settings(max_examples=50, deadline=None)
def test_activations_are_what_they_are_called(x):
    for f, formula in FORMULAS.items():
        assert f(x) == pytest.approx(formula(x), rel=1e-13 if f in (nn.mish, exact_gelu) else 1e-14)
    assert nn.glu(np.array([x, 2.0])) == pytest.approx([x * nn.sigmoid(2.0)])
    assert nn.gelu(x) == pytest.approx(exact_gelu(x), abs=1e-3)


# ---------------------------------------------------------------- softmax

SOFTMAX = [
    ([1e3, 1e3, -1e3], [0.5, 0.5, 0]),
    ([1e200, -1e200, 0.0], [1, 0, 0]),
    ([INF, 0.0, -INF], [1, 0, 0]),
    ([INF, INF, 0.0], [0.5, 0.5, 0]),
    ([-INF, 0.0, 0.0], [0, 0.5, 0.5]),
    ([-INF, -INF, -INF], [1 / 3, 1 / 3, 1 / 3]),
    ([7.0], [1]),
]


@each("x, expected", SOFTMAX, ids=str)
def test_softmax_at_large_numbers_infinities_and_ties(x, expected):
    x, expected = np.array(x), np.array(expected)
    identity = np.eye(len(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(nn.softmax(x), expected, rtol=1e-15)
        rows = [md.vjp(nn.softmax, x)[1](row)[0] for row in identity]
        np.testing.assert_allclose(rows, np.diag(expected) - np.outer(expected, expected), atol=1e-15)
        np.testing.assert_allclose(md.grad(nn.logsumexp)(x), expected, rtol=1e-15)
        rows = [md.vjp(nn.log_softmax, x)[1](row)[0] for row in identity]
        np.testing.assert_allclose(rows, identity - expected, atol=1e-15)


# ---------------------------------------------------------------- attention


@st.composite
def attention(draw):
    """Operands and options of `dot_product_attention`, the heads of keys shared or not."""
    size = st.integers(1, 3)
    b, t, s, k, group, h = (draw(size) for _ in range(6))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    query, key, value = (rng.normal(size=shape) for shape in ((b, t, k * group, h), (b, s, k, h), (b, s, k, h)))
    bias = draw(st.sampled_from([None, (b, k * group, t, s), (1, 1, t, s), (t, s), (s,)]))
    mask = draw(st.sampled_from([None, (b, k * group, t, s), (b, 1, 1, s), (t, 1)]))
    options = {
        "bias": None if bias is None else rng.normal(size=bias),
        "mask": None if mask is None else rng.random(mask) < 0.7,
        "scale": draw(st.sampled_from([None, 0.3])),
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.sampled_from([None, 0, 1, (2, 1)])),
    }
    return query, key, value, options


def attention_by_formula(query, key, value, bias, mask, scale, is_causal, local_window_size):
    key, value = (np.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    logits = np.einsum("btnh,bsnh->bnts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias
    row, column = np.ogrid[: query.shape[1], : key.shape[1]]
    reach = (99, 99) if local_window_size is None else local_window_size
    left, right = (reach, reach) if isinstance(reach, int) else reach
    allowed = (column >= row - left) & (column <= (row if is_causal else row + right))
    allowed = np.broadcast_to(allowed if mask is None else allowed & mask, logits.shape)
    weights = np.where(allowed.any(-1, keepdims=True), np.exp(logits) * allowed, 1)
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), value)


@given(attention())
@settings(max_examples=60, deadline=None)
def test_attention_is_its_formula(inputs):
    query, key, value, options = inputs
    actual = nn.dot_product_attention(query, key, value, **options)
    np.testing.assert_allclose(actual, attention_by_formula(query, key, value, **options), rtol=1e-12)
    unbatched = {k: x if k not in ("bias", "mask") or x is None or x.ndim < 4 else x[0] for k, x in options.items()}
    one = nn.dot_product_attention(query[0], key[0], value[0], **unbatched)
    np.testing.assert_allclose(one, actual[0], rtol=1e-12)


# ---------------------------------------------------------------- initializers


@each("name", ["lecun", "glorot", "he"])
@each("distribution", ["normal", "uniform"])
def test_initializers_have_the_variance_of_their_papers(name, distribution):
    shape = (3, 3, 20, 60)
    variance = {"lecun": 1 / (9 * 20), "glorot": 2 / (9 * 80), "he": 2 / (9 * 20)}[name]
    w = getattr(nn.initializers, f"{name}_{distribution}")()(md.random.key(0), shape, np.float32)
    assert w.dtype == np.float32 and w.shape == shape
    assert w.var() == pytest.approx(variance, rel=0.05) and abs(w.mean()) < 0.05 * math.sqrt(variance)
    most = {"normal": 2 / 0.87962566103423978, "uniform": math.sqrt(3)}[distribution]
    assert 0.95 * most < abs(w).max() / math.sqrt(variance) <= most * 1.0001
