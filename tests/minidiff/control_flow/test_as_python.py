"""Programs of control flow against the same programs with Python's own: values, derivatives, batches, compiled."""

import functools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meanings import ALL, FORWARD, check_meaning
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.control import ARGS, RANKS, AtOnce, Unrolled, on_ranks

rng = np.random.default_rng(0)
W = rng.normal(size=(3, 3)) / 2
XS = rng.normal(size=(4, 3))
X = rng.normal(size=3)

# ---------------------------------------------------------------- programs: `f(lax, *args)`, of `md` or `Unrolled`


def rnn(lax, w, h, xs):
    return lax.scan(lambda h, x: (np.tanh(w @ h + x), h[0] * x), h, xs)


def closed_over(lax, w, h):
    scale = np.sin(w)
    return lax.scan(lambda h, x: (np.tanh(scale @ h) + x * w[0], np.cos(w).sum()), h, XS)


def reverse_scan(lax, h, xs):
    return lax.scan(lambda h, x: (np.sin(h * x["a"]) + x["b"], {"y": h}), h, {"a": xs, "b": xs**2}, reverse=True)


def counting(lax, x):
    """Integer carries, and a carry that passes through."""
    step = lambda c, _: ((c[0] + 1, c[1] * c[2][0] + c[0], c[2]), c[0] * c[1])  # noqa: E731
    return lax.scan(step, (0, x.sum(), x), None, length=4)


def nested_scans(lax, w, xs):
    def row(total, x):
        inner, _ = lax.scan(lambda c, v: (np.tanh(c * v + w[1]), None), total, x)
        return inner, inner * x

    return lax.scan(row, w[0], xs)


def cond_in_scan(lax, x, xs):
    def step(c, v):
        c = lax.cond(v.sum() > 0, lambda c: np.sin(c) * v, lambda c: c * x, c)
        return c, c.sum()

    return lax.scan(step, x, xs)


def scan_in_cond(lax, x, xs):
    loop = lambda x: lax.scan(lambda c, v: (np.sin(c) * v, c), x, xs)[0]  # noqa: E731
    return lax.cond(xs.sum() > 0, loop, lambda x: x**2, x), lax.cond(xs.sum() > 0, lambda x: x * xs[0], loop, x)


def plain_cond(lax, pred, x, y):
    return lax.cond(pred, lambda x, y: (np.sin(x) * y, x), lambda x, y: (x * 2.0, np.exp(y) * x), x, y)


def cond_of_constants(lax, x, y):
    """One branch does not depend on an operand, the other on nothing at all."""
    first = lax.cond(x.sum() > 0, lambda: np.sin(y) * y, lambda: np.ones(3))
    return first, lax.cond(x.sum() > 0, lambda: 1.0, lambda: x.sum())


def switches(lax, k, x):
    branches = [lambda x: np.sin(x), lambda x: x * x, lambda x: np.ones(3), lambda x: x.sum() * x]
    return [lax.switch(k + i, branches, x) for i in range(-1, 4)]


def newton(lax, x):
    """The square root, to convergence."""
    return lax.while_loop(lambda r: abs(r * r - x).max() > 1e-13, lambda r: (r + x / r) / 2, np.ones(3) * x.sum())


def counted(lax, n, x):
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, np.sin(s[1]) * x), (0, x))


def while_in_scan(lax, x, xs):
    step = lambda c, v: lax.while_loop(lambda c: (c * c).sum() < 3, lambda c: c * 1.5 + x, c * v)  # noqa: E731
    return lax.scan(lambda c, v: (step(c, v), None), x, xs)


def derivatives_at_each_level(lax, a, xs):
    """Inner derivatives in bodies, of variables of the body, of the loop around it, and of the function around that."""

    def outer(c, x):
        g = lambda b: lax.scan(lambda d, y: (np.sin(d * a[0]) * b + c * y, None), b, xs)[0]  # noqa: E731
        slope = md.grad(g)(x) + md.jvp(g, (x,), (1.0,))[1]
        return lax.cond(x > 0, lambda c: c * slope * a[0], lambda c: c + slope, c), slope

    return lax.scan(outer, a[1], xs)


def vmap_inside(lax, w, xs):
    choose = lax.vmap(lambda v: lax.cond(v > 0, np.sin, lambda v: v * w[1], v))
    return lax.scan(lambda c, x: (choose(c) * x, None), w * np.ones(3), xs)[0]


def shard_map_in_a_loop(lax, x):
    double = spmd.shard_map(lambda x: x * np.sin(x), mesh=mesh(2), in_specs=P("i"), out_specs=P("i"))
    return lax.scan(lambda c, _: (double(c) * 1.0, None), np.concatenate([x, x[:1]]), None, length=2)[0]


#: Programs, and their arguments; of those in `WHILE` there is no reverse mode.
PROGRAMS = {
    "scan": (rnn, (W, X, XS)),
    "closed over": (closed_over, (W, X)),
    "reverse": (reverse_scan, (X, XS)),
    "integer carry": (counting, (X,)),
    "empty carry": (lambda lax, xs: lax.scan(lambda c, x: ((), np.sin(x) * x[0]), (), xs), (XS,)),
    "no ys": (lambda lax, x: lax.scan(lambda x, _: (np.sin(x) * x, None), x, None, length=3), (X,)),
    "python numbers": (lambda lax, x: lax.scan(lambda c, t: ((c[0] + 1.0, c[1] * t), c[0]), (0.0, 1), x), (X,)),
    "nested scans": (nested_scans, (X, XS)),
    "cond in scan": (cond_in_scan, (X, XS)),
    "scan in cond": (scan_in_cond, (X, XS)),
    "scan in cond, the other way": (scan_in_cond, (X, -XS)),
    "cond, true": (plain_cond, (True, X, X + 1)),
    "cond of a number": (plain_cond, (0.0, X, X + 1)),
    "cond of constants": (cond_of_constants, (abs(X), X)),
    "cond of constants, false": (cond_of_constants, (-abs(X), X)),
    "one operand twice": (lambda lax, x: lax.cond(x[0] > 0, np.multiply, lambda a, b: a * a * b, x, x), (X,)),
    "switch": (switches, (1, X)),
    "fori_loop": (lambda lax, x: lax.fori_loop(1, 4, lambda i, c: np.sin(c) * x + i, x), (X,)),
    "derivatives at each level": (derivatives_at_each_level, (X[:2], XS[0, :2])),
    "vmap inside": (vmap_inside, (X, XS[0])),
    "shard_map in a loop": (shard_map_in_a_loop, (X,)),
}
WHILE = {
    "while_loop": (newton, (abs(X) + 0.5,)),
    "counted while_loop": (counted, (3, X)),
    "fori_loop, traced bounds": (lambda lax, n, x: lax.fori_loop(0, n, lambda i, c: np.sin(c) * x + i, x), (3, X)),
    "while_loop in scan": (while_in_scan, (abs(X), abs(XS))),
}

# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", PROGRAMS | WHILE)
def test_derivatives_and_batches(name):
    f, args = (PROGRAMS | WHILE)[name]
    kinds = ALL if name in PROGRAMS else FORWARD
    of = functools.partial(check_meaning, functools.partial(f, md), functools.partial(f, Unrolled), args)
    of(kinds)
    of([kind for kind in ("jvp", "vmap", "grad", "vmap of grad") if kind in kinds], ["tape", "of jit"])


@each("name", PROGRAMS | WHILE)
@each("lax", [md, AtOnce(3), AtOnce(True)], ["md", "3 at once", "all at once"])
def test_values_and_types(name, lax):
    f, args = (PROGRAMS | WHILE)[name]
    expected = f(Unrolled, *args)
    for run in (lambda *args: f(lax, *args), md.jit(lambda *args: f(lax, *args))):
        actual = run(*args)
        assert md.tree.map(md.typeof, actual) == md.tree.map(md.typeof, expected)
        assert_trees_close(actual, expected)
    if name in PROGRAMS and lax is not md:
        check_meaning(functools.partial(f, lax), functools.partial(f, Unrolled), args, ["grad"], ["jit"])


@pytest.mark.parametrize("name", RANKS)
@each("check_rep", [True, False], ids=["typed", "untyped"])
def test_in_bodies_of_ranks(name, check_rep):
    f, at_once, meaning = (
        on_ranks(RANKS[name], lax, mesh(2, 2), check_rep=check_rep) for lax in (md, AtOnce(2), Unrolled)
    )
    kinds = ("value", "jvp", "vmap") + ("grad", "vmap of grad", "grad of grad") * (name != "while_loop")
    check_meaning(f, meaning, ARGS, kinds)
    check_meaning(f, meaning, ARGS, kinds[:4:3], ["tape", "jit", "of jit"])
    check_meaning(at_once, meaning, ARGS, kinds[:4:3])
