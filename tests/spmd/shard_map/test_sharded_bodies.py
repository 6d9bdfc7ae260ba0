"""Loops of sharded arrays whose steps communicate, and loops and branches under vmap; `loops.md` shows the others."""

import itertools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_values, summed
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.checks.whole import whole
from tests.programs import vmapped

LINE, PLANE = mesh(4), mesh(2, 2)


# ---------------------------------------------------------------- loops whose steps communicate


def _trained(w, xs):
    def step(w, x):
        value, gradient = md.value_and_grad(lambda w: np.sum(np.tanh(w @ x) ** 2))(w)
        return w - 0.1 * gradient, value

    return md.scan(step, w, xs)


def _mapped(w, h):
    """By a `shard_map` of its own, what the way back needs staying on its ranks."""
    return mapped(lambda w, h: np.tanh(psum(np.sin(w) @ h, "j")), PLANE, (P("i", "j"), P("j")), P("i"))(w, h)


LOOPS = {
    "of shard_maps": lambda w, xs: md.scan(lambda h, x: (_mapped(w, h) * x, h[1]), xs[0], xs),
    "recurrent": lambda w, xs: md.scan(lambda h, x: (np.tanh(h @ w + x), h.sum()), xs[1], xs),
    "from zeros": lambda w, xs: md.scan(lambda h, x: (np.tanh(w @ h + x), h * x), np.zeros(4), xs, reverse=True),
    "layers": lambda w, xs: md.scan(lambda h, w: (np.tanh(w @ h), h), xs[:4], np.stack([w, 2 * w, w.T])),
    "changing places": lambda w, xs: md.scan(lambda w, x: (w.T * x, w[1]), w, xs),
    "trained": _trained,
    "counted": lambda w, xs: [md.fori_loop(0, 3, lambda i, h: np.sin(w @ h), xs[:4].T)],
}
LAYOUTS = [(P("i"), P("i")), (P("j", "i"), P(None, "j")), (P(), P("i", "j"))]


@each("name, specs", [*zip(LOOPS, itertools.cycle(LAYOUTS)), ("recurrent", LAYOUTS[2]), ("from zeros", LAYOUTS[0])])
def test_values_gradients_and_counts_of_loops(name, specs):
    """Compiled, what is counted is done, that of each step too."""
    arrays = numpy.sin(numpy.arange(16.0)).reshape(4, 4), numpy.cos(numpy.arange(24.0).reshape(6, 4))
    args = [spmd.distribute(x, PLANE, spec) for x, spec in zip(arrays, specs)]
    for f in (LOOPS[name], md.grad(summed(LOOPS[name]), (0, 1))):
        check_values(f, args, f, arrays)
        compiled = md.jit(f)
        report = spmd.communication(compiled, optimized=True)(*args)
        PLANE.reset_calls()
        compiled(*args)
        assert (PLANE.calls, sum(PLANE.bytes.values())) == (report.counts, report.bytes)


@pytest.mark.parametrize("start, moved", [(P("i"), {}), (P(), {}), (P(None, "i"), {"all_to_all": 1})], ids=str)
def test_carries_are_sharded_as_steps_leave_them(start, moved):
    """Not as it starts: it is brought there once, and no step moves it."""
    w, h = (spmd.distribute(numpy.ones((4, 4)), PLANE, spec) for spec in (P("i"), start))
    f = lambda h: md.fori_loop(0, 5, lambda i, h: w * h.sum(), h)  # noqa: E731
    assert spmd.communication(f)(h).counts == {"psum": 5, **moved}
    assert md.jit(f)(h).spec == P("i")


# ---------------------------------------------------------------- under vmap


@pytest.mark.parametrize("program", vmapped.PROGRAMS, ids=lambda f: f.__name__)
def test_each_rank_runs_its_elements(program):
    """Compiled, nothing waits for other ranks."""
    actual = vmapped.check(program, LINE, P("i"), md.jit)
    report = spmd.communication(lambda: program(**vmapped.arguments(LINE, P("i"))), optimized=True)()
    assert report.counts == vmapped.PROGRAMS[program]
    assert report.counts or any(isinstance(x, spmd.ShardedArray) for x in md.tree.leaves(actual))


@each("program", [vmapped.scan_of_a_layer, vmapped.branches, vmapped.loops_in_loops, vmapped.gradient_of_each])
def test_elements_operation_by_operation(program):
    vmapped.check(program, LINE, P("i"))


@each("program, spec", [(vmapped.scan_of_a_layer, P(("i", "j"))), (vmapped.gradient_of_a_branch, P("j"))])
def test_elements_on_a_plane(program, spec):
    vmapped.check(program, PLANE, spec, md.jit)


def test_elements_that_are_split_themselves():
    """No rank has all of an element: a loop runs on all ranks together; to be sorted, elements become whole."""
    x = vmapped.arguments()["x"]
    f = md.vmap(lambda a: md.scan(lambda h, u: (np.tanh(h + u), h), np.sum(a), a))
    assert_trees_close(md.jit(f)(spmd.distribute(x, PLANE, P("i", "j"))), f(x))
    chosen = lambda v: md.cond(np.sum(v) > 0, np.sort, lambda v: v * 2, v)  # noqa: E731
    gradient = md.vmap(md.grad(lambda v: np.sum(chosen(v) ** 2)))
    x = numpy.sin(numpy.arange(32.0)).reshape(4, 8)
    check_values(gradient, (spmd.distribute(x, LINE, P(None, "i")),), gradient, (x,))


def test_a_branch_that_some_ranks_never_take_sees_no_operands_of_theirs():
    """log of a negative number would warn."""
    x = numpy.array([1.0, 2.0, -1.0, -2.0, 3.0, 4.0, -3.0, 5.0])
    one = lambda a: md.cond(a > 0, np.log, lambda a: a, a)  # noqa: E731
    f, split = md.vmap(one), spmd.distribute(x, LINE, P("i"))
    with numpy.errstate(all="raise"):
        for g in (f, md.jit(f), md.vmap(md.grad(one))):
            g(split)
        numpy.testing.assert_allclose(whole(md.jit(f)(split)), [numpy.log(v) if v > 0 else v for v in x])
