"""Loops and branches under vmap, over sharded batches, for simulated and MPI ranks.

Each takes rows `x` and `y`, an index `k` for each row, sequences of rows `t`, a vector `s` and a matrix `w`; the last
two are whole. Rows, indices and sequences are split alike, by rows.
"""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.results import assert_trees_close

ROWS, STEPS, WIDTH = 8, 3, 4


def arguments(mesh=None, spec=P()):
    rng = numpy.random.default_rng(0)
    x, y = rng.normal(size=(2, ROWS, WIDTH))
    batched = {"x": x, "y": y, "k": rng.integers(0, 4, ROWS), "t": rng.normal(size=(ROWS, STEPS, WIDTH))}
    if mesh is not None:
        batched = {name: spmd.distribute(value, mesh, spec) for name, value in batched.items()}
    return {**batched, "s": rng.normal(size=WIDTH), "w": rng.normal(size=(WIDTH, WIDTH)) / 2}


def layer(w):
    return lambda h, u: (np.tanh(h @ w + u), np.sum(h))


def scan_rows(x, y, k, t, s, w):
    """A carry that is a number at first; one that no element changes; and one that others lead to."""

    def step(c, u):
        total, count, _, second = c
        return (np.tanh(total + u), count + 1, second, u * count), total * count

    return md.vmap(lambda a: md.scan(step, (0.0, 0, 0.0, 0.0), a))(x)


def scan_of_a_layer(x, y, k, t, s, w):
    outs = md.vmap(lambda a, b: md.scan(layer(w), b, a), in_axes=(1, 0), out_axes=(0, 1))(np.swapaxes(t, 0, 1), x)
    return *outs, outs[0] @ w + y


def scan_of_shared_elements(x, y, k, t, s, w):
    """The loop runs over what all elements share, and a result is the same for all."""
    return md.vmap(lambda a: md.scan(lambda h, u: (h * u + a, (h, 2 * u)), a, s), out_axes=(0, (0, None)))(x)


def nested_vmaps(x, y, k, t, s, w):
    inner = lambda b: md.vmap(lambda a: md.scan(lambda h, u: (np.tanh(h + u * b), h), 0.0, a))(x)  # noqa: E731
    return md.vmap(inner)(s), md.vmap(md.vmap(lambda a: md.fori_loop(0, 3, lambda i, h: np.sin(h) * i, a)))(t)


def branches(x, y, k, t, s, w):
    """Operands of each element and of all; a result that the predicate alone decides, and one that is always `s`."""

    def one(a, b):
        positive = lambda b: (np.log(np.sum(a)) * b, 1.0, s)  # noqa: E731
        return md.cond(np.sum(a) > 0, positive, lambda b: (b @ w, np.sum(s), s), b)

    constant = md.vmap(lambda a: md.cond(np.sum(a) > 0, lambda: 1.0, lambda: 2.0))(x)
    return md.vmap(one, out_axes=(0, 0, None))(x, y), constant


def choices(x, y, k, t, s, w):
    return md.vmap(lambda i, a: md.switch(i, [np.sin, lambda v: v @ w, lambda v: s, lambda v: v * a], a))(k, x)


def loop_in_a_branch(x, y, k, t, s, w):
    """The loop of one branch is over what all elements share; a branch in it depends on that alone."""

    def one(a, b):
        shared = lambda: md.scan(lambda h, u: (md.cond(h > 0, np.sin, np.cos, h + u), None), 0.0, s)[0]  # noqa: E731
        return md.cond(np.sum(b) > 0, lambda: md.scan(layer(w), b, a)[0], lambda: b * shared())

    return md.vmap(one)(t, x)


def branch_in_a_loop(x, y, k, t, s, w):
    step = lambda h, u: (md.cond(np.sum(h) > 0, lambda: np.sin(h) + u, lambda: h @ w * u), np.sum(h))  # noqa: E731
    return md.vmap(lambda a, b: md.scan(step, b, a))(t, x)


def newton(a):
    """The square root of a, and the number of steps to it."""
    start = (0.5 * (1.0 + a), 0)
    return md.while_loop(lambda c: abs(c[0] ** 2 - a) > 1e-10, lambda c: (0.5 * (c[0] + a / c[0]), c[1] + 1), start)


def loops_of_their_own_length(x, y, k, t, s, w):
    """Each element stops by itself; a condition that reads what all share; a bound of each; a carry of them all."""
    rows = md.vmap(lambda a: md.while_loop(lambda v: np.sum(v * v) > s[0] ** 2 + 0.1, lambda v: 0.7 * v, a))(x)
    counted = md.vmap(lambda a: md.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] @ w, s[0]), (0, a, 0.0)))(x)
    return (
        rows,
        counted,
        md.vmap(newton)(x[:, 0] ** 2 + 0.1),
        md.vmap(lambda n, a: md.fori_loop(0, n, step_of(w), a))(k, x),
    )


def step_of(w):
    return lambda i, h: np.tanh(h @ w) + i


def loops_in_loops(x, y, k, t, s, w):
    """Newton's method in a step, in a branch, and a loop of each length whose step is a loop."""
    step = lambda h, u: (newton(1.0 + h * u)[0], h)  # noqa: E731
    outer = lambda c: (c[0] * 0.5, md.scan(lambda h, u: (h + u * c[0], None), c[1], s)[0])  # noqa: E731

    def branch(a):
        shared = lambda: md.while_loop(lambda v: v < 30.0, lambda v: v + s[1] ** 2, 1.0)  # noqa: E731
        return md.cond(a[0] > 0, lambda: newton(a[0])[0] * s[0], shared)

    sequences = md.vmap(lambda a: md.scan(step, 1.0, a * a))(x)
    return (
        sequences,
        md.vmap(branch)(x),
        md.vmap(lambda a: md.while_loop(lambda c: c[0] > 0.1, outer, (a, 0.0)))(x[:, 0]),
    )


def tangents_of_loops(x, y, k, t, s, w):
    roots = lambda x, s: md.vmap(lambda a: newton(np.sum(a * a) + s[0] ** 2)[0])(x)  # noqa: E731
    return md.jvp(roots, (x, s), (y, s)), md.vmap(md.jacfwd(lambda a: newton(np.sum(a * a))[0]))(x)


def gradient_of_a_weight(x, y, k, t, s, w):
    return md.grad(lambda w: np.sum(md.vmap(lambda a, b: md.scan(layer(w), b, a)[0])(t, x) ** 2))(w)


def gradient_of_a_branch(x, y, k, t, s, w):
    def loss(s, w):
        one = lambda a: md.cond(np.sum(a) > 0, lambda: a * s, lambda: np.sin(s) @ w)  # noqa: E731
        return np.sum(md.vmap(one)(x) ** 2)

    return md.grad(loss, (0, 1))(s, w)


def gradient_of_each(x, y, k, t, s, w):
    loss = lambda w, a, b: np.sum(md.scan(md.checkpoint(layer(w)), b, a)[0])  # noqa: E731
    return md.vmap(md.grad(loss, (0, 2)), (None, 0, 0))(w, t, x)


def named_axis(x, y, k, t, s, w):
    """A step that sums over the batch: its steps wait for all elements."""
    return md.vmap(lambda a: md.scan(lambda h, u: (h + psum(np.sin(u * h), "b"), h), 1.0, a), axis_name="b")(x)


#: What each communicates, compiled.
SILENT = [
    *(scan_rows, scan_of_a_layer, scan_of_shared_elements, nested_vmaps, branches, choices, loop_in_a_branch),
    *(branch_in_a_loop, loops_of_their_own_length, loops_in_loops, tangents_of_loops, gradient_of_each),
]
PROGRAMS = {program: {} for program in SILENT} | {
    gradient_of_a_weight: {"psum": 1},
    gradient_of_a_branch: {"psum": 1},
    named_axis: {"psum": STEPS + 1},
}


def check(program, mesh, spec, transform=lambda f: f):
    """Compare a program with itself on whole arrays; return what it gives."""
    arrays = arguments(mesh, spec)
    actual = transform(lambda: program(**arrays))()
    assert_trees_close(actual, program(**arguments()), rtol=1e-12)
    return actual
