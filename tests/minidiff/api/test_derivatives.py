"""`grad`, `vjp`, `jvp`, `linearize`, `linear_transpose`: arguments, results, nesting; linear functions as values."""

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import psum
from minidiff.values.dtypes import float0
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close

X, W = np.array([0.5, 2.0, 3.0]), np.arange(1.0, 4.0)


# ---------------------------------------------------------------- nesting


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


# ---------------------------------------------------------------- dependence


@each("f", [lambda x, y: y * 2.0, lambda x, y: 5.0, lambda x, y: np.floor(x).sum() * y])
def test_an_argument_that_does_not_matter_has_gradient_zero(f):
    x = np.ones((2, 3), np.float32)
    g = md.grad(f)(x, 1.0)
    assert md.typeof(g) == md.typeof(x) and not g.any()


# ---------------------------------------------------------------- arguments and results


@each("argnums, expected", [(0, 9.0), (1, 12.0), (-1, 54.0), ((2, 0), (54.0, 9.0)), ((np.int64(1),), (12.0,))], ids=str)
def test_argnums(argnums, expected):
    """Keywords are passed, and not differentiated."""
    assert md.grad(lambda x, y, z, *, power: x * y**power * z**3, argnums)(2.0, 3.0, 1.0, power=2) == expected


def test_cotangents_that_are_zero_or_of_integers():
    gx, gy = md.vjp(lambda x, y: (x * y, y), X, 2.0)[1]((np.zeros(3), 1.0))
    assert (gx.tolist(), gy) == ([0.0] * 3, 1.0)
    value, pullback = md.vjp(lambda x, i: (x[i], i.sum()), X, np.array([0, 2, 2]))
    gx, gi = pullback((np.ones(3), np.zeros((), float0)))
    assert value[1] == 4 and gx.tolist() == [1.0, 0.0, 2.0] and (gi.dtype, gi.shape) == (float0, (3,))
    for ct in (0, np.int8(0), 0.5):
        assert md.vjp(lambda x: (x, np.argmax(x)), X)[1]((X, ct))[0].tolist() == X.tolist()


def test_complex_numbers():
    np.testing.assert_allclose(md.grad(lambda z: np.abs(z) ** 2)(3 + 4j), 6 - 8j)
    for t in (1.0 + 0j, 1j, 1 - 2j):  # |z| is not holomorphic: its derivative is a real part
        np.testing.assert_allclose(md.jvp(np.abs, (3 + 4j,), (t,))[1], (np.conj(3 + 4j) * t).real / 5)
    assert md.jvp(np.abs, (0j,), (1j,))[1] == 0.0


def test_tangents_of_what_has_no_derivative():
    _, (zero, none) = md.jvp(lambda x: (np.float32(3.0), X > 1), (1.0,), (2.0,))
    assert md.typeof(zero) == md.typeof(np.float32(0)) and zero == 0 and (none.dtype, none.shape) == (float0, X.shape)
    integer = np.zeros((), float0)
    assert md.jvp(lambda x, n: x * n, (2.0, 3), (1.0, integer))[1] == 3.0
    assert md.linearize(lambda x, n: x * n, 2.0, 3)[1](1.0, integer) == 3.0


def test_linearize_evaluates_once():
    calls = []
    value, f_linear = md.linearize(lambda x, p: calls.append(1) or {"y": x * p["w"]}, X, {"w": 2.0})
    assert value["y"].tolist() == (2 * X).tolist()
    assert f_linear(np.ones(3), {"w": 0.0})["y"].tolist() == [2.0] * 3
    assert f_linear(np.zeros(3), {"w": 1.0})["y"].tolist() == X.tolist()
    assert calls == [1]


# ---------------------------------------------------------------- what comes with the value

#: The value and what came with it, of a function of one argument.
WITH_AUX = {
    "vjp": lambda f, x: md.vjp(f, x, has_aux=True)[::2],
    "linearize": lambda f, x: md.linearize(f, x, has_aux=True)[::2],
    "jvp": lambda f, x: md.jvp(f, (x,), (x,), has_aux=True)[::2],
    "value_and_grad": lambda f, x: md.value_and_grad(f, has_aux=True)(x)[0],
    "grad": lambda f, x: (x**2, md.grad(f, has_aux=True)(x)[1]),
}


@each("transform", WITH_AUX.values(), WITH_AUX)
def test_what_comes_with_the_value_is_of_any_kind_and_has_its_derivative(transform):
    f = lambda x: (x**2, {"twice": 2 * x, "text": "any", "none": None, "count": 3})  # noqa: E731
    twice = lambda x: transform(f, x)[1]["twice"]  # noqa: E731
    assert transform(f, 3.0) == (9, {"twice": 6, "text": "any", "none": None, "count": 3})
    assert type(twice(3.0)) is np.float64
    assert md.grad(lambda x: x * twice(x))(3.0) == 12 and md.jit(twice)(3.0) == 6
    np.testing.assert_array_equal(md.vmap(twice)(np.arange(3.0)), [0, 2, 4])


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
