"""Derivative rules of `custom_jvp` and `custom_vjp`, in every place where a function may stand."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as mnp
from collectives import psum
from spmd import P
from tests.checks.meanings import ALL, FORWARD, REVERSE, RUNS, check_meaning
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import KINDS
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import control as control_programs

X = np.array([0.3, -0.7, 1.1])


def step(c, w):
    return np.sin(c) * w + 0.5 * c


def of_step(c, w):
    return np.cos(c) * w + 0.5, np.sin(c)


def declared(kind, f, jvp, vjp):
    """The function with a rule of its kind: `jvp(x, t)` and `vjp(x, ct)` of all arguments."""
    f = kind(f)
    if kind is md.custom_jvp:
        f.defjvp(lambda p, t: (f(*p), jvp(p, t)))
    elif kind is md.custom_vjp:
        f.defvjp(lambda *args: (f(*args), args), vjp)
    return f


def with_jvps(f):
    f.defjvps(lambda t, out, c, w: of_step(c, w)[0] * t, lambda t, out, c, w: of_step(c, w)[1] * t)
    return f


def by_vjp():
    f = md.custom_vjp(step)
    of_saved = lambda saved, ct: tuple(d * ct for d in of_step(saved["c"], saved["w"][0]))  # noqa: E731
    f.defvjp(lambda c, w: (step(c, w), {"c": c, "w": (w,)}), of_saved)
    return f


def by_batching():
    f = md.custom_vmap(step)
    f.def_vmap(lambda n, batched, *args: (md.vmap(step, [0 if b else None for b in batched])(*args), True))
    return f


RULED = {
    "batching": by_batching(),
    "jvp": declared(md.custom_jvp, step, lambda x, t: sum(d * t for d, t in zip(of_step(*x), t)), None),
    "jvps": with_jvps(md.custom_jvp(step)),
    "vjp": by_vjp(),
    "vjp of itself": declared(md.custom_vjp, step, None, lambda x, ct: tuple(d * ct for d in of_step(*x))),
    "both": with_jvps(by_vjp()),
}
TWO = np.array([0.5, 2.0])


def sharded_rows(f):
    body = lambda c, w: md.scan(lambda c, _: (f(c, w) + psum(c, "i"), None), c, length=2)[0]  # noqa: E731
    return mapped(body, mesh(3), (P("i"), P("i")), P("i"))


# What runs a function like `step` in a body, as a function like `step`.
BODIES = {
    "itself": lambda f: f,
    "scan": lambda f: lambda c, w: md.scan(lambda c, k: (f(c, w) * k, f(k * w, c)), c, TWO)[0],
    "scan, reverse": lambda f: lambda c, w: md.scan(lambda c, k: (c, f(c, w) * k), c, TWO, reverse=True)[1].sum(0),
    "scan over its argument": lambda f: lambda c, w: md.scan(lambda c, w: (f(c, w), c), c, mnp.stack([w, c]))[0],
    "scan of what all steps share": lambda f: lambda c, w: md.scan(lambda s, _: (s + f(c, w), s), 0 * c, length=2)[0],
    "fori_loop": lambda f: lambda c, w: md.fori_loop(0, 2, lambda i, c: f(c, w) + i, c),
    "cond": lambda f: lambda c, w: md.cond(c.sum() > 0, f, lambda c, w: c * w, c, w),
    "switch": lambda f: lambda c, w: md.switch((w.sum() > 9).astype(int), [lambda: f(c, f(w, c)), lambda: w]),
    "checkpoint": lambda f: md.checkpoint(lambda c, w: f(f(c, w), w)),
    "jit": lambda f: lambda c, w: md.jit(lambda c: f(f(c, w), w))(c),
    "tape": lambda f: lambda c, w: md.make_tape(f)(c, w)(c, w)[0],
    "vmap": lambda f: lambda c, w: md.vmap(f, (0, None))(mnp.stack([c, 2 * c]), w)[1],
    "vmap over elements": lambda f: lambda c, w: md.vmap(f)(c, w),
    "vmap of vmap": lambda f: lambda c, w: md.vmap(md.vmap(f, (None, 0)), (0, None))(c, w).sum(0),
    "grad": lambda f: lambda c, w: md.grad(lambda c: f(c, w).sum())(c),
    "shard_map": sharded_rows,
}


#: Kinds of derivatives that a rule serves: backward ones no forward mode, and those of batches no reverse mode.
SERVES = dict.fromkeys(RULED, ALL) | {"vjp": ("value", "vmap", *REVERSE, "jvp of grad"), "vjp of itself": REVERSE}
SERVES |= {"batching": (*FORWARD, "grad of vmap")}
ARGS = X, X**2 - 0.5


@pytest.mark.parametrize("kind", RULED)
def test_rules_may_replace_those_of_operations(kind):
    check_meaning(RULED[kind], step, ARGS, SERVES[kind])
    check_meaning(RULED[kind], step, ARGS, [*{"jvp", "grad", "vmap of grad"}.intersection(SERVES[kind])], RUNS)
    for other in {*ALL} - {*SERVES[kind], "value", "vmap"} - {"jvp of grad"}:
        with pytest.raises(TypeError):
            KINDS[other](RULED[kind], md.vmap)(X, X)


@each("kind", ["jvp", "vjp"])
@each("body", BODIES)
def test_rules_serve_in_bodies(kind, body):
    check_meaning(BODIES[body](RULED[kind]), BODIES[body](step), ARGS, ["grad"], RUNS)


@each("of", ["jvp", "linearize", "grad of jvp"])
@each("body", ["scan", "vmap", "checkpoint", "jit"])
def test_backward_rules_do_not_serve_forward_mode_in_bodies(body, of):
    with pytest.raises(TypeError):
        KINDS[of](BODIES[body](RULED["vjp"]), md.vmap)(X, X)


# With maps over ranks they are nested in `test_nesting`: not every choice is one that ranks agree about.
TWO_BODIES = st.lists(st.sampled_from([name for name in BODIES if name != "shard_map"]), min_size=1, max_size=2)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["jvp", "vjp", "both"]), TWO_BODIES, st.sampled_from([*RUNS]), st.data())
def test_rules_in_any_two_bodies(kind, bodies, run, data):
    f, meaning = (functools.reduce(lambda f, name: BODIES[name](f), bodies, f) for f in (RULED[kind], step))
    check_meaning(f, meaning, ARGS, [data.draw(st.sampled_from(SERVES[kind]))], [run])


@each("around", [lambda f: f, lambda f: md.jit(lambda x: f(x)), lambda f: lambda x: md.vmap(f)(mnp.stack([x, x]))[1]])
def test_each_mode_takes_its_rule_and_no_other(around):
    """Rules that are no derivatives of the function, and functions that do not run: the rule stands for them."""
    f = md.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, None), lambda _, ct: (10.0 * ct,))
    f.defjvp(lambda primals, tangents: (primals[0] ** 2, 20.0 * tangents[0]))
    assert md.grad(around(f))(3.0) == 10.0
    assert md.jvp(around(f), (3.0,), (1.0,)) == (9.0, 20.0)
    assert md.linearize(around(f), 3.0)[1](1.0) == 20.0
    g = md.custom_jvp(lambda x: x**2)
    g.defjvp(lambda primals, tangents: (primals[0] ** 2, 10.0 * tangents[0]))
    assert (md.grad(around(g))(3.0), md.grad(md.grad(around(g)))(3.0)) == (10.0, 0.0)


def test_rules_may_return_python_numbers_for_any_precision():
    double = md.custom_jvp(lambda x: x * 2)
    double.defjvp(lambda primals, tangents: (double(*primals), 2.0))
    x = np.float32(3)
    assert md.jvp(double, (x,), (x,))[1].dtype == np.float32
    double = md.custom_vjp(lambda x: x * 2)
    double.defvjp(lambda x: (double(x), None), lambda residuals, ct: (2.0,))
    assert md.grad(double)(x).dtype == np.float32


@each("body", ["scan", "fori_loop", "cond", "switch", "vmap"])
def test_a_backward_rule_that_is_not_linear(body):
    """No other rule can stand for it."""
    clipped = md.custom_vjp(lambda c, w: c)
    clipped.defvjp(lambda c, w: (c, None), lambda _, ct: (np.clip(ct, -1.0, 1.0), None))
    f = BODIES[body](clipped)
    g = md.grad(lambda c: 5.0 * np.sum(f(c, X)))
    np.testing.assert_array_equal(md.jit(g)(X), g(X))
    assert 0 < np.abs(g(X)).max() <= 2


def test_a_derivative_with_a_backward_rule_is_linear_in_tangents_alone():
    push = lambda x, t: md.vmap(lambda x: md.jvp(RULED["vjp"], (x, x), (t, t))[1])(x)  # noqa: E731
    plainly = lambda x, t: md.vmap(lambda x: md.jvp(step, (x, x), (t, t))[1])(x)  # noqa: E731
    tape, expected = md.make_tape(push)(X, 1.0), md.make_tape(plainly)(X, 1.0)
    assert "linear_call" in str(tape)
    np.testing.assert_allclose(md.transpose(tape, 1)(X, X), md.transpose(expected, 1)(X, X))
    with pytest.raises(TypeError, match=r"derivative of step is linear in its tangents"):
        md.transpose(tape, 0)


# ---------------------------------------------------------------- what no mapped argument affects


def meaning(x, y):
    return np.sin(x) * y, y * y


def of_meaning(p, t):
    return np.cos(p[0]) * p[1] * t[0] + np.sin(p[0]) * t[1], 2 * p[1] * t[1]


def back(p, ct):
    return ct[0] * np.cos(p[0]) * p[1], ct[0] * np.sin(p[0]) + 2 * ct[1] * p[1]


AFFECTED, BACKWARD = declared(md.custom_jvp, meaning, of_meaning, None), declared(md.custom_vjp, meaning, None, back)


@each("f", [AFFECTED, BACKWARD, md.checkpoint(meaning)])
def test_results_that_no_mapped_argument_affects(f):
    """They have no batch axis: `vmap` takes out_axes=None for them, also where a rule is differentiated."""
    both = lambda f: md.vmap(f, (0, None), (0, None))  # noqa: E731
    plain = lambda xs, y: (np.stack([meaning(x, y)[0] for x in xs]), y * y)  # noqa: E731
    args, kinds = (X, np.array(1.5)), ("value", "grad") if f is BACKWARD else ("value", "grad", "jvp")
    check_meaning(both(f), plain, args, kinds, ["run", "jit"])
    check_meaning(md.vmap(both(f), (0, None), (0, None)), plain, (np.stack([X, X]), args[1]), ["value"], ["run", "jit"])


@each("kind", [md.custom_jvp, md.custom_vjp])
@each("run", [lambda f: f, md.jit])
def test_derivatives_with_respect_to_mapped_arguments_that_the_value_does_not_use(kind, run):
    """A rule such as of a straight-through estimator: each element of the batch has a derivative of its own."""
    rules = (lambda p, t: p[1] * t[1]), lambda p, ct: (0.0 * ct, p[1] * ct)
    f, depends = declared(kind, lambda value, x: value, *rules), declared(kind, lambda v, x: v + 0.0 * x, *rules)
    weights, x = np.array([1.0, 10.0, 100.0]), np.array([3.0, 4.0, 5.0])
    total = lambda x, f=f: (weights * md.vmap(f, (None, 0))(2.0, x)).sum()  # noqa: E731
    assert_trees_close(run(md.value_and_grad(total))(x), (222.0, weights * x))
    assert_trees_close(run(md.vmap(md.grad(total)))(np.stack([x, -x])), np.stack([weights * x, -weights * x]))
    if kind is md.custom_jvp:
        assert_trees_close(run(lambda: md.jvp(total, (x,), (weights,)))(), (222.0, (weights**2 * x).sum()))
    with pytest.raises(TypeError):
        md.grad(md.jit(total))(x)
    assert_trees_close(md.grad(md.jit(lambda x: total(x, depends)))(x), weights * x)


# ---------------------------------------------------------------- what rules close over


def closing(kind, y, within=lambda f: f):
    times_y = within(lambda x: x * y)
    return declared(kind, lambda x: times_y(x), lambda p, t: times_y(t[0]), lambda _, ct: (times_y(ct),))


def in_a_body(f):
    return mapped(f, mesh(2, 2), P("i"), P("i"))(np.arange(4.0))


def in_a_loop(c):
    return lambda x: md.scan(lambda s, _: (c(x)(s), None), x, length=2)[0]


CLOSING = {
    "constant": lambda c: md.grad(lambda y: c(y)(2.0))(3.0),
    "itself": lambda c: md.grad(lambda y: c(y)(y))(3.0),
    "staged": lambda c: md.make_tape(md.grad(lambda y: c(y)(y)))(3.0),
    "vmap": lambda c: md.grad(lambda y: md.vmap(c(y))(X).sum())(3.0),
    "in vmap": lambda c: md.vmap(md.grad(lambda y: c(y)(y)))(X),
    "tape": lambda c: md.grad(lambda y: md.make_tape(lambda x: c(y)(x))(2.0)(y)[0])(3.0),
    "in a body": lambda c: md.grad(lambda y: np.sum(in_a_body(lambda x: c(y)(x))))(3.0),
    "in a loop": lambda c: md.grad(in_a_loop(c))(3.0),
    "in a loop, jit of grad": lambda c: md.jit(md.grad(in_a_loop(c)))(3.0),
    "in a loop, grad of jit": lambda c: md.grad(md.jit(in_a_loop(c)))(3.0),
    "in a loop, grad of checkpoint": lambda c: md.grad(md.checkpoint(in_a_loop(c)))(3.0),
}


@each("kind", [md.custom_jvp, md.custom_vjp])
@each("within", [lambda f: f, md.checkpoint])
@each("use", CLOSING)
def test_rules_do_not_differentiate_what_they_close_over(kind, within, use):
    """They say so, wherever they are: no term is lost in silence."""
    with pytest.raises(TypeError, match="closes over"):
        CLOSING[use](functools.partial(closing, kind, within=within))


@each("kind", [md.custom_jvp, md.custom_vjp])
def test_rules_may_close_over_what_is_not_differentiated(kind):
    assert md.grad(lambda x: closing(kind, 3.0)(x))(2.0) == 3.0
    np.testing.assert_array_equal(md.vmap(lambda y: closing(kind, y)(2.0))(X), 2 * X)
    np.testing.assert_array_equal(md.vmap(lambda y: md.grad(closing(kind, y))(2.0))(X), X)
    np.testing.assert_allclose(md.grad(lambda x: md.vmap(lambda y: closing(kind, y)(x))(X).sum())(2.0), X.sum())
    assert md.make_tape(lambda y: md.grad(closing(kind, y))(2.0))(3.0)(5.0) == [5.0]
    f = lambda x, ys: md.scan(lambda c, y: (closing(kind, y)(c), None), x, ys)[0]  # noqa: E731
    assert md.grad(f)(1.0, X) == pytest.approx(X.prod())


# ---------------------------------------------------------------- on ranks

PLANE = (P(), P("i"))


@each("run", [lambda f: f, lambda f: lambda *args: md.make_tape(f)(*args)(*args)])
def test_rules_sum_over_ranks_and_results_are_pbroadcast(run):
    def gradient(f):
        body = lambda w, x: psum((y := f(w, x)).sum(), tuple(md.typeof(y).variance) or "i")  # noqa: E731
        return run(md.grad(mapped(body, mesh(2, 2), PLANE, P()), (0, 1)))(np.array([2.0, 3.0]), np.arange(4.0))

    summed = md.custom_jvp(lambda w, x: psum(w * x, "i"))
    summed.defjvp(lambda p, t: (psum(p[0] * p[1], "i"), psum(p[0] * t[1] + t[0] * p[1], "i")))
    # each of two ranks counts it once more
    assert_trees_close(gradient(summed), (np.array([4.0, 8.0]), np.array([4.0, 6.0, 4.0, 6.0])))
    varying = md.custom_jvp(lambda w, x: psum(w * x, "i"))
    varying.defjvp(lambda p, t: (p[0] * p[1], t[0]))
    np.testing.assert_array_equal(gradient(varying)[0], [2.0, 2.0])


@pytest.mark.parametrize("name", control_programs.BODIES)
def test_cotangents_are_summed_by_the_rule_in_bodies_too(name):
    in_body, meaning = control_programs.BODIES[name]
    args = np.array([2.0, 3.0]), np.arange(8.0) / 4
    plain = control_programs.loss_in_body(control_programs.modulated, meaning, mesh(2, 2))
    loss = control_programs.loss_in_body(control_programs.modulated_by_rules(), in_body, mesh(2, 2))
    gradient, expected = md.grad(loss, (0, 1)), md.tree.leaves(md.grad(plain, (0, 1))(*args))
    for run in (gradient, md.jit(gradient), md.grad(md.jit(loss), (0, 1)), md.make_tape(gradient)(*args)):
        assert_trees_close(run(*args), expected)


@each("of", [md.grad, lambda f: md.jit(md.grad(f)), lambda f: md.grad(md.jit(f)), lambda f: md.grad(md.checkpoint(f))])
def test_cotangents_that_no_rule_has_summed(of):
    """In loops too: an error, or the boundary sums where there are no types."""
    f = declared(md.custom_vjp, lambda w, x: w * x, None, lambda p, ct: (ct * p[1], ct * p[0]))
    body = lambda w, x: psum(md.scan(lambda c, _: (f(w, c), None), x, length=1)[0].sum(), ("i", "j")) / 2  # noqa: E731
    args = np.array([2.0, 3.0]), np.arange(4.0)
    with pytest.raises(md.VarianceError):
        of(mapped(body, mesh(2, 2), PLANE, P()))(*args)
    np.testing.assert_array_equal(of(mapped(body, mesh(2, 2), PLANE, P(), check_rep=False))(*args), [2.0, 4.0])


@each("forward", [lambda w, x: w * x, lambda w, x: w * 0.0])
def test_a_rule_of_a_recorded_function_may_vary_less(forward):
    f = md.custom_vjp(lambda w, x: w * x)
    f.defvjp(lambda w, x: (forward(w, x), (w, x)), lambda r, ct: (psum(ct * r[1], "i"), ct * r[0]))
    loss = md.jit(mapped(lambda w, x: psum(f(w, x).sum(), "i"), mesh(2, 2), PLANE, P()))
    np.testing.assert_array_equal(md.grad(loss)(np.array([2.0, 3.0]), np.arange(4.0)), [2.0, 4.0])
