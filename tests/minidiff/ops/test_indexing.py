"""Indexing in all of NumPy's forms, against NumPy itself."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.as_numpy import check_as_numpy
from tests.checks.indices import indices
from tests.checks.samples import each

X = np.arange(6.0).reshape(2, 3)


@settings(max_examples=300, deadline=None)
@given(indices())
@example((np.zeros((0, 1, 0)), (..., slice(None), 0, False)))
def test_an_index_means_what_it_means_to_numpy(x_and_index):
    x, index = x_and_index

    def f(x: Any) -> Any:
        return x[index]

    try:
        x[index]
    except IndexError:
        with pytest.raises((IndexError, ValueError)):
            md.make_tape(f)(x)
        return
    check_as_numpy(f, x)


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


@each("dtype", [float, np.float32, complex])
@each("i", [np.arange(60) % 7, np.arange(60)[::-1] - 60, np.array([[0] * 30, [-1] * 30])])
def test_rows_that_are_taken_add_up_however_many(i, dtype):
    x = np.arange(60.0 * 20).reshape(60, 20).astype(dtype)
    expected = np.zeros_like(x)
    ct = (1 + np.arange(20.0 * i.size)).reshape(*i.shape, 20).astype(dtype)
    np.add.at(expected, i, ct)
    np.testing.assert_allclose(md.vjp(lambda x: x[i], x)[1](ct)[0], expected, rtol=1e-6)


@each("f", [lambda x: (x[x > 2] ** 2).sum(), lambda x: np.extract(x > 2, x) @ np.extract(x > 2, x)])
def test_masks_of_values_that_are_differentiated(f):
    np.testing.assert_array_equal(md.grad(f)(X), np.where(X > 2, 2 * X, 0))


def test_values_behind_a_derivative_are_plain():
    np.testing.assert_array_equal(md.grad(lambda x: (x * md.stop_gradient(x).tolist()).sum())(X), X)


def test_plain_arrays_are_taken_from_at_traced_indices():
    f = md.vmap(lambda i: mnp.take(X, i, axis=1, mode="wrap"))
    np.testing.assert_array_equal(f(np.array([0, 4])), X[:, [0, 1]].T)
    g = md.vmap(lambda i: np.take_along_axis(X, i, axis=1))
    np.testing.assert_array_equal(g(np.array([[[0], [2]], [[1], [1]]])), [[[0], [5]], [[1], [4]]])
