"""References for control flow, in Python, and programs of it on blocks, for simulated and MPI ranks."""

import functools

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, ppermute, psum
from spmd import P


class Unrolled:
    """References for the functions, in Python."""

    @staticmethod
    def cond(pred, true_fun, false_fun, *operands):
        return true_fun(*operands) if pred else false_fun(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)

    @staticmethod
    def while_loop(cond_fun, body_fun, init_val):
        while cond_fun(init_val):
            init_val = body_fun(init_val)
        return init_val

    @staticmethod
    def fori_loop(lower, upper, body_fun, init_val):
        for i in range(int(lower), int(upper)):
            init_val = body_fun(i, init_val)
        return init_val

    @staticmethod
    def scan(f, init, xs=None, length=None, reverse=False):
        length = md.tree.leaves(xs)[0].shape[0] if xs is not None else length
        ys = []
        for i in reversed(range(length)) if reverse else range(length):
            init, y = f(init, md.tree.map(lambda x, i=i: x[i], xs))
            ys.append(y)
        return init, md.tree.map(lambda *ys: np.stack(ys), *(ys[::-1] if reverse else ys))

    @staticmethod
    def vmap(f):
        return over_rows(f)


def over_rows(f):
    """Return the reference for `vmap`: a loop."""
    return lambda *args: md.tree.map(lambda *xs: np.stack(xs), *[f(*row) for row in zip(*args)])


class AtOnce:
    """`md`, with loops that are recorded several steps at once."""

    cond, switch, while_loop, vmap = map(staticmethod, (md.cond, md.switch, md.while_loop, md.vmap))

    def __init__(self, unroll):
        self.scan = functools.partial(md.scan, unroll=unroll)
        self.unroll = unroll

    def fori_loop(self, lower, upper, body_fun, init_val):
        known = all(isinstance(n, int) for n in (lower, upper))
        return md.fori_loop(lower, upper, body_fun, init_val, unroll=self.unroll if known else None)


# ---------------------------------------------------------------- on ranks, along two axes of size 2

RING = [(0, 1), (1, 0)]


def ranks_scan(lax, w, x):
    """Collectives in the body; a carry that is invariant at first and varies later."""

    def step(c, k):
        mean = pmean(np.sin(c * x).sum(), "i")
        return c * x + ppermute(c * w, "i", RING) * mean + k, psum(c * x, ("i", "j")).sum()

    c, ys = lax.scan(step, w, np.arange(3.0))
    return psum(c, ("i", "j")), ys


def ranks_cond(lax, w, x):
    total = psum(x.sum(), ("i", "j"))
    y = lax.cond(total > 0, lambda x: np.sin(x) * w + psum(x * x, "i"), lambda x: w, x)
    z = lax.cond(total < 0, lambda x: psum(np.sin(x) * w, ("i", "j")), lambda x: np.ones(3), x)
    return psum(y + np.sin(w) * x, ("i", "j")), z  # what is pbroadcast in a branch is so again outside of it


def ranks_nested(lax, w, x):
    def step(c, k):
        c = lax.cond(psum(k, ("i", "j")) > 2, lambda c: psum(c * x, "j") * 0.1, lambda c: np.sin(c) * w, c)
        return c, lax.fori_loop(0, 2, lambda i, c: np.tanh(c + psum(c, "i")) + w * i, c)

    c, ys = lax.scan(step, x, np.arange(3.0))
    return psum(c, ("i", "j")), psum(ys, ("i", "j"))


def ranks_while(lax, w, x):
    def going(state):
        return psum((state[1] ** 2).sum(), ("i", "j")) < 9

    n, c = lax.while_loop(going, lambda s: (s[0] + 1, s[1] * 1.5 + x * w), (0, w))
    return psum(c, ("i", "j")) * n, psum(c * x, ("i", "j")) * w


def stepwise_gradients(scan, grad, w, x, turns):
    """Steps of derivatives in carries that all ranks share at first, and that turn into each other and into `x`."""

    def step(c, t):
        actual = [grad(lambda v: (v * v * x).sum())(v) for v in c]
        new = [v - 0.1 * t * g for v, g in zip(c, actual)]
        return (new[turns[0]] * x, new[turns[1]], new[turns[2]]), actual[0]

    return scan(step, (w, np.sin(w), np.cos(w)), np.arange(1.0, 4.0))


def positive(x):
    return psum(x.sum(), ("i", "j")) > 0


#: What runs a function of blocks in a body of its own: and what that is, in Python.
BODIES = {
    "scan": (
        lambda f: lambda x: md.scan(lambda c, t: (f(c * t), None), x, np.array([0.5, 1.5]))[0],
        lambda f: lambda x: f(1.5 * f(0.5 * x)),
    ),
    "fori_loop": (lambda f: lambda x: md.fori_loop(1, 3, lambda i, c: f(c / i), x), lambda f: lambda x: f(f(x) / 2)),
    "cond": (
        lambda f: lambda x: md.cond(positive(x), f, lambda x: 0.5 * f(-x), x),
        lambda f: lambda x: f(x) if positive(x) else 0.5 * f(-x),
    ),
    "switch": (
        lambda f: lambda x: md.switch(positive(x).astype(int), [lambda: x, lambda: f(x)]),
        lambda f: lambda x: f(x) if positive(x) else x,
    ),
    "checkpoint": (md.checkpoint, lambda f: f),
    "jit": (lambda f: md.jit(f), lambda f: f),
    "vmap": (
        lambda f: lambda x: md.vmap(lambda x: psum(f(x), "v"), axis_name="v")(np.stack([x, -x]))[0],
        lambda f: lambda x: f(x) + f(-x),
    ),
}


RANKS = {"scan": ranks_scan, "cond": ranks_cond, "nested": ranks_nested, "while_loop": ranks_while}
rng = np.random.default_rng(0)
ARGS = (rng.normal(size=3) / 4, rng.normal(size=12) / 4)


def on_ranks(f, lax, mesh, **options):
    """A program on blocks as a function of whole arrays; it closes over the first."""

    def mapped(w, x):
        def body(x):
            return f(lax, np.sin(w), x * w)

        out_specs = (P(), P()) if options.get("check_rep", True) else (P(None), P(None))
        return spmd.shard_map(body, mesh=mesh, in_specs=P(("i", "j")), out_specs=out_specs, **options)(x)

    return mapped


# ---------------------------------------------------------------- a function with a backward rule, in bodies


def modulated(w, x):
    return np.sin(w * x) + w


def modulated_by_rules():
    """The same, of a weight that ranks share: its cotangent is the sum over them, which the rule takes."""
    f = md.custom_vjp(modulated)

    def bwd(residuals, ct):
        w, x = residuals
        slope = ct * np.cos(w * x)
        return psum(slope * x + ct, ("i", "j")), slope * w

    f.defvjp(lambda w, x: (modulated(w, x), (w, x)), bwd)
    return f


def loss_in_body(f, body, mesh):
    """A loss of rows on ranks, by a function of the weight and of a rank's rows that runs in a body."""

    def of_rows(w, x):
        return psum((body(lambda x: f(w, x))(x) ** 2).sum(), ("i", "j"))

    return spmd.shard_map(of_rows, mesh=mesh, in_specs=(P(), P(("i", "j"))), out_specs=P())
