"""Indexing in all of NumPy's forms, against NumPy itself; and what the table of operations cannot say of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.indices import indices
from tests.minidiff.refusals import refusals

X = np.arange(6.0).reshape(2, 3)


@settings(max_examples=300, deadline=None)
@given(indices())
@example((np.zeros((0, 1, 0)), (..., slice(None), 0, False)))
def test_an_index_means_what_it_means_to_numpy(x_and_index):
    x, index = x_and_index

    def f(x: Any) -> Any:
        return x[index]

    try:
        expected = x[index]
    except IndexError:
        with pytest.raises((IndexError, ValueError)):
            md.make_tape(f)(x)
        return
    value, pullback = md.vjp(f, x)
    np.testing.assert_array_equal(value, expected)
    tape = md.make_tape(f)(x)
    tape.check()
    assert tape.out_types == [md.typeof(expected)]
    np.testing.assert_array_equal(tape(x)[0], expected)
    np.testing.assert_array_equal(md.vmap(f)(np.stack([x, -x])), np.stack([expected, -expected]))
    ct = 1.0 + np.arange(np.size(expected)).reshape(np.shape(expected))
    gradient = np.zeros_like(x)
    np.add.at(gradient, index, ct)
    np.testing.assert_array_equal(pullback(ct)[0], gradient)


@settings(max_examples=100, deadline=None)
@given(indices())
def test_traced_integers_index_as_known_ones_do(x_and_index):
    x, index = x_and_index
    entries = index if isinstance(index, tuple) else (index,)
    at = [k for k, i in enumerate(entries) if isinstance(i, (int, np.integer, np.ndarray, list)) and np.size(i)]
    at = [k for k in at if np.asarray(entries[k]).dtype != bool]

    def f(x, *arrays):
        replaced = dict(zip(at, arrays))
        return x[tuple(replaced.get(k, i) for k, i in enumerate(entries))]

    arrays = [np.asarray(entries[k]) for k in at]
    try:
        expected = x[index]
    except IndexError:
        return
    np.testing.assert_array_equal(md.make_tape(f)(x, *arrays)(x, *arrays)[0], expected)
    if arrays:
        twice = [np.stack([i, i]) for i in arrays]
        np.testing.assert_array_equal(md.vmap(f)(np.stack([x, x]), *twice), np.stack([expected] * 2))


# ---------------------------------------------------------------- the transpose of a gather


@pytest.mark.parametrize("dtype", [float, np.float32, complex])
@pytest.mark.parametrize("i", [np.arange(60) % 7, np.arange(60)[::-1] - 60, np.array([[0] * 30, [-1] * 30])])
def test_rows_that_are_taken_add_up_however_many(i, dtype):
    x = np.arange(60.0 * 20).reshape(60, 20).astype(dtype)
    expected = np.zeros_like(x)
    ct = (1 + np.arange(20.0 * i.size)).reshape(*i.shape, 20).astype(dtype)
    np.add.at(expected, i, ct)
    np.testing.assert_allclose(md.vjp(lambda x: x[i], x)[1](ct)[0], expected, rtol=1e-6)


def test_the_transpose_of_a_flip_is_a_flip():
    tape = md.make_tape(lambda ct: md.linear_transpose(lambda x: x[::-1, ::-1], X)(ct))(X)
    assert [str(e.primitive) for e in tape.equations] == ["slice"]


def test_tapes_write_slices_as_python_does():
    text = str(md.make_tape(lambda x: x[1:, None, ::-1, 0])(np.ones((2, 3, 4))))
    assert "slice(a, [1:, None, ::-1, 0])" in text


def test_an_index_of_everything_is_no_operation_and_one_of_new_axes_a_reshape():
    assert md.make_tape(lambda x: x[:, ...])(X).equations == []
    assert [str(e.primitive) for e in md.make_tape(lambda x: x[:, None])(X).equations] == ["reshape"]


# ---------------------------------------------------------------- errors

ERRORS = [
    (lambda x: x[1.0], IndexError, r"an index must be an integer, .*; got f64\[\] for a value of type f64\[2,3\]"),
    (lambda x: x["a"], IndexError, r"an index must be an integer"),
    (lambda x: x[0, 0, [0]], IndexError, r"3 for an array of 2 dimensions \(f64\[2,3\]\)"),
    (lambda x: x[x > 0], md.TracerError, r"a boolean mask needs a concrete value"),
    (lambda x: x[2], IndexError, r"out of bounds"),
    (lambda x: np.take(x, [0], mode="nearest"), ValueError, r"mode must be 'raise', 'wrap' or 'clip', got 'nearest'"),
    (lambda x: np.take(x[:, :0], [0], 1, mode="wrap"), IndexError, r"from an axis of size 0"),
    (lambda x: np.take_along_axis(x, np.array([0]), 1), ValueError, r"differ in the number of axes: .* i64\[1\]"),
    (lambda x: np.take_along_axis(x, x, 1), IndexError, r"indices must be integers, got f64\[2,3\]"),
    (lambda x: np.compress([[True]], x), ValueError, r"one dimension, got 2"),
    (lambda x: np.compress(x[0] > 0, x, 1), md.TracerError, r"np\.compress .*np\.where\) needs a"),
    (lambda x: np.extract(x > 0, x), md.TracerError, r"np\.extract .*np\.where\) needs a concrete"),
    (
        lambda x: np.put(x, 0, 1),
        TypeError,
        r"np\.put .* writes into its argument.* np\.at\(x\)\[index\]\.set\(values\)",
    ),
    (lambda x: np.put_along_axis(x, np.array([[0]]), 1, 1), TypeError, r"np\.at\(x\)\[index\]"),
    (lambda x: np.fill_diagonal(x, 0), TypeError, r"x = np\.at\(x\)\[i, i\]\.set\(values\)"),
    (lambda x: np.place(x, X > 0, 1.0), TypeError, r"np\.place .*np\.where\(mask, values, x\)"),
    (lambda x: np.putmask(x, X > 0, 1.0), TypeError, r"np\.putmask .*np\.where\(mask, values, x\)"),
    (lambda x: x.put(0, 1), TypeError, r"x\.put\(\) would write into .*x\.at\[index\]\.set\(values\)"),
    (lambda x: x.resize(3), TypeError, r"x\.resize\(\) would write into .*np\.resize\(x, shape\)"),
    (lambda x: x.tolist(), md.TracerError, r"tolist\(\) needs a concrete value, but .*f64\[2,3\]"),
]
test_errors_say_what_is_not_possible = refusals(ERRORS, lambda f: md.make_tape(f)(X))


def test_an_index_out_of_bounds_is_told_without_the_axes_in_front():
    with pytest.raises(IndexError, match="index 5 is out of bounds for an axis of size 3"):
        md.vmap(lambda row, k: row[k])(X, np.array([0, 5]))


def test_in_place_operators_make_a_new_value():
    def f(x):
        y = x
        y += 1.0
        y *= x
        return y.sum()

    np.testing.assert_array_equal(md.grad(f)(X), 2 * X + 1)


def test_values_behind_a_derivative_are_plain():
    seen = []
    md.jvp(lambda x: seen.append(md.stop_gradient(x).tolist()) or x, (X,), (X,))
    assert seen == [X.tolist()]


def test_masks_of_values_that_are_differentiated():
    np.testing.assert_array_equal(md.grad(lambda x: (x[x > 2] ** 2).sum())(X), np.where(X > 2, 2 * X, 0))
    np.testing.assert_array_equal(md.grad(lambda x: np.extract(x > 2, x).sum())(X), X > 2)


def test_plain_arrays_are_taken_from_at_traced_indices():
    f = md.vmap(lambda i: mnp.take(X, i, axis=1, mode="wrap"))
    np.testing.assert_array_equal(f(np.array([0, 4])), X[:, [0, 1]].T)
    g = md.vmap(lambda i: np.take_along_axis(X, i, axis=1))
    np.testing.assert_array_equal(g(np.array([[[0], [2]], [[1], [1]]])), [[[0], [5]], [[1], [4]]])
