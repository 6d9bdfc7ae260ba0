"""Rules for vmap: `custom_vmap` under all transformations."""

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import psum
from minidiff import custom_vmap
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

X, Y = np.arange(3.0), np.arange(1.0, 4.0)


def telling(seen):
    """A function sin(x) y whose rule says cos(x) y, so that one can tell them apart."""

    @custom_vmap
    def f(x, y):
        return {"out": np.sin(x) * y}

    @f.def_vmap
    def rule(axis_size, in_batched, x, y):
        seen.append((axis_size, in_batched, np.shape(x), np.shape(y)))
        return {"out": np.cos(x) * y}, {"out": True}

    return lambda x, y: f(x, y)["out"]


WAYS = {
    "plain": lambda f: f,
    "jit": md.jit,
    "tape": lambda f: lambda *args: md.make_tape(f)(*args)(*args)[0],
    "scan": lambda f: lambda *args: md.scan(lambda _, i: (None, f(*args)), None, np.arange(2))[1][1],
    "checkpoint": md.checkpoint,
}


@each("inner", WAYS)
@each("outer", WAYS)
def test_the_rule_serves_under_vmap_alone(inner, outer):
    seen = []
    f = telling(seen)
    inside, around = WAYS[inner], WAYS[outer]
    tangent = lambda x, y: md.jvp(f, (x, y), (1.0, 0.0))[1]  # noqa: E731
    total = lambda x, y: np.sum(md.vmap(inside(f))(x, y))  # noqa: E731
    np.testing.assert_allclose(around(inside(f))(1.0, 2.0), np.sin(1.0) * 2)
    assert seen == []
    for g, at in ((f, np.cos), (tangent, lambda x: -np.sin(x))):
        np.testing.assert_allclose(around(md.vmap(inside(g)))(X, Y), at(X) * Y)
        np.testing.assert_allclose(around(md.vmap(inside(g), in_axes=(None, 0)))(1.0, Y), at(1.0) * Y)
    assert (3, [True, True], (3,), (3,)) in seen and (3, [False, True], (), (3,)) in seen
    np.testing.assert_allclose(around(inside(tangent))(1.0, 2.0), np.cos(1.0) * 2)
    np.testing.assert_allclose(around(md.grad(total))(X, Y), -np.sin(X) * Y)


def test_derivatives_in_forward_mode():
    f = telling([])
    np.testing.assert_allclose(md.vmap(md.jacfwd(f))(X, Y), -np.sin(X) * Y)
    np.testing.assert_allclose(md.vmap(md.jacfwd(md.jacfwd(f)))(X, Y), -np.cos(X) * Y)
    np.testing.assert_allclose(md.jacfwd(md.vmap(f))(X, Y), np.diag(-np.sin(X) * Y))


def test_reverse_mode_by_a_custom_vjp():
    h = md.custom_vjp(custom_vmap(lambda x, y: np.sin(x) * y))
    h.def_vmap(lambda n, batched, x, y: (np.cos(x) * y, True))
    h.defvjp(lambda x, y: (h(x, y), (x, y)), lambda r, ct: (10 * ct * r[1], ct * np.sin(r[0])))
    assert md.value_and_grad(h)(0.0, 1.0) == (0.0, 10.0)
    for g in (md.vmap(md.value_and_grad(h)), md.jit(md.vmap(md.value_and_grad(h)))):
        assert_trees_close(g(np.zeros(3), np.ones(3)), (np.ones(3), np.full(3, 10.0)))


def test_a_primal_and_its_tangent_are_batched_alike():
    f = telling(seen := [])
    slope = lambda x, t: md.jvp(lambda x: f(x, 2.0), (x,), (t,))[1]  # noqa: E731
    np.testing.assert_allclose(md.vmap(slope, in_axes=(0, None))(X, 3.0), -np.sin(X) * 6)
    assert all(in_batched == [True, False] for _, in_batched, *_ in seen)
    np.testing.assert_allclose(md.vmap(slope, in_axes=(None, 0))(1.0, X), np.cos(1.0) * 2 * X)  # not mapped: no rule
    along = lambda t, y: md.jvp(lambda x: f(x, y), (1.0,), (t,))[1]  # noqa: E731
    np.testing.assert_allclose(md.vmap(along)(X, Y), -np.sin(1.0) * X * Y)
    assert seen[-1] == (3, [True, True], (3,), (3,))


def test_trees_flags_and_results_that_are_not_batched():
    @custom_vmap
    def f(p, n, scale=2.0):
        return {"sum": p["w"] + p["b"], "n": n * 2}

    @f.def_vmap
    def rule(axis_size, in_batched, p, n, scale):
        assert in_batched == [{"w": True, "b": False}, False, False]
        return {"sum": scale * (p["w"] + p["b"]), "n": n * 2}, {"sum": True, "n": False}

    axes = {"w": 0, "b": None}
    out = md.vmap(f, in_axes=(axes, None))({"w": X, "b": 1.0}, 3)
    assert out["sum"].tolist() == [2.0, 4.0, 6.0] and out["n"].tolist() == [6, 6, 6]
    out = md.vmap(f, in_axes=(axes, None), out_axes={"sum": 0, "n": None})({"w": X, "b": 1.0}, 3)
    assert out["n"] == 6


def test_ways_to_call():
    f = custom_vmap(lambda x, y=10.0: x + y)
    f.def_vmap(lambda n, batched, x, y: (x - y, True))
    assert f(1.0) == f(x=1.0) == 11.0 and md.vmap(f)(X).tolist() == [-10.0, -9.0, -8.0]


def scaled(w):
    f = custom_vmap(lambda x: w * x)
    f.def_vmap(lambda n, batched, x: (w * x, True))
    return f


def test_closures():
    assert md.vmap(scaled(2.0))(X).tolist() == [0.0, 2.0, 4.0]
    assert md.vmap(lambda w: scaled(w)(2.0))(X).tolist() == [0.0, 2.0, 4.0]  # no argument is mapped
    assert md.jit(lambda w, x: md.vmap(scaled(w))(x))(2.0, X).tolist() == [0.0, 2.0, 4.0]
    assert md.grad(lambda w: np.sum(md.vmap(scaled(w))(X)))(2.0) == 3.0
    for f in (
        lambda: md.vmap(lambda w, x: scaled(w)(x))(X, Y),
        lambda: md.vmap(lambda w, x: md.jit(scaled(w))(x))(X, Y),
        lambda: md.jvp(lambda w: scaled(w)(2.0), (1.0,), (1.0,)),
        lambda: md.vmap(lambda x: md.jvp(lambda w: scaled(w)(x), (1.0,), (1.0,)))(X),
    ):
        with pytest.raises((TypeError, md.LeakedTracerError)):
            f()


def test_on_ranks():
    cumulative = custom_vmap(lambda x: np.cumsum(x))
    seen = []

    @cumulative.def_vmap
    def rule(axis_size, in_batched, x):
        seen.append(str(md.typeof(x)))
        return np.cumsum(x, axis=1), True

    body = lambda x: psum(cumulative(x), "i")  # noqa: E731
    f = mapped(body, mesh(2, 2), P("i"), P())
    x = np.arange(12.0).reshape(3, 4)
    expected = np.cumsum(x.reshape(3, 2, 2), axis=2).sum(axis=1)
    for g in (md.vmap(f), md.jit(md.vmap(f))):
        np.testing.assert_array_equal(g(x), expected)
    assert {*seen} == {"f64[3,2]{i}"}
    partial = mapped(body, mesh(2, 2), P("i"), P(), axis_names={"i"})
    sharded = spmd.distribute(x, mesh(2, 2), P(None, ("i", "j")))
    np.testing.assert_array_equal(partial(sharded[0]), expected[0])
    with pytest.raises(TypeError):
        md.vmap(partial)(sharded)
