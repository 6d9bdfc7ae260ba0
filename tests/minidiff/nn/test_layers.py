"""Convolutions, pooling and norms against loops over windows, adjoints and statistics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import nn

# ---------------------------------------------------------------- convolutions


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
    space = kernel.ndim - 2
    shape, reach = x.shape[-space - 1 : -1], [d * (k - 1) + 1 for k, d in zip(kernel.shape, dilation)]
    if padding == "same":
        rest = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(shape, stride, reach)]
        padding = [(n // 2, n - n // 2) for n in rest]
    padding = [(0, 0)] * space if padding == "valid" else [(1, 1)] * space if padding == 1 else padding
    x = np.pad(x, [(0, 0)] * (x.ndim - space - 1) + padding + [(0, 0)])
    places = [(n - r) // s + 1 for n, r, s in zip(x.shape[-space - 1 : -1], reach, stride)]
    out = np.zeros((*x.shape[: -space - 1], *places, kernel.shape[-1]))
    for place in np.ndindex(*places):
        at = tuple(slice(s * p, s * p + r, d) for s, p, r, d in zip(stride, place, reach, dilation))
        parts = zip(np.split(x[(..., *at, slice(None))], groups, -1), np.split(kernel, groups, -1))
        out[(..., *place, slice(None))] = np.concatenate([np.tensordot(w, k, space + 1) for w, k in parts], -1)
    return out


@given(convolution())
@settings(max_examples=25, deadline=None)
def test_a_convolution_is_a_loop_over_windows(inputs):
    x, kernel, options = inputs
    f, expected = lambda x, kernel: nn.conv(x, kernel, **options), conv_by_loops(x, kernel, **options)
    for conv in (f, md.jit(f)):
        np.testing.assert_allclose(conv(x, kernel), expected, rtol=1e-10, atol=1e-12)
    ct = np.cos(expected)
    gradients = md.jit(md.grad(lambda *xs: (f(*xs) * ct).sum(), (0, 1)))(x, kernel)
    for value, gradient in zip((x, kernel), gradients):  # it is bilinear: each gradient pairs to the loss
        np.testing.assert_allclose((value * gradient).sum(), (expected * ct).sum(), rtol=1e-9, atol=1e-9)


@given(convolution())
@settings(max_examples=25, deadline=None)
def test_a_transposed_convolution_is_the_adjoint(inputs):
    ct, kernel, options = inputs
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


# ---------------------------------------------------------------- pooling


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


# ---------------------------------------------------------------- norms


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
