"""minidiff.nn where a table of modest numbers cannot say enough: large numbers, infinities, ties, masks."""

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

#: (function, x, value, derivative), exactly or to the last digits.
FAR = [
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
@each("f, x, value, slope", FAR, ids=lambda x: getattr(x, "__name__", str(x)))
def test_far_out(f, x, value, slope, dtype):
    check_far_out(f, x, value, slope, dtype)


@pytest.mark.parametrize("x", [1e3, 1e200, INF, -1e3, -1e200, -INF])
def test_the_exact_gelu_far_out(x):
    check_far_out(lambda x: nn.gelu(x, approximate=False), x, max(x, 0), float(x > 0), np.float64)


def check_far_out(f, x, value, slope, dtype):
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


def test_half_precision_does_not_overflow():
    x = np.array([-6e4, -50.0, 0.0, 50.0, 6e4, INF], np.float16)
    for f in (nn.relu, nn.gelu, nn.silu, nn.mish, nn.softplus, nn.sigmoid):
        slope = md.vjp(f, x)[1](np.ones(6, np.float16))[0]
        assert slope.dtype == np.float16
        assert np.isfinite(slope).all()


@given(st.floats(-30, 30))
@settings(max_examples=50, deadline=None)
def test_activations_are_what_they_are_called(x):
    close = pytest.approx
    assert nn.sigmoid(x) == close(1 / (1 + math.exp(-x)), rel=1e-14)
    assert nn.softplus(x) == close(math.log1p(math.exp(x)), rel=1e-14)
    assert nn.log_sigmoid(x) == close(-math.log1p(math.exp(-x)), rel=1e-14)
    assert nn.silu(x) == close(x / (1 + math.exp(-x)), rel=1e-14)
    assert nn.elu(x, 0.3) == close(x if x > 0 else 0.3 * math.expm1(x), rel=1e-14)
    assert nn.celu(x, 0.3) == close(x if x > 0 else 0.3 * math.expm1(x / 0.3), rel=1e-14)
    assert nn.mish(x) == close(x * math.tanh(math.log1p(math.exp(x))), rel=1e-13)
    assert nn.swish(x) == nn.silu(x)
    assert nn.glu(np.array([x, 2.0])) == close([x * nn.sigmoid(2.0)])
    assert nn.leaky_relu(x, 0.3) == close(x if x > 0 else 0.3 * x, rel=1e-14)
    assert nn.gelu(x, approximate=False) == close(x * math.erfc(-x / math.sqrt(2)) / 2, rel=1e-13)
    assert nn.gelu(x) == close(nn.gelu(x, approximate=False), abs=1e-3)
    assert nn.erf(x) == math.erf(x)


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


@pytest.mark.parametrize("x, expected", SOFTMAX, ids=str)
def test_softmax_at_large_numbers_infinities_and_ties(x, expected):
    x, expected = np.array(x), np.array(expected)
    n = len(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(nn.softmax(x), expected, rtol=1e-15)
        _, pullback = md.vjp(nn.softmax, x)
        for i, row in enumerate(np.diag(expected) - np.outer(expected, expected)):
            np.testing.assert_allclose(pullback(np.eye(n)[i])[0], row, atol=1e-15)
        np.testing.assert_allclose(md.grad(nn.logsumexp)(x), expected, rtol=1e-15)
        _, pullback = md.vjp(nn.log_softmax, x)
        for i in range(n):
            np.testing.assert_allclose(pullback(np.eye(n)[i])[0], np.eye(n)[i] - expected, atol=1e-15)


def test_log_softmax_at_large_numbers_and_infinities():
    np.testing.assert_allclose(nn.log_softmax(np.array([1e3, -1e3])), [0, -2e3])
    np.testing.assert_allclose(nn.log_softmax(np.array([INF, INF, 0, -INF])), [-math.log(2), -math.log(2), -INF, -INF])


def test_logsumexp_in_factors_that_are_0():
    """It has a derivative there, except where exp would overflow: such elements are left out."""
    a, b = np.array([0.3, -0.2, 1.1]), np.array([0.5, 0.0, 2.0])
    f = lambda b: nn.logsumexp(a, b=b)  # noqa: E731
    for g in (md.grad(f), md.jit(md.grad(f)), md.jacfwd(f)):
        np.testing.assert_allclose(g(b), np.exp(a - f(b)), rtol=1e-14)
    for x in (INF, -INF, np.nan, 1e4):
        a[1] = x
        value, gradients = md.value_and_grad(lambda a, b: nn.logsumexp(a, b=b), (0, 1))(a, b)
        total = 0.5 * np.exp(0.3) + 2 * np.exp(1.1)
        np.testing.assert_allclose(value, np.log(total), rtol=1e-14)
        in_b = np.array([np.exp(0.3), 0, np.exp(1.1)]) / total
        np.testing.assert_allclose(gradients, [b * in_b, in_b], rtol=1e-14)
    assert nn.logsumexp(np.zeros(0), b=np.zeros(0), return_sign=True)[1] == 0


def test_logsumexp_of_infinities():
    assert nn.logsumexp(np.array([-INF, -INF])) == -INF
    assert nn.logsumexp(np.array([INF, 0.0])) == INF
    assert nn.logsumexp(np.zeros(0)) == -INF
    assert nn.logsumexp(np.array([1e3, 1e3])) == pytest.approx(1e3 + math.log(2))


def test_logsumexp_with_weights():
    x, b = np.array([1e3, 1e3, INF]), np.array([2.0, -5.0, 0.0])
    size, sign = nn.logsumexp(x, b=b, return_sign=True)
    assert (size, sign) == (pytest.approx(1e3 + math.log(3)), -1)
    np.testing.assert_allclose(md.grad(lambda x: nn.logsumexp(x, b=b, return_sign=True)[0])(x), [-2 / 3, 5 / 3, 0])


def test_what_is_masked_has_no_part():
    x, mask = np.array([[1.0, INF, np.nan], [5.0, 6.0, 7.0]]), np.array([[True, False, False], [False] * 3])
    np.testing.assert_array_equal(nn.softmax(x, where=mask), [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(nn.log_softmax(x, where=mask), [[0, -INF, -INF], [-INF] * 3])
    np.testing.assert_array_equal(nn.logsumexp(x, 1, where=mask), [1.0, -INF])
    _, pullback = md.vjp(lambda x: nn.softmax(x, where=mask), x)
    np.testing.assert_array_equal(pullback(np.ones((2, 3)))[0], np.zeros((2, 3)))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), st.floats(-1e3, 1e3))
@settings(max_examples=50, deadline=None)
def test_softmax_is_a_distribution_and_does_not_see_shifts(x, shift):
    x = np.array(x)
    assert nn.softmax(x).sum() == pytest.approx(1)
    np.testing.assert_allclose(nn.softmax(x + shift), nn.softmax(x), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(nn.log_softmax(x), x - nn.logsumexp(x), rtol=1e-12, atol=1e-9)


def test_one_hot_out_of_range_is_zero():
    assert nn.one_hot([-1, 3, 1], 3).tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert nn.one_hot(2, 3, dtype=bool).tolist() == [False, False, True]
    assert nn.one_hot(np.zeros((2, 3), int), 4, axis=1).shape == (2, 4, 3)


def test_activations_are_one_operation_each():
    for f in (nn.relu, nn.gelu, nn.sigmoid, nn.softplus, nn.silu, nn.erf, nn.softmax, nn.log_softmax):
        assert len(md.make_tape(f)(np.ones(3)).equations) == 1


def test_float32_stays():
    x = np.ones((2, 3), np.float32)
    for f in (nn.relu, nn.gelu, nn.sigmoid, nn.elu, nn.erf, nn.softmax, nn.logsumexp):
        assert f(x).dtype == np.float32
        assert md.make_tape(f)(x).out_types[0].dtype == np.float32


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


def attention_by_loops(query, key, value, bias, mask, scale, is_causal, local_window_size):
    """One query of one head after the other."""
    (b, t, n, h), (_, s, k, _) = query.shape, key.shape
    out = np.empty(query.shape)
    reach = (s + t, s + t) if local_window_size is None else local_window_size
    left, right = (reach, reach) if isinstance(reach, int) else reach
    bias = np.broadcast_to(0.0 if bias is None else bias, (b, n, t, s))
    mask = np.broadcast_to(True if mask is None else mask, (b, n, t, s))
    for i, row, head in np.ndindex(b, t, n):
        of_head = head // (n // k)
        logits = key[i, :, of_head] @ query[i, row, head] * (h**-0.5 if scale is None else scale) + bias[i, head, row]
        last = row if is_causal else row + right
        allowed = mask[i, head, row] & (np.arange(s) <= last) & (np.arange(s) >= row - left)
        weights = np.exp(logits - logits.max()) * allowed if allowed.any() else np.ones(s)
        out[i, row, head] = weights / weights.sum() @ value[i, :, of_head]
    return out


@given(attention())
@settings(max_examples=60, deadline=None)
def test_attention_is_a_loop_over_queries(given_):
    query, key, value, options = given_
    actual = nn.dot_product_attention(query, key, value, **options)
    np.testing.assert_allclose(actual, attention_by_loops(query, key, value, **options), rtol=1e-12)
    unbatched = {k: x if k not in ("bias", "mask") or x is None or x.ndim < 4 else x[0] for k, x in options.items()}
    one = nn.dot_product_attention(query[0], key[0], value[0], **unbatched)
    np.testing.assert_allclose(one, actual[0], rtol=1e-12)


def test_attention_in_half_precision_does_not_overflow():
    x = np.full((1, 2, 1, 4), 300, np.float16)
    actual = nn.dot_product_attention(x, x, x)
    assert actual.dtype == np.float16
    assert (actual == 300).all()


# ---------------------------------------------------------------- convolutions, pooling


@st.composite
def convolution(draw):
    """Operands and options of `conv`, in 1 to 3 dimensions."""
    space, size = draw(st.integers(1, 3)), st.integers(1, 3)
    groups, each, features = draw(size), draw(size), draw(size)
    taps, lead = [draw(size) for _ in range(space)], [draw(size) for _ in range(draw(st.integers(0, 2)))]
    stride, dilation = [draw(size) for _ in range(space)], [draw(st.integers(1, 2)) for _ in range(space)]
    shape = [d * (k - 1) + draw(size) for k, d in zip(taps, dilation)]
    pairs = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(space)]
    padding = draw(st.sampled_from(["same", "valid", 1, pairs]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x, kernel = rng.normal(size=(*lead, *shape, groups * each)), rng.normal(size=(*taps, each, groups * features))
    return x, kernel, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def conv_by_loops(x, kernel, stride, padding, dilation, groups):
    """One window after the other; the sizes of 'same' are those that TensorFlow documents."""
    taps, space = kernel.shape[:-2], kernel.ndim - 2
    shape, (each, features) = x.shape[-space - 1 : -1], kernel.shape[-2:]
    reach = [d * (k - 1) + 1 for k, d in zip(taps, dilation)]
    if padding == "same":
        rest = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(shape, stride, reach)]
        padding = [(n // 2, n - n // 2) for n in rest]
    padding = [(0, 0)] * space if padding == "valid" else [(1, 1)] * space if padding == 1 else padding
    x = np.pad(x, [(0, 0)] * (x.ndim - space - 1) + padding + [(0, 0)])
    places = [(n - r) // s + 1 for n, r, s in zip(x.shape[-space - 1 : -1], reach, stride)]
    out = np.zeros((*x.shape[: -space - 1], *places, features))
    for place in np.ndindex(*places):
        for tap in np.ndindex(*taps):
            at = tuple(s * p + d * k for s, p, d, k in zip(stride, place, dilation, tap))
            for f in range(features):
                group = f // (features // groups)
                values = x[(..., *at, slice(group * each, (group + 1) * each))]
                out[(..., *place, f)] += values @ kernel[(*tap, slice(None), f)]
    return out


@given(convolution())
@settings(max_examples=60, deadline=None)
def test_a_convolution_is_a_loop_over_windows(given_):
    x, kernel, options = given_
    expected = conv_by_loops(x, kernel, **options)
    np.testing.assert_allclose(nn.conv(x, kernel, **options), expected, rtol=1e-10, atol=1e-12)
    compiled = md.jit(lambda x, kernel: nn.conv(x, kernel, **options))(x, kernel)
    np.testing.assert_allclose(compiled, expected, rtol=1e-10, atol=1e-12)
    ct, loss = np.cos(expected), lambda x, kernel: (nn.conv(x, kernel, **options) * np.cos(expected)).sum()
    actual = md.jit(md.grad(loss, (0, 1)))(x, kernel)  # a convolution is bilinear: each gradient pairs to the loss
    for value, gradient in zip((x, kernel), actual):
        np.testing.assert_allclose((value * gradient).sum(), (expected * ct).sum(), rtol=1e-9, atol=1e-9)


@given(convolution())
@settings(max_examples=60, deadline=None)
def test_a_transposed_convolution_is_the_adjoint(given_):
    ct, kernel, options = given_
    kernel, stride, dilation = np.swapaxes(kernel, -1, -2)[..., : ct.shape[-1]], options["stride"], options["dilation"]
    ct = ct[..., : kernel.shape[-1]]
    axes = tuple(range(kernel.ndim - 2))
    for padding in ("same", "valid"):
        actual = nn.conv_transpose(ct, kernel, stride, padding, dilation, transpose_kernel=True)
        x = np.zeros_like(actual)
        (expected,) = md.vjp(lambda x, p=padding: nn.conv(x, kernel, stride, p, dilation), x)[1](ct)
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
        flipped = np.flip(np.swapaxes(kernel, -1, -2), axes)
        np.testing.assert_allclose(nn.conv_transpose(ct, flipped, stride, padding, dilation), actual, atol=1e-12)


def test_transposed_convolutions_have_the_numbers_of_jax():
    x, kernel = np.arange(6.0).reshape(1, 3, 2, 1), np.arange(6.0).reshape(3, 2, 1, 1)
    same, valid = (nn.conv_transpose(x, kernel, (2, 1), padding)[0, ..., 0] for padding in ("same", "valid"))
    assert same.tolist() == [[0, 5], [0, 3], [10, 24], [6, 13], [22, 44], [12, 23]]
    assert valid.tolist() == [[0, 5, 4], [0, 3, 2], [10, 24, 12], [6, 13, 6], [22, 44, 20], [12, 23, 10], [4, 5, 0]]


def test_windows_are_a_view_which_is_what_the_backward_pass_keeps():
    """Nine windows of an element take no memory: the residuals are the operands."""
    x, kernel = np.zeros((64, 64, 8)), np.zeros((3, 3, 8, 8))
    tape = md.make_tape(lambda x: nn.conv(x, kernel, padding="valid"))(x)
    (windows,) = [eqn for eqn in tape.equations if eqn.primitive.name == "windows"]
    result = windows.primitive.impl(x, **windows.params)
    assert np.shares_memory(result, x) and result.nbytes > 8 * x.nbytes and not result.flags.writeable


def test_half_precision_adds_windows_in_float32():
    x = np.ones((4100, 1), np.float16)
    ct = md.vjp(lambda x: nn.conv(x, np.ones((4100, 1, 1), np.float16), padding=(4099, 0)), x)[1](x)[0]
    assert ct.dtype == np.float16 and ct[0, 0] == 4100  # whose sum of ones in float16 stops at 2048


@pytest.mark.parametrize("padding", ["same", "valid", ((1, 1), (0, 1))])
def test_pooling_is_a_function_of_windows(padding):
    x = np.random.default_rng(0).normal(size=(2, 7, 6, 3))
    around = {"same": ((1, 1), (0, 1)), "valid": ((0, 0), (0, 0))}.get(padding, padding)
    for f, reduce, value in ((nn.max_pool, np.max, -np.inf), (nn.avg_pool, np.mean, 0.0)):
        wide = np.pad(x, ((0, 0), *around, (0, 0)), constant_values=value)
        windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (1, 2))[:, ::2, ::2]
        if padding == "same":
            windows = windows[:, :4, :3]
        np.testing.assert_allclose(f(x, (3, 3), 2, padding), reduce(windows, axis=(-1, -2)), rtol=1e-12)
    assert nn.max_pool(np.arange(6)[:, None], (2,)).ravel().tolist() == [1, 3, 5]


# ---------------------------------------------------------------- norms, initializers


def test_batch_norm_of_parts_has_the_statistics_of_the_whole():
    """With a mean over a named axis of vmap: values, gradients, and the statistics that are returned."""
    x = np.random.default_rng(0).normal(2, 3, size=(4, 6, 5))
    average = lambda moments: moments.mean(axis=0)  # noqa: E731
    mean, variance = x.mean(axis=(0, 1)), x.var(axis=(0, 1))
    y, actual = nn.batch_norm(x)
    np.testing.assert_allclose(actual, (mean, variance), rtol=1e-12)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-12)
    moments = np.stack([np.stack([part.mean(0), (part**2).mean(0)]) for part in x])
    for part, of_part in zip(x, y):
        again, statistics = nn.batch_norm(part, average=lambda local: average(moments))
        np.testing.assert_allclose(again, of_part, rtol=1e-10)
        np.testing.assert_allclose(statistics, (mean, variance), rtol=1e-10)


def test_norms_of_half_precision_do_not_overflow():
    x = np.array([[-6e4, 6e4], [3e2, -3e2]], np.float16)
    for f in (nn.layer_norm, nn.rms_norm, nn.standardize, lambda x: nn.batch_norm(x)[0], lambda x: nn.group_norm(x, 1)):
        assert f(x).dtype == np.float16
        np.testing.assert_allclose(abs(f(x)), 1, rtol=1e-2)


@pytest.mark.parametrize("name", ["lecun", "glorot", "he"])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_initializers_have_the_variance_of_their_papers(name, distribution):
    shape = (3, 3, 20, 60)
    variance = {"lecun": 1 / (9 * 20), "glorot": 2 / (9 * 80), "he": 2 / (9 * 20)}[name]
    w = getattr(nn.initializers, f"{name}_{distribution}")()(md.random.key(0), shape, np.float32)
    assert w.dtype == np.float32 and w.shape == shape
    assert w.var() == pytest.approx(variance, rel=0.05) and abs(w.mean()) < 0.05 * math.sqrt(variance)
    most = {"normal": 2 / 0.87962566103423978, "uniform": math.sqrt(3)}[distribution]
    assert 0.95 * most < abs(w).max() / math.sqrt(variance) <= most * 1.0001


def test_initializers_of_one_distribution():
    key = md.random.key(0)
    assert nn.initializers.zeros(key, (2, 3)).tolist() == [[0] * 3] * 2
    assert nn.initializers.ones(key, (2,), np.float32).dtype == np.float32
    assert nn.initializers.constant(0.3)(key, ()) == 0.3
    assert nn.initializers.normal(0.5)(key, (10000,)).std() == pytest.approx(0.5, rel=0.05)
    w = nn.initializers.variance_scaling(3.0, "fan_out", "normal", 0, 1)(key, (100, 50, 2))
    assert w.var() == pytest.approx(3 / 100, rel=0.05)
