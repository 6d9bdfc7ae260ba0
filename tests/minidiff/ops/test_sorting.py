"""Sorting and searching where a table of smooth points has nothing to say: ties, partitions, functions of values."""

import operator
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.ops.sorting import permute_p
from tests.checks.samples import each
from tests.minidiff.refusals import refusals

modest = settings(max_examples=60, deadline=None)
vectors = st.lists(st.integers(-3, 3), min_size=1, max_size=8).map(lambda x: np.array(x, float))


@modest
@given(vectors, st.sampled_from([None, "stable", "heapsort"]))
def test_the_derivative_of_sort_is_the_permutation(x, kind):
    t = np.arange(1.0, len(x) + 1)
    value, tangent = md.jvp(lambda x: np.sort(x, kind=kind), (x,), (t,))
    assert value.tolist() == np.sort(x).tolist()
    assert sorted(tangent) == t.tolist()
    assert [x[int(i) - 1] for i in tangent] == value.tolist()  # each tangent is where its element went
    _, pullback = md.vjp(lambda x: np.sort(x, kind=kind), x)
    assert pullback(value)[0].tolist() == x.tolist()


@modest
@given(vectors, st.integers(0, 7))
def test_a_partition_puts_the_element_where_sorting_would(x, k):
    k %= len(x)
    value, tangent = md.jvp(lambda x: np.partition(x, k), (x,), (np.arange(1.0, len(x) + 1),))
    assert value[k] == np.sort(x)[k]
    assert max(value[: k + 1]) == value[k] == min(value[k:])
    assert [x[int(i) - 1] for i in tangent] == value.tolist()


@modest
@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 1), st.integers(0, 2**32 - 1))
def test_a_permutation_and_its_inverse_undo_each_other(n, m, axis, seed):
    x = np.random.default_rng(seed).standard_normal((n, m))
    indices = np.argsort(-x, axis)
    there = permute_p.bind(x, indices, axis=axis, inverse=False)
    assert there.tolist() == np.take_along_axis(x, indices, axis).tolist()
    assert permute_p.bind(there, indices, axis=axis, inverse=True).tolist() == x.tolist()


# ---------------------------------------------------------------- searches

SEARCHES: dict[str, Callable] = {
    "searchsorted": lambda a, v: np.searchsorted(np.sort(a), v),
    "right": lambda a, v: np.searchsorted(np.sort(a), v, side="right"),
    "sorter": lambda a, v: np.searchsorted(a, v, sorter=np.argsort(a)),
    "digitize": lambda a, v: np.digitize(v, np.sort(a)),
    "isin": lambda a, v: np.isin(v, a),
    "lexsort": lambda a, v: np.lexsort((a[:2], v)),
    "histogram": lambda a, v: np.histogram(v, bins=np.sort(a))[0],
}


@each("name", SEARCHES)
@each("in_axes", [(0, 0), (0, None), (None, 0)])
def test_searches_of_many_tables_under_vmap(name, in_axes):
    f, rng = SEARCHES[name], np.random.default_rng(0)
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
        (counts, edges), _ = md.vjp(lambda x, options=options: np.histogram(x, **options), x)
        expected = np.histogram(x, **options)
        assert counts.tolist() == expected[0].tolist()
        np.testing.assert_allclose(edges, expected[1])


# ---------------------------------------------------------------- functions of values

X = np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]])

VALUES: dict[str, Callable] = {
    "nonzero": np.nonzero,
    "method nonzero": operator.methodcaller("nonzero"),
    "flatnonzero": np.flatnonzero,
    "argwhere": np.argwhere,
    "bincount": lambda x: np.bincount(np.ravel(x).astype(int)),
    "unique": lambda x: np.unique(x, return_index=True, return_inverse=True, return_counts=True),
    "unique, axis": lambda x: np.unique(x, axis=1),
}


@pytest.mark.parametrize("name", VALUES)
def test_functions_of_values_see_them_under_derivatives(name):
    f = VALUES[name]
    seen = []
    md.grad(lambda x: md.grad(lambda x: seen.append(f(x)) or x.sum())(x).sum())(X)
    expected = f(X)
    for actual, known in zip(*[x if isinstance(x, tuple) else (x,) for x in (seen[0], expected)], strict=True):
        assert str(actual) == str(known)


@pytest.mark.parametrize("name", VALUES)
def test_functions_of_values_have_no_place_on_a_tape(name):
    word = name.split()[-1].split(",")[0] if "axis" not in name else "unique"
    with pytest.raises(md.TracerError, match=rf"np.{word} needs a concrete value"):
        md.make_tape(VALUES[name])(X)
    with pytest.raises(md.TracerError, match=rf"np.{word} needs one concrete value"):
        md.vmap(VALUES[name])(X)


def test_unique_elements_are_differentiable():
    g = md.grad(lambda x: np.unique(x) @ np.array([1.0, 10.0, 100.0]))(np.array([5.0, 3.0, 7.0, 3.0]))
    assert g.tolist() == [10.0, 1.0, 100.0, 0.0]


def test_sorting_in_place_says_what_to_write():
    for method, instead in (("sort", r"x = np.sort\(x\)"), ("partition", r"x = np.partition\(x, kth\)")):
        with pytest.raises(TypeError, match=rf"x.{method}\(\) would write .*f64\[2,3\].*{instead}"):
            md.grad(lambda x, m=method: getattr(x, m)(0))(X)


ERRORS = [
    (lambda x: np.sort(x, kind="bubble"), ValueError, r"kind must be 'quicksort', .*'bubble'"),
    (lambda x: np.argsort(x, 2), np.exceptions.AxisError, r"argsort: axis 2 is out of bounds"),
    (lambda x: np.partition(x, 3), ValueError, r"kth=3 is out of bounds for an axis of size 3"),
    (lambda x: np.lexsort((x, x[0])), ValueError, r"one shape, got f64\[2,3\], f64\[3\]"),
    (lambda x: np.searchsorted(x, 0.0), ValueError, r"searchsorted: .* one dimension, got f64\[2,3\]"),
]
test_errors_say_what_does_not_fit = refusals(ERRORS, lambda f: md.make_tape(f)(X))
