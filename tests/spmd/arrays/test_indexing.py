"""Indices into sharded arrays: batches stay split, and look-ups fetch only what they name."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.samples import each
from tests.programs import indexing as programs

FOUR = spmd.make_mesh((4,), ("i",), backend="simulated")
GRID = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
PROGRAMS = {**programs.BATCHES, **programs.LOOKUPS, **programs.NEIGHBORS, **programs.TOTALS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    programs.check(PROGRAMS[name], FOUR)


@pytest.mark.parametrize("name", ["take_along_axis", "set", "convolve", "searchsorted", "cond", "switch", "rows"])
@pytest.mark.parametrize("spec", [P("i", "j"), P(("j", "i")), P(None, "j")], ids=str)
def test_on_two_axes(name, spec):
    programs.check(PROGRAMS[name], GRID, spec)


@pytest.mark.parametrize("name", [*programs.NEIGHBORS, *programs.TOTALS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_neighbors_on_other_numbers_of_ranks(name, ranks):
    programs.check(PROGRAMS[name], spmd.make_mesh((ranks,), ("i",), backend="simulated"))


@pytest.mark.parametrize("name", ["roll by a block and more", "roll both", "inside", "zeros around", "flip"])
@pytest.mark.parametrize("spec", [P("i", "j"), P(("j", "i")), P(None, "j")], ids=str)
def test_neighbors_on_two_axes(name, spec):
    programs.check(PROGRAMS[name], GRID, spec)


@pytest.mark.parametrize("n", [4, 8, 12])
def test_any_shift_and_any_slice(n):
    """Shift and slice arrays with a few places in each block."""
    x = numpy.sin(numpy.arange(n * 2.0)).reshape(n, 2)
    split = spmd.distribute(x, FOUR, P("i"))
    for shift in range(-n - 1, n + 2):
        np.testing.assert_array_equal(np.roll(split, shift, 0), np.roll(x, shift, 0))
    for start in range(n):
        for stop in range(start, n + 1):
            for step in (1, 2, -1):
                index = slice(start, stop, step)
                np.testing.assert_array_equal(split[index], x[index])
            grown = np.pad(split, ((start, n - stop), (0, 0)))
            np.testing.assert_array_equal(grown, np.pad(x, ((start, n - stop), (0, 0))))


def test_a_shift_sends_what_a_halo_sends():
    u = spmd.distribute(numpy.ones((8000, 12)), FOUR, P("i"))
    stencil = lambda u: u[:-2] - 2 * u[1:-1] + u[2:]  # noqa: E731
    of_blocks = lambda u: u + 0.1 * stencil(spmd.halo(u, ((1, 1), (0, 0)), "i"))  # noqa: E731
    by_halo = spmd.communication(spmd.shard_map(of_blocks, FOUR, P("i"), P("i")))(u)
    of_whole = lambda u: u + 0.1 * (np.roll(u, 1, 0) - 2 * u + np.roll(u, -1, 0))  # noqa: E731
    report = spmd.communication(of_whole)(u)
    assert (report.counts, report.bytes) == (by_halo.counts, by_halo.bytes) == ({"ppermute": 2}, 192)
    assert spmd.communication(programs.diffusion)(u).bytes == 576


def test_an_index_counts_if_it_has_all_places_in_order():
    x = spmd.distribute(programs.X, FOUR, P("i"))
    for index, gathers in [
        (numpy.arange(24), False),
        (numpy.arange(24)[::-1], True),
        (numpy.arange(-24, 0), True),
        (numpy.arange(24) // 2, True),
    ]:
        f = lambda x, y, index=index: x[index, y]  # noqa: E731
        y = spmd.distribute(programs.LABELS, FOUR, P("i"))
        assert bool(spmd.communication(f)(x, y).counts) == gathers
        np.testing.assert_array_equal(f(x, y), programs.X[index, programs.LABELS])
    np.testing.assert_array_equal(x[:, np.arange(6)], programs.X)
    square = spmd.distribute(programs.X[:8].T @ programs.X[:8], spmd.make_mesh((2,), ("i",)), P("i"))
    np.testing.assert_array_equal(square[np.arange(6), np.arange(6)], np.diag(square.gather()))


def test_many_runs_have_the_counts_of_the_first():
    """Eager operations that repeat are compiled; of the same types, an index may count or not."""
    x, y = spmd.distribute(programs.X, FOUR, P("i")), spmd.distribute(programs.LABELS, FOUR, P("i"))
    for index in (numpy.arange(24), numpy.arange(24)[::-1].copy()):
        for _ in range(25):
            FOUR.reset_calls()
            np.testing.assert_array_equal(x[index, y], programs.X[index, programs.LABELS])
            assert FOUR.calls == ({} if index[0] == 0 else {"all_gather": 1})


def test_an_index_out_of_bounds_raises():
    x = spmd.distribute(programs.X, FOUR, P("i"))
    y = spmd.distribute(programs.LABELS + 6, FOUR, P("i"))
    for f in (lambda x, y: x[np.arange(24), y], md.vmap(lambda x, y: x[y])):
        with pytest.raises(IndexError, match="is out of bounds"):
            f(x, y)


@each("axis", [(0,), (1,)])
def test_batches_of_one(axis):
    """Axes of size 1 broadcast: they are not split."""
    x, i = programs.X[:1] if axis == 0 else programs.X[:, :1], numpy.zeros((24, 1), int)
    split = [spmd.distribute(v, FOUR, P("i")) if len(v) == 24 else v for v in (x, i)]
    np.testing.assert_array_equal(np.take_along_axis(*split, 1), np.take_along_axis(x, i, 1))


def test_a_branch_runs_on_the_ranks_whose_elements_take_it():
    """Elements that do not take a branch are not seen by it: their logarithms would warn, and give NaN derivatives."""
    x = numpy.concatenate([-numpy.ones((18, 6)), numpy.ones((6, 6))])
    split = spmd.distribute(x, FOUR, P("i"))
    f = md.vmap(lambda v: md.cond(v[0] > 0, lambda v: np.sum(np.log(v)), lambda v: np.sum(v), v))
    np.testing.assert_array_equal(f(split), f(x))
    np.testing.assert_array_equal(md.grad(lambda x: np.sum(f(x)))(split), numpy.ones((24, 6)))


def test_branches_close_over_what_all_elements_share():
    w, x = spmd.distribute(programs.WEIGHTS[:, :4], FOUR, P(None, "i")), spmd.distribute(programs.X, FOUR, P("i"))

    def loss(w, x):
        return np.sum(md.vmap(lambda v: md.cond(v[0] > 0, lambda: v @ w, lambda: np.sum(w) * v[:4]))(x) ** 2)

    for f in (loss, md.grad(loss), md.grad(loss, 1)):
        expected = f(programs.WEIGHTS[:, :4], programs.X)
        for g in (f, md.jit(f)):
            programs.compare(g(w, x), expected)


def test_a_report_says_that_values_of_indices_decide():
    """Op by op, a computed index is known, and the rank that has the row sends it; a program takes a sum of rows."""
    x, rows = spmd.distribute(numpy.ones((8, 3)), FOUR, P("i")), spmd.distribute(numpy.arange(8), FOUR, P("i"))
    for f in (lambda x, rows: x[rows[0]], lambda x, rows: x[np.argsort(rows)]):
        assert "values of whole indices" in str(spmd.communication(f)(x, rows))
        assert not spmd.communication(f, optimized=True)(x, rows).notes
    assert not spmd.communication(lambda x, rows: x[np.arange(8), rows % 3])(x, rows).notes
