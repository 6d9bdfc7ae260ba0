"""Rules of `custom_jvp` and `custom_vjp`, in every place where a function may stand; `custom_rules.md` has the rest."""

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
    check_meaning(BODIES[body](RULED[kind]), BODIES[body](step), ARGS, ["grad"], ["run", "jit", "of jit"])


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


@pytest.mark.parametrize("name", control_programs.BODIES)
def test_cotangents_are_summed_by_the_rule_in_bodies_too(name):
    in_body, meaning = control_programs.BODIES[name]
    args = np.array([2.0, 3.0]), np.arange(8.0) / 4
    plain = control_programs.loss_in_body(control_programs.modulated, meaning, mesh(2, 2))
    loss = control_programs.loss_in_body(control_programs.modulated_by_rules(), in_body, mesh(2, 2))
    gradient, expected = md.grad(loss, (0, 1)), md.tree.leaves(md.grad(plain, (0, 1))(*args))
    for run in (gradient, md.jit(gradient), md.grad(md.jit(loss), (0, 1)), md.make_tape(gradient)(*args)):
        assert_trees_close(run(*args), expected)
