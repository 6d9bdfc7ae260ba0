"""Reductions where a table of smooth points has nothing to say: zeros, ties, NaNs, no spread, kinks, errors."""

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
from tests.minidiff.refusals import refusals

modest = settings(max_examples=25, deadline=None)
#: Small integers, so that zeros and ties are common and sums and products exact.
vectors = st.lists(st.integers(-2, 2), min_size=1, max_size=6).map(lambda x: np.array(x, float))


def hessian(f: Callable) -> Callable:
    g = md.grad(f)
    return lambda x: np.stack([md.grad(lambda x, i=i: g(x)[i])(x) for i in range(len(x))])


def without(x: np.ndarray, *places: int) -> float:
    return math.prod(v for i, v in enumerate(x) if i not in places)


# ---------------------------------------------------------------- products


@modest
@given(vectors)
def test_prod_has_the_right_derivatives_at_zeros(x):
    n = range(len(x))
    assert md.grad(np.prod)(x).tolist() == [without(x, i) for i in n]
    assert hessian(np.prod)(x).tolist() == [[0.0 if i == j else without(x, i, j) for j in n] for i in n]


@modest
@given(vectors, st.integers(0, 5))
def test_cumprod_has_the_right_derivatives_at_zeros(x, k):
    k, n = k % len(x), range(len(x))

    def f(x):
        return np.cumprod(x)[k]

    head = x[: k + 1]
    assert md.grad(f)(x).tolist() == [without(head, i) if i <= k else 0.0 for i in n]
    expected = [[without(head, i, j) if i != j and max(i, j) <= k else 0.0 for j in n] for i in n]
    assert hessian(f)(x).tolist() == expected


def test_third_derivatives_of_products_at_zeros():
    third = md.grad(lambda x: hessian(np.prod)(x)[0, 1])(np.zeros(3))
    assert third.tolist() == [0.0, 0.0, 1.0]


def test_prod_over_axes_with_zeros():
    x = np.array([[[0.0, 2.0], [3.0, 4.0]], [[0.0, 5.0], [0.0, 0.0]]])
    g = md.grad(lambda x: np.prod(x, axis=(0, 2)).sum())(x)
    assert g.tolist() == [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]
    x[1, 0, 0] = 1.0
    g = md.grad(lambda x: np.prod(x, axis=(0, 2)).sum())(x)
    assert g.tolist() == [[[10.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]


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
        assert np.allclose(md.grad(f)(x), (x == best) / np.sum(x == best))


def test_a_tie_with_initial_is_shared_too():
    assert md.grad(lambda x: np.max(x, initial=2.0))(np.array([1.0, 2.0])).tolist() == [0.0, 0.5]


def test_what_is_left_out_takes_no_share():
    x, mask = np.array([-1.0, -1.0, -2.0]), np.array([True, False, True])
    g = md.grad(lambda x: np.max(x, where=mask, initial=-np.inf))(x)
    assert g.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("f", [np.std, np.nanstd])
@pytest.mark.parametrize("x", [np.full(3, 1.5), np.array([2.0]), np.full(2, 1 + 1j)])
def test_where_there_is_no_spread_the_derivative_of_std_is_zero(f, x):
    assert md.grad(f)(x).tolist() == [0.0] * len(x)


def test_var_about_another_mean_is_differentiable_in_it():
    x = np.array([1.0, 2.0, 6.0])
    assert md.grad(lambda m: np.var(x, mean=m))(1.0) == pytest.approx(-2 * (x - 1.0).mean())
    assert md.grad(lambda x: np.var(x, mean=np.mean(x)))(x) == pytest.approx(md.grad(np.var)(x))


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "var", "std", "max", "min", "median"])
def test_nans_are_left_out(name):
    f, without_nans = getattr(np, f"nan{name}"), getattr(np, name)
    numbers = np.array([0.3, 1.7, 0.9, -0.4])
    x = np.insert(numbers, [1, 3], np.nan)
    value, g = md.value_and_grad(f)(x)
    assert value == pytest.approx(without_nans(numbers))
    assert g[[0, 2, 3, 5]] == pytest.approx(md.grad(without_nans)(numbers))
    assert g[[1, 4]].tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["mean", "var", "std", "max", "min", "median"])
def test_where_nothing_is_left_there_is_nan(name):
    x = np.array([[np.nan, np.nan], [1.0, 3.0]])
    f = getattr(np, f"nan{name}")
    value, _ = md.jvp(lambda x: f(x, axis=1), (x,), (np.ones_like(x),))
    np.testing.assert_array_equal(value, f(x, axis=1))
    assert np.isnan(value[0])


@pytest.mark.parametrize("f", [np.max, np.median, lambda x: np.quantile(x, 0.2), np.ptp, np.cumsum, np.prod])
def test_nans_spread_where_nothing_leaves_them_out(f):
    x = np.array([1.0, np.nan, 2.0])
    np.testing.assert_array_equal(md.jvp(f, (x,), (np.ones(3),))[0], f(x))


# ---------------------------------------------------------------- dtypes


@each("dtype", [np.float16, np.float32, np.float64, np.complex64])
@each("f", [np.sum, np.mean, np.prod, np.var, np.std, np.cumsum, np.cumprod, np.max, np.median])
def test_dtypes_are_numpys(f, dtype):
    x = np.arange(1, 6).astype(dtype)
    value, _ = md.jvp(f, (x,), (x,))
    assert value.dtype == f(x).dtype
    np.testing.assert_allclose(value, f(x), rtol=1e-2)


@each("dtype", [bool, np.int8, np.uint16, np.int64])
@each("f", [np.sum, np.mean, np.prod, np.var, np.cumsum, np.max, np.ptp, np.median, np.nansum])
def test_integers_are_reduced_as_numpy_reduces_them(f, dtype):
    x = np.arange(5).astype(dtype)
    if dtype is bool and f is np.ptp:
        pytest.skip("NumPy subtracts no booleans")
    (out,) = md.make_tape(f)(x).out_types
    assert (out.shape, out.dtype) == (f(x).shape, f(x).dtype)
    assert md.make_tape(f)(x)(x)[0].tolist() == f(x).tolist()


@pytest.mark.parametrize("f", [np.sum, np.mean, np.prod, np.var, np.cumsum, np.nanmean, np.std])
def test_a_dtype_can_be_asked_for(f):
    x = np.ones(3, np.float32)
    value, g = md.value_and_grad(lambda x: np.sum(f(x, dtype=float) ** 2))(x)
    assert (value.dtype, g.dtype) == (np.float64, np.float32)


@each("dtype", [bool, np.int8, np.uint16, np.float16])
@each("f", [np.sum, np.prod, np.cumsum, np.cumprod])
def test_a_small_dtype_that_is_asked_for_is_given(f, dtype):
    x = np.array([100, 27, 3], np.int8)
    expected = f(x, dtype=dtype)
    (out,) = md.make_tape(lambda x: f(x, dtype=dtype))(x)(x)
    assert (out.dtype, out.tolist()) == (expected.dtype, expected.tolist())


# ---------------------------------------------------------------- on ranks

BODIES: dict[str, Callable] = {
    "var": lambda x, w: np.var(x * w),
    "prod": lambda x, w: np.prod(w) * np.prod(x),
    "cumprod": lambda x, w: np.cumprod(x * w) @ np.cumprod(w),
    "sort": lambda x, w: np.sort(x) @ w + np.sort(w) @ x,
    "quantiles": lambda x, w: np.quantile(x * w, [0.2, 0.5]).sum() + np.nanmedian(x + w),
    "searchsorted": lambda x, w: w[np.searchsorted(np.sort(x), np.array([0.1, 0.2])) % 4].sum(),
    "histogram": lambda x, w: np.histogram(x, 3, (-1.0, 1.0), weights=w)[0][1],
    "isin": lambda x, w: np.sum(np.where(np.isin(x, w), x, w) * x),
    "gradient": lambda x, w: np.sum(np.gradient(x, np.sort(w))),
}


@pytest.mark.parametrize("name", BODIES)
def test_reductions_of_blocks(name):
    f, mesh = BODIES[name], spmd.make_mesh((3,), ("i",), backend="simulated")
    x, w = np.random.default_rng(0).standard_normal((3, 4)), np.random.default_rng(1).standard_normal(4)
    specs = {"mesh": mesh, "in_specs": (spmd.P("i"), spmd.P()), "out_specs": spmd.P("i")}
    blocks = spmd.shard_map(lambda x, w: f(x[0], w)[None], **specs)
    scale = np.array([1.0, 2.0, -1.0])
    actual = md.value_and_grad(lambda x, w: (scale * blocks(x, w)).sum(), argnums=(0, 1))(x, w)
    expected = md.value_and_grad(lambda x, w: scale @ np.stack([f(r, w) for r in x]), argnums=(0, 1))(x, w)
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- tapes


@pytest.mark.parametrize(
    "f, equations",
    [
        (lambda x: np.sum(x, axis=1, keepdims=True), ["sum"]),
        (np.var, ["var"]),
        (md.grad(lambda x: np.sum(x, axis=(0, 1))), ["sum", "broadcast_to"]),
        (lambda x: md.vjp(lambda x: np.sum(x, 0), x)[1](np.ones(3))[0], ["sum", "broadcast_to"]),
        (lambda x: md.vjp(lambda x: np.sum(x, 1, keepdims=True), x)[1](np.ones((2, 1)))[0], ["sum", "broadcast_to"]),
        (lambda x: md.vjp(lambda x: np.sum(x, 1), x)[1](x[:, 0])[0], ["slice", "sum", "reshape", "broadcast_to"]),
    ],
)
def test_tapes_are_short(f, equations):
    names = [e.primitive.name for e in md.make_tape(f)(np.ones((2, 3))).equations]
    assert sorted(names) == sorted(equations)


# ---------------------------------------------------------------- average, quantiles, differences


def test_average_returns_the_sum_of_weights():
    x, w = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0, 3.0])
    (y, total), _ = md.vjp(lambda x: np.average(x, 1, w, returned=True), x)
    expected = np.average(x, 1, w, returned=True)
    assert (y.tolist(), total.tolist()) == (expected[0].tolist(), expected[1].tolist())


def test_a_quantile_is_differentiable_in_its_place():
    x = np.array([3.0, 0.0, 1.0])
    assert md.grad(lambda q: np.quantile(x, q))(0.75) == 4.0
    assert md.grad(lambda q: np.percentile(x, q))(25.0) == pytest.approx(0.02)
    assert md.grad(lambda x: np.median(x))(x).tolist() == [0.0, 0.0, 1.0]
    assert md.grad(lambda x: np.quantile(x, 0.75))(x).tolist() == [0.5, 0.0, 0.5]


def test_gradient_of_several_axes_is_a_tuple():
    x = np.arange(12.0).reshape(3, 4) ** 2
    out, _ = md.vjp(np.gradient, x)
    assert isinstance(out, tuple)
    for actual, expected in zip(out, np.gradient(x), strict=True):
        np.testing.assert_allclose(actual, expected)


ERRORS: dict[str, tuple[Callable, type, str]] = {
    "max of nothing": (lambda x: np.max(x[:0], axis=0), ValueError, r"f64\[0,3\] is empty along axes \(0,\)"),
    "where with more dimensions": (lambda x: np.mean(x, where=np.ones((1, 1, 1), bool)), ValueError, r"mask\.reshape"),
    "where that repeats": (
        lambda x: np.sum(x[:1], where=np.ones((4, 3), bool)),
        ValueError,
        r"\(4, 3\), which does not",
    ),
    "reduce": (lambda x: np.logical_or.reduce(x, where=np.ones((4, 2, 3), bool)), ValueError, r"\(4, 2, 3\), which"),
    "where without initial": (lambda x: np.max(x, where=x > 0), ValueError, r"max: .*pass the result as initial="),
    "average": (lambda x: np.average(x, 0, np.ones(3)), ValueError, r"shape \(3,\) fit neither .* \(2, 3\) nor"),
    "ddof twice": (lambda x: np.var(x, ddof=1, correction=1), ValueError, r"var: ddof and correction are the same"),
    "method": (lambda x: np.quantile(x, 0.5, method="low"), ValueError, r"quantile: method must be .*'low'"),
    "range": (lambda x: np.percentile(x, 101), ValueError, r"percentile: q must be between 0 and 100, got 101"),
    "range of q": (
        lambda x: np.quantile(x, [0.5, 2]),
        ValueError,
        r"quantile: q must be between 0 and 1, got \[0.5, 2.0\]",
    ),
    "complex": (lambda x: np.quantile(x + 1j, 0.5), TypeError, r"quantile: complex numbers .*: c128\[2,3\]"),
    "diff": (lambda x: np.diff(x, -1), ValueError, r"diff: n must not be negative, got -1"),
    "gradient": (lambda x: np.gradient(x, 1.0, 2.0, 3.0), TypeError, r"gradient: 3 spacings for 2 axes"),
    "gradient, short": (lambda x: np.gradient(x, edge_order=2), ValueError, r"f64\[2,3\] needs at least 3 elements"),
    "gradient, coordinates": (lambda x: np.gradient(x, np.ones(4), axis=1), ValueError, r"shape \(4,\) .* of size 3"),
    "gradient, edges": (lambda x: np.gradient(x, edge_order=3), ValueError, r"edge_order must be 1 or 2, got 3"),
}
if hasattr(np, "cumulative_sum"):  # of NumPy 2.1
    ERRORS["cumulative_sum"] = (np.cumulative_sum, ValueError, r"cumulative_sum: pass an axis for f64\[2,3\]")


test_errors_say_what_does_not_fit = refusals(ERRORS, lambda f: md.make_tape(f)(np.ones((2, 3))))


# ---------------------------------------------------------------- numbers have an axis for some functions

#: What NumPy says of a number along axis 0 or -1, a function or a refusal.
ALONG_NO_AXIS = [np.sum, np.prod, np.max, np.min, np.all, np.any, np.ptp, np.mean, np.var, np.std, np.median, np.nansum]
ALONG_NO_AXIS += [np.nanprod, np.nanmax, np.nanmin, np.nanmean, np.nanvar, np.nanstd, np.count_nonzero, np.argmax]
ALONG_NO_AXIS += [np.argmin, np.cumsum, np.cumprod, np.nancumsum, np.nancumprod, np.sort, np.argsort, np.flip]
ALONG_NO_AXIS += [np.squeeze, lambda x, axis: np.add.reduce(x, axis=axis)]
ALONG_NO_AXIS += [lambda x, axis: np.take(x, 0, axis=axis), lambda x, axis: np.repeat(x, 2, axis=axis)]
ALONG_NO_AXIS += [lambda x, axis: np.partition(x, 0, axis=axis), lambda x, axis: np.bitwise_or.reduce(x > 0, axis=axis)]


@each("axis", [0, -1, 1, -2, None, ()])
@each("f", ALONG_NO_AXIS, ids=lambda f: f.__name__)
def test_axes_of_numbers_are_as_in_numpy(f, axis):
    def run(x):
        return f(x, axis=axis)

    x = np.float64(2.5)
    try:
        expected = run(x)
    except (ValueError, TypeError, np.exceptions.AxisError):
        for refuses in (lambda: md.jit(run)(x), lambda: md.vmap(run)(x[None]), lambda: md.jvp(run, (x,), (x,))):
            with pytest.raises((ValueError, TypeError, np.exceptions.AxisError)):
                refuses()
        return
    for y in (md.jit(run)(x), md.vmap(run)(x[None])[0], md.jvp(run, (x,), (x,))[0]):
        assert np.shape(y) == np.shape(expected)
        np.testing.assert_array_equal(y, expected)
    if np.asarray(expected).dtype.kind == "f":
        assert md.grad(lambda x: run(x).sum())(x) == md.grad(lambda x: np.sum(f(x[None], axis=None)))(x)
