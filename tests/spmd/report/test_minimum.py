"""Reports against the least bytes that a line must send: programs whose minimum is known."""

import itertools
import re

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_gather_invariant, all_to_all, axis_index, ppermute, pscatter, psum, psum_scatter
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

MESH, GRID = mesh(4), mesh(2, 2)
ROWS, WIDTH = 16, 4
X = numpy.sin(numpy.arange(ROWS * WIDTH)).reshape(ROWS, WIDTH)
ROW, BLOCK = WIDTH * 8, ROWS // 4 * WIDTH * 8
W, LARGE = numpy.ones((WIDTH, 3)), numpy.broadcast_to(0.0, (1 << 15, 1 << 9))
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def body(f, out=P("i"), over=MESH, spec=P("i"), **options):
    return mapped(f, over, spec, out, **options)


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
    "a gradient": (md.value_and_grad(lambda x: np.mean(np.tanh(x @ W) ** 2)), 8, 8),
    "a gradient of weights": (
        lambda x: md.value_and_grad(lambda w: np.mean(np.tanh(x @ w) ** 2))(W),
        *(8 + W.nbytes, 8 + W.nbytes),
    ),
    "two rows of one line": (
        body(lambda x: all_gather_invariant(x, "i").sum() + psum(x.sum(), "i"), P()),
        *(BLOCK + 8, 8),
    ),
    # Half of the block is summed over `i`, in which ranks that differ along `j` take no part.
    "along one axis of two": (
        lambda x: body(lambda x: psum(x[:, :1], "i"), P(None, "j"), GRID, P("i", "j"))(X),
        *(BLOCK // 2, BLOCK // 2),
    ),
    "what is too large": (lambda x: body(lambda x: psum(x @ x.T, "i"), P())(LARGE), 8 * (1 << 26), None),
    "what has no types": (lambda x: body(lambda x: psum(x, "i"), P(), check_rep=False)(X), BLOCK, None),
}


@each("name", PROGRAMS)
def test_minima_of_lines(name):
    f, passed, needed = PROGRAMS[name]
    x = spmd.distribute(X, MESH, P("i"))
    report = spmd.communication(f, against="minimum")(x)
    assert (report.bytes, report.minimum) == (passed, needed)
    assert report == spmd.communication(md.make_tape(f)(x), against="minimum")
    if len(report.rows) == 1:
        assert report.rows[0].minimum == needed and report.rows[0].ratio == (passed / needed if needed else None)


def test_a_value_gathered_along_one_axis_varies_along_the_other():
    """Three products of a column are summed over `j`; but a rank needs only the number of the other, along `i`."""
    grid = spmd.make_mesh((2, 3), ("i", "j"), backend="simulated")
    x = spmd.distribute(numpy.ones((1, 2, 3)), grid, P(None, "i", "j"))
    y = spmd.distribute(numpy.ones((4, 3)), grid, P("i"))
    report = spmd.communication(np.matvec, against="minimum")(x, y)
    assert (report.counts, report.minimum) == ({"all_gather": 1, "psum": 1}, 8)


def test_the_table(golden):
    """Each line of a gradient has a minimum; the first row of a line with two."""
    x = spmd.distribute(X, MESH, P("i"))
    names = "a gradient of weights", "two rows of one line", "what has no types"
    reports = [spmd.communication(PROGRAMS[name][0], against="minimum")(x) for name in names]
    golden("minimum", re.sub(r":\d+:", ":", "\n\n".join(map(str, reports))))  # without numbers of lines


def test_no_program_sends_less_than_its_minimum():
    from tests.benchmarks import array_programs

    for program in itertools.islice(array_programs.programs(), 0, None, 3):
        arrays = [spmd.distribute(x, MESH, spec) for x, spec in program.arguments]
        report = spmd.communication(array_programs.our_function(program), against="minimum")(*arrays)
        assert report.minimum is None or report.minimum <= report.bytes, program.name
