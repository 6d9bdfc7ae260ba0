"""Loops and branches under vmap, over batches that are split: each rank runs those of its own elements."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.programs import vmapped as programs

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
GRID = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
EACH = pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda f: f.__name__)


@EACH
def test_they_equal_those_of_whole_arrays(program):
    programs.check(program, MESH, P("i"))


@EACH
def test_compiled_nothing_waits_for_other_ranks(program):
    got = programs.check(program, MESH, P("i"), md.jit)
    arrays = programs.arguments(MESH, P("i"))
    report = spmd.communication(lambda: program(**arrays), optimized=True)()
    assert report.counts == programs.PROGRAMS[program]
    if not report.counts:
        assert any(isinstance(x, spmd.ShardedArray) for x in md.tree.leaves(got))


@pytest.mark.parametrize("spec", [P(("i", "j")), P("j")], ids=str)
@pytest.mark.parametrize("program", [programs.scan_of_a_layer, programs.gradient_of_a_branch], ids=lambda f: f.__name__)
def test_on_a_grid(program, spec):
    programs.check(program, GRID, spec, md.jit)


def test_elements_that_are_split_themselves_are_resharded():
    """No rank has all of an element: the loop runs on all ranks together."""
    x = programs.arguments()["x"]
    f = md.vmap(lambda a: md.scan(lambda h, u: (np.tanh(h + u), h), np.sum(a), a))
    got, expected = md.jit(f)(spmd.distribute(x, GRID, P("i", "j"))), f(x)
    for actual, value in zip(got, expected):
        numpy.testing.assert_allclose(np.asarray(actual), value, rtol=1e-12)


def test_a_branch_that_some_ranks_never_take_sees_no_operands_of_theirs():
    """log of a negative number would warn."""
    x = numpy.array([1.0, 2.0, -1.0, -2.0, 3.0, 4.0, -3.0, 5.0])
    f = md.vmap(lambda a: md.cond(a > 0, np.log, lambda a: a, a))
    expected = [numpy.log(v) if v > 0 else v for v in x]
    with numpy.errstate(all="raise"):
        for g in (f, md.jit(f), md.vmap(md.grad(lambda a: md.cond(a > 0, np.log, lambda a: a, a)))):
            g(spmd.distribute(x, MESH, P("i")))
        numpy.testing.assert_allclose(np.asarray(md.jit(f)(spmd.distribute(x, MESH, P("i")))), expected)


def test_branches_that_need_whole_elements():
    """To sort elements that are split, ranks take whole elements each: there, their sharding is no more."""
    f = lambda v: md.cond(np.sum(v) > 0, np.sort, lambda v: v * 2, v)  # noqa: E731
    gradient = md.vmap(md.grad(lambda v: np.sum(f(v) ** 2)))
    x = numpy.sin(numpy.arange(32.0)).reshape(4, 8)
    split = spmd.distribute(x, MESH, P(None, "i"))
    for g in (gradient, md.jit(gradient)):
        numpy.testing.assert_allclose(g(split).gather(), gradient(x), rtol=1e-12)
