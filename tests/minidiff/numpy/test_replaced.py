"""Functions that `minidiff.numpy` replaces, as `array`, `arange` and `vectorize`: on traced values as on plain ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from minidiff.checks.testing import check_grads
from tests.checks.samples import each

X = np.array([[1.0, 2.0], [3.0, 4.0]])
LEAVES = st.sampled_from([2, 2.5, True, 1j, np.float32(1.5), np.int8(3), "traced", "traced float32"])
LINES = st.lists(LEAVES, min_size=3, max_size=3) | st.sampled_from([np.arange(3), np.ones(3, np.float32), (1, 2.0, 3)])


@settings(max_examples=60, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=3), st.booleans(), st.integers(0, 3))
def test_nested_lists_are_what_numpy_makes_of_them(nested, as_complex, ndmin):
    def build(np_, x, y):
        def value(v):
            return {"traced": x, "traced float32": y}[v] if isinstance(v, str) else v

        lines = [line if isinstance(line, np.ndarray) else [value(v) for v in line] for line in nested]
        return np_.array(lines, complex if as_complex else None, ndmin=ndmin)

    x, y = np.float64(0.5), np.float32(0.25)
    actual = md.jvp(lambda x, y: build(mnp, x, y), (x, y), (x, y))[0]
    np.testing.assert_array_equal(actual, build(np, x, y), strict=True)


#: Beside the rows of the table: sizes that depend on values, and functions that look at them.
CALLS = [
    (lambda np_, x: np_.asarray_chkfinite(x), X),
    (lambda np_, x: np_.arange(x + 1.5), 2.0),
    (lambda np_, x: np_.arange(x, 3.2 * x, x / 2), 1.5),
    (lambda np_, x: np_.array([x, 1.0], dtype="float32"), np.float32(1.5)),
    (lambda np_, x: np_.vectorize(lambda x, y: x * y if x < y else y * y)(x, 2.5), X),
    (lambda np_, x: np_.vectorize(lambda k, x: x**k, excluded=["k"])(x=x, k=2), X),
]


@each("f, x", CALLS)
def test_values_and_derivatives(f, x):
    value, _ = md.jvp(lambda x: f(mnp, x), (x,), (x,))
    np.testing.assert_array_equal(value, f(np, x), strict=True)
    check_grads(lambda x: f(mnp, x), (x,))


def test_vectorized_functions_have_several_results():
    f = lambda x, y: (x * y, 2) if x < y else (y * y, 3)  # noqa: E731
    values, _ = md.jvp(mnp.vectorize(f), (X, 2.0), (X, 1.0))
    for value, expected in zip(values, np.vectorize(f)(X, 2.0), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_plain_arguments_make_numpys_arrays():
    for name in ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite"):
        np.testing.assert_array_equal(getattr(mnp, name)([1, 2.0]), getattr(np, name)([1, 2.0]), strict=True)
    for args in ((3,), (1, 4), (1, 4, 0.5), (0, 3, 1, "float32")):
        np.testing.assert_array_equal(mnp.arange(*args), np.arange(*args), strict=True)
    assert mnp.asarray([1, 2], float).dtype == float
    np.testing.assert_array_equal(mnp.full((2, 1), [3]), np.full((2, 1), [3]), strict=True)
    np.testing.assert_array_equal(mnp.r_[1:3, 0.5], np.r_[1:3, 0.5], strict=True)
    np.testing.assert_array_equal(mnp.vectorize(abs)([-1, 2]), [1, 2], strict=True)


def test_finite_arrays_are_checked_by_their_values():
    with pytest.raises(ValueError):
        md.grad(lambda x: mnp.asarray_chkfinite(x).sum())(np.array([1.0, np.inf]))


def test_errors_of_the_function_itself_are_not_explained_away():
    def f(x):
        raise TypeError("got an unexpected keyword argument of its own")

    with pytest.raises(TypeError, match="of its own"):
        md.make_tape(lambda x: mnp.vectorize(f)(x))(X)
