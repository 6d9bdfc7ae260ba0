"""Sorting, searching and sets where a table of smooth points says nothing: ties, partitions, functions of values."""

import operator
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.ops.sorting import permute_p
from tests.checks.samples import each

modest = settings(max_examples=60, deadline=None)
vectors = st.lists(st.integers(-3, 3), min_size=1, max_size=8).map(lambda x: np.array(x, float))
numbers = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5, -1.0]), min_size=1, max_size=6).map(np.array)


@modest
@given(vectors, st.sampled_from([None, "stable", "heapsort"]))
def test_the_derivative_of_sort_is_the_permutation(x, kind):
    f, t = lambda x: np.sort(x, kind=kind), np.arange(1.0, len(x) + 1)
    value, tangent = md.jvp(f, (x,), (t,))
    assert sorted(tangent) == t.tolist()
    assert [x[int(i) - 1] for i in tangent] == value.tolist() == np.sort(x).tolist()  # each is where its element went
    assert md.vjp(f, x)[1](value)[0].tolist() == x.tolist()


@modest
@given(vectors, st.integers(0, 7))
def test_a_partition_puts_the_element_where_sorting_would(x, k):
    k %= len(x)
    value, tangent = md.jvp(lambda x: np.partition(x, k), (x,), (np.arange(1.0, len(x) + 1),))
    assert max(value[: k + 1]) == value[k] == min(value[k:]) == np.sort(x)[k]
    assert [x[int(i) - 1] for i in tangent] == value.tolist()


@modest
@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 1), st.integers(0, 2**32 - 1))
def test_a_permutation_and_its_inverse_undo_each_other(n, m, axis, seed):
    x = np.random.default_rng(seed).standard_normal((n, m))
    indices = np.argsort(-x, axis)
    there = permute_p.bind(x, indices, axis=axis, inverse=False)
    assert there.tolist() == np.take_along_axis(x, indices, axis).tolist()
    assert permute_p.bind(there, indices, axis=axis, inverse=True).tolist() == x.tolist()


SEARCHES: list[Callable] = [
    lambda a, v: np.searchsorted(np.sort(a), v),
    lambda a, v: np.searchsorted(np.sort(a), v, side="right"),
    lambda a, v: np.searchsorted(a, v, sorter=np.argsort(a)),
    lambda a, v: np.digitize(v, np.sort(a)),
    lambda a, v: np.isin(v, a),
    lambda a, v: np.lexsort((a[:2], v)),
    lambda a, v: np.histogram(v, bins=np.sort(a))[0],
]


@each("f", SEARCHES)
@each("in_axes", [(0, 0), (0, None), (None, 0)])
def test_searches_of_many_tables_under_vmap(f, in_axes):
    rng = np.random.default_rng(0)
    a, v = rng.integers(0, 5, (3, 4)), rng.integers(0, 5, (3, 2))
    args = [x if axis == 0 else x[0] for x, axis in zip((a, v), in_axes)]
    expected = [f(*[x[i] if axis == 0 else x for x, axis in zip(args, in_axes)]) for i in range(3)]
    assert md.vmap(f, in_axes)(*args).tolist() == np.stack(expected).tolist()


def test_searches_under_vmap_twice():
    a, v = np.sort(np.random.default_rng(0).standard_normal((2, 3, 4))), np.zeros((3, 2))
    out = md.vmap(lambda a: md.vmap(np.searchsorted)(a, v))(a)
    assert out.tolist() == [[np.searchsorted(r, [0.0, 0.0]).tolist() for r in m] for m in a]
    assert md.vmap(np.searchsorted)(np.zeros((0, 4)), np.zeros((0, 2))).shape == (0, 2)


@modest
@given(vectors, st.integers(1, 4))
def test_histograms_are_numpys(x, bins):
    for options in ({"bins": bins}, {"bins": [-1, 0, 2]}, {"bins": bins, "range": (-2, 1)}, {"bins": "sturges"}):
        actual, _ = md.vjp(lambda x, options=options: np.histogram(x, **options), x)
        for y, expected in zip(actual, np.histogram(x, **options)):
            np.testing.assert_allclose(y, expected)


# ---------------------------------------------------------------- functions of values

X = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]])
VALUES: list[Callable] = [
    np.nonzero,
    operator.methodcaller("nonzero"),
    np.flatnonzero,
    np.argwhere,
    lambda x: np.bincount(np.ravel(x).astype(int)),
    lambda x: np.unique(x, return_index=True, return_inverse=True, return_counts=True),
    lambda x: np.unique(x, axis=1),
    lambda x: np.intersect1d(x, [3.0, 2.0], return_indices=True),
    lambda x: np.union1d(x, x),
]


@each("f", VALUES)
def test_functions_of_values_see_them_under_derivatives_and_have_no_place_on_a_tape(f):
    seen: list = []
    md.grad(lambda x: md.grad(lambda x: seen.append(f(x)) or x.sum())(x).sum())(X)
    for actual, known in zip(*[x if isinstance(x, tuple) else (x,) for x in (seen[0], f(X))], strict=True):
        assert str(actual) == str(known)
    for way in (md.make_tape, md.vmap):
        with pytest.raises(md.TracerError):
            way(f)(X)


BINARY = [np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d]
UNARY = [np.unique_values, np.unique_counts, np.unique_inverse, np.unique_all]


@modest
@given(st.sampled_from(BINARY), numbers, numbers)
def test_elements_of_sets_are_numpys_and_each_has_one_source(f, x, y):
    value, pullback = md.vjp(f, x, y)
    np.testing.assert_array_equal(value, f(x, y), strict=True)
    assert sum(ct.sum() for ct in pullback(np.ones(value.shape))) == value.size


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(UNARY), numbers)
def test_unique_elements_come_with_what_numpy_tells_of_them(f, x):
    value, _ = md.jvp(f, (x,), (x,))
    np.testing.assert_equal(tuple(value), tuple(f(x)))
    assert type(value) is type(f(x)) or f is np.unique_values


@each("f", [*BINARY, lambda x, y: np.unique(x) @ np.array([1.0, 10.0, 100.0, 1e3])])
def test_derivatives_of_sets(f):
    check_grads(f, (np.array([[3.0, 1.0], [7.0, 5.0]]), np.array([1.5, 9.0])))
    options = {} if f not in BINARY[1:] else {"assume_unique": True}
    assert md.grad(lambda x: f(x, np.array([1.0, 2.0]), **options).sum())(np.array([4.0, 1.0, 3.0, 9.0])).shape == (4,)
