"""Reductions where a table of smooth points says nothing: zeros, ties, NaNs, no spread, kinks, dtypes, numbers."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from minidiff.ops.reduction import recurrence_p
from tests.checks.samples import each

INF, NAN = np.inf, np.nan
modest = settings(max_examples=25, deadline=None)
#: Small integers, so that zeros and ties are common and sums and products exact.
vectors = st.lists(st.integers(-2, 2), min_size=1, max_size=6).map(lambda x: np.array(x, float))


# ---------------------------------------------------------------- products


def without(x: np.ndarray, *places: int) -> float:
    return math.prod(v for i, v in enumerate(x) if i not in places)


@modest
@given(vectors, st.integers(0, 5))
def test_products_have_the_right_derivatives_at_zeros(x, k):
    k, n = k % len(x), range(len(x))
    for f, last in ((np.prod, len(x) - 1), (lambda x: np.cumprod(x)[k], k)):
        head = x[: last + 1]
        assert md.grad(f)(x).tolist() == [without(head, i) if i <= last else 0.0 for i in n]
        expected = [[without(head, i, j) if i != j and max(i, j) <= last else 0.0 for j in n] for i in n]
        assert md.hessian(f)(x).tolist() == expected


def test_third_derivatives_of_products_at_zeros():
    third = md.grad(lambda x: md.hessian(np.prod)(x)[0, 1])(np.zeros(3))
    assert third.tolist() == [0.0, 0.0, 1.0]


@each("corner, expected", [(0.0, 0.0), (1.0, 10.0)])
def test_prod_over_axes_with_zeros(corner, expected):
    x = np.array([[[0.0, 2.0], [3.0, 4.0]], [[corner, 5.0], [0.0, 0.0]]])
    g = md.grad(lambda x: np.prod(x, axis=(0, 2)).sum())(x)
    assert g.tolist() == [[[expected, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]


@modest
@given(st.integers(0, 20), st.integers(0, 2**32 - 1), st.booleans())
def test_recurrences_are_what_they_say(n, seed, reverse):
    a, b = np.random.default_rng(seed).standard_normal((2, n, 3))
    y, previous = np.zeros_like(b), np.zeros(3)
    for i in reversed(range(n)) if reverse else range(n):
        previous = y[i] = a[i] * previous + b[i]
    params = {"axis": 0, "reverse": True} if reverse else {"axis": 0}
    np.testing.assert_allclose(recurrence_p.bind(a, b, **params), y, rtol=1e-9, atol=1e-9)


def test_products_that_overflow_do_not_spoil_those_that_are_zero():
    x = np.array([0.0, 1e200, 1e200, 1e200])
    assert md.jvp(np.cumprod, (x,), (np.array([0.0, 1.0, 1.0, 1.0]),))[1].tolist() == [0.0] * 4


# ---------------------------------------------------------------- ties, NaNs, no spread


@modest
@given(vectors)
def test_what_ties_shares(x):
    for f, best in ((np.max, x.max()), (np.min, x.min())):
        for g in (md.grad(f)(x), md.grad(lambda x, f=f: f(x, axis=0)[1])(np.stack([-x, x], 1))[:, 1]):
            np.testing.assert_allclose(g, (x == best) / np.sum(x == best))


X3, MASK = np.array([3.0, 0.0, 1.0]), np.array([True, False, True])
#: Functions, their argument, and the gradient.
GRADIENTS = [
    (lambda x: np.max(x, initial=2.0), np.array([1.0, 2.0]), [0.0, 0.5]),
    (lambda x: np.max(x, where=MASK, initial=-INF), np.array([-1.0, -1.0, -2.0]), [1.0, 0.0, 0.0]),
    *((f, x, 0 * x) for f in (np.std, np.nanstd) for x in (np.full(3, 1.5), np.array([2.0]), np.full(2, 1 + 1j))),
    (lambda m: np.var(X3, mean=m), 1.0, -2 / 3),
    (lambda x: np.var(x, mean=np.mean(x)), X3, md.grad(np.var)(X3)),
    (lambda q: np.quantile(X3, q), 0.75, 4.0),
    (lambda q: np.percentile(X3, q), 25.0, 0.02),
    (np.median, X3, [0.0, 0.0, 1.0]),
    (lambda x: np.quantile(x, 0.75), X3, [0.5, 0.0, 0.5]),
]


@each("f, x, expected", GRADIENTS)
def test_gradients_at_ties_and_kinks(f, x, expected):
    np.testing.assert_allclose(md.grad(f)(x), expected, atol=1e-15)


@each("name", ["sum", "prod", "mean", "var", "std", "max", "min", "median"])
def test_nans_are_left_out(name):
    f, without_nans = getattr(np, f"nan{name}"), getattr(np, name)
    numbers = np.array([0.3, 1.7, 0.9, -0.4])
    x = np.insert(numbers, [1, 3], NAN)
    value, g = md.value_and_grad(f)(x)
    assert value == pytest.approx(without_nans(numbers))
    np.testing.assert_allclose(g, np.insert(md.grad(without_nans)(numbers), [1, 3], 0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name", ["mean", "var", "std", "max", "min", "median"])
def test_where_nothing_is_left_there_is_nan(name):
    f, x = getattr(np, f"nan{name}"), np.array([[NAN, NAN], [1.0, 3.0]])
    value, _ = md.jvp(lambda x: f(x, axis=1), (x,), (np.ones_like(x),))
    np.testing.assert_array_equal(value, f(x, axis=1))


@each("f", [np.max, np.median, lambda x: np.quantile(x, 0.2), np.ptp, np.cumsum, np.prod])
def test_nans_spread_where_nothing_leaves_them_out(f):
    x = np.array([1.0, NAN, 2.0])
    np.testing.assert_array_equal(md.jvp(f, (x,), (np.ones(3),))[0], f(x))


# ---------------------------------------------------------------- dtypes

SUMS = [np.sum, np.mean, np.prod, np.var, np.std, np.cumsum, np.cumprod, np.max, np.median, np.ptp, np.nansum]
DTYPES = [np.float16, np.float32, np.float64, np.complex64, bool, np.int8, np.uint16, np.int64]


@each("dtype", DTYPES)
@each("f", SUMS)
def test_dtypes_are_numpys(f, dtype):
    x = np.arange(1, 6).astype(dtype)
    if dtype is not bool or f is not np.ptp:  # NumPy subtracts no booleans
        for actual in (
            md.make_tape(f)(x)(x)[0],
            md.jvp(f, (x,), (np.zeros_like(x),))[0] if x.dtype.kind in "fc" else f(x),
        ):
            assert md.typeof(actual) == md.typeof(f(x))
            np.testing.assert_allclose(actual, f(x), rtol=1e-2)


@each("dtype", [bool, np.int8, np.uint16, np.float16, float])
@each("f", [np.sum, np.prod, np.cumsum, np.cumprod])
@each("x", [np.array([100, 27, 3], np.int8), np.ones(3, np.float32)])
def test_a_dtype_that_is_asked_for_is_given(f, dtype, x):
    np.testing.assert_array_equal(md.make_tape(lambda x: f(x, dtype=dtype))(x)(x)[0], f(x, dtype=dtype), strict=True)


@each("f", [np.sum, np.mean, np.prod, np.var, np.cumsum, np.nanmean, np.std])
def test_gradients_have_the_dtype_of_the_argument(f):
    value, g = md.value_and_grad(lambda x: np.sum(f(x, dtype=float) ** 2))(np.ones(3, np.float32))
    assert (value.dtype, g.dtype) == (np.float64, np.float32)


# ---------------------------------------------------------------- on ranks

BODIES: list[Callable] = [
    lambda x, w: np.var(x * w),
    lambda x, w: np.prod(w) * np.prod(x),
    lambda x, w: np.cumprod(x * w) @ np.cumprod(w),
    lambda x, w: np.sort(x) @ w + np.sort(w) @ x,
    lambda x, w: np.quantile(x * w, [0.2, 0.5]).sum() + np.nanmedian(x + w),
    lambda x, w: w[np.searchsorted(np.sort(x), np.array([0.1, 0.2])) % 4].sum(),
    lambda x, w: np.histogram(x, 3, (-1.0, 1.0), weights=w)[0][1],
    lambda x, w: np.sum(np.where(np.isin(x, w), x, w) * x),
    lambda x, w: np.sum(np.gradient(x, np.sort(w))),
]


@each("f", BODIES)
def test_reductions_of_blocks(f):
    mesh = spmd.make_mesh((3,), ("i",), backend="simulated")
    x, w = np.random.default_rng(0).standard_normal((3, 4)), np.random.default_rng(1).standard_normal(4)
    specs = {"mesh": mesh, "in_specs": (spmd.P("i"), spmd.P()), "out_specs": spmd.P("i")}
    blocks = spmd.shard_map(lambda x, w: f(x[0], w)[None], **specs)
    scale = np.array([1.0, 2.0, -1.0])
    actual = md.value_and_grad(lambda x, w: (scale * blocks(x, w)).sum(), argnums=(0, 1))(x, w)
    expected = md.value_and_grad(lambda x, w: scale @ np.stack([f(r, w) for r in x]), argnums=(0, 1))(x, w)
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- several results


@each("f", [lambda x: np.average(x, 1, np.array([1.0, 2.0, 3.0]), returned=True), np.gradient])
def test_several_results_are_a_tuple(f):
    x = np.arange(6.0).reshape(2, 3) ** 2
    out, _ = md.vjp(f, x)
    assert isinstance(out, tuple)
    for actual, expected in zip(out, f(x), strict=True):
        np.testing.assert_allclose(actual, expected)


# ---------------------------------------------------------------- numbers have an axis for some functions

#: What NumPy says of a number along axis 0 or -1, a function or a refusal.
ALONG_NO_AXIS = [np.sum, np.prod, np.max, np.min, np.all, np.any, np.ptp, np.mean, np.var, np.std, np.median, np.nansum]
ALONG_NO_AXIS += [np.nanprod, np.nanmax, np.nanmin, np.nanmean, np.nanvar, np.nanstd, np.count_nonzero, np.argmax]
ALONG_NO_AXIS += [np.argmin, np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.sort, np.argsort, np.flip]
ALONG_NO_AXIS += [np.squeeze, lambda x, axis: np.add.reduce(x, axis=axis)]
ALONG_NO_AXIS += [lambda x, axis: np.take(x, 0, axis=axis), lambda x, axis: np.repeat(x, 2, axis=axis)]
ALONG_NO_AXIS += [lambda x, axis: np.partition(x, 0, axis=axis), lambda x, axis: np.bitwise_or.reduce(x > 0, axis=axis)]
REFUSALS = (ValueError, TypeError, np.exceptions.AxisError)


@each("axis", [0, -1, 1, -2, None, ()])
@each("f", ALONG_NO_AXIS)
def test_axes_of_numbers_are_as_in_numpy(f, axis):
    run, x = (lambda x: f(x, axis=axis)), np.float64(2.5)
    ways = [lambda: md.jit(run)(x), lambda: md.vmap(run)(x[None])[0], lambda: md.jvp(run, (x,), (x,))[0]]
    try:
        expected = run(x)
    except REFUSALS:
        for way in ways:
            with pytest.raises(REFUSALS):
                way()
        return
    for way in ways:
        assert np.shape(way()) == np.shape(expected)
        np.testing.assert_array_equal(way(), expected)
    if np.asarray(expected).dtype.kind == "f":
        assert md.grad(lambda x: run(x).sum())(x) == md.grad(lambda x: np.sum(f(x[None], axis=None)))(x)
