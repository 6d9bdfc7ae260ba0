"""Fourier transforms of random lengths, along random axes, in every norm."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from tests.checks.as_numpy import check_as_numpy

ONE = [np.fft.fft, np.fft.ifft, np.fft.rfft, np.fft.irfft, np.fft.hfft, np.fft.ihfft]
MANY = [np.fft.fftn, np.fft.ifftn, np.fft.rfftn, np.fft.irfftn]
REAL = [np.fft.rfft, np.fft.ihfft, np.fft.rfftn]
NORMS = st.sampled_from([None, "backward", "ortho", "forward"])
modest = settings(max_examples=60, deadline=None)


def argument(f, shape):
    numbers = np.random.default_rng(0).standard_normal((2, *shape))
    return numbers[0] if f in REAL else numbers[0] + 1j * numbers[1]


@modest
@given(st.sampled_from(ONE), st.integers(2, 7), st.integers(1, 9) | st.none(), st.integers(0, 1), NORMS)
def test_transforms_along_one_axis(f, size, n, axis, norm):
    check_as_numpy(lambda x: f(x, n, axis, norm), argument(f, (size, 2) if axis == 0 else (2, size)))


@modest
@given(st.sampled_from(MANY), st.permutations([0, 1, 2]), st.integers(1, 3), st.data(), NORMS)
def test_transforms_along_several_axes(f, order, count, data, norm):
    s = data.draw(st.none() | st.lists(st.integers(1, 5) | st.just(-1), min_size=count, max_size=count))
    check_as_numpy(lambda x: f(x, s, order[:count], norm), argument(f, (2, 3, 4)))


@pytest.mark.parametrize(
    "f, x, ct, name",
    [(np.fft.rfft, np.ones(4), np.ones(3), "hfft"), (np.fft.ifft2, np.ones((2, 2)), np.ones((2, 2)), "ifft")],
)
def test_the_transpose_of_a_transform_is_one_transform(f, x, ct, name):
    tape = md.make_tape(md.linear_transpose(f, x if f in REAL else x + 0j))(ct + 0j)
    assert {e.primitive.name for e in tape.equations if "fft" in e.primitive.name} == {name}
