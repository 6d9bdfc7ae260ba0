"""Count the collectives of programs over whole arrays: `python -m tests.benchmarks.array_programs [--differences]`.

Each program is compiled for arrays that are split over 4 ranks. The table has the collectives that it runs, and the
bytes that a rank passes to them: here, in the HLO that JAX compiles from the same source (where JAX is installed), and
in the best program known, which is stated beside each program. A loop counts each of its steps; one whose length is not
known beforehand counts one. "split" names the dimensions of the results that stay split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P

from . import libraries, measure
from .state_names import by_kind

RANKS = 4
ROWS, FEATURES, CLASSES = 64, 12, 8
BLOCK = ROWS // RANKS * FEATURES * 8  # the bytes of a rank's rows of features
ROW, MATRIX, NUMBER = FEATURES * 8, FEATURES * CLASSES * 8, 8


class Program(NamedTuple):
    """A program, its arguments with their specs, and the collectives and bytes that it needs."""

    name: str
    function: Callable  # of `np`, `md` and the arrays
    arguments: tuple[tuple[numpy.ndarray, P], ...]
    collectives: int = 0
    bytes: int = 0


def gradient(loss: Callable, of: int | tuple[int, ...] = 0) -> Callable:
    """A program that differentiates a loss, of `np`, `md` and the arrays, in some of the arrays."""
    return lambda np, md, *arrays: md.grad(lambda *xs: loss(np, md, *xs), of)(*arrays)


class Sent(NamedTuple):
    """The collectives of a compiled program, the bytes that a rank passes to them, and how its results are split."""

    kinds: Counter
    bytes: int
    split: str

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(self.kinds.items()))
        return f"{kinds or '-'}: {self.bytes:,}" if self.kinds else "-"

    @property
    def count(self) -> int:
        return sum(self.kinds.values())


# ---------------------------------------------------------------- the programs


def programs() -> Iterator[Program]:
    yield from elementwise_programs()
    yield from reductions()
    yield from products()
    yield from batched_programs()
    yield from indexing()
    yield from neighbors()
    yield from control_flow()
    yield from cross_entropies()
    yield from gradients()
    yield from programs_of_users()


_rng = numpy.random.default_rng(0)
X = _rng.normal(size=(ROWS, FEATURES)), P("i")
Y = _rng.normal(size=(ROWS, FEATURES)), P("i")
WHOLE = _rng.normal(size=(ROWS, FEATURES)), P()
COLUMNS = _rng.normal(size=(ROWS, FEATURES)), P(None, "i")
VECTOR = _rng.normal(size=ROWS), P("i")
W = 0.1 * _rng.normal(size=(FEATURES, CLASSES)), P()
BIAS = _rng.normal(size=CLASSES), P()
LABELS = _rng.integers(0, CLASSES, ROWS), P("i")
PLACES = _rng.integers(0, FEATURES, ROWS), P("i")
SCALE = _rng.normal(size=FEATURES), P()
SQUARES = _rng.normal(size=(8, 3, 3)) + 4 * numpy.eye(3), P("i")
RIGHT = _rng.normal(size=(8, 3)), P("i")
IMAGES = _rng.normal(size=(8, 6, 6, 2)), P("i")
KERNELS = _rng.normal(size=(3, 3, 2, 4)), P()
QUERIES = _rng.normal(size=(8, 6, 2, 4)), P("i")


def elementwise_programs() -> Iterator[Program]:
    yield Program("tanh(x) * y", lambda np, md, x, y: np.tanh(x) * y, (X, Y))
    yield Program("x + a row", lambda np, md, x, b: x + b, (X, SCALE))
    yield Program("split rows + a whole array", lambda np, md, x, y: x + y, (X, WHOLE))
    yield Program("where(x > 0, x, y)", lambda np, md, x, y: np.where(x > 0, x, y), (X, Y))
    yield Program("x[:, None] * x", lambda np, md, x: x[:, None, :] * x[:, :, None], (X,))
    yield Program("concatenate along features", lambda np, md, x, y: np.concatenate([x, y], axis=1), (X, Y))
    yield Program("stack of two", lambda np, md, x, y: np.stack([x, y]), (X, Y))
    yield Program("transpose", lambda np, md, x: x.T * 2, (X,))
    yield Program("reshape, rows divided", lambda np, md, x: x.reshape(ROWS // 4, 4, FEATURES), (X,))
    yield Program("reshape, features divided", lambda np, md, x: x.reshape(ROWS, 3, 4).sum(2), (X,))
    yield Program("flat", lambda np, md, x: x.reshape(-1), (X,))
    yield Program("rows + columns", lambda np, md, x, y: x + y, (X, COLUMNS), 1, BLOCK)


def reductions() -> Iterator[Program]:
    yield Program("sum", lambda np, md, x: np.sum(x), (X,), 1, NUMBER)
    yield Program("sum of rows", lambda np, md, x: np.sum(x, axis=0), (X,), 1, ROW)
    yield Program("mean and variance", lambda np, md, x: (np.mean(x, 0), np.mean(x * x, 0)), (X,), 1, 2 * ROW)
    yield Program("var", lambda np, md, x: np.var(x, axis=0), (X,), 2, 2 * ROW)
    yield Program("max", lambda np, md, x: np.max(x), (X,), 1, NUMBER)
    yield Program("any", lambda np, md, x: np.any(x > 3), (X,), 1, 1)
    yield Program("norm", lambda np, md, x: np.sqrt(np.sum(x * x)), (X,), 1, NUMBER)
    yield Program("two sums", lambda np, md, x, y: np.sum(x) + np.sum(y * y), (X, Y), 1, NUMBER)
    yield Program("logsumexp of each row", lambda np, md, x: md.nn.logsumexp(x, axis=1), (X,))
    yield Program("standardized columns", lambda np, md, x: (x - x.mean(0)) / (x - x.mean(0)).std(0), (X,), 2, 2 * ROW)


def products() -> Iterator[Program]:
    yield Program("x @ w", lambda np, md, x, w: x @ w, (X, W))
    yield Program("x.T @ y", lambda np, md, x, y: x.T @ y, (X, Y), 1, FEATURES * ROW)
    yield Program("x @ x.T", lambda np, md, x: x @ x.T, (X,), 1, BLOCK)
    yield Program("two layers", lambda np, md, x, w, b: np.tanh(x @ w + b) @ w.T, (X, W, BIAS))
    yield Program("columns @ rows", lambda np, md, x, w: x @ w, (COLUMNS, (W[0], P("i"))), 1, ROWS * CLASSES * 8)
    yield Program("rows @ columns", lambda np, md, x, w: x @ w, (WHOLE, (W[0], P(None, "i"))))
    yield Program("einsum bi,bj->bij", lambda np, md, x, y: np.einsum("bi,bj->bij", x, y), (X, Y))
    yield Program("einsum bi,bj->ij", lambda np, md, x, y: np.einsum("bi,bj->ij", x, y), (X, Y), 1, FEATURES * ROW)
    yield Program("vector dot", lambda np, md, x, y: x @ y, (VECTOR, VECTOR), 1, NUMBER)
    yield Program("outer", lambda np, md, x, y: np.outer(x, y), (VECTOR, SCALE))
    yield Program("solve, batched", lambda np, md, a, b: np.linalg.solve(a, b[..., None]), (SQUARES, RIGHT))
    yield Program("inv, batched", lambda np, md, a: np.linalg.inv(a), (SQUARES,))
    yield Program("cholesky, batched", lambda np, md, a: np.linalg.cholesky(a @ np.swapaxes(a, 1, 2)), (SQUARES,))


def batched_programs() -> Iterator[Program]:
    for name in ("sum", "max", "argmax", "cumsum", "sort", "argsort", "median", "diff"):
        yield Program(f"{name} of each row", lambda np, md, x, name=name: getattr(np, name)(x, axis=1), (X,))
    for name in ("dot", "convolve", "outer"):
        yield Program(f"vmap({name})", lambda np, md, x, y, name=name: md.vmap(getattr(np, name))(x, y), (X, Y))
    yield Program("softmax", lambda np, md, x: md.nn.softmax(x, axis=-1), (X,))
    yield Program("layer norm", lambda np, md, x: md.nn.standardize(x, axis=-1), (X,))
    yield Program("one_hot @ w", lambda np, md, y, w: md.nn.one_hot(y, CLASSES) @ w.T, (LABELS, W))
    yield Program("flip of each row", lambda np, md, x: x[:, ::-1], (X,))
    yield Program("roll of each row", lambda np, md, x: np.roll(x, 1, axis=1), (X,))
    yield Program("pad of each row", lambda np, md, x: np.pad(x, ((0, 0), (1, 1))), (X,))
    yield Program("convolution of images", lambda np, md, x, k: md.conv(x, k), (IMAGES, KERNELS))
    yield Program("attention", _attention, (QUERIES, QUERIES, QUERIES))
    yield Program(
        "vmap(searchsorted)", lambda np, md, x, y: md.vmap(lambda a, b: np.searchsorted(np.sort(a), b))(x, y), (X, Y)
    )
    yield Program(
        "vmap(correlate)", lambda np, md, x, y: md.vmap(lambda a, b: np.correlate(a, b, "same"))(x, y), (X, Y)
    )
    yield Program("vmap(random.normal)", _random(lambda md, key, a: a + md.random.normal(key, a.shape)), (X,))
    yield Program("vmap(random.permutation)", _random(lambda md, key, a: md.random.permutation(key, a)), (X,))
    yield Program("searchsorted in a table", lambda np, md, t, x: np.searchsorted(np.sort(t), x), (SCALE, X))
    yield Program("interp in a table", lambda np, md, t, x: np.interp(x, np.arange(12.0), t), (SCALE, VECTOR))


def _random(draw: Callable) -> Callable:
    """A program that draws with a key for each row."""
    return lambda np, md, x: md.vmap(lambda key, a: draw(md, key, a))(md.random.split(md.random.key(0), ROWS), x)


def _attention(np, md, q, k, v):
    weights = md.nn.softmax(np.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


def indexing() -> Iterator[Program]:
    yield Program("take_along_axis", lambda np, md, x, i: np.take_along_axis(x, i[:, None], axis=1), (X, PLACES))
    yield Program("vmap(a[b])", lambda np, md, x, i: md.vmap(lambda a, b: a[b])(x, i), (X, PLACES))
    yield Program("x[arange(n), i]", lambda np, md, x, i: x[np.arange(ROWS), i], (X, PLACES))
    yield Program("columns x[:, [3, 1]]", lambda np, md, x: x[:, np.array([3, 1])], (X,))
    yield Program("vmap(at.set)", lambda np, md, x, i: md.vmap(lambda a, b: np.at(a)[b].set(0.0))(x, i), (X, PLACES))
    yield Program("vmap(at.add)", lambda np, md, x, i: md.vmap(lambda a, b: np.at(a)[b].add(1.0))(x, i), (X, PLACES))
    part = lambda np, md, x, i: md.vmap(lambda a, b: md.dynamic_slice(a, (b,), (3,)))(x, i)  # noqa: E731
    yield Program("vmap(dynamic_slice)", part, (X, PLACES))
    yield Program("embedding w.T[y]", lambda np, md, w, y: w.T[y], (W, LABELS))
    yield Program("2 rows x[[3, 40]]", lambda np, md, x: x[np.array([3, 40])], (X,), 1, 2 * ROW)
    yield Program("first row", lambda np, md, x: x[0], (X,), 1, ROW)
    yield Program("first column", lambda np, md, x: x[:, 0], (X,))
    yield Program("x.at[:, 0].set", lambda np, md, x: np.at(x)[:, 0].set(0.0), (X,))


def neighbors() -> Iterator[Program]:
    yield Program("roll by 1", lambda np, md, x: np.roll(x, 1, axis=0), (X,), 1, ROW)
    yield Program("diff", lambda np, md, x: np.diff(x, axis=0), (X,), 1, BLOCK)
    yield Program("x[1:] - x[:-1]", lambda np, md, x: x[1:] - x[:-1], (X,), 1, BLOCK)
    yield Program("diff, padded", lambda np, md, x: np.pad(np.diff(x, axis=0), ((1, 0), (0, 0))), (X,), 1, ROW)
    yield Program("pad by 2 rows", lambda np, md, x: np.pad(x, ((2, 2), (0, 0))), (X,), 2, 2 * ROW)
    yield Program(
        "heat, fixed edges", lambda np, md, x: np.at(x)[1:-1].add(x[2:] - 2 * x[1:-1] + x[:-2]), (X,), 2, 2 * ROW
    )
    yield Program("flip", lambda np, md, x: x[::-1], (X,), 1, BLOCK)
    yield Program("every other row", lambda np, md, x: x[::2], (X,))
    yield Program("gradient", lambda np, md, x: np.gradient(x, axis=0), (X,), 2, 2 * ROW)
    yield Program("roll by 20 rows", lambda np, md, x: np.roll(x, 20, axis=0), (X,), 2, BLOCK)
    yield Program("first half of the rows", lambda np, md, x: x[: ROWS // 2], (X,), 2, BLOCK)
    yield Program("repeat rows", lambda np, md, x: np.repeat(x, 2, axis=0), (X,))
    yield Program("cumsum of rows", lambda np, md, x: np.cumsum(x, axis=0), (X,), 1, ROW)
    yield Program("diffusion, 3 steps", _diffusion, (X,), 6, 6 * ROW)


def _diffusion(np, md, x):
    for _ in range(3):
        x = x + 0.1 * (np.roll(x, 1, 0) + np.roll(x, -1, 0) - 2 * x)
    return x


def control_flow() -> Iterator[Program]:
    def scan_rows(np, md, x, y):
        return md.vmap(lambda a, b: md.scan(lambda h, x: (np.tanh(h + x), h * x), 0.0, (a * b))[0])(x, y)

    def scan_over_time(np, md, x):
        return md.scan(lambda h, u: (np.tanh(h + u), np.sum(h)), np.zeros(ROWS), x.T)

    def power(np, md, x):
        return md.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * c[1] * 0.5), (0, x))[1]

    def newton(np, md, x):
        def one(a):
            return md.while_loop(lambda v: abs(v * v - a) > 1e-9, lambda v: 0.5 * (v + a / v), a)

        return md.vmap(one)(abs(x) + 0.1)

    def halved(np, md, x):
        return md.while_loop(lambda v: np.sum(v * v) > 1.0, lambda v: 0.5 * v, x)

    def branches(np, md, x, y):
        return md.vmap(lambda a, b: md.cond(np.sum(a) > 0, np.sin, np.cos, b))(x, y)

    def switches(np, md, x, i):
        return md.vmap(lambda k, a: md.switch(k % 3, [np.sin, np.cos, np.tanh], a))(i, x)

    layers = lambda np, md, x, w: md.fori_loop(0, 4, lambda _, h: np.tanh(h @ w @ w.T), x)  # noqa: E731
    yield Program("vmap(scan)", scan_rows, (X, Y))
    yield Program("scan over time, sums", scan_over_time, (X,), FEATURES, FEATURES * NUMBER)
    yield Program("while_loop with a counter", power, (X,))
    yield Program("vmap(while_loop), scalars", newton, (VECTOR,))
    yield Program("vmap(while_loop), rows", lambda np, md, x: md.vmap(lambda a: halved(np, md, a))(x), (X,))
    yield Program("vmap(cond)", branches, (X, Y))
    yield Program("vmap(switch)", switches, (X, PLACES))
    yield Program("cond on a sum", lambda np, md, x: md.cond(np.sum(x) > 0, np.sin, np.cos, x), (X,), 1, NUMBER)
    yield Program("fori_loop of a layer", layers, (X, W))
    yield Program("while_loop on a sum", halved, (X,), 1, NUMBER)


def cross_entropies() -> Iterator[Program]:
    def of(chosen: Callable) -> Callable:
        """The gradient of the mean of what is chosen of the logarithms of probabilities."""
        return gradient(
            lambda np, md, w, b, x, y: -np.mean(chosen(np, md, md.nn.log_softmax(x @ w + b, axis=-1), y)), (0, 1)
        )

    by_one_hot = of(lambda np, md, logp, y: np.sum(logp * md.nn.one_hot(y, CLASSES), 1))
    by_take = of(lambda np, md, logp, y: np.take_along_axis(logp, y[:, None], axis=1))
    by_index = of(lambda np, md, logp, y: logp[np.arange(ROWS), y])
    by_vmap = of(lambda np, md, logp, y: md.vmap(lambda p, k: p[k])(logp, y))
    both = MATRIX + CLASSES * 8
    yield Program("grad: cross-entropy, one_hot", by_one_hot, (W, BIAS, X, LABELS), 1, both)
    yield Program("grad: cross-entropy, take_along_axis", by_take, (W, BIAS, X, LABELS), 1, both)
    yield Program("grad: cross-entropy, logp[arange, y]", by_index, (W, BIAS, X, LABELS), 1, both)
    yield Program("grad: cross-entropy, vmap", by_vmap, (W, BIAS, X, LABELS), 1, both)


def gradients() -> Iterator[Program]:
    def squares(np, md, w, x, y):
        return np.mean((np.tanh(x @ w) @ w.T - y) ** 2)

    def value_too(np, md, w, x, y):
        return md.value_and_grad(lambda w: squares(np, md, w, x, y))(w)

    def layer(np, md, w, x):
        return np.sum(np.tanh(x @ w))

    def each(np, md, w, x):
        return md.vmap(md.grad(lambda w, x: layer(np, md, w, x)), (None, 0))(w, x)

    def recurrent(np, md, w, x):
        step = lambda h, u: (np.tanh(h @ w @ w.T + u[:, None]), None)  # noqa: E731
        return np.sum(md.scan(step, np.zeros((ROWS, FEATURES)), x.T)[0])

    def in_cond(np, md, s, x):
        row = lambda h, u: (h + np.sum(md.cond(np.sum(h) > 0, np.sin, np.cos, u[:, None] * s)), None)  # noqa: E731
        return md.scan(row, 0.0, x.T)[0]

    def rms(np, md, s, x):
        return np.sum(np.tanh(s * x / np.sqrt(np.mean(x * x, axis=1, keepdims=True))))

    tall, wide = (W[0], P(None, "i")), (W[0].T.copy(), P("i"))
    yield Program("grad: squares", gradient(squares), (W, X, Y), 1, MATRIX)
    yield Program("value_and_grad: squares", value_too, (W, X, Y), 1, MATRIX + NUMBER)
    yield Program("grad of the input", gradient(lambda np, md, x, w: layer(np, md, w, x)), (X, W))
    yield Program("vmap(grad)", each, (W, X))
    yield Program("grad: embedding", gradient(lambda np, md, w, y: np.sum(np.tanh(w.T[y]))), (W, LABELS), 1, MATRIX)
    yield Program("grad: RNN over split rows", gradient(recurrent), (W, X), 1, MATRIX)
    sums = FEATURES * NUMBER + ROW
    yield Program("grad: operand of a cond in a loop", gradient(in_cond), (SCALE, X), FEATURES + 1, sums)
    diffused = gradient(lambda np, md, x: np.sum(_diffusion(np, md, x) ** 2))
    yield Program("grad: diffusion, 3 steps", diffused, (X,), 12, 12 * ROW)
    network = gradient(lambda np, md, w, v, x: np.sum(np.tanh(np.tanh(x @ w) @ v)), (0, 1))
    yield Program("grad: tensor parallel", network, (tall, wide, WHOLE), 1, ROWS * ROW)
    yield Program("grad: scale of rms norm", gradient(rms), (SCALE, X), 1, ROW)


def programs_of_users() -> Iterator[Program]:
    def normalized(np, x):
        return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

    def centers(np, md, x, c):
        nearest = md.nn.one_hot(np.argmin(np.sum((x[:, None] - c[None]) ** 2, -1), 1), 5)
        return (nearest.T @ x) / (np.sum(nearest, 0)[:, None] + 1)

    def clipped(np, md, w, x):
        g = md.grad(lambda w: np.mean((x @ w) ** 2))(w)
        return g / np.maximum(1, np.sqrt(np.sum(g * g)))

    def attend(np, md, q, k, v):
        return md.nn.softmax(q @ k.T, axis=-1) @ v

    def relaxed(np, md, x):
        return md.fori_loop(0, 10, lambda k, x: np.at(x)[1:-1].set((x[2:] + x[:-2]) / 2), x)

    table, middle = (W[0].T.copy(), P("i")), (WHOLE[0][:5], P())
    keys = 2 * ROWS * NUMBER + ROWS * ROW  # the maxima and sums of each query, and the sums of values
    running = gradient(lambda np, md, x: np.sum(np.cumsum(x, axis=0) ** 2))
    yield Program("batch norm", lambda np, md, x: normalized(np, x), (X,), 2, 3 * ROW)
    weighted = gradient(lambda np, md, x, y: np.sum(y * normalized(np, x)))
    yield Program("grad: batch norm", weighted, (X, Y), 4, 6 * ROW)
    yield Program("covariance", lambda np, md, x: np.cov(x, rowvar=False), (X,), 2, ROW + FEATURES * ROW)
    yield Program("k-means, a step", centers, (X, middle), 1, 5 * ROW + 5 * NUMBER)
    yield Program("segment sum", lambda np, md, x, y: np.at(np.zeros((8, 12)))[y].add(x), (X, LABELS), 1, 8 * ROW)
    yield Program("argmax of columns", lambda np, md, x: np.argmax(x, axis=0), (X,), 2, 2 * ROW)
    yield Program("sorted vector", lambda np, md, v: np.sort(v), (VECTOR,), 1, ROWS // 4 * 8)
    yield Program("clipped gradient", clipped, (W, X), 1, MATRIX)
    yield Program("embedding, split table", lambda np, md, w, y: w[y], (table, LABELS), 1, 2 * ROW)
    looked_up = gradient(lambda np, md, w, y: np.sum(np.tanh(w[y])))
    yield Program("grad: embedding, split table", looked_up, (table, LABELS), 2, 10 * ROW)
    yield Program("attention over split keys", attend, (WHOLE, X, Y), 3, keys)
    yield Program("attention, all split", attend, (X, X, Y), 2, 2 * BLOCK)
    yield Program("rows of x, then of y", lambda np, md, x, y: np.concatenate([x, y]), (X, Y), 2, 2 * BLOCK)
    yield Program("grad: cumsum of rows", running, (X,), 2, 5 * ROW)
    yield Program("jacobi, 10 steps", relaxed, (X,), 20, 20 * ROW)
    yield Program("trapezoid", lambda np, md, v: np.trapezoid(v), (VECTOR,), 2, 2 * NUMBER)


# ---------------------------------------------------------------- counting


def count(program: Program) -> Sent:
    """Return what a rank sends in the program that `jit` compiles."""
    mesh = spmd.make_mesh((RANKS,), ("i",), backend="simulated")
    arrays = [spmd.distribute(x, mesh, spec) for x, spec in program.arguments]
    function = our_function(program)
    report = spmd.communication(function, optimized=True)(*arrays)
    results = md.tree.leaves(md.jit(function)(*arrays))
    return Sent(by_kind(report.counts), report.bytes, ", ".join(_dimensions(spmd.spec_of(x)) for x in results))


def our_function(program: Program) -> Callable:
    names = libraries.our_names()
    return lambda *arrays: program.function(np, names, *arrays)


def _dimensions(spec: Any) -> str:
    """Return the dimensions that a spec splits: "0", "01", or "-" for none."""
    return "".join(str(d) for d, entry in enumerate(spec or ()) if entry) or "-"


def count_jax(program: Program) -> Sent | None:
    """Return what a rank sends in the HLO that JAX compiles; None without JAX."""
    jax = libraries.jax(RANKS)
    if jax is None:
        return None
    mesh = jax.make_mesh((RANKS,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*spec.entries))) for x, spec in program.arguments
    ]
    compiled = (
        jax.jit(lambda *arrays: program.function(libraries.jax_numpy(), libraries.jax_names(), *arrays))
        .lower(*arrays)
        .compile()
    )
    kinds, nbytes = sent_by_hlo(compiled.as_text())
    outs = [sharding.spec for sharding in jax.tree.leaves(compiled.output_shardings)]
    return Sent(kinds, nbytes, ", ".join(map(_dimensions, outs)))


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(.*)$")
_SENDS = {"collective-permute": "ppermute"} | {
    kind: kind for kind in ("all-reduce", "all-gather", "all-to-all", "reduce-scatter")
}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def sent_by_hlo(text: str) -> tuple[Counter, int]:
    """Return the collectives of a compiled module, and the bytes of their operands on one rank."""
    computations: dict[str, list] = {}
    entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computations[header[1]] = steps = []
            entry = header[1] if line.startswith("ENTRY") else entry
        elif computations and (instruction := _INSTRUCTION.match(line)):
            steps.append(instruction.groups())
    return _sent_in(computations, entry)


def _sent_in(computations: dict[str, list], name: str) -> tuple[Counter, int]:
    """Return what a computation sends: loops as often as they run, of branches the one that sends most."""
    types_of = {result: text for result, text, *_ in computations[name]}
    kinds, nbytes = Counter(), 0
    for _, _, operation, operands, rest in computations[name]:
        kind = _SENDS.get(operation.removesuffix("-start"))
        if kind:
            kinds[kind] += 1
            nbytes += sum(_nbytes(types_of[x]) for x in re.findall(r"%([\w.\-]+)", operands))
        inner = re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", rest) if not kind else []
        times = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
        parts = [_sent_in(computations, x) for x in inner]
        if branches := re.search(r"branch_computations=\{(.*?)\}", rest):
            every = [_sent_in(computations, x.strip().lstrip("%")) for x in branches[1].split(",")]
            parts.append(max(every, key=lambda part: part[1]))
        elif operation == "conditional":
            every = [_sent_in(computations, x) for x in re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)]
            parts.append(max(every, key=lambda part: part[1]))
        for more, size in parts:
            for _ in range(int(times[1]) if times else 1):
                kinds.update(more)
                nbytes += size
    return kinds, nbytes


def _nbytes(text: str) -> int:
    """Return the bytes of an HLO type: `f64[2,3]{1,0}`, or a tuple of such."""
    return sum(
        _SIZES[dtype] * numpy.prod([int(n) for n in shape.split(",") if n], dtype=int)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", text)
    )


# ---------------------------------------------------------------- the report


def is_worse(here: Sent, collectives: int, nbytes: int) -> bool:
    """Whether a program runs more collectives, or sends more than 1.1 times the bytes."""
    return here.count > collectives or here.bytes > 1.1 * nbytes


def rows(chosen: Sequence[Program]) -> Iterator[tuple[str, list[str]]]:
    """Yield the verdict on each program, and its cells."""
    for program in chosen:
        here, jax = count(program), count_jax(program)
        verdict = ""
        if jax and is_worse(here, jax.count, jax.bytes):
            verdict = "more than JAX"
        elif is_worse(here, program.collectives, program.bytes):
            verdict = "more than needed"
        needed = f"{program.collectives}: {program.bytes:,}" if program.collectives else "-"
        split = here.split if jax is None or jax.split == here.split else f"{here.split} (JAX {jax.split})"
        yield verdict, [program.name, str(here), str(jax or "?"), needed, split, verdict]


def main() -> None:
    options = measure.options(__doc__, None, differences=False, only=())
    widths = 38, 44, 44, 12, 22
    print("".join(f"{name:{n}}" for name, n in zip(("program", "here", "JAX", "needed", "split"), widths)))
    chosen = [p for p in programs() if measure.chosen([p.name], options.only)]
    verdicts: Counter = Counter()
    for verdict, cells in rows(chosen):
        verdicts[verdict or "as few as needed"] += 1
        if verdict or not options.differences:
            print("".join(f"{cell:{n}}" for cell, n in zip(cells, (*widths, 0))), flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()), f"of {len(chosen)} programs")


if __name__ == "__main__":
    main()
