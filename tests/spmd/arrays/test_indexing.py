"""Indices into sharded arrays: batches stay split, and look-ups fetch only what they name."""

import itertools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs import indexing as programs
from tests.programs.indexing import LABELS, X

FOUR, PLANE = mesh(4), mesh(2, 2)
PROGRAMS = {**programs.BATCHES, **programs.LOOKUPS, **programs.NEIGHBORS, **programs.TOTALS}
NEIGHBORS = [*programs.NEIGHBORS, *programs.TOTALS]
SEVERAL_AXES = ["take_along_axis", "set", "convolve", "searchsorted", "cond", "switch", "rows"]
SEVERAL_AXES += ["roll by a block and more", "roll both", "inside", "zeros around", "flip"]


def split(x):
    return spmd.distribute(x, FOUR, P("i"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    programs.check(PROGRAMS[name], FOUR)


@each("name, spec", zip(SEVERAL_AXES, itertools.cycle([P("i", "j"), P(("j", "i")), P(None, "j")])))
def test_on_two_axes(name, spec):
    programs.check(PROGRAMS[name], PLANE, spec)


@each("name, ranks", zip(NEIGHBORS, itertools.cycle([2, 3])))
def test_neighbors_on_other_numbers_of_ranks(name, ranks):
    programs.check(PROGRAMS[name], mesh(ranks))


@pytest.mark.parametrize("n", [4, 12])
def test_any_shift_any_slice_and_any_padding(n):
    """Shift, cut and pad arrays with a few places in each block."""
    x = numpy.sin(numpy.arange(n * 2.0)).reshape(n, 2)
    for shift in range(-n - 1, n + 2):
        np.testing.assert_array_equal(np.roll(split(x), shift, 0), np.roll(x, shift, 0))
    for start in range(n):
        for stop in range(start, n + 1):
            np.testing.assert_array_equal(split(x)[start:stop], x[start:stop])
            around = ((start, n - stop), (0, 0))
            np.testing.assert_array_equal(np.pad(split(x), around), np.pad(x, around))


#: Indices of rows beside one of columns, and whether the rows are gathered.
INDICES = [
    (numpy.arange(24), False),
    (numpy.arange(24)[::-1].copy(), True),
    (numpy.arange(-24, 0), True),
    (numpy.arange(24) // 2, True),
]


@each("index, gathers", INDICES)
def test_an_index_counts_if_it_has_all_places_in_order(index, gathers):
    """Many runs have the counts of the first: eager operations that repeat are compiled."""
    f = lambda x, y: x[index, y]  # noqa: E731
    assert bool(spmd.communication(f)(split(X), split(LABELS)).counts) == gathers
    for _ in range(25):
        FOUR.reset_calls()
        np.testing.assert_array_equal(f(split(X), split(LABELS)), X[index, LABELS])
        assert FOUR.calls == ({"all_gather": 1} if gathers else {})


def test_diagonals_and_axes_of_size_1():
    np.testing.assert_array_equal(split(X)[:, np.arange(6)], X)
    square = spmd.distribute(X[:8].T @ X[:8], mesh(2), P("i"))
    np.testing.assert_array_equal(square[np.arange(6), np.arange(6)], np.diag(square.gather()))
    i = numpy.zeros((24, 1), int)
    for x, y in ((X[:1], split(i)), (split(X[:, :1]), split(i))):
        np.testing.assert_array_equal(np.take_along_axis(x, y, 1), np.take_along_axis(numpy.asarray(x), i, 1))


@each("f", [lambda x, y: x[np.arange(24), y], md.vmap(lambda x, y: x[y])])
def test_an_index_out_of_bounds_raises(f):
    with pytest.raises(IndexError):
        f(split(X), split(LABELS + 6))


def test_a_branch_runs_on_the_ranks_whose_elements_take_it():
    """Elements that do not take a branch are not seen by it: their logarithms would warn, and give NaN derivatives."""
    x = numpy.concatenate([-numpy.ones((18, 6)), numpy.ones((6, 6))])
    f = md.vmap(lambda v: md.cond(v[0] > 0, lambda v: np.sum(np.log(v)), lambda v: np.sum(v), v))
    np.testing.assert_array_equal(f(split(x)), f(x))
    np.testing.assert_array_equal(md.grad(lambda x: np.sum(f(x)))(split(x)), numpy.ones((24, 6)))


def test_a_report_says_that_values_of_indices_decide():
    """Op by op, a computed index is known, and the rank that has the row sends it; a program takes a sum of rows."""
    x, rows = split(numpy.ones((8, 3))), split(numpy.arange(8))
    for f in (lambda x, rows: x[rows[0]], lambda x, rows: x[np.argsort(rows)]):
        assert "values of whole indices" in str(spmd.communication(f)(x, rows))
        assert not spmd.communication(f, optimized=True)(x, rows).notes
    assert not spmd.communication(lambda x, rows: x[np.arange(8), rows % 3])(x, rows).notes
