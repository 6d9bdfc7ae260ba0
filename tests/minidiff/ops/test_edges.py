"""Derivatives where differences say nothing: at kinks, zeros, ties, infinities; and of functions of values."""

import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from minidiff.checks.testing import check_grads
from tests.checks.samples import each
from tests.minidiff.ops.test_random_arguments import update

INF, NAN = np.inf, np.nan
X, X3, MASK = np.arange(6.0).reshape(2, 3), np.array([3.0, 0.0, 1.0]), np.array([True, False, True])
TIED = np.array([1.0, 3.0, 3.0, 0.0, 3.0])
NUMBERS = np.array([0.3, 1.7, 0.9, -0.4])
CUBE = np.array([[[0.0, 2.0], [3.0, 4.0]], [[1.0, 5.0], [0.0, 0.0]]])


def with_nans(x: np.ndarray, nan: float = NAN) -> np.ndarray:
    return np.insert(x, [1, 3], nan)


def at_knots(x: Any) -> Any:
    return np.interp(x, [0.0, 1.0, 3.0], [0.0, 1.0, 7.0])


def scaled(row: Any, scale: float, power: int = 1) -> Any:
    return scale * row**power if row[0] > 1 else row[:1] * np.ones(3)


#: A function of numbers, those, and the derivative in each.
ELEMENTWISE: list[tuple] = [
    *((f, (0.0,), (0,)) for f in (np.abs, np.sign, np.sinc, lambda x: np.abs(x * (1 + 1j)))),
    (np.hypot, (0.0, 0.0), (0, 0)),
    *((np.hypot, (3 * s, 4 * s), (0.6, 0.8)) for s in (1e-200, 1e200)),
    (np.arctan2, (0.0, 0.0), (0, 0)),
    (np.arctan2, (0.0, 2e-200), (5e199, 0)),
    (np.arctan2, (1.0, 0.0), (0, -1)),
    *((np.power, (0.0, n), (d, 0)) for n, d in ((2.0, 0), (1.0, 1), (0.0, 0))),
    (np.power, (INF, 0.0), (0, INF)),
    (np.power, (-2.0, 3), (12,)),
    (np.float_power, (0.0, 2.0), (0, 0)),
    *((lambda x, n=n: x**n, (0.0,), (d,)) for n, d in ((3.0, 0), (0, 0), (1, 1))),
    *((md.grad(lambda x, n=n: x**n), (0.0,), (d,)) for n, d in ((1, 0), (2, 2), (3.0, 0))),
    (md.grad(np.power), (2.0, 3.0), (12, 4 + 12 * np.log(2))),
    (md.grad(np.power), (2.0, 0.0), (0, 0.5)),
    (md.grad(np.power), (0.5, -1.0), (16, 4 * (np.log(2) + 1))),
    (lambda x: np.floor(x) + np.sign(x) + x // 2, (1.5,), (0,)),
    *((np.logaddexp, (x, x), (0.5, 0.5)) for x in (0.0, INF, -INF)),
    *((np.logaddexp, (x, y), (float(x > y), float(x < y))) for x, y in ((-INF, 0.0), (INF, 0.0), (1e3, -1e3))),
    (md.grad(lambda x: np.logaddexp(x, 1.0)), (1.0,), (0.25,)),
    (md.grad(np.logaddexp), (INF, INF), (0.25, -0.25)),
    (np.logaddexp2, (-INF, -INF), (0.5, 0.5)),
    (np.logaddexp2, (1e4, -1e4), (1, 0)),
    *((f, (x, x), (0.5, 0.5)) for f in (np.maximum, np.fmin) for x in (1.0, INF)),
    (np.maximum, (-INF, INF), (0, 1)),
    (np.minimum, (-INF, INF), (1, 0)),
    (np.fmax, (NAN, 1.0), (0, 1)),
    (np.fmin, (1.0, NAN), (1, 0)),
    (np.fmod, (-7.0, 2.0), (1, 3)),
    (np.fmod, (7.0, INF), (1, 0)),
    (np.remainder, (-7.0, 2.0), (1, 4)),
    *((np.copysign, (x, y), (d, 0)) for x, y, d in ((2.0, -0.0, -1), (-2.0, -1.0, 1), (0.0, -1.0, 0))),
    (np.heaviside, (0.0, 0.5), (0, 1)),
    (np.tanh, (1e3,), (0,)),
    (np.expm1, (-1e3,), (0,)),
    *((np.nan_to_num, (x,), (0,)) for x in (NAN, INF)),
    (lambda x: np.clip(x, 0, 1), (1.0,), (0.5,)),
    (lambda x: np.clip(x, None, 1), (INF,), (0,)),
    (at_knots, (1.0,), (3,)),
    (at_knots, (4.0,), (0,)),
    (lambda x: np.modf(x)[0], (-2.5,), (1,)),
    (lambda x: np.frexp(x)[0], (6.0,), (1 / 8,)),
    *((f, (0.0,), (d,)) for f, d in ((np.sqrt, INF), (np.cbrt, INF), (np.log, INF), (np.reciprocal, -INF))),
]
#: The same of one array, and the gradient.
OF_ARRAYS: list[tuple] = [
    (lambda x: np.piecewise(x, [x > 0], [np.log, np.square]).sum(), np.array([0.0, 2.0, -3.0]), [0, 0.5, -6]),
    # products
    (lambda x: np.prod(x, axis=(0, 2)).sum(), CUBE, [[[10, 0], [0, 0]], [[0, 0], [0, 0]]]),
    (lambda x: np.prod(x, axis=(0, 2)).sum(), CUBE * (CUBE != 1), np.zeros((2, 2, 2))),
    # what ties shares
    *((lambda x, s=s, f=f: s * f(s * x), TIED, (TIED == 3) / 3) for s, f in ((1, np.max), (-1, np.min))),
    (lambda x: np.max(x, axis=0)[1], np.stack([-TIED, TIED], 1), np.stack([0 * TIED, (TIED == 3) / 3], 1)),
    (lambda x: np.max(x, initial=2.0), np.array([1.0, 2.0]), [0, 0.5]),
    (lambda x: np.max(x, where=MASK, initial=-INF), np.array([-1.0, -1.0, -2.0]), [1, 0, 0]),
    # no spread
    *((f, x, 0 * x) for f in (np.std, np.nanstd) for x in (np.full(3, 1.5), np.array([2.0]), np.full(2, 1 + 1j))),
    (lambda m: np.var(X3, mean=m), 1.0, -2 / 3),
    (lambda x: np.var(x, mean=np.mean(x)), X3, md.grad(np.var)(X3)),
    # quantiles
    (lambda q: np.quantile(X3, q), 0.75, 4),
    (lambda q: np.percentile(X3, q), 25.0, 0.02),
    (np.median, X3, [0, 0, 1]),
    (lambda x: np.quantile(x, 0.75), X3, [0.5, 0, 0.5]),
    *(  # NaNs that are left out
        (getattr(np, f"nan{name}"), with_nans(NUMBERS), with_nans(md.grad(getattr(np, name))(NUMBERS), 0))
        for name in ("sum", "prod", "mean", "var", "std", "max", "min", "median")
    ),
    # parts: those that are not used have gradient 0
    (lambda x: (np.split(x, 3, 1)[1] ** 2).sum(), X, [[0, 2, 0], [0, 8, 0]]),
    (lambda x: next(iter(x)).sum(), X, [[1, 1, 1], [0, 0, 0]]),
    *(
        (lambda x, f=f: f([x[0], X[1]]).sum(), X, [[1, 1, 1], [0, 0, 0]])
        for f in (mnp.asarray, mnp.asanyarray, mnp.ascontiguousarray, mnp.asfortranarray)
    ),
    (lambda v: mnp.full((2, 2), v, float).sum(), 3.0, 4),
    # functions that look at values
    (lambda x: np.trim_zeros(x).sum(), np.zeros(6), np.zeros(6)),
    (lambda x: np.real_if_close(x * (1 + 0j)).sum(), X, np.ones((2, 3))),
    (lambda x: (x[x > 2] ** 2).sum(), X, np.where(X > 2, 2 * X, 0)),
    (lambda x: np.extract(x > 2, x) @ np.extract(x > 2, x), X, np.where(X > 2, 2 * X, 0)),
    (lambda x: (x * md.stop_gradient(x).tolist()).sum(), X, X),
    (lambda x: x[np.where(x > 0)].sum() + (x[np.where(x)] ** 2).sum(), np.array([-1.0, 2.0]), [-2, 5]),
    *((lambda x, t=t: (np.trim_zeros(x, t) ** 2).sum(), np.array([0.0, 2, 0, 3, 0]), [0, 4, 0, 6, 0]) for t in "fb"),
    (lambda x: np.apply_along_axis(scaled, 1, x, 2.0, power=2).sum(), X, [[3, 0, 0], [12, 16, 20]]),
]
#: Elements of an array of 3 that are updated at repeated indices: 1, 10 and 100 times they have these gradients.
UPDATES = [
    ("set", [0, 0, 2], [1.0] * 3, [1.0] * 3, [0, 10, 0], [0, 1, 100]),  # the last value that is set stays
    ("multiply", [0, 0, 2], [2.0, 3.0, 5.0], [0.0, 0.0, 0.0], [0, 10, 0], [0, 0, 500]),
    ("multiply", [0, 0, 2], [2.0, 3.0, 5.0], [0.0, 7.0, 1.0], [0, 10, 100], [14, 0, 500]),
    ("max", [0, 0, 2], [1.0] * 3, [1.0] * 3, [1 / 3, 10, 50], [1 / 3, 1 / 3, 50]),  # what ties shares
    ("min", [0, 2, 1], [1.0] * 3, [1.0] * 3, [0.5, 5, 50], [0.5, 50, 5]),
]


def check_edge(f: Callable, x: Any, expected: Any) -> None:
    """Compare both modes, and see no warning but where the derivative is infinite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if np.isinf(expected).any() else "error")
        np.testing.assert_allclose(md.grad(f)(x), expected, rtol=1e-14, atol=1e-15)
        tangent = md.jvp(f, (x,), (np.ones_like(x),))[1]
        np.testing.assert_allclose(tangent, np.sum(expected).real, rtol=1e-14, atol=1e-14)


@each("f, args, expected", ELEMENTWISE)
def test_derivatives_of_numbers(f, args, expected):
    for i, e in enumerate(expected):
        check_edge(lambda x, i=i: f(*args[:i], x, *args[i + 1 :]), args[i], e)


@each("f, x, expected", OF_ARRAYS)
def test_gradients_of_arrays(f, x, expected):
    check_edge(f, x, expected)


@each("method, index, x, v, gx, gv", UPDATES)
def test_gradients_at_indices_that_repeat(method, index, x, v, gx, gv):
    total = lambda x, v: (update(method, index, x, v) * np.array([1.0, 10.0, 100.0])).sum()  # noqa: E731
    check_edge(lambda x: total(x, np.array(v)), np.array(x), gx)
    check_edge(lambda v: total(np.array(x), v), np.array(v), gv)


def test_the_mixed_derivative_of_two_factors_that_are_0():
    product = md.grad(lambda v: mnp.at(np.array([2.0, 3.0, 5.0]))[[0, 0, 2]].multiply(v)[0])
    assert md.jvp(product, (np.zeros(3),), (np.eye(3)[0],))[1].tolist() == [0.0, 2.0, 0.0]


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


def test_third_derivatives_of_products_at_zeros():
    assert md.grad(lambda x: md.hessian(np.prod)(x)[0, 1])(np.zeros(3)).tolist() == [0.0, 0.0, 1.0]


def test_products_that_overflow_do_not_spoil_those_that_are_zero():
    x = np.array([0.0, 1e200, 1e200, 1e200])
    assert md.jvp(np.cumprod, (x,), (np.array([0.0, 1.0, 1.0, 1.0]),))[1].tolist() == [0.0] * 4


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
