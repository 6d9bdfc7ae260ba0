"""Derivatives in derivatives; pullbacks and linear functions as values. `derivatives.md` has arguments and results."""

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import psum
from minidiff.values.dtypes import float0
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

X, W = np.array([0.5, 2.0, 3.0]), np.arange(1.0, 4.0)


#: Functions of a number, which have derivatives inside, and their derivative at 2.
SLOPES = [
    (md.grad(md.grad(lambda x: x**5)), 240.0),
    (lambda x: (lambda ys: md.grad(lambda y: sum(y * z for z in ys) * y)(x))([x * i for i in range(3)]), 24.0),
    (lambda x: (lambda value, linear: value + linear(x))(*md.linearize(lambda y: y * y * x, x)), 36.0),
    (lambda x: (lambda pullback: pullback(x)[0] + pullback(1.0)[0])(md.vjp(lambda y: y**3, x)[1]), 48.0),
    (lambda x: md.jit(lambda x: md.vjp(lambda x: x**2, x)[1])(x)(x)[0], 8.0),
]


@each("f, slope", SLOPES)
def test_derivatives_pass_through_derivatives(f, slope):
    assert md.grad(f)(2.0) == md.jvp(f, (2.0,), (1.0,))[1] == md.jit(md.grad(f))(2.0) == slope


# ---------------------------------------------------------------- pullbacks and linear functions are values


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
    return lambda x: (lambda y: make(lambda x: mnp.sin(x) * y)(x))(mnp.cos(x))


FUNCTIONS = {
    "elementwise": lambda x: mnp.sin(x) * x * W,
    "linear": lambda x: 2 * x,
    "constant": lambda x: W,
    "indices": lambda x: mnp.sort(x[np.array([2, 0, 1])] * x) @ mnp.outer(x, x),
    "scan": lambda x: md.scan(lambda c, _: (mnp.sin(c) * W, c), x, None, length=3),
    "cond": lambda x: md.cond(x[0] > 0, mnp.sin, lambda x: x, x),
    "checkpoint": closing_over(md.checkpoint),
    "custom_jvp": with_jvp(lambda x: mnp.sin(x) * x),
    "jit": closing_over(md.jit),
    "a derivative": md.grad(lambda x: mnp.sum(x**3)),
}
OF_REVERSE_MODE = {
    "trees": lambda x: {"a": x * x, "b": (mnp.sum(x), np.arange(3))},
    "custom_vjp": with_vjp(lambda x: mnp.sin(x) * x),
}


def vjp(f):
    return lambda x: md.vjp(f, x)[1]


def linearized(f):
    return lambda x: md.linearize(f, x)[1]


def batch(x):
    return md.tree.map(lambda v: mnp.stack([v, v]), x)


call = md.jit(lambda g, t: g(t))

#: The result of f_linear(t), where `make(x)` is f_linear, by ways that take it through another transformation.
WAYS = {
    "out of a jit": lambda make, t: md.jit(make)(X)(t),
    "into a jit": lambda make, t: call(make(X), t),
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


@each("f", [*FUNCTIONS.values(), *OF_REVERSE_MODE.values()], [*FUNCTIONS, *OF_REVERSE_MODE])
@each("way", WAYS.values(), WAYS)
def test_pullbacks_and_linear_functions_go_everywhere(f, way):
    cts = md.tree.map(lambda v: np.cos(v) if v.dtype == float else np.zeros(v.shape, float0), f(X))
    for make, t in ((vjp, cts), (linearized, X)):
        if make is vjp or f in FUNCTIONS.values():
            assert_trees_close(md.tree.leaves(way(make(f), t)), md.tree.leaves(make(f)(X)(t)))


@each("f", FUNCTIONS.values(), FUNCTIONS)
@each("through", [lambda f: f, md.jit, lambda f: lambda x: md.vmap(f)(x[None])[0]], ["grad", "jit", "vmap"])
def test_a_rule_keeps_a_pullback(f, through):
    loss = lambda f: lambda x: sum(mnp.sum(mnp.sin(y)) for y in md.tree.leaves(f(x)))  # noqa: E731
    assert_trees_close(through(md.grad(loss(with_vjp(f))))(X), md.grad(loss(f))(X))


def test_one_program_for_the_pullbacks_of_a_compiled_function():
    calls = []
    apply = md.jit(lambda pullback: calls.append(1) or pullback(1.0)[0])
    make = md.jit(vjp(lambda x: x * x))
    assert repr(make(1.0)) == "<pullback, a function that is linear>" and md.tree.leaves(vjp(lambda x: 2 * x)(X)) == []
    assert [apply(make(x)) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0] and calls == [1]


@each("wrapped", [lambda f: f, md.jit], ["eager", "jit"])
@each("x", [X, spmd.distribute(X, mesh(3), P("i"))], ["whole", "sharded"])
def test_pullbacks_leave_bodies_and_stay_in_them(wrapped, x):
    f = lambda x: mnp.sin(x) * x  # noqa: E731
    rows = lambda f, out_specs=P("i"): wrapped(mapped(f, mesh(3), P("i"), out_specs))  # noqa: E731
    expected = vjp(f)(X)(W)
    assert_trees_close(rows(lambda pullback, ct: pullback(ct))(rows(vjp(f))(x), W), expected)
    assert_trees_close(wrapped(vjp(rows(f)))(x)(W), expected)
    loss = rows(lambda x: psum(mnp.sum(with_vjp(f)(x)), "i"), P())
    assert_trees_close(wrapped(md.grad(loss))(x), vjp(f)(X)(np.ones(3))[0])
