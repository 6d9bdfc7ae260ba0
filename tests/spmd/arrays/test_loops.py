"""Loops over sharded arrays: one `shard_map` of the loop, after which one sum follows."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.whole import whole
from tests.programs import sharded_loop as programs
from tests.programs.sharded_loop import STEPS, WS, W, X

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
GRID = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
EACH = pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda f: f.__name__)


@EACH
def test_a_gradient_takes_one_sum(program):
    programs.check(program, MESH, P("i"))


@pytest.mark.parametrize("spec", [P(("j", "i")), P("j")], ids=str)
@pytest.mark.parametrize("program", [programs.closed_over, programs.operand_of_cond], ids=lambda f: f.__name__)
def test_on_a_grid(program, spec):
    programs.check(program, GRID, spec)


@pytest.mark.parametrize("program", [programs.used_twice, programs.recurrent], ids=lambda f: f.__name__)
def test_second_derivatives(program):
    f = lambda x: md.jvp(lambda w: md.grad(program)(x, w, WS), (W,), (W,))[1]  # noqa: E731
    numpy.testing.assert_allclose(whole(md.jit(f)(spmd.distribute(X, MESH, P("i")))), f(X), rtol=1e-9, atol=1e-12)


def test_the_loop_is_in_the_body_of_one_shard_map():
    tape = md.make_tape(lambda x: programs.closed_over(x, W, WS))(spmd.distribute(X, MESH, P("i")))
    names = [str(eqn.primitive) for eqn in tape.equations]
    assert "scan" not in names and names[0] == "shard_map"
    assert "scan" in [str(e.primitive) for e in tape.equations[0].params["body"].equations]


def test_sums_that_a_step_needs_stay_in_it():
    """One in each step, and one of the loss; that of the mean's cotangent in each step back, and one after the loop."""
    x = spmd.distribute(X, MESH, P("i"))
    gradient = md.grad(programs.with_sums, argnums=(0, 1))
    for f, count in [(programs.with_sums, STEPS + 1), (gradient, 2 * STEPS + 1)]:
        MESH.reset_calls()
        got = md.tree.leaves(md.jit(f)(x, W, WS))
        assert MESH.calls["psum"] == count
        for actual, value in zip(got, md.tree.leaves(f(X, W, WS))):
            numpy.testing.assert_allclose(whole(actual), value, rtol=1e-9, atol=1e-12)


def test_a_step_that_moves_blocks_runs_as_it_is():
    f = lambda x: md.scan(lambda c, v: (c + np.sum(v.T @ v), np.cumsum(v, axis=0)), 0.5, x)  # noqa: E731
    xs = numpy.stack([X, X + 1])
    for actual, value in zip(md.jit(f)(spmd.distribute(xs, MESH, P(None, "i"))), f(xs)):
        numpy.testing.assert_allclose(whole(actual), value, rtol=1e-9)


def test_effects_are_those_of_the_whole_array(capsys):
    def f(x):
        def step(k, x):
            md.debug.print("{}", np.sum(x))
            return 2 * x

        return md.fori_loop(0, 3, step, x)

    md.jit(f)(spmd.distribute(numpy.ones(4), MESH, P("i"))).gather()
    assert [float(line) for line in capsys.readouterr().out.split()] == [4.0, 8.0, 16.0]


def test_two_weights_share_one_message():
    """A weight and a bias, each used in several steps, on one mesh of one axis and on two meshes."""

    def loss(w, b, x):
        for _ in range(3):
            x = np.tanh(x @ w + b)
        return np.sum(x)

    x, gradient = spmd.distribute(X, MESH, P("i")), md.grad(loss, argnums=(0, 1))
    MESH.reset_calls()
    got = gradient(W, W[0], x)
    assert MESH.calls["psum"] == 2  # of the loss, and of both cotangents
    for actual, value in zip(got, gradient(W, W[0], X)):
        numpy.testing.assert_allclose(actual, value, rtol=1e-9, atol=1e-12)
    y = spmd.distribute(X, GRID, P(("i", "j")))
    both = md.grad(lambda w: loss(w, W[0], x) + loss(w, W[0], y) + np.sum(w * w))(W)
    numpy.testing.assert_allclose(both, 2 * gradient(W, W[0], X)[0] + 2 * W, rtol=1e-9)


@pytest.mark.parametrize("compiled", [lambda f: f, md.jit], ids=["eager", "jit"])
def test_under_vmap_and_second_derivatives(compiled):
    def loss(v, w):
        for _ in range(3):
            v = np.tanh(v @ w)
        return np.sum(v)

    rows = md.vmap(compiled(md.grad(loss, 1)), (0, None))
    f = lambda x: md.grad(lambda w: np.sum(rows(x, w) ** 2))(W)  # noqa: E731
    numpy.testing.assert_allclose(whole(f(spmd.distribute(X, MESH, P("i")))), f(X), rtol=1e-9, atol=1e-12)
