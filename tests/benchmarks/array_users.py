"""Further programs over whole arrays, of the kinds that users write, for `array_programs.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from spmd import P
from tests.benchmarks import array_programs as table
from tests.benchmarks.array_programs import BLOCK, CLASSES, FEATURES, LABELS, MATRIX, NUMBER, ROW, ROWS, VECTOR, Program

gradient = table.gradient
X, Y, W, WHOLE, QUERIES, PLACES = table.X, table.Y, table.W, table.WHOLE, table.QUERIES, table.PLACES
_rng = numpy.random.default_rng(1)
CENTERS = _rng.normal(size=(5, FEATURES)), P()
TEXTS = _rng.normal(size=(8, 16, FEATURES)), P("i")
ROWS_OF_TABLE = W[0].T.copy(), P("i")


def programs() -> Iterator[Program]:
    yield from statistics()
    yield from losses()
    yield from attention_and_shapes()
    yield from running_totals()
    yield from stencils()


def statistics() -> Iterator[Program]:
    def normalized(np: Any, x: Any) -> Any:
        return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

    def centers(np: Any, md: Any, x: Any, c: Any) -> Any:
        nearest = md.nn.one_hot(np.argmin(np.sum((x[:, None] - c[None]) ** 2, -1), 1), 5)
        return (nearest.T @ x) / (np.sum(nearest, 0)[:, None] + 1)

    yield Program("batch norm", lambda np, md, x: normalized(np, x), (X,), 2, 3 * ROW)
    weighted = gradient(lambda np, md, x, y: np.sum(y * normalized(np, x)))
    yield Program("grad: batch norm", weighted, (X, Y), 4, 6 * ROW)
    yield Program("covariance", lambda np, md, x: np.cov(x, rowvar=False), (X,), 2, ROW + FEATURES * ROW)
    yield Program("k-means, a step", centers, (X, CENTERS), 1, 5 * ROW + 5 * NUMBER)
    yield Program("pairwise distances", lambda np, md, x: np.sum((x[:, None] - x) ** 2, -1), (X,), 1, BLOCK)
    yield Program("histogram", lambda np, md, y: np.sum(md.nn.one_hot(y, CLASSES), 0), (LABELS,), 1, CLASSES * 8)
    yield Program("counts", lambda np, md, y: np.at(np.zeros(CLASSES))[y].add(1.0), (LABELS,), 1, CLASSES * 8)
    yield Program("segment sum", lambda np, md, x, y: np.at(np.zeros((8, 12)))[y].add(x), (X, LABELS), 1, 8 * ROW)
    yield Program("weighted mean", lambda np, md, x, w: np.sum(x * w[:, None], 0) / np.sum(w), (X, VECTOR), 1, ROW + 8)
    yield Program("masked mean", lambda np, md, x: np.sum(np.where(x > 0, x, 0)) / np.sum(x > 0), (X,), 2, 2 * NUMBER)
    yield Program("3 largest of each row", lambda np, md, x: np.sort(x, axis=1)[:, -3:], (X,))
    yield Program("argmax of all", lambda np, md, x: np.argmax(x), (X,), 2, 2 * NUMBER)
    yield Program("argmax of columns", lambda np, md, x: np.argmax(x, axis=0), (X,), 2, 2 * ROW)
    yield Program("sorted vector", lambda np, md, v: np.sort(v), (VECTOR,), 1, ROWS // 4 * 8)


def losses() -> Iterator[Program]:
    def logistic(np: Any, md: Any, w: Any, x: Any, y: Any) -> Any:
        return np.mean(np.log1p(np.exp(-(x @ w) * y[:, None])))

    def clipped(np: Any, md: Any, w: Any, x: Any) -> Any:
        gradient = md.grad(lambda w: np.mean((x @ w) ** 2))(w)
        return gradient / np.maximum(1, np.sqrt(np.sum(gradient * gradient)))

    looked_up = gradient(lambda np, md, w, y: np.sum(np.tanh(w[y])))
    yield Program("grad: logistic", gradient(logistic), (W, X, VECTOR), 1, MATRIX)
    yield Program("clipped gradient", clipped, (W, X), 1, MATRIX)
    yield Program("grad: logsumexp", gradient(lambda np, md, x: md.nn.logsumexp(x)), (X,), 2, 2 * NUMBER)
    yield Program("embedding, split table", lambda np, md, w, y: w[y], (ROWS_OF_TABLE, LABELS), 1, 2 * ROW)
    yield Program("grad: embedding, split table", looked_up, (ROWS_OF_TABLE, LABELS), 2, 10 * ROW)


def attention_and_shapes() -> Iterator[Program]:
    def causal(np: Any, md: Any, q: Any, k: Any) -> Any:
        scores = np.einsum("bqhd,bkhd->bhqk", q, k)
        return md.nn.softmax(np.where(np.tril(np.ones((6, 6), bool)), scores, -1e9), axis=-1)

    def attend(np: Any, md: Any, q: Any, k: Any, v: Any) -> Any:
        return md.nn.softmax(q @ k.T, axis=-1) @ v

    keys = 2 * ROWS * NUMBER + ROWS * ROW  # the maxima and sums of each query, and the sums of values
    yield Program("causal attention", causal, (QUERIES, QUERIES))
    yield Program("attention over split keys", attend, (WHOLE, X, Y), 3, keys)
    yield Program("attention of split queries", attend, (X, WHOLE, WHOLE))
    yield Program("attention, all split", attend, (X, X, Y), 2, 2 * BLOCK)
    yield Program("mask of rows", lambda np, md, x: np.where(np.arange(ROWS)[:, None] < 50, x, 0), (X,))
    yield Program("heads in front", lambda np, md, x: x.reshape(8, 16, 3, 4).transpose(0, 2, 1, 3), (TEXTS,))
    yield Program("pairs of rows joined", lambda np, md, x: x.reshape(32, 24), (X,))
    yield Program("maxima of pairs", lambda np, md, x: x.reshape(32, 2, 12).max(1), (X,))
    yield Program("stack in the middle", lambda np, md, x, y: np.stack([x, y], 1), (X, Y))
    yield Program("rows of x, then of y", lambda np, md, x, y: np.concatenate([x, y]), (X, Y), 2, 2 * BLOCK)
    yield Program("two rows written", lambda np, md, x: np.at(x)[np.array([3, 40])].set(0.0), (X,))


def running_totals() -> Iterator[Program]:
    squares = gradient(lambda np, md, x: np.sum(np.cumsum(x, axis=0) ** 2))

    yield Program("cumsum of a vector", lambda np, md, v: np.cumsum(v), (VECTOR,), 1, NUMBER)
    yield Program("cumprod of rows", lambda np, md, x: np.cumprod(x, axis=0), (X,), 1, ROW)
    yield Program("grad: cumsum of rows", squares, (X,), 2, 5 * ROW)


def stencils() -> Iterator[Program]:
    def smooth(np: Any, x: Any) -> Any:
        return (x[:-2] + x[1:-1] + x[2:]) / 3

    def squares(np: Any, md: Any, x: Any) -> Any:
        return np.sum((x[1:] - x[:-1]) ** 2)

    def jacobi(np: Any, x: Any) -> Any:
        return np.at(x)[1:-1].set((x[2:] + x[:-2]) / 2)

    def predicted(np: Any, md: Any, w: Any, x: Any) -> Any:
        return np.mean((x[1:] - np.tanh(x[:-1] @ w @ w.T)) ** 2)

    def relaxed(np: Any, md: Any, x: Any) -> Any:
        return md.fori_loop(0, 10, lambda k, x: jacobi(np, x), x)

    yield Program("jacobi", lambda np, md, x: jacobi(np, x), (X,), 2, 2 * ROW)
    yield Program("jacobi, 10 steps", relaxed, (X,), 20, 20 * ROW)
    yield Program("next row predicted", predicted, (W, X), 2, ROW + NUMBER)
    yield Program("second differences", lambda np, md, x: np.sum(np.diff(x, 2, axis=0) ** 2), (X,), 3, 2 * ROW + NUMBER)
    yield Program("trapezoid", lambda np, md, v: np.trapezoid(v), (VECTOR,), 2, 2 * NUMBER)
    yield Program("moving average", lambda np, md, x: smooth(np, x), (X,), 1, BLOCK)
    yield Program("moving average, padded", lambda np, md, x: smooth(np, np.pad(x, ((1, 1), (0, 0)))), (X,), 2, 2 * ROW)
    yield Program("upwind", lambda np, md, x: x - 0.1 * (x - np.roll(x, 1, 0)), (X,), 1, ROW)
    yield Program("squared differences", squares, (X,), 2, ROW + NUMBER)
    yield Program("grad: squared differences", gradient(squares), (X,), 2, 2 * ROW)
    yield Program("last row first", lambda np, md, x: np.concatenate([x[-1:], x[:-1]]), (X,), 1, ROW)
    yield Program("even minus odd rows", lambda np, md, x: x[::2] - x[1::2], (X,))
    yield Program("without the last rows", lambda np, md, x: x[:-4], (X,), 1, 3 * ROW)
