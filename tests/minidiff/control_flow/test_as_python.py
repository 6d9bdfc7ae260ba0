"""Programs of control flow against the same programs with Python's own: values, derivatives, batches, compiled."""

import functools

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import check_each, each
from tests.programs.control import ARGS, RANKS, AtOnce, Unrolled, on_ranks, over_rows
from tests.programs.on_blocks import assert_trees_close

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


#: Name -> program, arguments, whether reverse mode takes it.
PROGRAMS = {
    "scan": (rnn, (W, X, XS), True),
    "closed over": (closed_over, (W, X), True),
    "reverse": (reverse_scan, (X, XS), True),
    "integer carry": (counting, (X,), True),
    "empty carry": (lambda lax, xs: lax.scan(lambda c, x: ((), np.sin(x) * x[0]), (), xs), (XS,), True),
    "no ys": (lambda lax, x: lax.scan(lambda x, _: (np.sin(x) * x, None), x, None, length=3), (X,), True),
    "python numbers": (lambda lax, x: lax.scan(lambda c, t: ((c[0] + 1.0, c[1] * t), c[0]), (0.0, 1), x), (X,), True),
    "nested scans": (nested_scans, (X, XS), True),
    "cond in scan": (cond_in_scan, (X, XS), True),
    "scan in cond": (scan_in_cond, (X, XS), True),
    "scan in cond, the other way": (scan_in_cond, (X, -XS), True),
    "cond, true": (plain_cond, (True, X, X + 1), True),
    "cond, false": (plain_cond, (False, X, X + 1), True),
    "cond of a number": (plain_cond, (2.0, X, X + 1), True),
    "cond of constants": (cond_of_constants, (abs(X), X), True),
    "cond of constants, false": (cond_of_constants, (-abs(X), X), True),
    "one operand twice": (
        lambda lax, x: lax.cond(x.sum() > 0, lambda a, b: np.sin(a) * b, lambda a, b: a * a * b, x, x),
        (X,),
        True,
    ),
    "switch": (switches, (1, X), True),
    "fori_loop": (lambda lax, x: lax.fori_loop(1, 4, lambda i, c: np.sin(c) * x + i, x), (X,), True),
    "derivatives at each level": (derivatives_at_each_level, (X[:2], XS[0, :2]), True),
    "vmap inside": (vmap_inside, (X, XS[0]), True),
    "shard_map in a loop": (shard_map_in_a_loop, (X,), True),
    "while_loop": (newton, (abs(X) + 0.5,), False),
    "counted while_loop": (
        lambda lax, n, x: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, np.sin(s[1]) * x), (0, x)),
        (3, X),
        False,
    ),
    "fori_loop, traced bounds": (
        lambda lax, n, x: lax.fori_loop(0, n, lambda i, c: np.sin(c) * x + i, x),
        (3, X),
        False,
    ),
    "while_loop in scan": (while_in_scan, (abs(X), abs(XS)), False),
}

# ---------------------------------------------------------------- properties


def random_like(x, seed=7):
    rng = np.random.default_rng(seed)
    return md.tree.map(lambda x: rng.normal(size=np.shape(x)), x)


def loss(f):
    """A scalar, not quadratic in anything."""

    def scalar(*args):
        outs = [x for x in md.tree.leaves(f(*args)) if md.typeof(x).dtype.kind == "f"]
        return sum((np.sin(x) * c).sum() for x, c in zip(outs, random_like([np.zeros(np.shape(x)) for x in outs], 3)))

    return scalar


def gradient(f, t):
    return md.grad(loss(f), tuple(range(len(t))))


def slope(f, t):
    """The derivative of a scalar function in the direction t, by its gradient."""
    return lambda *args: sum((g * v).sum() for g, v in zip(gradient(f, t)(*args), t))


def rows(args):
    return [np.stack([x, x + 0.1 * abs(y)]) for x, y in zip(args, random_like(args))]


def one_mapped(f, over, k, args):
    """A batch in one argument alone."""
    return over(lambda x: f(*args[:k], x, *args[k + 1 :]))(rows(args)[k])


#: What is computed of f, with tangents t like its arguments, and `vmap` or a loop.
FORWARD = {
    "value": lambda f, t, over: f,
    "jvp": lambda f, t, over: lambda *args: md.jvp(f, args, t),
    "jvp of jvp": lambda f, t, over: lambda *args: md.jvp(lambda *args: md.jvp(f, args, t)[1], args, t),
    "linearize": lambda f, t, over: lambda *args: md.linearize(f, *args)[1](*t),
    "vmap": lambda f, t, over: lambda *args: over(f)(*rows(args)),
    "vmap in one": lambda f, t, over: lambda *args: [one_mapped(f, over, k, args) for k in range(len(args))],
}
REVERSE = {
    "grad": lambda f, t, over: gradient(f, t),
    "forward over reverse": lambda f, t, over: lambda *args: md.jvp(gradient(f, t), args, t)[1],
    "reverse over reverse": lambda f, t, over: md.grad(slope(f, t), tuple(range(len(t)))),
    "reverse over forward": lambda f, t, over: md.grad(lambda *args: md.jvp(loss(f), args, t)[1], tuple(range(len(t)))),
    "vmap of grad": lambda f, t, over: lambda *args: over(gradient(f, t))(*rows(args)),
    "grad of vmap": lambda f, t, over: md.grad(lambda *args: over(loss(f))(*rows(args)).sum(), tuple(range(len(t)))),
}


def floats(f):
    """The function's results that have derivatives."""
    return lambda *args: [x for x in md.tree.leaves(f(*args)) if md.typeof(x).dtype.kind == "f"]


def check_properties(f, meaning, args, names, run):
    """Compare each property of f, run so, with that of its meaning; other arguments than arrays are constants."""
    moving = [i for i, x in enumerate(args) if isinstance(x, np.ndarray)]

    def of_moving(f):
        return floats(lambda *xs: f(*[xs[moving.index(i)] if i in moving else x for i, x in enumerate(args)]))

    arrays = [args[i] for i in moving]
    tangents = tuple(random_like(arrays))

    def check(property):
        expected = property(of_moving(meaning), tangents, over_rows)(*arrays)
        actual = run(property(of_moving(f), tangents, md.vmap), arrays)
        assert_trees_close(md.tree.leaves(actual), md.tree.leaves(expected))

    check_each((name, functools.partial(check, (FORWARD | REVERSE)[name])) for name in names)


RUNS = {
    "run": lambda f, args: f(*args),
    "tape": lambda f, args: md.make_tape(f)(*args)(*args),
    "jit": lambda f, args: md.jit(f)(*args),
}


@pytest.mark.parametrize("name", PROGRAMS)
@each("run", ["run", "tape", "of jit"])
def test_derivatives_and_batches(name, run):
    f, args, reverse = PROGRAMS[name]
    g = functools.partial(f, md)
    names = FORWARD | REVERSE if reverse else FORWARD
    check_properties(
        md.jit(g) if run == "of jit" else g, functools.partial(f, Unrolled), args, names, RUNS.get(run, RUNS["run"])
    )


@each("name", PROGRAMS)
@each("lax", [md, AtOnce(2), AtOnce(3), AtOnce(True)], ["md", "2 at once", "3 at once", "all at once"])
def test_values_and_types(name, lax):
    f, args, reverse = PROGRAMS[name]
    expected = f(Unrolled, *args)
    for run in (lambda *args: f(lax, *args), md.jit(lambda *args: f(lax, *args))):
        actual = run(*args)
        assert md.tree.map(md.typeof, actual) == md.tree.map(md.typeof, expected)
        assert_trees_close(actual, expected)
    if reverse and lax is not md:
        check_properties(functools.partial(f, lax), functools.partial(f, Unrolled), args, ["grad"], RUNS["jit"])


@pytest.mark.parametrize("name", RANKS)
@each("check_rep", [True, False], ids=["typed", "untyped"])
@each("run", [*RUNS, "of jit", "at once"])
def test_in_bodies_of_ranks(name, check_rep, run):
    f = on_ranks(RANKS[name], AtOnce(2) if run == "at once" else md, mesh(2, 2), check_rep=check_rep)
    meaning = on_ranks(RANKS[name], Unrolled, mesh(2, 2), check_rep=check_rep)
    names = ["value", "jvp", "vmap"] + ["grad", "vmap of grad", "reverse over reverse"] * (name != "while_loop")
    names = names[:4:3] if run == "at once" else names
    check_properties(md.jit(f) if run == "of jit" else f, meaning, ARGS, names, RUNS.get(run, RUNS["run"]))
