"""Convolutions of all lengths, and of infinities. (Products: `tests/table/linalg.py`.)"""

import functools
import itertools

import numpy as np
import pytest

import minidiff as md
from tests.checks.as_numpy import check_as_numpy
from tests.checks.samples import each


@each("function", [np.convolve, np.correlate])
@each("mode", ["full", "same", "valid"])
@each("n, m", list(itertools.product((1, 2, 3, 5), repeat=2)))
def test_convolutions_of_all_lengths(function, mode, n, m):
    xs, y = np.random.default_rng(0).standard_normal((3, n)), np.ones(m) + 1j * np.arange(m)
    f = functools.partial(function, mode=mode)
    check_as_numpy(f, xs[0], y)
    np.testing.assert_allclose(md.vmap(lambda x: f(x, y))(xs), [f(x, y) for x in xs], atol=1e-12)
    np.testing.assert_allclose(md.vmap(lambda x: f(y, x))(xs), [f(y, x) for x in xs], atol=1e-12)


@each("dtype", [np.float64, np.float16, np.complex128])
def test_convolutions_of_infinities(dtype):
    xs, y = np.array([[1.0, np.inf, 2.0], [0.0, 1.0, 3.0]], dtype), np.array([2.0, -np.inf], dtype)
    with np.errstate(all="ignore"):
        for f in (lambda x: np.convolve(x, y), lambda x: np.convolve(y, x)):
            np.testing.assert_array_equal(md.vmap(f)(xs), [f(x) for x in xs])


def test_solutions_are_not_linear_in_the_matrix():
    with pytest.raises(TypeError):
        md.linear_transpose(lambda a: np.linalg.solve(a, np.ones(2)), np.eye(2))(np.ones(2))
