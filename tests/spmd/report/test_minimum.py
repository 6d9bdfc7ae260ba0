"""Reports against the least bytes that a line must send: programs whose minimum is known."""

import math

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, all_to_all, axis_index, ppermute, pscatter, psum, psum_scatter
from spmd import P

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
GRID = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
ROWS, WIDTH = 16, 4
X = numpy.sin(numpy.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)
ROW, BLOCK = WIDTH * 8, ROWS // 4 * WIDTH * 8
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def body(f, out=P("i"), mesh=MESH, spec=P("i")):
    return spmd.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out)


#: A program of split rows, the bytes that it passes to collectives, and those that it must.
PROGRAMS = {
    "elementwise": (lambda x: np.tanh(x) * x, 0, 0),
    "a sum": (lambda x: np.sum(x), 8, 8),
    "whether any": (lambda x: np.any(x > 0.5), 1, 1),
    "sums of columns": (lambda x: np.sum(x, 0), ROW, ROW),
    "a product": (lambda x: x.T @ x, WIDTH * ROW, WIDTH * ROW),
    "a shift": (lambda x: np.roll(x, 1, axis=0), ROW, ROW),
    "rows backwards": (lambda x: x[::-1], BLOCK, BLOCK),
    "a histogram of integers": (lambda x: np.histogram((8 * x).astype(int), bins=4)[0], 64, 64),
    "slopes": (lambda x: np.gradient(x, axis=0), 2 * ROW, 2 * ROW),
    "another split": (lambda x: spmd.reshard(x, P(None, "i")), BLOCK, BLOCK),
    "gathered": (lambda x: spmd.reshard(x, P()), BLOCK, BLOCK),
    "softmax of columns": (lambda x: md.nn.softmax(x, axis=0), 2 * ROW, 2 * ROW),
    "blocks exchanged": (body(lambda x: all_to_all(x, "i", 1, 0, tiled=True)), BLOCK, BLOCK),
    "sums scattered": (body(lambda x: psum_scatter(x, "i", tiled=True)), BLOCK, BLOCK),
    "an edge": (body(lambda x: ppermute(x[-1:], "i", RING)), ROW, ROW),
    "an edge of gathered blocks": (body(lambda x: all_gather(x, "i")[axis_index("i") - 1][-1:]), BLOCK, ROW),
    "a sum of gathered blocks": (body(lambda x: all_gather_invariant(x, "i").sum(), P()), BLOCK, 8),
    "sums of gathered columns": (body(lambda x: all_gather(x, "i", tiled=True).sum(0)), BLOCK, ROW),
    "the block of the rank itself": (body(lambda x: all_gather(x, "i")[axis_index("i")]), BLOCK, 0),
    "a part of a sum": (body(lambda x: pscatter(psum(x, "i"), "i", tiled=True)), BLOCK, 3 * BLOCK // 4),
    "every step": (
        body(lambda x: md.scan(lambda h, u: (h + psum(u, "i"), None), np.zeros(WIDTH), x)[0], P()),
        BLOCK,
        BLOCK,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_minima_of_lines(name):
    f, passed, needed = PROGRAMS[name]
    x = spmd.distribute(X, MESH, P("i"))
    report = spmd.communication(f, against="minimum")(x)
    assert (report.bytes, report.minimum) == (passed, needed)
    assert report == spmd.communication(md.make_tape(f)(x), against="minimum")
    for row in report.rows[:1]:
        assert row.minimum == needed and row.ratio == (passed / needed if needed else None)


def test_of_two_axes_only_those_that_a_value_varies_along_count():
    """Half of the block is summed over `i`, in which ranks that differ along `j` take no part."""
    f = body(lambda x: psum(x[:, :1], "i"), P(None, "j"), GRID, P("i", "j"))
    report = spmd.communication(f, against="minimum")(X)
    assert (report.bytes, report.minimum) == (64, 64)


def test_a_value_gathered_along_one_axis_varies_along_the_other():
    """Three products of a column are summed over `j`; but a rank needs only the number of the other, along `i`."""
    grid = spmd.make_mesh((2, 3), ("i", "j"), backend="simulated")
    x = spmd.distribute(numpy.ones((1, 2, 3)), grid, P(None, "i", "j"))
    y = spmd.distribute(numpy.ones((4, 3)), grid, P("i"))
    report = spmd.communication(np.matvec, against="minimum")(x, y)
    assert (report.counts, report.minimum) == ({"all_gather": 1, "psum": 1}, 8)


def test_a_gradient_has_a_minimum_for_each_line():
    def loss(w, x):
        hidden = np.tanh(x @ w)
        return np.mean(hidden**2)

    w, x = numpy.ones((WIDTH, 3)), spmd.distribute(X, MESH, P("i"))
    for options in ({}, {"optimized": True}):
        report = spmd.communication(md.value_and_grad(loss), against="minimum", **options)(w, x)
        assert report.minimum == report.bytes == 8 + w.nbytes
    text = str(spmd.communication(md.value_and_grad(loss), against="minimum")(w, x)).splitlines()
    assert text[0].split()[:8] == ["collective", "axes", "count", "bytes", "per", "rank", "minimum", "ratio"]
    assert [line.split()[4:6] for line in text[2:4]] == [["8", "1.00"], ["96", "1.00"]]


def test_a_line_of_several_rows_has_one_minimum():
    f = body(lambda x: all_gather_invariant(x, "i").sum() + psum(x.sum(), "i"), P())
    report = spmd.communication(f, against="minimum")(X)
    assert [row.minimum for row in report.rows] == [8, None]
    assert math.isclose(report.rows[0].ratio, (BLOCK + 8) / 8)


def test_what_is_too_large_or_has_no_types_has_no_minimum():
    large = md.ShapeDtypeStruct((1 << 15, 1 << 9), float)
    for f, x in [
        (body(lambda x: psum(x @ x.T, "i"), P()), large),
        (spmd.shard_map(lambda x: psum(x, "i"), mesh=MESH, in_specs=P("i"), out_specs=P(), check_rep=False), X),
    ]:
        report = spmd.communication(f, against="minimum")(x)
        assert (report.minimum, report.rows[0].minimum) == (None, None)
        assert "minimum" in str(report)


def test_no_program_sends_less_than_its_minimum():
    from tests.benchmarks import array_programs

    for program in array_programs.programs():
        arrays = [spmd.distribute(x, MESH, spec) for x, spec in program.arguments]
        report = spmd.communication(array_programs.our_function(program), against="minimum")(*arrays)
        assert report.minimum is None or report.minimum <= report.bytes, program.name
