"""Derivative rules of one's own, in every place where a function may stand."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import axis_index, psum
from minidiff.checks.testing import check_grads
from spmd import P
from tests.checks.samples import each
from tests.minidiff.refusals import refusals
from tests.programs import control as control_programs
from tests.programs.on_blocks import assert_trees_close

X = np.array([0.3, -0.7, 1.1])
MESH = spmd.make_mesh((3,), ("i",), backend="simulated")


def plain(x, y):
    return np.sin(x) * y


@md.custom_jvp
def by_jvp(x, y):
    return np.sin(x) * y


@by_jvp.defjvp
def by_jvp_rule(primals, tangents):
    (x, y), (tx, ty) = primals, tangents
    return by_jvp(x, y), np.cos(x) * y * tx + np.sin(x) * ty


@md.custom_jvp
def by_jvps(x, y):
    return np.sin(x) * y


by_jvps.defjvps(lambda t, out, x, y: np.cos(x) * y * t, lambda t, out, x, y: np.sin(x) * t)


@md.custom_vjp
def by_vjp(x, y):
    return np.sin(x) * y


def by_vjp_fwd(x, y):
    return by_vjp(x, y), (x, {"y": y})


def by_vjp_bwd(residuals, ct):
    x, y = residuals[0], residuals[1]["y"]
    return ct * np.cos(x) * y, ct * np.sin(x)


by_vjp.defvjp(by_vjp_fwd, by_vjp_bwd)


def both_fwd(x, y):
    return by_both(x, y), (x, {"y": y})


by_both = md.custom_vjp(plain)
by_both.defvjp(both_fwd, by_vjp_bwd)
by_both.defjvp(by_jvp_rule)

ALL = each("f", [by_jvp, by_jvps, by_vjp, by_both], ids=["jvp", "jvps", "vjp", "both"])


def total(f):
    return lambda x, y: (f(x, y) * np.cos(y)).sum()


def sharded(f):
    return spmd.shard_map(lambda x, y: psum(total(f)(x, y), "i"), mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P())


def of_tape(f, x, y):
    tape = md.make_tape(f)(x, y)
    return lambda x, y: tape(x, y)[0]


# What is done with the function; the rules must give what NumPy's functions give.
USES = {
    "value": lambda f: f,
    "grad": lambda f: md.grad(total(f), (0, 1)),
    "grad in one": lambda f: md.grad(total(f), 1),
    "second derivative": lambda f: md.grad(lambda x, y: md.grad(total(f))(x, y) @ y),
    "hvp": lambda f: lambda x, y: md.hvp(total(f), (x, y), (y, x)),
    "hessian": lambda f: md.hessian(total(f), (0, 1)),
    "jacrev": lambda f: md.jacrev(f, (0, 1)),
    "vmap": lambda f: md.vmap(f),
    "vmap in one": lambda f: lambda x, y: md.vmap(f, (0, None))(x, y),
    "vmap of nothing": lambda f: lambda x, y: md.vmap(lambda z: f(x, y) * z)(y),
    "vmap of grad": lambda f: md.vmap(md.grad(total(f), (0, 1))),
    "vmap of grad in one": lambda f: lambda x, y: md.vmap(md.grad(total(f)), (None, 0))(x[0], y),
    "grad of vmap": lambda f: md.grad(lambda x, y: total(md.vmap(f))(x, y), (0, 1)),
    "grad of vmap in one": lambda f: md.grad(lambda x, y: md.vmap(f, (None, 0))(x[0], y).sum() ** 2, (0, 1)),
    "second derivative of vmap": lambda f: md.grad(lambda x, y: md.grad(total(md.vmap(f)))(x, y) @ x, (0, 1)),
    "vmap of vmap": lambda f: md.grad(lambda x, y: md.vmap(md.vmap(f, (None, 0)), (0, None))(x, y).sum() ** 2, (0, 1)),
    "closing over a batch": lambda f: lambda x, y: md.vmap(lambda z: f(z, y).sum() * z)(x),
    "staged": lambda f: lambda x, y: md.make_tape(f)(x, y)(x, y)[0],
    "staged grad": lambda f: lambda x, y: md.make_tape(md.grad(total(f), (0, 1)))(x, y)(x, y),
    "grad of staged": lambda f: md.grad(lambda x, y: md.make_tape(total(f))(x, y)(x, y)[0], (0, 1)),
    "grad of a tape": lambda f: lambda x, y: md.grad(of_tape(total(f), x, y), (0, 1))(x, y),
    "vmap of a tape": lambda f: lambda x, y: md.vmap(md.make_tape(f)(x[0], y[0]))(x, y)[0],
    "grad of a tape of vmap": lambda f: lambda x, y: md.grad(of_tape(total(md.vmap(f)), x, y), (0, 1))(x, y),
    "in shard_map": lambda f: sharded(f),
    "grad of shard_map": lambda f: md.grad(sharded(f), (0, 1)),
    "second derivative of shard_map": lambda f: md.grad(lambda x, y: md.grad(sharded(f))(x, y) @ x, (0, 1)),
    "vmap of grad of shard_map": lambda f: (
        lambda x, y: md.vmap(md.grad(sharded(f), (0, 1)))(np.stack([x, y]), np.stack([y, x]))
    ),
    "staged grad of shard_map": lambda f: lambda x, y: md.make_tape(md.grad(sharded(f), (0, 1)))(x, y)(x, y),
}


@ALL
@each("use", USES)
def test_rules_hold_everywhere(f, use):
    if f is by_vjp and use in ("hvp", "hessian"):
        pytest.skip("the forward rule calls the function itself, which forward mode cannot take")
    expected = USES[use](plain)(X, X**2)
    actual = USES[use](f)(X, X**2)
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("f", [by_jvp, by_jvps, by_both], ids=["jvp", "jvps", "both"])
def test_jvp_rules_serve_forward_mode(f):
    check_grads(f, (X, X**2))
    np.testing.assert_allclose(md.jacfwd(f)(X, X), md.jacfwd(plain)(X, X))
    np.testing.assert_allclose(md.linearize(f, X, X)[1](X, X), md.linearize(plain, X, X)[1](X, X))


def test_vjp_rules_serve_reverse_mode_to_any_order():
    check_grads(by_vjp, (X, X**2), modes=["rev"])


def test_forward_over_reverse_goes_through_the_rules():
    f = md.custom_vjp(plain)
    f.defvjp(lambda x, y: (plain(x, y), (x, {"y": y})), by_vjp_bwd)
    check_grads(lambda x: md.grad(total(f))(x, X), (X,), modes=["fwd", "rev"])
    np.testing.assert_allclose(md.hessian(total(f))(X, X), md.hessian(total(plain))(X, X))
    with pytest.raises(TypeError, match="by_vjp has a backward rule only"):  # here the forward rule calls the function
        md.hessian(total(by_vjp))(X, X)


FORWARD = {
    "jvp": lambda: md.jvp(by_vjp, (X, X), (X, X)),
    "jacfwd": lambda: md.jacfwd(by_vjp)(X, X),
    "linearize": lambda: md.linearize(by_vjp, X, X)[1](X, X),
    "jvp of vmap": lambda: md.jvp(md.vmap(by_vjp), (X, X), (X, X)),
    "vmap of jvp": lambda: md.vmap(lambda x: md.jvp(by_vjp, (x, x), (x, x)))(X),
    "grad of jvp": lambda: md.grad(lambda x: md.jvp(by_vjp, (x, x), (x, x))[1])(0.5),
    "jit of jvp": lambda: md.jit(lambda x: md.jvp(by_vjp, (x, x), (x, x)))(X),
    "jvp of jit": lambda: md.jvp(md.jit(lambda x: by_vjp(x, x)), (X,), (X,)),
    "jvp of jit of vmap": lambda: md.jvp(md.jit(lambda x: md.vmap(by_vjp)(x, x)), (X,), (X,)),
    "jvp in a loop": lambda: md.jit(md.jacfwd(lambda x: in_steps(by_vjp, x, x)))(X),
    "jvp of a loop of unknown length": lambda: md.jit(
        lambda n, x: md.jvp(lambda x: md.fori_loop(0, n, lambda i, c: by_vjp(c, c), x), (x,), (x,))
    )(2, X),
    "jvp of checkpoint": lambda: md.jvp(md.checkpoint(by_vjp), (X, X), (X, X)),
    "linear part of a loop": lambda: md.linearize(md.jit(lambda x: in_steps(by_vjp, x, x)), X)[1](X),
}


def in_steps(f, x, y):
    return md.scan(lambda c, _: (f(c, y), None), x, length=2)[0]


@each("use", FORWARD)
def test_vjp_rules_do_not_serve_forward_mode(use):
    with pytest.raises(TypeError, match=r"by_vjp has a backward rule only .*forward mode.*by_vjp\.defjvp.*custom_jvp"):
        FORWARD[use]()


# ---------------------------------------------------------------- in the bodies of loops, branches and the like


def step(c, w):
    return np.sin(c) * w + 0.5 * c


def step_fwd(c, w):
    return step(c, w), {"c": c, "w": (w,)}


def step_bwd(residuals, ct):
    c, (w,) = residuals["c"], residuals["w"]
    return (np.cos(c) * w + 0.5) * ct, np.sin(c) * ct


step_by_vjp, step_by_both = md.custom_vjp(step), md.custom_vjp(step)
step_by_vjp.defvjp(step_fwd, step_bwd)
step_by_both.defvjp(step_fwd, step_bwd)
step_by_both.defjvps(lambda t, out, c, w: (np.cos(c) * w + 0.5) * t, lambda t, out, c, w: np.sin(c) * t)

TWO = np.array([0.5, 2.0])


def sharded_rows(f):
    body = lambda c, w: md.scan(lambda c, _: (f(c, w) + psum(c, "i"), None), c, length=2)[0]  # noqa: E731
    return spmd.shard_map(body, mesh=MESH, in_specs=(P("i"), P("i")), out_specs=P("i"))


# What runs a function like `step` in a body, as a function like `step`.
BODIES = {
    "scan": lambda f: lambda c, w: md.scan(lambda c, k: (f(c, w) * k, f(k * w, c)), c, TWO)[0],
    "scan, reverse": lambda f: lambda c, w: md.scan(lambda c, k: (c, f(c, w) * k), c, TWO, reverse=True)[1].sum(0),
    "scan over its argument": lambda f: lambda c, w: md.scan(lambda c, w: (f(c, w), c), c, np.stack([w, c]))[0],
    "scan of what all steps share": lambda f: lambda c, w: md.scan(lambda s, _: (s + f(c, w), s), 0 * c, length=2)[0],
    "fori_loop": lambda f: lambda c, w: md.fori_loop(0, 2, lambda i, c: f(c, w) + i, c),
    "cond": lambda f: lambda c, w: md.cond(c.sum() > 0, f, lambda c, w: c * w, c, w),
    "switch": lambda f: lambda c, w: md.switch((w.sum() > 9).astype(int), [lambda: f(c, f(w, c)), lambda: w]),
    "checkpoint": lambda f: md.checkpoint(lambda c, w: f(f(c, w), w)),
    "jit": lambda f: lambda c, w: md.jit(lambda c: f(f(c, w), w))(c),
    "vmap": lambda f: lambda c, w: md.vmap(f, (0, None))(mnp.stack([c, 2 * c]), w)[1],
    "grad": lambda f: lambda c, w: md.grad(lambda c: f(c, w).sum())(c),
    "shard_map": sharded_rows,
}


def weighted(f):
    return lambda c, w: (f(c, w) * np.cos(w)).sum()


def compiled(f):
    return md.jit(lambda *args: f(*args))


def by_tape(f):
    return lambda *args: md.make_tape(f)(*args)(*args)


REVERSE = {
    "value": compiled,
    "grad": lambda f: md.grad(weighted(f), (0, 1)),
    "jit of grad": lambda f: compiled(md.grad(weighted(f), (0, 1))),
    "grad of jit": lambda f: md.grad(compiled(weighted(f)), (0, 1)),
    "tape of grad": lambda f: by_tape(md.grad(weighted(f), (0, 1))),
    "grad of checkpoint": lambda f: md.grad(md.checkpoint(weighted(f)), (0, 1)),
    "vmap of grad": lambda f: lambda c, w: md.vmap(compiled(md.grad(weighted(f))))(np.stack([c, w]), np.stack([w, c])),
    "grad of vmap": lambda f: md.grad(
        compiled(lambda c, w: md.vmap(weighted(f), (0, None))(mnp.stack([c, c * w]), w).sum()), (0, 1)
    ),
    "jit of grad of grad": lambda f: compiled(md.grad(lambda c, w: md.grad(weighted(f))(c, w) @ c, (0, 1))),
    "grad of jit of grad": lambda f: md.grad(lambda c, w: compiled(md.grad(weighted(f)))(c, w) @ c, (0, 1)),
    "vjp": lambda f: compiled(lambda c, w: md.vjp(f, c, w)[1](c)),
    "jacrev": lambda f: md.jacrev(compiled(f), (0, 1)),
    "jacrev of grad": lambda f: compiled(md.jacrev(md.grad(weighted(f)))),
    "hessian": lambda f: compiled(md.hessian(weighted(f))),
}
BOTH = {
    **REVERSE,
    "jvp": lambda f: compiled(lambda c, w: md.jvp(f, (c, w), (w, c))),
    "jvp of jit": lambda f: lambda c, w: md.jvp(compiled(f), (c, w), (w, c)),
    "jacfwd": lambda f: compiled(md.jacfwd(f, (0, 1))),
    "linearize": lambda f: lambda c, w: md.linearize(compiled(f), c, w)[1](w, c),
    "grad of jvp": lambda f: compiled(md.grad(lambda c, w: md.jvp(f, (c, w), (w, c))[1].sum())),
    "jacfwd of jacfwd": lambda f: md.jacfwd(compiled(md.jacfwd(f))),
}


# With maps over ranks they are nested in `test_nesting`: not every choice is one that ranks agree about.
TWO_BODIES = st.lists(st.sampled_from([name for name in BODIES if name != "shard_map"]), min_size=1, max_size=2)


def compare(f, bodies, composition):
    g, expected = f, step
    for name in bodies:
        g, expected = BODIES[name](g), BODIES[name](expected)
    actual, expected = (composition(h)(X, X**2 - 0.5) for h in (g, expected))
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-9, atol=1e-12)


@each("composition", ["jit of grad", "grad of jit", "tape of grad", "grad of checkpoint"])
@each("body", BODIES)
def test_backward_rules_serve_in_bodies(body, composition):
    compare(step_by_vjp, [body], REVERSE[composition])


@settings(max_examples=15, deadline=None)
@given(TWO_BODIES, st.sampled_from([*REVERSE]))
def test_a_backward_rule_may_replace_the_rules_of_operations(bodies, composition):
    """In any two bodies, and in any derivative by reverse mode."""
    compare(step_by_vjp, bodies, REVERSE[composition])


@settings(max_examples=15, deadline=None)
@given(TWO_BODIES, st.sampled_from([*BOTH]))
def test_both_rules_may_replace_the_rules_of_operations(bodies, composition):
    compare(step_by_both, bodies, BOTH[composition])


@pytest.mark.parametrize(
    "loop",
    [
        lambda f: lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        lambda f: lambda x: md.fori_loop(0, 2, lambda i, c: f(c), x),
        lambda f: lambda x: md.cond(x > 0, lambda c: f(f(c)), lambda c: c, x),
        lambda f: lambda x: md.switch((x > 0).astype(int), [lambda c: c, lambda c: f(f(c))], x),
    ],
    ids=["scan", "fori_loop", "cond", "switch"],
)
def test_examples_of_backward_rules_in_bodies(loop):
    foo = md.custom_vjp(lambda x: 2.0 * x)
    foo.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * ct,))
    f = loop(foo)
    assert md.jit(md.grad(f))(1.0) == md.grad(md.jit(f))(1.0) == 4.0
    assert md.make_tape(md.grad(f))(1.0)(1.0) == [4.0]
    assert md.grad(md.checkpoint(f))(np.float64(1.0)) == 4.0
    clipped = md.custom_vjp(lambda x: x)  # not linear in the cotangent: no other rule can stand for it
    clipped.defvjp(lambda x: (x, None), lambda _, ct: (np.clip(ct, -1.0, 1.0),))
    assert md.jit(md.grad(lambda x: 5.0 * loop(clipped)(x)))(1.0) == 1.0


def test_the_two_rules_are_transposes():
    for f in (step_by_both, md.jit(step_by_both), lambda c, w: in_steps(step_by_both, c, w)):
        check_grads(f, (X, X**2))
        out, tangent = md.jvp(f, (X, X**2), (X**2, X))
        cts = md.vjp(f, X, X**2)[1](out)
        np.testing.assert_allclose(out @ tangent, cts[0] @ X**2 + cts[1] @ X)


def test_each_mode_takes_its_own_rule():
    f = md.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, None), lambda _, ct: (10.0 * ct,))
    f.defjvp(lambda primals, tangents: (primals[0] ** 2, 20.0 * tangents[0]))
    for wrapped in (f, md.jit(lambda x: f(x)), lambda x: md.vmap(f)(mnp.stack([x, x]))[1]):
        assert md.grad(wrapped)(3.0) == 10.0
        assert md.jvp(wrapped, (3.0,), (1.0,)) == (9.0, 20.0)
        assert md.linearize(wrapped, 3.0)[1](1.0) == 20.0


def test_integers_and_static_arguments_in_loops():
    for declare in (lambda f: None, lambda f: f.defjvp(lambda g, p, t: (g(p[1]) * p[0] + p[2].sum(), t[1] * p[0] * 2))):
        f = md.custom_vjp(lambda n, x, k, g: g(x) * n + k.sum(), nondiff_argnums=(3,))
        f.defvjp(lambda n, x, k, g: (g(x) * n + k.sum(), n), lambda g, n, ct: (None, 2.0 * n * ct, None))
        declare(f)

        def loop(x, k, f=f):
            return md.scan(lambda c, n: (f(n, c, k, lambda v: 2.0 * v), None), x, np.arange(1, 3))[0]

        for gradient in (md.grad(loop, (0, 1)), md.jit(md.grad(loop, (0, 1))), md.grad(md.jit(loop), (0, 1))):
            x_bar, k_bar = gradient(1.0, X)
            assert x_bar == 8.0 and k_bar.tolist() == [0.0] * 3
    assert md.jvp(md.jit(loop), (1.0, 0 * X), (1.0, X)) == (8.0, 8.0)


def test_a_derivative_with_a_backward_rule_is_linear_in_tangents_alone():
    push = lambda x, t: md.vmap(lambda x: md.jvp(step_by_vjp, (x, x), (t, t))[1])(x)  # noqa: E731
    plainly = lambda x, t: md.vmap(lambda x: md.jvp(step, (x, x), (t, t))[1])(x)  # noqa: E731
    tape, expected = md.make_tape(push)(X, 1.0), md.make_tape(plainly)(X, 1.0)
    tape.check()
    assert "linear_call" in str(tape)
    np.testing.assert_allclose(md.transpose(tape, 1)(X, X), md.transpose(expected, 1)(X, X))
    with pytest.raises(TypeError, match=r"derivative of step is linear in its tangents, not in the value of type f64"):
        md.transpose(tape, 0)


def test_the_rule_is_what_counts():
    @md.custom_jvp
    def f(x):
        return x**2

    f.defjvp(lambda primals, tangents: (primals[0] ** 2, 10.0 * tangents[0]))
    assert md.grad(f)(3.0) == 10.0
    assert md.grad(lambda x: md.vmap(f)(x).sum())(X).tolist() == [10.0] * 3
    assert md.grad(md.grad(f))(3.0) == 0.0


def test_a_rule_may_evaluate_something_else():
    @md.custom_vjp
    def f(x):
        raise AssertionError("the forward rule stands for the function")

    f.defvjp(lambda x: (2 * x, None), lambda _, ct: (ct,))
    assert md.value_and_grad(f)(3.0) == (6.0, 1.0)


# ---------------------------------------------------------------- calling conventions


@pytest.mark.parametrize("argnums", [(0, 2), (-3, -1), (2, 0)])
def test_static_arguments_come_first(argnums):
    @functools.partial(md.custom_jvp, nondiff_argnums=argnums)
    def f(g, x, n):
        return g(x) * n

    @f.defjvp
    def rule(g, n, primals, tangents):
        return g(primals[0]) * n, 5.0 * tangents[0]

    @functools.partial(md.custom_vjp, nondiff_argnums=argnums)
    def h(g, x, n):
        return g(x) * n

    h.defvjp(lambda g, x, n: (g(x) * n, ()), lambda g, n, residuals, ct: (n * ct,))
    assert md.value_and_grad(lambda x: f(np.square, x, 2))(3.0) == (18.0, 5.0)
    assert md.value_and_grad(lambda x: h(np.square, x, 7))(3.0) == (63.0, 7.0)
    np.testing.assert_array_equal(md.grad(lambda x: md.vmap(lambda y: h(np.square, y, 7))(x).sum())(X), [7.0] * 3)


@ALL
def test_arguments_by_name(f):
    assert md.grad(lambda x: f(y=2.0, x=x))(0.5) == 2 * np.cos(0.5)


def test_defaults_are_put_in():
    @md.custom_jvp
    def f(x, n=2.0):
        return x * n

    f.defjvp(lambda primals, tangents: (primals[0] * primals[1], primals[1] * tangents[0]))
    assert md.grad(f)(1.0) == 2.0 and md.grad(f)(1.0, 3.0) == 3.0 and md.grad(lambda x: f(x, n=4.0))(1.0) == 4.0


def test_methods_may_have_rules():
    class Scale:
        @functools.partial(md.custom_jvp, nondiff_argnums=(0,))
        def apply(self, x):
            return 2 * x

        @apply.defjvp
        def rule(self, primals, tangents):
            return 2 * primals[0], 3 * tangents[0]

    assert md.grad(lambda x: Scale().apply(x))(1.0) == 3.0


def test_trees_in_and_out():
    @md.custom_vjp
    def f(p, xs):
        return {"y": p["w"] * xs[0], "z": (xs[1],)}

    def bwd(residuals, ct):
        p, xs = residuals
        return {"w": ct["y"] * xs[0], "b": None}, [ct["y"] * p["w"], 10 * ct["z"][0]]

    f.defvjp(lambda p, xs: (f(p, xs), (p, xs)), bwd)
    p, xs = {"w": 2.0, "b": (1.0, 1.0)}, [3.0, 4.0]
    loss = lambda p, xs: f(p, xs)["y"] + f(p, xs)["z"][0]  # noqa: E731
    assert md.grad(loss, (0, 1))(p, xs) == ({"w": 3.0, "b": (0.0, 0.0)}, [2.0, 10.0])


def test_integers_have_tangents_without_values():
    seen = []

    @md.custom_jvp
    def f(x, n):
        return x * n, n + 1

    @f.defjvp
    def rule(primals, tangents):
        (x, n), (tx, tn) = primals, tangents
        seen.append((tn.dtype.name, tn.shape))
        return (x * n, n + 1), (tx * n, tn)

    assert md.grad(lambda x: f(x, 3)[0])(2.0) == 3.0
    assert seen == [("void", ())]
    indices = np.arange(3)
    np.testing.assert_array_equal(md.grad(lambda x: md.vmap(f)(x, indices)[0].sum())(X), indices)

    @md.custom_vjp
    def g(x, n):
        return x * n, n + 1

    g.defvjp(lambda x, n: (g(x, n), n), lambda n, cts: (n * cts[0], None))
    assert md.grad(lambda x: g(x, 3)[0])(2.0) == 3.0
    np.testing.assert_array_equal(md.grad(lambda x: md.vmap(g)(x, indices)[0].sum())(X), indices)


def test_float32_stays():
    x = X.astype(np.float32)
    for f in (by_jvp, by_vjp):
        assert md.grad(total(f))(x, x).dtype == np.float32


def test_documentation_is_the_functions_own():
    assert (by_jvp.__name__, by_vjp.__name__) == ("by_jvp", "by_vjp")


# ---------------------------------------------------------------- closing over values


def closing(kind, y, within=lambda f: f):
    times_y = within(lambda x: x * y)
    if kind == "jvp":
        f = md.custom_jvp(lambda x: times_y(x))
        f.defjvp(lambda primals, tangents: (times_y(primals[0]), times_y(tangents[0])))
    else:
        f = md.custom_vjp(lambda x: times_y(x))
        f.defvjp(lambda x: (times_y(x), None), lambda _, ct: (times_y(ct),))
    return f


def in_a_body(f):
    return spmd.shard_map(f, mesh=PLANE, in_specs=P("i"), out_specs=P("i"))(BLOCKS)


KINDS = each("kind", ["jvp", "vjp"])


@KINDS
@each(
    "use",
    [
        lambda kind: md.grad(lambda y: closing(kind, y)(2.0))(3.0),
        lambda kind: md.grad(lambda y: closing(kind, y)(y))(3.0),
        lambda kind: md.make_tape(md.grad(lambda y: closing(kind, y)(2.0)))(3.0),
        lambda kind: md.make_tape(md.grad(lambda y: closing(kind, y)(y)))(3.0),
        lambda kind: md.grad(lambda y: md.vmap(closing(kind, y))(X).sum())(3.0),
        lambda kind: md.vmap(md.grad(lambda y: closing(kind, y)(y)))(X),
        lambda kind: md.grad(lambda y, t=None: md.make_tape(lambda x: closing(kind, y)(x))(2.0)(y)[0])(3.0),
        lambda kind: md.grad(lambda y: np.sum(in_a_body(lambda x: closing(kind, y)(x))))(3.0),
        lambda kind: md.grad(lambda y: closing(kind, y, md.checkpoint)(y))(3.0),
        lambda kind: md.grad(lambda y: np.sum(in_a_body(lambda x: closing(kind, y, md.checkpoint)(x))))(3.0),
    ],
    ids=[
        *("constant", "itself", "staged", "staged itself", "vmap", "in vmap", "tape", "in a body"),
        *("checkpoint", "checkpoint in a body"),
    ],
)
def test_rules_do_not_differentiate_what_they_close_over(kind, use):
    with pytest.raises(
        TypeError, match=r"<lambda> closes over a value of type f64\[\] that is being differentiated.*pass the value"
    ):
        use(kind)


CLOSING = {
    "the function": lambda x: (lambda y: y * x, lambda y: (y * x, None), lambda _, ct: (ct * x,)),
    "the forward rule": lambda x: (lambda y: y, lambda y: (y * x, None), lambda _, ct: (ct,)),
    "the backward rule": lambda x: (lambda y: y, lambda y: (y, None), lambda _, ct: (ct * x,)),
}


TRANSFORMS = {
    "grad": md.grad,
    "jit of grad": lambda f: md.jit(md.grad(f)),
    "grad of jit": lambda f: md.grad(md.jit(f)),
    "grad of checkpoint": lambda f: md.grad(md.checkpoint(f)),
}


@each("label", CLOSING)
@each("transform", TRANSFORMS)
def test_rules_in_loops_do_not_differentiate_what_they_close_over(label, transform):
    """They say so, wherever the loop is, and whichever of the three closes over it: no term is lost in silence."""

    def f(x):
        function, fwd, bwd = CLOSING[label](x)
        g = md.custom_vjp(function)
        g.defvjp(fwd, bwd)
        return in_steps(lambda c, _: g(c), x, x)

    with pytest.raises(TypeError, match="closes over"):
        TRANSFORMS[transform](f)(3.0)

    def by_jvp_rule(x):
        g = md.custom_jvp(lambda y: y)
        g.defjvp(lambda primals, tangents: (primals[0] * x, tangents[0]))
        return in_steps(lambda c, _: g(c), x, x)

    with pytest.raises(TypeError, match="closes over"):
        TRANSFORMS[transform](by_jvp_rule)(3.0)


def test_what_a_rule_in_a_recorded_loop_closes_over_is_to_be_an_argument():
    def f(x, ys):
        return md.scan(lambda c, y: (closing("vjp", y)(c), None), x, ys)[0]

    assert md.grad(f)(1.0, X) == pytest.approx(X.prod())
    with pytest.raises(md.LeakedTracerError, match=r"the forward rule of <lambda>, runs when .* an argument: pass it"):
        md.grad(md.jit(f))(1.0, X)


@KINDS
def test_rules_may_close_over_what_is_not_differentiated(kind):
    assert md.grad(lambda x: closing(kind, 3.0)(x))(2.0) == 3.0
    np.testing.assert_array_equal(md.vmap(lambda y: closing(kind, y)(2.0))(X), 2 * X)
    np.testing.assert_array_equal(md.vmap(lambda y: md.grad(closing(kind, y))(2.0))(X), X)
    np.testing.assert_allclose(md.grad(lambda x: md.vmap(lambda y: closing(kind, y)(x))(X).sum())(2.0), X.sum())
    tape = md.make_tape(lambda y: md.grad(closing(kind, y))(2.0))(3.0)
    assert tape(5.0) == [5.0]


def test_a_function_may_close_over_an_outer_derivative_where_an_inner_one_is_taken():
    # The inner derivative has its own values; that of the outer one goes through the rule as through any function.
    assert md.grad(lambda y: md.grad(lambda x: by_jvp(x, y))(0.5))(3.0) == np.cos(0.5)


# ---------------------------------------------------------------- what rules must return


def jvp_returning(result):
    f = md.custom_jvp(lambda x, p: (x, p["w"]))
    f.__name__ = f.name = "f"

    def rule(primals, tangents):
        return result(primals, tangents)

    f.defjvp(rule)
    return md.jvp(f, (X, {"w": 1.0}), (X, {"w": 1.0}))


def vjp_returning(fwd, bwd):
    f = md.custom_vjp(lambda x, p: x * p["w"])
    f.__name__ = f.name = "f"

    def fwd_rule(x, p):
        return fwd(x, p)

    def bwd_rule(residuals, ct):
        return bwd(residuals, ct)

    f.defvjp(fwd_rule, bwd_rule)
    return md.vjp(f, X, {"w": 1.0})[1](X)


def fine(x, p):
    return x * p["w"], x


def with_rule(f):
    f.defjvp(lambda static, primals, tangents: (primals, tangents))
    return f


ERRORS = [
    (
        lambda: jvp_returning(lambda p, t: p[0]),
        r"rule, the jvp rule of f, must return a pair \(result, tangent\), got \*",
    ),
    (
        lambda: jvp_returning(lambda p, t: ((p[0], p[1]["w"]), [t[0], t[1]["w"]])),
        r"rule, the jvp rule of f, must return a tangent like its result: \(\*, \*\), got \[\*, \*\]",
    ),
    (
        lambda: jvp_returning(lambda p, t: ((p[0], p[1]["w"]), (t[0][:2], t[1]["w"]))),
        r"rule, the jvp rule of f, returns a result\[0\] of type f64\[3\]: its tangent must have the type f64\[3\], "
        r"got f64\[2\]",
    ),
    (
        lambda: jvp_returning(lambda p, t: ((p[0], p[1]["w"]), (t[0], np.float32(1)))),
        r"returns a result\[1\] of type f64\[\]: its tangent must have the type f64\[\], got f32\[\]",
    ),
    (
        lambda: vjp_returning(lambda x, p: x, lambda r, ct: (ct, None)),
        r"fwd_rule, the forward rule of f, must return a pair \(result, residuals\), got \*",
    ),
    (
        lambda: vjp_returning(fine, lambda r, ct: (ct,)),
        r"bwd_rule, the backward rule of f, must return a tuple of 2 cotangents, one for each argument, got \(\*,\)",
    ),
    (
        lambda: vjp_returning(fine, lambda r, ct: ct),
        r"bwd_rule, the backward rule of f, must return a tuple of 2 cotangents",
    ),
    (
        lambda: vjp_returning(fine, lambda r, ct: (ct, 1.0)),
        r"bwd_rule, the backward rule of f, must return a cotangent like argument 1: \{'w': \*\}, got \*",
    ),
    (
        lambda: vjp_returning(fine, lambda r, ct: (ct, {"w": ct})),
        r"bwd_rule, the backward rule of f, returns a cotangent of argument 1\['w'\]: it must have the type f64\[\], "
        r"got f64\[3\]",
    ),
    (
        lambda: vjp_returning(fine, lambda r, ct: (ct, {"w": "one"})),
        r"bwd_rule, .* of argument 1\['w'\]: it must have the type f64\[\]: expected an array or a number, got str",
    ),
    (
        lambda: vjp_returning(lambda x, p: (x, np.sin), lambda r, ct: (ct, None)),
        r"fwd_rule, .* must return residuals that are arrays: .* got ufunc: .*named by nondiff_argnums",
    ),
    (
        lambda: with_rule(md.custom_jvp(by_jvp.fun, nondiff_argnums=2))(X, X),
        r"by_jvp: nondiff_argnums names argument 2, but it was called with 2",
    ),
]
test_errors_name_the_rule_the_leaf_and_both_types = refusals(ERRORS, error=TypeError)


def test_a_rule_must_agree_with_its_function():
    f = md.custom_jvp(lambda x: (x, x))
    f.defjvp(lambda p, t: (p[0], t[0]))
    tape = md.make_tape(lambda x: f(x)[0])(1.0)
    with pytest.raises(TypeError, match=r"must return a result like <lambda>'s: \(\*, \*\), got \*"):
        md.grad(lambda x: tape(x)[0])(1.0)


def test_functions_without_rules():
    with pytest.raises(AttributeError, match=r"by_jvp is a custom_jvp without a rule: declare one with by_jvp\.defjvp"):
        md.custom_jvp(by_jvp.fun)(X, X)
    with pytest.raises(AttributeError, match=r"by_vjp is a custom_vjp without rules.*by_vjp\.defvjp"):
        md.custom_vjp(by_vjp.fun)(X, X)
    with pytest.raises(TypeError, match="with nondiff_argnums, declare one rule with defjvp"):
        md.custom_jvp(by_jvp.fun, nondiff_argnums=(0,)).defjvps(None, None)


def test_arguments_by_keyword_only():
    f = md.custom_jvp(lambda x, *, n: x)
    f.defjvp(lambda p, t: (p[0], t[0]))
    with pytest.raises(TypeError, match=r"rules take arguments by position, but \['n'\] are keyword-only"):
        f(1.0, n=2)


def declared(kind, f, slope):
    """A function with a rule of one argument."""
    f = kind(f)
    if kind is md.custom_jvp:
        f.defjvp(lambda primals, tangents: (f(*primals), slope * tangents[0]))
    else:
        f.defvjp(lambda *args: (f(*args), None), lambda _, ct: (slope * ct,))
    return f


@pytest.mark.parametrize("kind", [md.custom_jvp, md.custom_vjp])
def test_defaults_by_keyword_only_and_partials(kind):
    """The function itself has them: rules do not take them."""
    for f in (
        lambda x, *, n=2.0: n * x,
        functools.partial(lambda n, x: n * x, 2.0),
        functools.partial(lambda x, n: n * x, n=2.0),
        functools.partial(lambda x, *, n, m=1.0: n * m * x, n=2.0),
    ):
        ruled = declared(kind, f, 5.0)
        for run in (lambda f: f, md.jit):
            assert run(ruled)(3.0) == 6.0 and run(md.grad(ruled))(3.0) == 5.0
            assert_trees_close(run(md.vmap(md.grad(ruled)))(X), np.full(3, 5.0))


@pytest.mark.parametrize("kind", [md.custom_jvp, md.custom_vjp, md.checkpoint])
@pytest.mark.parametrize("run", [lambda f: f, md.jit], ids=["run", "jit"])
def test_results_that_no_mapped_argument_affects(kind, run):
    """They have no batch axis: `vmap` takes out_axes=None for them, also where a rule is differentiated."""
    f = kind(lambda x, y: (np.sin(x) * y, y * y))
    if kind is md.custom_jvp:
        f.defjvp(lambda p, t: (f(*p), (np.cos(p[0]) * p[1] * t[0] + np.sin(p[0]) * t[1], 2 * p[1] * t[1])))
    elif kind is md.custom_vjp:
        f.defvjp(
            lambda x, y: (f(x, y), (x, y)),
            lambda saved, ct: (ct[0] * np.cos(saved[0]) * saved[1], ct[0] * np.sin(saved[0]) + 2 * ct[1] * saved[1]),
        )
    both = lambda f: md.vmap(f, (0, None), (0, None))  # noqa: E731
    meaning = lambda x, y: (np.sin(x) * y, y * y)  # noqa: E731
    y = np.array(1.5)
    assert_trees_close(run(both(f))(X, y), both(meaning)(X, y))
    total = lambda f: lambda x, y: sum(z.sum() ** 2 for z in both(f)(x, y))  # noqa: E731
    for arguments in (0, 1, (0, 1)):
        assert_trees_close(run(md.grad(total(f), arguments))(X, y), md.grad(total(meaning), arguments)(X, y))
    nested = lambda f: md.vmap(both(f), (0, None), (0, None))  # noqa: E731
    assert_trees_close(run(nested(f))(np.stack([X, X]), y), nested(meaning)(np.stack([X, X]), y))
    if kind is not md.custom_vjp:
        tangents = np.ones(3), np.array(2.0)
        assert_trees_close(run(lambda: md.jvp(both(f), (X, y), tangents))(), md.jvp(both(meaning), (X, y), tangents))


@pytest.mark.parametrize("kind", [md.custom_jvp, md.custom_vjp])
def test_derivatives_with_respect_to_mapped_arguments_that_the_value_does_not_use(kind):
    """A rule such as of a straight-through estimator: each element of the batch has a derivative of its own."""
    f = kind(lambda value, x: value)
    if kind is md.custom_jvp:
        f.defjvp(lambda p, t: (f(*p), p[1] * t[1]))
    else:
        f.defvjp(lambda value, x: (f(value, x), x), lambda x, ct: (0.0 * ct, x * ct))
    weights, x = np.array([1.0, 10.0, 100.0]), np.array([3.0, 4.0, 5.0])
    mapped = lambda x: md.vmap(f, (None, 0))(2.0, x)  # noqa: E731
    total = lambda x: (weights * mapped(x)).sum()  # noqa: E731
    for run in (lambda f: f, md.jit):
        assert_trees_close(run(md.value_and_grad(total))(x), (222.0, weights * x))
        matrix = run(md.grad(lambda x: (weights * md.vmap(mapped)(x)).sum()))(np.stack([x, -x]))
        assert_trees_close(matrix, np.stack([weights * x, -weights * x]))
    if kind is md.custom_jvp:
        assert_trees_close(md.jvp(mapped, (x,), (weights,)), (np.full(3, 2.0), weights * x))
    assert md.jit(mapped)(x).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(TypeError, match=r"does not depend on the arguments over which vmap maps.*0\.0 \* x"):
        md.grad(md.jit(total))(x)
    g = kind(lambda value, x: value + 0.0 * x)
    g.defjvp(lambda p, t: (g(*p), p[1] * t[1])) if kind is md.custom_jvp else g.defvjp(
        lambda value, x: (g(value, x), x), lambda x, ct: (0.0 * ct, x * ct)
    )
    recorded = md.jit(lambda x: (weights * md.vmap(g, (None, 0))(2.0, x)).sum())
    assert_trees_close(md.grad(recorded)(x), weights * x)


# ---------------------------------------------------------------- tapes


def test_tapes_show_the_call_and_its_body():
    tape = md.make_tape(lambda x: by_jvp(x, 2.0))(1.0)
    tape.check()
    assert str(tape).splitlines() == [
        "lambda a:f64[]:",
        "  b:f64[] = custom_jvp(a, 2.0, by_jvp)",
        "    lambda c:f64[], d:f64[]:",
        "      e:f64[] = sin(c)",
        "      f:f64[] = multiply(e, d)",
        "      return f",
        "  return b",
    ]


def test_constants_of_the_body_become_operands():
    y = np.arange(3.0)
    for f in (closing("jvp", y), closing("vjp", y)):
        tape = md.make_tape(f)(X)
        tape.check()
        assert len(tape.constants) == 1
        np.testing.assert_array_equal(md.grad(lambda x, tape=tape: tape(x)[0].sum())(X), y)


def test_linear_functions_with_rules_are_transposed():
    f = md.custom_jvp(lambda x: 2.0 * x)
    f.defjvp(lambda p, t: (2.0 * p[0], 2.0 * t[0]))
    assert md.linear_transpose(f, 1.0)(3.0) == (6.0,)


# ---------------------------------------------------------------- stop_gradient


def test_stop_gradient_is_a_constant():
    f = lambda x: (md.stop_gradient(x) * x).sum()  # noqa: E731
    np.testing.assert_array_equal(md.grad(f)(X), X)
    np.testing.assert_array_equal(md.jvp(f, (X,), (X,))[1], (X * X).sum())
    np.testing.assert_array_equal(md.grad(lambda x: md.grad(f)(x).sum())(X), np.zeros(3))
    np.testing.assert_array_equal(md.vmap(md.grad(f))(np.stack([X, 2 * X])), [X, 2 * X])
    np.testing.assert_array_equal(md.make_tape(md.grad(f))(X)(X)[0], X)


def test_stop_gradient_takes_trees():
    stopped = md.stop_gradient({"a": X, "b": (1, 2.0)})
    np.testing.assert_array_equal(stopped["a"], X)
    assert stopped["b"] == (1, 2.0)


# ---------------------------------------------------------------- on ranks

PLANE = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")


def scaled(bwd):
    """w * x with a backward rule: `bwd(w, x, ct)`."""
    f = md.custom_vjp(lambda w, x: w * x)
    f.__name__ = f.name = "scaled"

    def scaled_bwd(residuals, ct):
        return bwd(*residuals, ct)

    f.defvjp(lambda w, x: (w * x, (w, x)), scaled_bwd)
    return f


def summed_product(jvp):
    """The sum over ranks of w * x, with a rule: `jvp(w, x, w_dot, x_dot)` gives the result and its tangent."""
    f = md.custom_jvp(lambda w, x: psum(w * x, "i"))
    f.__name__ = f.name = "summed_product"

    @f.defjvp
    def product_jvp(primals, tangents):
        return jvp(*primals, *tangents)

    return f


def on_ranks(f, staged=False, in_specs=(P(), P("i"))):
    """The gradient of the sum of its results."""

    def body(w, x):
        y = f(w, x)
        return psum(y.sum(), tuple(md.typeof(y).variance) or "i")

    loss = spmd.shard_map(body, mesh=PLANE, in_specs=in_specs, out_specs=P())
    gradient = md.grad(loss, (0, 1))
    if not staged:
        return gradient
    return lambda *args: tape_that_checks(gradient, args)(*args)


def tape_that_checks(f, args):
    tape = md.make_tape(f)(*args)
    tape.check()
    return tape


W, BLOCKS = np.array([2.0, 3.0]), np.arange(4.0)
STAGED = pytest.mark.parametrize("staged", [False, True], ids=["", "staged"])


@STAGED
def test_cotangents_are_summed_by_the_rule_and_pbroadcast_by_themselves(staged):
    right = scaled(lambda w, x, ct: (psum(ct * x, "i"), w * psum(ct, "i") / 2))  # the second one is pbroadcast
    w_bar, x_bar = on_ranks(right, staged)(W, BLOCKS)
    np.testing.assert_array_equal(w_bar, [2.0, 4.0])
    np.testing.assert_array_equal(np.asarray(x_bar), [2.0, 3.0, 2.0, 3.0])


VARIANCES = {
    "not summed": (
        lambda: on_ranks(scaled(lambda w, x, ct: (ct * x, ct * w))),
        r"scaled_bwd, the backward rule of scaled, returns a cotangent of argument 0: it must have the type f64\[2\], "
        r"got f64\[2\]\{i\}, which varies along 'i': .*psum\(cotangent, 'i'\).*pbroadcast\(argument, 'i'\)",
    ),
    "not summed, staged": (
        lambda: on_ranks(scaled(lambda w, x, ct: (ct * x, ct * w)), staged=True),
        r"scaled_bwd, .* argument 0: it must have the type f64\[2\], got f64\[2\]\{i\}, .*psum\(cotangent, 'i'\)",
    ),
    "along one of two": (
        lambda: on_ranks(scaled(lambda w, x, ct: (psum(ct * x, "i"), ct * w)), in_specs=(P(), P(("i", "j")))),
        r"it must have the type f64\[1\], got f64\[1\]\{j\}, which varies along 'j': .*psum\(cotangent, 'j'\)",
    ),
    "along both": (
        lambda: on_ranks(scaled(lambda w, x, ct: (ct * x, ct * w)), in_specs=(P(), P(("i", "j")))),
        r"got f64\[1\]\{i,j\}, which varies along 'i', 'j': .*psum\(cotangent, \('i', 'j'\)\)",
    ),
    "a tangent that is not summed": (
        lambda: on_ranks(summed_product(lambda w, x, w_dot, x_dot: (psum(w * x, "i"), w * x_dot + w_dot * x))),
        r"product_jvp, the jvp rule of summed_product, returns a result of type f64\[2\]: its tangent must have the "
        r"type f64\[2\], got f64\[2\]\{i\}, which varies along 'i': .*psum\(tangent, 'i'\).*pbroadcast\(result, 'i'\)",
    ),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_wrong_variances_are_named(name):
    gradient, message = VARIANCES[name]
    args = (W[:1], BLOCKS) if "of two" in name or "both" in name else (W, BLOCKS)
    with pytest.raises(md.VarianceError, match=message):
        gradient()(*args)


def test_a_rule_gives_what_the_recorded_function_gives():
    """Rules of a recorded function must give results of its recorded types."""

    def by_rules(fwd):
        f = md.custom_vjp(lambda w, x: w * x)
        f.__name__ = f.name = "f"
        f.defvjp(lambda w, x: (fwd(w, x), (w, x)), lambda r, ct: (psum(ct * r[1], "i"), ct * r[0]))
        body = lambda w, x: psum(f(w, x).sum(), "i")  # noqa: E731
        loss = md.jit(spmd.shard_map(body, mesh=PLANE, in_specs=(P(), P("i")), out_specs=P()))
        return md.grad(lambda w, x: loss(w, x), (0, 1))(W, BLOCKS)

    for fwd in (lambda w, x: w * x, lambda w, x: w * 0.0):  # one that varies less is pbroadcast
        np.testing.assert_array_equal(by_rules(fwd)[0], [2.0, 4.0])
    message = (
        r"<lambda>, the forward rule of f, returns another result than f: it must have the type f64\[2\]\{i\}, got "
    )
    for fwd, got in (
        (lambda w, x: (w * x).sum(), r"f64\[\]\{i\}$"),
        (lambda w, x: (w * x).astype(np.float32), r"f32\[2\]\{i\}$"),
    ):
        with pytest.raises(TypeError, match=message + got):
            by_rules(fwd)
    with pytest.raises(md.VarianceError, match=r"got f64\[2\]\{i,j\}, which varies along 'j': .*psum\(result, 'j'\)"):
        by_rules(lambda w, x: w * x * axis_index("j"))


@STAGED
def test_tangents_are_summed_by_the_rule_and_pbroadcast_by_themselves(staged):
    right = summed_product(lambda w, x, w_dot, x_dot: (psum(w * x, "i"), psum(w * x_dot + w_dot * x, "i")))
    w_bar, x_bar = on_ranks(right, staged)(W, BLOCKS)
    np.testing.assert_array_equal(w_bar, [4.0, 8.0])  # each of two ranks counts the sum once more
    np.testing.assert_array_equal(np.asarray(x_bar), [4.0, 6.0, 4.0, 6.0])

    varying = summed_product(lambda w, x, w_dot, x_dot: (x * w, w_dot))
    w_bar, _ = on_ranks(varying, staged)(W, BLOCKS)
    np.testing.assert_array_equal(w_bar, [2.0, 2.0])


@STAGED
def test_what_a_backward_rule_closes_over_in_a_body_must_be_a_residual(staged):
    def closing_over(w, x):
        total = md.stop_gradient(psum(x, "i"))
        f = md.custom_vjp(lambda w: w * total)
        f.defvjp(lambda w: (w * total, None), lambda _, ct: (ct * total,))
        return f(w)

    message = r"<lambda>, the backward rule of <lambda>, .*f64\[2\].*\(.*shard_map of body\).*return it from <lambda>"
    with pytest.raises(md.LeakedTracerError, match=message):
        on_ranks(closing_over, staged)(W, BLOCKS)


@pytest.mark.parametrize("name", control_programs.BODIES)
def test_cotangents_are_summed_by_the_rule_in_bodies_too(name):
    in_body, meaning = control_programs.BODIES[name]
    args = W, np.arange(8.0) / 4
    expected = md.grad(control_programs.loss_in_body(control_programs.modulated, meaning, PLANE), (0, 1))(*args)
    loss = control_programs.loss_in_body(control_programs.modulated_by_rules(), in_body, PLANE)
    gradient = md.grad(loss, (0, 1))
    for run in (gradient, compiled(gradient), md.grad(compiled(loss), (0, 1)), tape_that_checks(gradient, args)):
        assert_trees_close(run(*args), md.tree.leaves(expected))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_wrong_variances_are_named_in_loops_too(transform):
    def body(w, x):
        f = scaled(lambda w, x, ct: (ct * x, ct * w))
        return psum(md.scan(lambda c, _: (f(w, c), None), x, length=2)[0].sum(), "i")

    loss = spmd.shard_map(body, mesh=PLANE, in_specs=(P(), P("i")), out_specs=P())
    with pytest.raises(
        md.VarianceError, match=r"scaled_bwd, .* argument 0: .*got f64\[2\]\{i\}.*psum\(cotangent, 'i'\)"
    ):
        TRANSFORMS[transform](loss)(W, BLOCKS)


def test_without_types_the_boundary_sums():
    f = scaled(lambda w, x, ct: (ct * x, ct * w))
    body = lambda w, x: psum(f(w, x).sum(), ("i", "j")) / 2  # noqa: E731
    loss = spmd.shard_map(body, mesh=PLANE, in_specs=(P(), P("i")), out_specs=P(), check_rep=False)
    np.testing.assert_array_equal(md.grad(loss)(W, BLOCKS), [2.0, 4.0])


def test_a_leaked_value_among_residuals_is_said_to_have_leaked():
    stored = []
    md.grad(lambda x: stored.append(x) or x)(1.0)
    f = md.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, stored[0]), lambda _, ct: (ct,))
    with pytest.raises(md.LeakedTracerError, match="used outside the transformation"):
        md.grad(f)(2.0)


def test_a_function_without_results_has_a_backward_rule():
    f = md.custom_vjp(lambda x: ())
    f.defvjp(lambda x: ((), x), lambda x, ct: (0 * x,))
    gradient = md.grad(lambda x: (f(x), np.sum(x**3))[1])
    np.testing.assert_array_equal(gradient(np.ones(2)), [3.0, 3.0])
