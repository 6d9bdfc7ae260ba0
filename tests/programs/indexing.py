"""Programs that index whole sharded arrays, with the collectives that they need; on any mesh of axes "i" and "j"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import random
from minidiff.ops.updates import at
from spmd import P
from spmd.mesh.specs import part_count
from tests.checks.results import assert_trees_close

rng = numpy.random.default_rng(0)
N, C = 24, 6  # on meshes of 2, 3, 4 and 2 x 2 ranks
X, Z = rng.standard_normal((2, N, C))
COMPLEX = X + 1j * Z
PICKED = rng.integers(-C, C, (N, 4))
LABELS = rng.integers(0, C, N)
STARTS = rng.integers(-4, C + 2, N)
FEW = rng.integers(-N, N, 3)
VALUES, FILTERS = rng.standard_normal((N, 4)), rng.standard_normal((N, 3))
WEIGHTS = rng.standard_normal((C, C))
ROWS = P("i")


class Program(NamedTuple):
    """A function of arrays, of which those with N rows are split; and the collectives that a compiled call needs."""

    f: Callable
    args: tuple
    needed: Any = {}  # noqa: RUF012 (never written; a function of the number of ranks, if it depends on that)
    gradient: Any = None  # of the sum of squares, in the first argument; None if it has none
    spec: P | None = ROWS  # of the result; None if it is whole


def gradient_of_loss(pick: Callable) -> Program:
    """The gradient of a cross-entropy, which picks the log-probabilities of labels."""
    loss = lambda w, x, y: -np.mean(pick(md.nn.log_softmax(x @ w), y))  # noqa: E731
    return Program(md.grad(loss), (WEIGHTS, X, LABELS), {"psum": 1}, None, None)


def branch(x):
    """Logarithms of positive numbers, on the elements that have these alone."""
    return md.cond(x[0] > 0, lambda x: x * np.log(x[0]), lambda x: np.sin(x), x)


def branches(k, x):
    return md.switch(k % 3, [lambda x: 2 * x, np.sin, lambda x: x * np.log(x[0] ** 2)], x)


#: Batches of gathers, scatters, slices, sorts, searches, convolutions and branches, which stay split.
BATCHES = {
    "take_along_axis": Program(lambda x, i: np.take_along_axis(x, i, 1), (X, PICKED), {}, {}),
    "a[b]": Program(md.vmap(lambda a, b: a[b]), (X, PICKED), {}, {}),
    "clip": Program(md.vmap(lambda a, b: np.take(a, b, mode="clip")), (X, 2 * PICKED), {}, {}),
    "one index of each": Program(lambda x, y: x[np.arange(N), y], (X, LABELS), {}, {}),
    "dynamic_slice": Program(md.vmap(lambda a, s: md.dynamic_slice_in_dim(a, s, 4)), (X, STARTS), {}, {}),
    "set": Program(md.vmap(lambda a, b, v: at(a)[b].set(v)), (X, PICKED, VALUES), {}, {}),
    "add": Program(md.vmap(lambda a, b, v: at(a)[b].add(v)), (X, PICKED, VALUES), {}, {}),
    "max": Program(md.vmap(lambda a, b, v: at(a)[b].max(v)), (X, PICKED, VALUES), {}, {}),
    "add at one of each": Program(lambda x, y: at(x)[np.arange(N), y].add(1.0), (X, LABELS), {}, {}),
    "update": Program(md.vmap(lambda a, v, s: md.dynamic_update_slice_in_dim(a, v, s, 0)), (X, VALUES, STARTS), {}, {}),
    "permutation": Program(md.vmap(random.permutation), (random.split(random.key(3), N), X)),
    "sort": Program(lambda x: np.sort(x, 1), (X,), {}, {}),
    "top": Program(lambda x: np.partition(x, 2, 1)[:, 2], (X,), {}, {}),
    "convolve": Program(md.vmap(np.convolve), (X, FILTERS), {}, {}),
    "correlate": Program(md.vmap(lambda a, v: np.correlate(a, v, "same")), (COMPLEX, FILTERS)),
    "searchsorted": Program(md.vmap(np.searchsorted), (numpy.sort(X, 1), FILTERS)),
    "digitize": Program(md.vmap(np.digitize), (FILTERS, numpy.sort(X, 1))),
    "cond": Program(md.vmap(branch), (X,), {}, {}),
    "switch": Program(md.vmap(branches), (LABELS, X)),
    "gradient of cond": Program(md.vmap(md.grad(lambda x: np.sum(branch(x) ** 2))), (X,)),
}

#: Whole indices into a dimension that is split fetch only their rows; and what needs one sum, for any spelling.
LOOKUPS = {
    "rows": Program(lambda x, i: x[i], (X, FEW), {"psum": 1}, {"psum": 1}, None),
    "take": Program(lambda x, i: np.take(x, i, 0), (X, FEW), {"psum": 1}, {"psum": 1}, None),
    "a traced slice": Program(
        lambda x, s: md.dynamic_slice_in_dim(x, s, 5), (X, FEW[0]), {"psum": 1}, {"psum": 1}, None
    ),
    "a traced update": Program(lambda x, v, s: md.dynamic_update_slice_in_dim(x, v, s, 0), (X, X[:5], FEW[0])),
    "cross-entropy along an axis": gradient_of_loss(lambda z, y: np.take_along_axis(z, y[:, None], 1)),
    "cross-entropy at indices": gradient_of_loss(lambda z, y: z[np.arange(N), y]),
}


def diffusion(u):
    for _ in range(3):
        u = u + 0.1 * (np.roll(u, 1, 0) - 2 * u + np.roll(u, -1, 0))
    return u


def permutes(*counts: int) -> Callable:
    """The number of ppermutes on 2, 3 and 4 ranks, as a function."""
    return lambda ranks: {"ppermute": counts[ranks - 2]} if counts[ranks - 2] else {}


ONE, TWO, NONE = {"ppermute": 1}, {"ppermute": 2}, {}

#: Shifts, slices and pads along a split dimension, which send what crosses from one block to another.
NEIGHBORS = {
    "roll": Program(lambda x: np.roll(x, 1, 0), (X,), ONE, TWO),
    "roll back": Program(lambda x: np.roll(x, -2, 0) * x, (X,), ONE, TWO),
    "roll by a block and more": Program(lambda x: np.roll(x, 13, 0), (X,), permutes(1, 2, 2), permutes(2, 4, 4)),
    "roll once around": Program(lambda x: np.roll(x, 24, 0), (X,), NONE, NONE),
    "roll both": Program(lambda x: np.roll(x, (3, -2), (0, 1)), (COMPLEX,), ONE),
    "roll a flat array": Program(lambda v: np.roll(v, -1), (X[:, 0],), ONE, TWO),
    "diffusion": Program(diffusion, (X,), {"ppermute": 6}, {"ppermute": 12}),
    "gradient": Program(lambda x: np.gradient(x, 0.5, axis=0), (X,), TWO, {"ppermute": 4}),
    "flip": Program(lambda x: x[::-1], (X,), ONE, TWO),
    "every second": Program(lambda x: x[1::2], (X,), NONE, NONE),
    "without the first": Program(lambda x: x[12:], (X,), permutes(1, 1, 2), permutes(2, 2, 4)),
    "inside": Program(lambda x: x[6:-6], (X,), permutes(0, 2, 2), permutes(0, 4, 4)),
    "zeros around": Program(lambda x: np.pad(x, ((6, 6), (0, 1))), (X,), permutes(0, 2, 2), permutes(0, 4, 4)),
}


GATHERS, TOTALS_BACK = {"all_gather": 1}, {"all_gather": 1, "psum_scatter": 1}
WITH_NAN = numpy.where(numpy.arange(X.size).reshape(X.shape) % 17 == 5, numpy.nan, X)

#: Sums, products and positions along a split dimension, for which ranks send what they have of all of their block.
TOTALS = {
    "cumsum": Program(lambda x: np.cumsum(x, 0), (X,), GATHERS, TOTALS_BACK),
    "cumsum of NaNs": Program(lambda x: np.cumsum(x, 0), (WITH_NAN,), GATHERS),
    "cumsum of booleans": Program(lambda x: np.cumsum(x > 0, 0), (X,), GATHERS),
    "cumsum along another axis": Program(lambda x: np.cumsum(x, 1), (X,), NONE, NONE),
    "argmax": Program(lambda x: np.argmax(x, 0), (X,), {"all_gather_invariant": 2}, None, None),
    "argmax of NaNs": Program(lambda x: np.argmax(x, 0), (WITH_NAN,), {"all_gather_invariant": 2}, None, None),
    "argmax of all": Program(lambda x: np.argmax(x), (COMPLEX,), {"all_gather_invariant": 2}, None, None),
}


def distributed(args: tuple, mesh: spmd.Mesh, spec: P) -> list:
    """The arguments, with those of N rows split by the spec, as far as it fits them."""
    return [spmd.distribute(x, mesh, _fitting(spec, x, mesh)) if numpy.shape(x)[:1] == (N,) else x for x in args]


def _fitting(spec: P, x: numpy.ndarray, mesh: spmd.Mesh) -> P:
    entries = [axes if n % part_count(axes, mesh.shape) == 0 else None for axes, n in zip(spec.dims(2), x.shape)]
    return P(*entries)


def check(program: Program, mesh: spmd.Mesh, spec: P = ROWS) -> None:
    """Compare a program on sharded arrays with itself on whole ones, and count what it sends, compiled and not."""
    args = distributed(program.args, mesh, spec)
    expected = program.f(*program.args)
    for f in (program.f, md.jit(program.f)):
        assert_trees_close(f(*args), expected)
    if spec == ROWS:
        count(md.jit(program.f), args, program.needed, mesh)
        assert spmd.spec_of(f(*args)) == (program.spec or P())
    if program.gradient is not None:
        gradient = md.jit(md.grad(lambda *args: np.sum(program.f(*args) ** 2)))
        assert_trees_close(gradient(*args), gradient(*program.args))
        if spec == ROWS:
            count(gradient, args, program.gradient, mesh)


def count(f: Callable, args: list, needed: Any, mesh: spmd.Mesh) -> None:
    """Compare the collectives of a compiled call with those that are needed, and with its report."""
    mesh.reset_calls()
    f(*args)
    report = spmd.communication(f, optimized=True)(*args)
    needed = needed(mesh.size) if callable(needed) else needed
    assert report.counts == needed, f"{report}"
    assert (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes)
