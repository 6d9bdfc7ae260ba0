"""Fourier transforms: what random arguments and wrong ones show."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md

ONE = [np.fft.fft, np.fft.ifft, np.fft.rfft, np.fft.irfft, np.fft.hfft, np.fft.ihfft]
MANY = [np.fft.fftn, np.fft.ifftn, np.fft.rfftn, np.fft.irfftn]
REAL = [np.fft.rfft, np.fft.ihfft, np.fft.rfftn]
NORMS = st.sampled_from([None, "backward", "ortho", "forward"])
modest = settings(max_examples=60, deadline=None)


def argument(f, shape, seed):
    numbers = np.random.default_rng(seed).standard_normal((2, *shape))
    return numbers[0] if f in REAL else numbers[0] + 1j * numbers[1]


def inner(x, y):
    return float(np.real(np.sum(x * y)))


def check_linear(f, x):
    """A linear function: its values and tangents are NumPy's, and its pullback is its transpose."""
    value, tangent = md.jvp(f, (x,), (2 * x,))
    np.testing.assert_allclose(value, f(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(tangent, 2 * f(x), rtol=1e-12, atol=1e-12)
    ct = argument(None if np.iscomplexobj(value) else np.fft.rfft, value.shape, 1)
    (pulled,) = md.vjp(f, x)[1](ct)
    assert md.typeof(pulled) == md.typeof(x)
    np.testing.assert_allclose(inner(pulled, x), inner(ct, f(x)), rtol=1e-10, atol=1e-10)


@modest
@given(st.sampled_from(ONE), st.integers(2, 7), st.integers(1, 9) | st.none(), st.integers(0, 1), NORMS)
def test_transforms_along_one_axis(f, size, n, axis, norm):
    x = argument(f, (size, 2) if axis == 0 else (2, size), size)
    check_linear(lambda x: f(x, n, axis, norm), x)


@modest
@given(st.sampled_from(MANY), st.permutations([0, 1, 2]), st.integers(1, 3), st.data(), NORMS)
def test_transforms_along_several_axes(f, order, count, data, norm):
    axes = order[:count]
    s = data.draw(st.none() | st.lists(st.integers(1, 5) | st.just(-1), min_size=count, max_size=count))
    check_linear(lambda x: f(x, s, axes, norm), argument(f, (2, 3, 4), count))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_gradients_by_parseval(n):
    """The energy of a signal is that of its spectrum, so its gradient is the signal, twice."""
    x = argument(np.fft.rfft, (n,), n)
    np.testing.assert_allclose(md.grad(lambda x: np.sum(np.absolute(np.fft.fft(x, norm="ortho")) ** 2))(x), 2 * x)


def test_inverses():
    x = argument(np.fft.rfft, (3, 5), 0)
    for there, back in ((np.fft.rfft, np.fft.irfft), (np.fft.ihfft, np.fft.hfft)):
        np.testing.assert_allclose(md.jvp(lambda x: back(there(x), 5), (x,), (x,))[1], x)  # noqa: B023 (used at once)


def test_single_precision_stays():
    x = np.ones(4, np.float32)
    tape = md.make_tape(lambda x: np.fft.irfft(np.fft.rfft(x)))(x)
    assert [str(v.type) for e in tape.equations for v in e.outputs] == ["c64[3]", "f32[4]"]
    assert tape.out_types == [md.typeof(x)]


def test_the_tape_of_a_gradient_shows_the_transposes():
    tape = str(md.make_tape(md.linear_transpose(np.fft.rfft, np.ones(4)))(np.ones(3, complex)))
    assert "hfft" in tape and "irfft" not in tape
    assert "ifft" in str(
        md.make_tape(md.linear_transpose(np.fft.ifft2, np.ones((2, 2), complex)))(np.ones((2, 2), complex))
    )


ERRORS = {
    "points": (
        lambda x: np.fft.fft(x, 0),
        ValueError,
        "fft: a transform needs at least one point, got 0 along axis 1 of",
    ),
    "points of irfft": (lambda x: np.fft.irfft(x[:, :1]), ValueError, "irfft: a transform needs at least one point"),
    "norm": (lambda x: np.fft.fft(x, norm="both"), ValueError, "norm must be 'backward', 'ortho' or 'forward'"),
    "axis": (lambda x: np.fft.rfft(x, axis=2), np.exceptions.AxisError, "rfft: axis 2 is out of bounds"),
    "s": (lambda x: np.fft.fftn(x, (2,), (0, 1)), ValueError, "the shape s=(2,) and the axes (0, 1) differ in number"),
    "no axes": (lambda x: np.fft.rfftn(x, axes=()), ValueError, "needs at least one axis"),
    "complex": (lambda x: np.fft.rfft(np.fft.fft(x)), TypeError, "rfft transforms real numbers, got c128[2,3]"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_does_not_fit(case):
    f, error, message = ERRORS[case]
    with pytest.raises(error, match=re.escape(message)):
        md.make_tape(f)(np.ones((2, 3)))
