"""Functional updates against NumPy's assignments, at random indices, at repeated ones, and where a mask holds."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.as_numpy import check_as_numpy
from tests.checks.indices import indices
from tests.checks.samples import each

X = np.arange(6.0).reshape(2, 3)
UFUNCS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power}
UFUNCS |= {"max": np.maximum, "min": np.minimum}
METHODS = ["set", *UFUNCS]


def update(method: str, index: Any, x: Any, v: Any) -> Any:
    """Return the updated array; plain ones are updated by NumPy, in place on a copy."""
    if not (isinstance(x, np.ndarray) and isinstance(v, (np.ndarray, float))):
        return getattr(mnp.at(x)[index], method)(v)
    x = np.array(x)
    if method == "set":
        x[index] = v
    else:
        UFUNCS[method].at(x, index, v)
    return x


@settings(max_examples=300, deadline=None)
@given(indices(), st.sampled_from(METHODS))
def test_updates_are_numpys_assignments(x_and_index, method):
    x, index = x_and_index
    try:
        shape = np.shape(x[index])
    except IndexError:
        with pytest.raises((IndexError, ValueError)):
            getattr(mnp.at(x)[index], method)(1.0)
        return
    v, before = np.random.default_rng(0).uniform(0.5, 1.5, shape), x.copy()
    check_as_numpy(functools.partial(update, method, index), x, v)
    np.testing.assert_allclose(getattr(mnp.at(x)[index], method)(v), update(method, index, x, v), rtol=1e-12)
    np.testing.assert_array_equal(x, before)


#: A method, an index, values (of an array of 3), and the gradients of 1, 10 and 100 times the elements in both.
X3 = [2.0, 3.0, 5.0]
GRADIENTS = [
    ("set", [0, 0, 2], [1.0] * 3, [1.0] * 3, [0, 10, 0], [0, 1, 100]),  # the last value that is set stays
    ("multiply", [0, 0, 2], X3, [0.0, 0.0, 0.0], [0, 10, 0], [0, 0, 500]),
    ("multiply", [0, 0, 2], X3, [0.0, 7.0, 1.0], [0, 10, 100], [14, 0, 500]),
    ("max", [0, 0, 2], [1.0] * 3, [1.0] * 3, [1 / 3, 10, 50], [1 / 3, 1 / 3, 50]),  # what ties shares
    ("min", [0, 2, 1], [1.0] * 3, [1.0] * 3, [0.5, 5, 50], [0.5, 50, 5]),
]


@each("method, index, x, v, gx, gv", GRADIENTS)
def test_gradients_at_indices_that_repeat(method, index, x, v, gx, gv):
    f = lambda x, v: (update(method, index, x, v) * np.array([1.0, 10.0, 100.0])).sum()  # noqa: E731
    actual = md.grad(f, argnums=(0, 1))(np.array(x), np.array(v))
    np.testing.assert_array_equal(actual, [gx, gv])


def test_the_mixed_derivative_of_two_factors_that_are_0():
    product = md.grad(lambda v: mnp.at(np.array(X3))[[0, 0, 2]].multiply(v)[0])
    assert md.jvp(product, (np.zeros(3),), (np.eye(3)[0],))[1].tolist() == [0.0, 2.0, 0.0]


@each("method", METHODS)
def test_traced_indices_mean_the_same(method):
    x, v, i = np.array(X3), np.array([1.5, 0.5, 3.0]), np.array([[0, 0, -1], [1, -2, 1], [2, 1, 0]])
    f = md.vmap(lambda i, x, v: getattr(mnp.at(x)[i], method)(v), (0, None, None))
    np.testing.assert_allclose(f(i, x, v), [update(method, j, x, v) for j in i])
    h = md.grad(lambda v, x, i: (update(method, i, x, v) * x).sum())
    np.testing.assert_allclose(md.vmap(h, (None, None, 0))(v, x, i), [h(v, x, j) for j in i], rtol=1e-12)


@each("method", METHODS)
def test_a_number_goes_where_a_traced_mask_holds(method):
    check_as_numpy(lambda x, v: update(method, x > 2.5, x, v), X, np.float64(1.5))


def test_rows_of_a_traced_mask():
    tape = md.make_tape(lambda x: x.at[x[:, 0] > 0].apply(np.square))(X)
    np.testing.assert_array_equal(tape(X)[0], [[0, 1, 2], [9, 16, 25]])


#: An array, an index, a method, values, and the result, of the array's dtype.
TYPES = [
    (np.zeros(2, np.float32), 0, "set", 1.5, [1.5, 0]),
    (np.zeros(2, np.float32), [0, 0], "add", np.ones(2), [2, 0]),
    (np.zeros(2, complex), 0, "set", np.float32(1), [1, 0]),
    (np.arange(3), [0, 0], "add", 2, [4, 1, 2]),
    ([1.0, 2.0], 0, "set", 3, [3.0, 2.0]),
]


@each("x, index, method, v, expected", TYPES)
def test_values_take_the_dtype_of_what_they_go_into(x, index, method, v, expected):
    actual = getattr(mnp.at(x)[index], method)(v)
    np.testing.assert_array_equal(actual, np.array(expected, np.asarray(x).dtype), strict=True)
