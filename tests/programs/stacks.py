"""Transformations as layers: each makes a function of two vectors out of another one.

It takes a derivative, or it is a detour that changes nothing (a checkpoint, a compilation, the mean over ranks that all
compute the same).
"""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmean, psum
from spmd import P
from tests.checks.meshes import mesh

N = 3
V = np.array([0.5, -1.0, 0.25])
A = np.sin(np.arange(9.0)).reshape(3, 3)

# ---------------------------------------------------------------- functions of two vectors


def of_tree(x, c):
    def inner(tree):
        return {"y": np.sin(tree["x"]) * tree["c"], "z": (tree["x"][0] ** 2, np.tanh(tree["c"]))}

    out = inner({"x": x, "c": c})
    return out["y"] + out["z"][0] * out["z"][1]


def with_closure(x, c):
    return np.stack([np.cos(t * c[1]) + c[0] for t in x]) * c


BASES = {
    "products": lambda x, c: np.sin(x) * c + 0.5 * x[::-1] * np.sum(c),
    "matrix": lambda x, c: np.tanh(A @ x * c) + c * c,
    "tree": of_tree,
    "closure": with_closure,
    "pieces": lambda x, c: np.where(x > 0, np.exp(0.5 * x) * c, np.abs(x) + c**3),
    "updates": lambda x, c: np.concatenate([x[1:] * c[0], np.cos(x[:1])]) + np.at(x * c)[1].set(c[2] * x[0]),
}

# ---------------------------------------------------------------- layers: what is tested, and what it must be


def ranks(f):
    mapped = spmd.shard_map(lambda y, c: psum(f(y, c), ("i", "j")) / 4, mesh=mesh(2, 2), in_specs=P(), out_specs=P())
    return lambda x, c: mapped(x, c)


def ranks_closing_over(f):
    # Each rank has c for itself: a derivative in it, in the body, is that of this rank alone.
    def g(x, c):
        body = lambda y: pmean(f(y[0], pbroadcast(c, "i")), "i")  # noqa: E731
        return spmd.shard_map(body, mesh=mesh(2, 2), in_specs=P("i"), out_specs=P())(np.stack([x, x]))

    return g


def ranks_along_one_axis(f):
    """Leaving the other axis to one inside. All ranks have x and c alike, and a share of the result."""
    body = lambda x, c: psum(f(x, c) * (1 + axis_index("i")) / 3, "i")  # noqa: E731
    return lambda x, c: spmd.shard_map(body, mesh=mesh(2, 2), in_specs=P(), out_specs=P(), axis_names={"i"})(x, c)


def sharded_result(f):
    def g(x, c):
        body = lambda y: f(y[0], pbroadcast(c, ("i", "j")))[None]  # noqa: E731
        return spmd.shard_map(body, mesh=mesh(2, 2), in_specs=P(("i", "j")), out_specs=P(("i", "j")))(
            np.stack([x] * 4)
        )[2]

    return g


def with_jvp(f):
    g = md.custom_jvp(lambda x, c: f(x, c))
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return lambda x, c: g(x, c)


def with_vjp(f):
    g = md.custom_vjp(lambda x, c: f(x, c))
    g.defvjp(lambda x, c: (f(x, c), (x, c)), lambda xc, ct: md.vjp(f, *xc)[1](ct))
    return lambda x, c: g(x, c)


def with_both_rules(f):
    g = md.custom_vjp(lambda x, c: f(x, c))
    g.defvjp(lambda x, c: (f(x, c), (x, c)), lambda xc, ct: md.vjp(f, *xc)[1](ct))
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return lambda x, c: g(x, c)


def steps(f, n):
    def g(x, c):
        for _ in range(n):
            x = 0.5 * f(x, c)
        return x

    return g


def jacobian(f, x, c):
    """By forward mode, column by column."""
    return np.stack([md.jvp(lambda y: f(y, c), (x,), (e,))[1] for e in np.eye(N)], -1)


def plain_grad(f, x):
    return np.stack([md.jvp(f, (x,), (e,))[1] for e in np.eye(N)])


def unless(f, x, c):
    return f(x, c) if (x * x).sum() > 0.5 else -f(x, c) * c


def while_some(f):
    def body(state):
        n, y, c = state
        return n + 1, 0.5 * f(y, c), c

    return lambda x, c: md.while_loop(lambda state: state[0] < 2, body, (0, x, c))[1]


def named(f):
    def program(*args):
        return f(*args)

    return program


def same(f):
    return f


LAYERS = {
    # ways around
    "checkpoint": (md.checkpoint, same),
    "jit": (lambda f: md.jit(named(f)), same),
    "jit, closed over": (lambda f: lambda x, c: md.jit(named(lambda y: f(y, c)))(x), same),
    "tape": (lambda f: lambda x, c: md.make_tape(f)(x, c)(x, c)[0], same),
    "tape, closed over": (lambda f: lambda x, c: md.make_tape(lambda y: f(y, c))(x)(x)[0], same),
    "vmap, closed over": (lambda f: lambda x, c: md.vmap(lambda y: f(y, c), 1, 1)(np.stack([x, -x], 1))[:, 0], same),
    "named vmap": (
        lambda f: lambda x, c: md.vmap(lambda y: pmean(f(y, c), "v"), axis_name="v")(np.stack([x, x]))[1],
        same,
    ),
    "shard_map": (ranks, same),
    "shard_map, closed over": (ranks_closing_over, same),
    "shard_map, mapped": (sharded_result, same),
    "shard_map along i": (ranks_along_one_axis, same),
    "custom_jvp": (with_jvp, same),
    "custom_vjp": (with_vjp, same),
    "custom_vjp with both rules": (with_both_rules, same),
    "scan": (
        lambda f: lambda x, c: md.scan(lambda y, d: (0.5 * f(y, d), y), x, np.stack([c, c]))[0],
        lambda f: steps(f, 2),
    ),
    "scan, closed over": (lambda f: lambda x, c: md.scan(lambda y, _: (y, f(y, c)), x, length=2)[1][1], same),
    "fori_loop": (lambda f: lambda x, c: md.fori_loop(0, 2, lambda i, y: 0.5 * f(y, c), x), lambda f: steps(f, 2)),
    "while_loop": (while_some, lambda f: steps(f, 2)),
    "cond": (
        lambda f: lambda x, c: md.cond((x * x).sum() > 0.5, f, lambda y, d: -f(y, d) * c, x, c),
        lambda f: lambda x, c: unless(f, x, c),
    ),
    "cond, closed over": (
        lambda f: lambda x, c: md.cond((x * x).sum() > 0.5, lambda: f(x, c), lambda: -f(x, c) * c),
        lambda f: lambda x, c: unless(f, x, c),
    ),
    # derivatives
    "grad": (
        lambda f: lambda x, c: md.grad(lambda y: f(y, c).sum())(x),
        lambda f: lambda x, c: plain_grad(lambda y: f(y, c).sum(), x),
    ),
    "grad in what is closed over": (
        lambda f: lambda x, c: md.grad(lambda d: f(x, d).sum())(c),
        lambda f: lambda x, c: plain_grad(lambda d: f(x, d).sum(), c),
    ),
    "grad in both": (
        lambda f: lambda x, c: sum(md.grad(lambda y, d: f(y, d).sum(), (0, 1))(x, c)),
        lambda f: lambda x, c: plain_grad(lambda y: f(y, c).sum(), x) + plain_grad(lambda d: f(x, d).sum(), c),
    ),
    "jvp": (lambda f: lambda x, c: md.jvp(f, (x, c), (c, V))[1], lambda f: lambda x, c: md.jvp(f, (x, c), (c, V))[1]),
    "linearize": (
        lambda f: lambda x, c: md.linearize(lambda y: f(y, c), x)[1](c),
        lambda f: lambda x, c: jacobian(f, x, c) @ c,
    ),
    "vjp": (lambda f: lambda x, c: md.vjp(lambda y: f(y, c), x)[1](c)[0], lambda f: lambda x, c: c @ jacobian(f, x, c)),
    "jacfwd": (lambda f: lambda x, c: md.jacfwd(f)(x, c) @ V, lambda f: lambda x, c: jacobian(f, x, c) @ V),
    "jacrev": (lambda f: lambda x, c: md.jacrev(f)(x, c) @ c, lambda f: lambda x, c: jacobian(f, x, c) @ c),
    "hessian": (
        lambda f: lambda x, c: md.hessian(lambda y: f(y, c).sum())(x) @ c,
        lambda f: lambda x, c: md.jvp(lambda y: plain_grad(lambda z: f(z, c).sum(), y), (x,), (c,))[1],
    ),
    "hvp": (
        lambda f: lambda x, c: md.hvp(lambda y: f(y, c).sum(), (x,), (c,)),
        lambda f: lambda x, c: md.jvp(lambda y: plain_grad(lambda z: f(z, c).sum(), y), (x,), (c,))[1],
    ),
}
