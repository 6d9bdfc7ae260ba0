"""Convolutions against loops over windows, and adjoints; `layers.md` has pooling and norms."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import nn


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
