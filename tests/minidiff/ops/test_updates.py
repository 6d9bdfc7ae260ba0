"""Functional updates against NumPy's assignments, at random indices; and what the table cannot say of them."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.indices import indices
from tests.minidiff.refusals import refusals

X = np.arange(6.0).reshape(2, 3)
UFUNCS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power}
UFUNCS |= {"max": np.maximum, "min": np.minimum}


def update(method: str, index: Any, x: Any, v: Any) -> Any:
    return getattr(mnp.at(x)[index], method)(v)


def written(method: str, index: Any, x: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return NumPy's result, computed in place on a copy."""
    x = np.array(x)
    if method == "set":
        x[index] = v
    else:
        UFUNCS[method].at(x, index, v)
    return x


def inner(xs: Any, ys: Any) -> float:
    return sum(float(np.sum(x * y)) for x, y in zip(xs, ys, strict=True))


@settings(max_examples=300, deadline=None)
@given(indices(), st.sampled_from(["set", *UFUNCS]))
def test_updates_are_numpys_assignments(x_and_index, method):
    x, index = x_and_index
    f = functools.partial(update, method, index)
    try:
        shape = np.shape(x[index])
    except IndexError:
        with pytest.raises((IndexError, ValueError)):
            f(x, 1.0)
        return
    v = np.random.default_rng(0).uniform(0.5, 1.5, shape)
    expected = written(method, index, x, v)
    np.testing.assert_allclose(f(x, v), expected, rtol=1e-12)
    tape = md.make_tape(f)(x, v)
    tape.check()
    np.testing.assert_allclose(tape(x, v)[0], expected, rtol=1e-12)
    np.testing.assert_allclose(md.vmap(f)(np.stack([x, x]), np.stack([v, v]))[1], expected, rtol=1e-12)
    (value, pullback), tangents = md.vjp(f, x, v), (np.cos(x), np.sin(v))
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    tangent, ct = md.jvp(f, (x, v), tangents)[1], np.cos(x + 1)
    np.testing.assert_allclose(inner(pullback(ct), tangents), inner([ct], [tangent]), rtol=1e-9, atol=1e-9)
    if method in ("set", "add", "subtract"):  # linear
        np.testing.assert_allclose(tangent, written(method, index, *tangents), rtol=1e-12)


# ---------------------------------------------------------------- indices that repeat

TWICE = [0, 0, 2]


def gradients(method: str, x: np.ndarray, v: np.ndarray, index: Any = TWICE) -> list:
    f = functools.partial(update, method, index)
    gx, gv = md.grad(lambda x, v: (f(x, v) * np.array([1.0, 10.0, 100.0])).sum(), argnums=(0, 1))(x, v)
    return [gx.tolist(), gv.tolist()]


def test_the_last_value_that_is_set_stays_and_has_the_gradient():
    assert mnp.at(np.zeros(3))[TWICE].set(np.array([1.0, 2.0, 3.0])).tolist() == [2.0, 0.0, 3.0]
    assert gradients("set", np.ones(3), np.ones(3)) == [[0.0, 10.0, 0.0], [0.0, 1.0, 100.0]]


def test_gradients_of_products_where_factors_are_zero():
    x, v = np.array([2.0, 3.0, 5.0]), np.array([0.0, 0.0, 0.0])
    assert gradients("multiply", x, v) == [[0.0, 10.0, 0.0], [0.0, 0.0, 500.0]]
    assert gradients("multiply", x, np.array([0.0, 7.0, 1.0])) == [[0.0, 10.0, 100.0], [14.0, 0.0, 500.0]]
    # Two factors that are zero: only the mixed second derivative is not.
    product = md.grad(lambda v: mnp.at(x)[TWICE].multiply(v)[0])
    mixed = md.jvp(product, (v,), (np.array([1.0, 0.0, 0.0]),))[1]
    assert mixed.tolist() == [0.0, 2.0, 0.0]


def test_what_ties_shares_the_gradient():
    assert gradients("max", np.ones(3), np.ones(3)) == [[1 / 3, 10.0, 50.0], [1 / 3, 1 / 3, 50.0]]
    assert gradients("min", np.ones(3), np.ones(3), [0, 2, 1]) == [[0.5, 5.0, 50.0], [0.5, 50.0, 5.0]]


@pytest.mark.parametrize("method", ["set", *UFUNCS])
def test_traced_indices_are_checked_for_nothing_but_mean_the_same(method):
    x, v, i = np.array([2.0, 3.0, 5.0]), np.array([1.5, 0.5, 3.0]), np.array([[0, 0, -1], [1, -2, 1], [2, 1, 0]])
    f = md.vmap(lambda i, x, v: update(method, i, x, v), (0, None, None))
    np.testing.assert_allclose(f(i, x, v), [written(method, j, x, v) for j in i])
    g = md.vmap(md.grad(lambda v, x, i: (update(method, i, x, v) * x).sum()), (None, None, 0))
    h = md.grad(lambda v, x, i: (update(method, i, x, v) * x).sum())
    np.testing.assert_allclose(g(v, x, i), [h(v, x, j) for j in i], rtol=1e-12)


# ---------------------------------------------------------------- masks that are traced


@pytest.mark.parametrize("method", ["set", *UFUNCS])
def test_a_number_goes_where_a_traced_mask_holds(method):
    def f(x, v):
        return update(method, x > 2, x, v)

    expected = written(method, X > 2, X, 1.5)
    np.testing.assert_allclose(md.make_tape(f)(X, 1.5)(X, 1.5)[0], expected)
    np.testing.assert_allclose(md.vmap(f)(X, np.array([1.5, 1.5])), expected)
    np.testing.assert_allclose(
        md.vmap(md.grad(lambda x, v: f(x, v).sum()))(X, np.array([1.5, 1.5])), md.grad(lambda x: f(x, 1.5).sum())(X)
    )


def test_rows_of_a_traced_mask():
    tape = md.make_tape(lambda x: x.at[x[:, 0] > 0].apply(np.square))(X)
    np.testing.assert_array_equal(tape(X)[0], [[0, 1, 2], [9, 16, 25]])


# ---------------------------------------------------------------- types


def test_updates_leave_what_they_are_of():
    x = X.copy()
    for method in ("set", *UFUNCS):
        for index in (0, [0, 0], ...):
            update(method, index, x, 2.0)
    np.testing.assert_array_equal(x, X)


def test_values_take_the_dtype_of_what_they_go_into():
    assert mnp.at(np.zeros(2, np.float32))[0].set(1.5).dtype == np.float32
    assert mnp.at(np.zeros(2, np.float32))[[0, 0]].add(np.ones(2)).dtype == np.float32
    assert mnp.at(np.zeros(2, complex))[0].set(np.float32(1)).dtype == complex
    assert mnp.at(np.arange(3))[[0, 0]].add(2).tolist() == [4, 1, 2]
    assert mnp.at([1.0, 2.0])[0].set(3).tolist() == [3.0, 2.0]


ERRORS = [
    (lambda x: x.at[0].set(np.ones(2)), ValueError, r"at\[\.\.\.\]\.set: values of type f64\[2\] do not .*\(3,\)"),
    (lambda x: mnp.at(np.arange(3))[0].add(x[0, 0]), TypeError, r"add: values of type f64\[\] cannot .* i64\[3\]"),
    (lambda x: mnp.at(np.arange(3))[0].set(0.5), TypeError, r"set: values of type f64\[\] cannot go into .*i64"),
    (lambda x: x.at[0].set(1j), TypeError, r"values of type c128\[\] cannot go into .* f64\[2,3\] without"),
    (lambda x: mnp.at(np.arange(3))[0].divide(2), TypeError, r"a value of type i64\[3\] cannot hold"),
    (lambda x: x.at[[0, 5]].set(1), IndexError, r"\[0, 5\] is out of bounds .* size 2"),
    (lambda x: x.at[0, 0, 0].set(1), IndexError, r"too many indices: 3"),
    (lambda x: x.at[x > 0].set(np.ones(2)), TypeError, r"at\[mask\]\.set: the mask is traced, .*np\.where"),
    (lambda x: x.at[x[0] > 0].set(1), IndexError, r"mask of shape \(3,\) does not fit f64\[2,3\]"),
    (lambda x: x.at[[0, 0]].apply(np.sin), ValueError, r"\[0, 0\] may name an element twice"),
]
test_errors_say_what_is_not_possible = refusals(ERRORS, lambda f: md.make_tape(f)(X))


def test_what_can_be_done_is_shown():
    assert repr(mnp.at(X)) == "<updates of f64[2,3]: .at[index].set(values), .add, .multiply, …>"


def test_a_known_slice_is_updated_by_one_operation():
    assert str(md.make_tape(lambda x, v: x.at[1:, 0].set(v))(X, np.ones(1))).splitlines()[1] == (
        "  c:f64[2,3] = update(a, b, [1:, 0])"
    )
