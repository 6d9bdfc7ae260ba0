"""Derivatives where differences say nothing, and of functions of values; `corners.md` has those of single functions."""

import operator
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.checks.testing import check_grads
from tests.checks.samples import each
from tests.minidiff.ops.test_random_arguments import update

#: Elements of an array of 3 that are updated at repeated indices: 1, 10 and 100 times they have these gradients.
UPDATES = [
    ("set", [0, 0, 2], [1.0] * 3, [1.0] * 3, [0, 10, 0], [0, 1, 100]),  # the last value that is set stays
    ("multiply", [0, 0, 2], [2.0, 3.0, 5.0], [0.0, 0.0, 0.0], [0, 10, 0], [0, 0, 500]),
    ("multiply", [0, 0, 2], [2.0, 3.0, 5.0], [0.0, 7.0, 1.0], [0, 10, 100], [14, 0, 500]),
    ("max", [0, 0, 2], [1.0] * 3, [1.0] * 3, [1 / 3, 10, 50], [1 / 3, 1 / 3, 50]),  # what ties shares
    ("min", [0, 2, 1], [1.0] * 3, [1.0] * 3, [0.5, 5, 50], [0.5, 50, 5]),
]


@each("method, index, x, v, gx, gv", UPDATES)
def test_gradients_at_indices_that_repeat(method, index, x, v, gx, gv):
    total = lambda x, v: (update(method, index, x, v) * np.array([1.0, 10.0, 100.0])).sum()  # noqa: E731
    args = np.array(x), np.array(v)
    np.testing.assert_allclose(md.grad(total, (0, 1))(*args), (gx, gv), rtol=1e-14)
    np.testing.assert_allclose(md.jvp(total, args, (np.ones(3), np.ones(3)))[1], np.sum((gx, gv)), rtol=1e-14)


@each("dtype", [float, np.float32, complex])
@each("i", [np.arange(60) % 7, np.arange(60)[::-1] - 60, np.array([[0] * 30, [-1] * 30])])
def test_rows_that_are_taken_add_up_however_many(i, dtype):
    x = np.arange(60.0 * 20).reshape(60, 20).astype(dtype)
    expected = np.zeros_like(x)
    ct = (1 + np.arange(20.0 * i.size)).reshape(*i.shape, 20).astype(dtype)
    np.add.at(expected, i, ct)
    np.testing.assert_allclose(md.vjp(lambda x: x[i], x)[1](ct)[0], expected, rtol=1e-6)


# ---------------------------------------------------------------- small integers, where zeros and ties are common

vectors = st.lists(st.integers(-2, 2), min_size=1, max_size=6).map(lambda x: np.array(x, float))


def without(x: np.ndarray, *places: int) -> float:
    return float(np.prod(np.delete(x, places)))


@settings(max_examples=25, deadline=None)
@given(vectors, st.integers(0, 5))
def test_products_have_the_right_derivatives_at_zeros(x, k):
    k, n = k % len(x), range(len(x))
    for f, last in ((np.prod, len(x) - 1), (lambda x: np.cumprod(x)[k], k)):
        head = x[: last + 1]
        assert md.grad(f)(x).tolist() == [without(head, i) if i <= last else 0.0 for i in n]
        expected = [[without(head, i, j) if i != j and max(i, j) <= last else 0.0 for j in n] for i in n]
        assert md.hessian(f)(x).tolist() == expected


@settings(max_examples=40, deadline=None)
@given(vectors, st.integers(0, 7), st.sampled_from([None, "stable", "heapsort"]))
def test_sorted_elements_take_their_tangents_along(x, k, kind):
    k %= len(x)
    t, places = np.arange(1.0, len(x) + 1), lambda tangent: [x[int(i) - 1] for i in tangent]
    value, tangent = md.jvp(lambda x: np.sort(x, kind=kind), (x,), (t,))
    assert sorted(tangent) == t.tolist()
    assert places(tangent) == value.tolist() == np.sort(x).tolist()
    assert md.vjp(lambda x: np.sort(x, kind=kind), x)[1](value)[0].tolist() == x.tolist()
    value, tangent = md.jvp(lambda x: np.partition(x, k), (x,), (t,))
    assert max(value[: k + 1]) == value[k] == min(value[k:]) == np.sort(x)[k]
    assert places(tangent) == value.tolist()


# ---------------------------------------------------------------- functions of values, and sets

M = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]])
VALUES: list[Callable] = [
    *(np.nonzero, operator.methodcaller("nonzero"), np.flatnonzero, np.argwhere),
    *(lambda x: np.bincount(np.ravel(x).astype(int)), lambda x: np.union1d(x, x), lambda x: np.unique(x, axis=1)),
    lambda x: np.unique(x, return_index=True, return_inverse=True, return_counts=True),
    lambda x: np.intersect1d(x, [3.0, 2.0], return_indices=True),
]


@each("f", VALUES)
def test_functions_of_values_see_them_under_derivatives_and_have_no_place_on_a_tape(f):
    seen: list = []
    md.grad(lambda x: md.grad(lambda x: seen.append(f(x)) or x.sum())(x).sum())(M)
    for actual, known in zip(*[x if isinstance(x, tuple) else (x,) for x in (seen[0], f(M))], strict=True):
        assert str(actual) == str(known)
    for way in (md.make_tape, md.vmap):
        with pytest.raises(md.TracerError):
            way(f)(M)


numbers = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5, -1.0]), min_size=1, max_size=6).map(np.array)
SETS = [np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d]
UNIQUE = [np.unique_values, np.unique_counts, np.unique_inverse, np.unique_all]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SETS), st.sampled_from(UNIQUE), numbers, numbers)
def test_sets_are_numpys_and_each_element_has_one_source(f, unique, x, y):
    value, pullback = md.vjp(f, x, y)
    np.testing.assert_array_equal(value, f(x, y), strict=True)
    assert sum(ct.sum() for ct in pullback(np.ones(value.shape))) == value.size
    value, _ = md.jvp(unique, (x,), (x,))
    np.testing.assert_equal(tuple(value), tuple(unique(x)))
    assert type(value) is type(unique(x)) or unique is np.unique_values


@each("f", [*SETS, lambda x, y: np.unique(x) @ np.array([1.0, 10.0, 100.0, 1e3])])
def test_derivatives_of_sets(f):
    check_grads(f, (np.array([[3.0, 1.0], [7.0, 5.0]]), np.array([1.5, 9.0])))
    options = {} if f not in SETS[1:] else {"assume_unique": True}
    assert md.grad(lambda x: f(x, np.array([1.0, 2.0]), **options).sum())(np.array([4.0, 1.0, 3.0, 9.0])).shape == (4,)


# ---------------------------------------------------------------- functions by their differential equations


def test_derivatives_of_sinc_to_any_order():
    # sinc(x) = sum of (-1)^k (pi x)^2k / (2k + 1)!
    f, expected = np.sinc, [1, 0, -(np.pi**2) / 3, 0, np.pi**4 / 5, 0, -(np.pi**6) / 7]
    for e in expected:
        assert f(0.0) == pytest.approx(e, rel=1e-12)
        assert f(1e-9) == pytest.approx(e, rel=1e-12, abs=1e-6)
        f = md.grad(f)


EQUATIONS = [
    (np.sinc, lambda x, f, df, ddf: x * ddf + 2 * df + np.pi**2 * x * f, [0.1, 0.9, 0.96, 3.0, 30.5, -2.0]),
    (np.i0, lambda x, f, df, ddf: (x * ddf + df) / f - x, [0.0, 1e-6, 0.5, 8.0, 50.0, -3.0, 600.0]),
    (lambda x: md.grad(md.grad(np.i0))(0.0) + 0 * x, lambda x, f, df, ddf: f - 0.5, [0.0]),
]


@each("f, equation, points", EQUATIONS)
def test_derivatives_satisfy_an_equation(f, equation, points):
    for x in points:
        assert equation(x, f(x), md.grad(f)(x), md.grad(md.grad(f))(x)) == pytest.approx(0, abs=1e-12 * max(1, abs(x)))
