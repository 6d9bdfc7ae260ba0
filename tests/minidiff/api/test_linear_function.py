"""Pullbacks and linear functions are values: trees of their residuals, which go wherever arrays go."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.values.dtypes import float0
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close

X, W = np.array([0.5, 1.0, 2.0]), np.arange(1.0, 4.0)


def with_vjp(f):
    """The function with a rule of its own, which keeps its pullback as the residual."""
    g = md.custom_vjp(f)
    g.defvjp(lambda x: md.vjp(f, x), lambda pullback, ct: pullback(ct))
    return g


def with_jvp(f):
    g = md.custom_jvp(f)
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return g


def closing_over(make):
    return lambda x: (lambda y: make(lambda x: np.sin(x) * y)(x))(np.cos(x))


FUNCTIONS = {
    "elementwise": lambda x: np.sin(x) * x * W,
    "linear": lambda x: 2 * x,
    "constant": lambda x: W,
    "trees": lambda x: {"a": x * x, "b": (np.sum(x), np.arange(3))},
    "matmul": lambda x: x @ np.outer(x, x),
    "indices": lambda x: np.sort(x[np.array([2, 0, 1])] * x),
    "scan": lambda x: md.scan(lambda c, _: (np.sin(c) * W, c), x, None, length=3),
    "fori_loop": lambda x: md.fori_loop(0, 2, lambda k, c: c * c, x),
    "cond": lambda x: md.cond(x[0] > 0, np.sin, lambda x: x, x),
    "checkpoint": closing_over(md.checkpoint),
    "custom_jvp": with_jvp(lambda x: np.sin(x) * x),
    "custom_vjp": with_vjp(lambda x: np.sin(x) * x),
    "jit": closing_over(md.jit),
    "vmap": md.vmap(lambda x: x**3),
    "a derivative": md.grad(lambda x: np.sum(x**3)),
}


def vjp(f):
    return lambda x: md.vjp(f, x)[1]


def batch(x):
    return md.tree.map(lambda v: np.stack([v, v]), x)


call = md.jit(lambda g, t: g(t))

#: The result of f_linear(t), where `make(x)` is f_linear, by ways that take it through another transformation.
WAYS = {
    "rebuilt": lambda make, t: md.tree.map(lambda v: v, make(X))(t),
    "out of a jit": lambda make, t: md.jit(make)(X)(t),
    "into a jit": lambda make, t: call(make(X), t),
    "through a jit": lambda make, t: md.jit(lambda g: g)(make(X))(t),
    "out of one into another": lambda make, t: call(md.jit(make)(X), t),
    "inside a jit": lambda make, t: md.jit(lambda x, t: call(md.jit(make)(x), t))(X, t),
    "a tape": lambda make, t: md.make_tape(lambda x, t: call(make(x), t))(X, t)(X, *md.tree.leaves(t)),
    "the carry of a scan": lambda make, t: md.jit(
        lambda x, t: md.scan(lambda g, _: (g, None), make(x), None, length=2)[0](t)
    )(X, t),
    "the operand of a cond": lambda make, t: md.jit(
        lambda x, t: md.cond(x[0] > 0, lambda g: g(t), lambda g: g(t), make(x))
    )(X, t),
    "a checkpoint": lambda make, t: md.checkpoint(lambda g, t: g(t))(make(X), t),
    "a batch": lambda make, t: md.tree.map(
        lambda v: v[1], md.vmap(lambda g, t: g(t))(md.vmap(make)(batch(X)), batch(t))
    ),
}


@each("f", FUNCTIONS.values(), FUNCTIONS)
@each("way", WAYS.values(), WAYS)
def test_pullbacks_go_everywhere(f, way):
    cts = md.tree.map(lambda v: np.cos(v) if v.dtype == float else numpy.zeros(v.shape, float0), f(X))
    expected = vjp(f)(X)(cts)
    assert_trees_close(md.tree.leaves(way(vjp(f), cts)), md.tree.leaves(expected))


@each("f", [f for name, f in FUNCTIONS.items() if name != "custom_vjp"])
@each("way", WAYS.values(), WAYS)
def test_linear_functions_go_everywhere(f, way):
    make = lambda x: md.linearize(f, x)[1]  # noqa: E731
    expected = [x for x in md.tree.leaves(make(X)(X)) if x.dtype != float0]
    actual = [x for x in md.tree.leaves(way(make, X)) if x.dtype != float0]
    assert_trees_close(actual, expected)


@each("f", [f for name, f in FUNCTIONS.items() if name != "trees"])
def test_a_rule_keeps_a_pullback(f):
    loss = lambda f: lambda x: sum(np.sum(np.sin(y)) for y in md.tree.leaves(f(x)))  # noqa: E731
    expected = md.grad(loss(f))(X)
    for transform in (md.grad, lambda f: md.jit(md.grad(f)), lambda f: lambda x: md.vmap(md.grad(f))(x[None])[0]):
        assert_trees_close(transform(loss(with_vjp(f)))(X), expected)


def test_derivatives_pass_through_residuals():
    slope = lambda x: md.jit(vjp(np.exp))(x)(1.0)[0]  # noqa: E731
    assert md.grad(slope)(0.0) == md.jvp(slope, (0.0,), (1.0,))[1] == 1.0


def test_one_program_for_the_pullbacks_of_a_compiled_function():
    count = 0

    @md.jit
    def apply(pullback):
        nonlocal count
        count += 1
        return pullback(1.0)[0]

    make = md.jit(vjp(lambda x: x * x))
    assert [apply(make(x)) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert count == 1


def test_leaves_are_the_residuals():
    x = np.arange(3.0)
    pullback = vjp(lambda x: x * W)(x)
    (saved,) = md.tree.leaves(pullback)
    assert saved is not W and saved.tolist() == W.tolist()
    assert md.tree.leaves(vjp(lambda x: 2 * x)(x)) == []
    assert repr(pullback) == "<pullback, a function that is linear>"
    with pytest.raises(TypeError, match=r"keep the structure .* LinearFunction\(\*; pullback\)"):
        md.scan(lambda g, _: (vjp(lambda x: x * W)(x), None), pullback, None, length=2)


# ---------------------------------------------------------------- on ranks

MESH = spmd.make_mesh((3,), ("i",), backend="simulated")
ROWS = spmd.P("i")


def mapped(f, out_specs=ROWS):
    return spmd.shard_map(f, mesh=MESH, in_specs=ROWS, out_specs=out_specs)


@each("wrapped", [lambda f: f, md.jit], ["eager", "jit"])
@each("x", [X, spmd.distribute(X, MESH, ROWS)], ["whole", "sharded"])
def test_pullbacks_leave_bodies(wrapped, x):
    f = lambda x: np.sin(x) * x  # noqa: E731
    expected = vjp(f)(X)(W)
    make, apply = wrapped(mapped(vjp(f))), wrapped(mapped(lambda pullback, ct: pullback(ct)))
    assert_trees_close(apply(make(x), W), expected)
    assert_trees_close(wrapped(vjp(mapped(f)))(x)(W), expected)


@each("wrapped", [lambda f: f, md.jit], ["eager", "jit"])
def test_a_rule_in_a_body_keeps_a_pullback(wrapped):
    f = lambda x: np.sin(x) * x  # noqa: E731
    loss = mapped(lambda x: psum(np.sum(with_vjp(f)(x)), "i"), spmd.P())
    assert_trees_close(wrapped(md.grad(loss))(X), vjp(f)(X)(np.ones(3))[0])
