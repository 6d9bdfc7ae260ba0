"""Programs in which each rank takes as many steps as it needs, for simulated ranks and real ones.

A program is a function of a weight, a rank's block and the rank's index. Its meaning, `whole`, runs it in Python on one
block after another.
"""

import minidiff as md
import minidiff.numpy as np
import spmd
from tests.checks.properties import shows
from tests.programs.branch import W, X, on_ranks


def newton(lax, w, x, rank):
    """The square root of a number; on rank r it starts 10^2r times too far away."""
    number = 1 + np.sum(w * x) ** 2
    step = lambda s: (0.5 * (s[0] + number / s[0]), s[1] + 1)  # noqa: E731
    away = lambda s: np.abs(s[0] * s[0] - number) > 1e-12 * number  # noqa: E731
    root, count = lax.while_loop(away, step, (10.0 ** (2 * rank), 0))
    return np.stack([root, 1.0 * count])


def ode(lax, w, x, rank):
    """y' = -k y up to t = 1, by steps of Heun's method that are halved while Euler's is too far from it."""
    rate = (1 + 3 * rank) * (1 + w[0] ** 2)
    slope = lambda y: -rate * y  # noqa: E731

    def step(s):
        h = np.minimum(s["h"], 1 - s["t"])
        first = slope(s["y"])
        error = 0.5 * h * np.abs(slope(s["y"] + h * first) - first).max()
        new = s["y"] + 0.5 * h * (first + slope(s["y"] + h * first))
        good = error < 0.01
        return {
            "t": np.where(good, s["t"] + h, s["t"]),
            "y": np.where(good, new, s["y"]),
            "h": np.where(good, 1.5 * h, 0.5 * h),
            "steps": s["steps"] + 1,
        }

    out = lax.while_loop(lambda s: s["t"] < 1, step, {"t": 0.0, "y": x, "h": 1.0, "steps": 0})
    return out["y"] * out["steps"]


def sampler(lax, w, x, rank):
    """A number below a level of the rank's own, by rejection."""
    level = 0.5 ** (1 + rank)

    def draw(s):
        key = md.random.fold_in(s[0], 1)
        return key, md.random.uniform(key), s[2] + 1

    key = md.random.fold_in(md.random.key(3), rank)
    _, sample, count = lax.while_loop(lambda s: s[1] > level, draw, (key, 1.0, 0))
    return w * sample + count


def descent(lax, w, x, rank):
    """Steps along a rank's own gradient, of a weight that all ranks share."""

    def step(c):
        return c - 0.2 * md.grad(lambda c: ((c - x) ** 2 * np.exp(w)).sum())(c)

    return lax.while_loop(lambda c: np.abs(c - x).sum() > 0.1, step, np.zeros(2))


def gradient_of_what_is_shared(lax, w, x, rank):
    def step(c):
        return c + 0.1 + np.abs(md.grad(lambda v: (np.sin(v) * x).sum())(w)).sum()

    return x * lax.while_loop(lambda c: c < 1 + rank, step, np.sum(w))


def roots(lax, w, x, rank):
    """The square root of what is left: it would be a NaN on a rank that has reached its end."""
    return lax.while_loop(lambda c: c.min() > 1.0, lambda c: np.sqrt(c - 1) + np.log(c), 1 + (1 + rank) * x * x) * w


def becomes_different(lax, w, x, rank):
    """All ranks begin alike, and a carry is the same on all as long as they run alike."""
    total, count = lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + np.abs(x).sum(), s[1] + 1), (0.0, 0))
    return w * total + count


def nested(lax, w, x, rank):
    inner = lambda c: lax.fori_loop(0, rank, lambda i, c: np.sin(c) + w * i, c)  # noqa: E731
    return lax.while_loop(lambda c: c.sum() < 2, lambda c: inner(c) + 1, x)


def scan_of_loops(lax, w, x, rank):
    def step(c, k):
        c = lax.while_loop(lambda c: np.abs(c).sum() > 0.3 + k, lambda c: 0.7 * c * np.cos(w), c)
        return c, c.sum()

    c, ys = lax.scan(step, x + rank, np.arange(3.0)[::-1])
    return c + ys.sum()


PROGRAMS = {
    "Newton": newton,
    "an adaptive solve": ode,
    "a rejection sampler": sampler,
    "descent": descent,
    "a gradient of what is shared": gradient_of_what_is_shared,
    "roots": roots,
    "becomes different": becomes_different,
    "nested": nested,
    "a scan of loops": scan_of_loops,
    "a loop of scans": lambda lax, w, x, rank: lax.while_loop(
        lambda c: np.abs(c).sum() > 0.2,
        lambda c: lax.scan(lambda c, k: (c * np.sin(w + k), None), c, np.arange(2.0))[0],
        x,
    ),
    "a bound": lambda lax, w, x, rank: lax.fori_loop(0, rank, lambda i, c: np.sin(c) * w + i, x),
    "two bounds": lambda lax, w, x, rank: lax.fori_loop(rank - 1, 2, lambda i, c: c * w + i, np.zeros(2)),
    "no carry of its own": lambda lax, w, x, rank: w * lax.while_loop(lambda n: n < rank, lambda n: n + 1, 0) + x,
    "a carry that starts anew": lambda lax, w, x, rank: lax.while_loop(
        lambda s: s[0] < rank, lambda s: (s[0] + 1, np.ones(2)), (0, x)
    )[1],
    "in a branch": lambda lax, w, x, rank: lax.cond(
        x[0] > 0, lambda: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + np.exp(w), x), lambda: x * w
    ),
    "a branch in a loop": lambda lax, w, x, rank: lax.fori_loop(
        0, rank, lambda i, c: lax.cond(c.sum() > 0, lambda: c - w, lambda: c * w + np.sqrt(-c.sum())), x
    ),
    "compiled": lambda lax, w, x, rank: lax.while_loop(
        lambda c: np.abs(c).sum() > 0.1, md.jit(lambda c: c * np.cos(w) / 2), x
    ),
    "checkpoint": lambda lax, w, x, rank: md.checkpoint(
        lambda x: lax.while_loop(lambda c: np.abs(c).sum() > 0.1, lambda c: c * np.cos(w) / 2, x)
    )(x),
}


#: A `cond` whose branches differ between ranks needs types.
NEED_TYPES = {"in a branch", "a branch in a loop"}
KINDS = ("value", "jvp of jvp", "vmap of jvp")
FEW = ("jvp", "vmap")


#: Programs of arithmetic and roots, whose bits do not depend on how many elements NumPy computes at once.
EXACT = ("Newton", "an adaptive solve", "a rejection sampler", "becomes different", "two bounds", "no carry of its own")


@shows("reference", "modes")
def check_same_bits(mesh, name):
    """MPI ranks compute the bits that simulated ones do."""
    x = np.resize(X, 2 * mesh.size)
    simulated = spmd.make_mesh((mesh.size,), ("i",), backend="simulated")
    for run in (lambda f: f, md.jit):
        actual, expected = (run(on_ranks(PROGRAMS[name], m))(W, x) for m in (mesh, simulated))
        np.testing.assert_array_equal(actual.gather(), expected.gather())
