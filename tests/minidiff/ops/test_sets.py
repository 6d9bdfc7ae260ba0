"""Arrays as sets: which elements remain, and that their derivatives come along."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.checks.testing import check_grads

BINARY = [np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d]
UNARY = [np.unique_values, np.unique_counts, np.unique_inverse, np.unique_all]

numbers = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5, -1.0]), min_size=1, max_size=6).map(np.array)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BINARY), numbers, numbers)
def test_values_are_numpys_and_each_has_one_source(f, x, y):
    value, pullback = md.vjp(f, x, y)
    np.testing.assert_array_equal(value, f(x, y), strict=True)
    assert sum(ct.sum() for ct in pullback(np.ones(value.shape))) == value.size


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(UNARY), numbers)
def test_unique_elements_come_with_what_numpy_tells_of_them(f, x):
    value, _ = md.jvp(f, (x,), (x,))
    np.testing.assert_equal(tuple(value), tuple(f(x)))
    assert type(value) is type(f(x)) or f is np.unique_values


@pytest.mark.parametrize("f", BINARY, ids=lambda f: f.__name__)
def test_derivatives(f):
    check_grads(f, (np.array([[3.0, 1.0], [7.0, 5.0]]), np.array([1.5, 9.0])))
    assert md.grad(lambda x: f(x, np.array([1.0, 2.0]), **_unique(f)).sum())(np.array([4.0, 1.0, 3.0])).shape == (3,)


def _unique(f):
    return {} if f is np.union1d else {"assume_unique": True}


def test_common_elements_come_with_their_indices():
    x, y = np.array([4.0, 1.0, 3.0]), np.array([3.0, 4.0])
    value, _ = md.jvp(lambda x: np.intersect1d(x, y, return_indices=True), (x,), (x,))
    np.testing.assert_equal(tuple(value), np.intersect1d(x, y, return_indices=True))


def test_they_need_values():
    with pytest.raises(md.TracerError, match=r"np\.union1d needs a concrete value"):
        md.make_tape(np.union1d)(np.ones(2), np.ones(2))
