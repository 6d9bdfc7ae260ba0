"""Functions that `minidiff.numpy` replaces, as `array`, `arange` and `vectorize`: on traced values as on plain ones."""

import numpy as np
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
