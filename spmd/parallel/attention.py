"""Attention on one rank: for all tokens at once, or for a chunk of keys at a time.

A query attends to keys with weights, the softmax of scores. With positions, it attends only to keys at or before its
own position. There may be fewer heads of keys and values than of queries (grouped-query attention). Each then serves
several heads of queries.

The weights of t queries for t keys are heads * t * t numbers. `attention` computes them all at once, and keeps them for
the backward pass. `chunked_attention` computes the weights of one chunk of keys at a time, and again in the backward
pass. It keeps only the sums so far, one array of the result's size for each chunk. `accumulate` computes the softmax in
parts: weights are relative to the largest score so far, so that none overflows, and a larger score scales the sums
down.

Sources: Ainslie et al., "GQA: Training generalized multi-query transformer models from multi-head checkpoints"; Rabe
and Staats, "Self-attention does not need O(n²) memory".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
from minidiff.nn import dot_product_attention

MASKED = -1e30  # the score of a key that is not attended to: finite, so that differences of scores are numbers


def attention(q: Any, k: Any, v: Any, q_positions: Any = None, k_positions: Any = None) -> Any:
    """Return the mean of the values v for each query and head, weighted by how well q matches their keys k.

    [queries, heads, d], [tokens, groups, d], [tokens, groups, d] -> [queries, heads, d], where groups divide heads.
    With integer positions [queries] and [tokens], a query attends only to keys at or before its own position; there
    must be at least one.

    >>> q, k, v = np.zeros((1, 1, 2)), np.ones((3, 1, 2)), np.arange(6.0).reshape(3, 1, 2)
    >>> attention(q, k, v)
    array([[[2., 3.]]])
    >>> attention(q, k, v, np.array([1]), np.arange(3))
    array([[[1., 2.]]])
    """
    return dot_product_attention(q, k, v, mask=None if q_positions is None else q_positions[:, None] >= k_positions)


def empty_sums(q: Any) -> tuple:
    """Return the sums of `accumulate` before the first keys, in float32 at least."""
    result = md.precision.widen(np.moveaxis(0 * q, 0, 1))
    return np.full((*result.shape[:2], 1), MASKED, result.dtype), np.zeros((*result.shape[:2], 1), result.dtype), result


def accumulate(
    so_far: tuple,
    q: Any,
    k: Any,
    v: Any,
    q_positions: Any = None,
    k_positions: Any = None,
    change: Callable = lambda scores: scores,
) -> tuple:
    """Attend to further keys and values: the largest scores, the sums of weights, and those of weighted values."""
    before, total, result = so_far
    if q.shape[1] != k.shape[1]:
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = change(np.einsum("qhd,thd->hqt", q, k) / math.sqrt(q.shape[-1]))
    if q_positions is not None:
        scores = np.where(q_positions[:, None] >= k_positions, scores, MASKED)
    largest = np.maximum(before, np.max(md.stop_gradient(scores), axis=-1, keepdims=True))
    weights, scale = np.exp(scores - largest), np.exp(before - largest)
    result = result * scale + np.einsum("hqt,thd->hqd", weights, v)
    return largest, total * scale + np.sum(weights, axis=-1, keepdims=True), result


def finish(so_far: tuple, dtype: Any) -> Any:
    """Return the result of attention, [queries, heads, d]."""
    _, total, result = so_far
    return np.moveaxis(result / total, 0, 1).astype(dtype)


def _attended_chunks(shape: tuple[int, int], blocks: Any) -> numpy.ndarray:
    """Return whether each tile of queries attends to each chunk of keys, and check the shape."""
    lists = numpy.ones(shape, bool) if blocks is None else numpy.asarray(blocks, bool)
    if lists.shape != shape:
        raise ValueError(f"chunked_attention: blocks has the shape {lists.shape}; there are {shape} tiles and chunks")
    return lists


def chunked_attention(
    q: Any,
    k: Any,
    v: Any,
    chunk: int,
    causal: bool = False,
    *,
    tile: int | None = None,
    score: Callable | None = None,
    blocks: Any = None,
) -> Any:
    """Compute `attention` of one sequence to itself, `chunk` keys at a time, by a scan that recomputes its weights.

    With `tile`, it is for that many queries at a time: [heads, tile, chunk] scores exist at once, and the backward pass
    keeps the sums of one tile. `score(scores, q_positions, k_positions)` changes them: it adds a bias of the positions,
    or puts `MASKED` where a query does not attend to a key. `blocks` is a plain boolean array [tokens / tile, tokens /
    chunk]; a tile of queries skips a chunk of keys where it is False. If `causal`, chunks after a tile are skipped,
    too. Each query must have a key. Raises ValueError if `chunk` or `tile` does not divide the number of tokens, or for
    other `blocks`.

    >>> q = k = v = np.arange(8.0).reshape(4, 1, 2)
    >>> bool(np.allclose(chunked_attention(q, k, v, chunk=2), attention(q, k, v)))
    True
    >>> near = lambda scores, i, j: np.where(abs(i[:, None] - j) < 2, scores, MASKED)
    >>> chunked_attention(0 * q, k, v, chunk=2, score=near)[:, 0, 0]
    array([1., 2., 4., 5.])
    """
    tokens, tile = len(k), len(q) if tile is None else tile
    for kind, size, n in (("chunks", chunk, tokens), ("tiles", tile, len(q))):
        if n % size:
            raise ValueError(f"chunked_attention: {kind} of {size} do not divide {n} tokens; choose a divisor")
    shape = len(q) // tile, tokens // chunk
    lists = _attended_chunks(shape, blocks)
    if causal:
        lists = lists & (numpy.arange(shape[1]) * chunk < numpy.arange(1, shape[0] + 1)[:, None] * tile)
    q_tiles, k_chunks, v_chunks, q_places, k_places = (
        x.reshape(len(x) // size, size, *x.shape[1:])
        for x, size in ((q, tile), (k, chunk), (v, chunk), (np.arange(len(q)), tile), (np.arange(tokens), chunk))
    )

    def attend_tile(operands: tuple) -> Any:
        """Attend to the chunks in the tile's list, of which the first `count` are in it."""
        q, q_positions, order, count = operands

        @md.checkpoint
        def step(so_far: tuple, keys: tuple) -> tuple:
            k, v, k_positions, number = keys
            change = {} if score is None else {"change": lambda scores: score(scores, q_positions, k_positions)}
            positions = (q_positions, k_positions) if causal else ()
            attend = lambda *so_far: accumulate(so_far, q, k, v, *positions, **change)  # noqa: E731
            if lists.all():
                return attend(*so_far), None
            return md.cond(number < count, attend, lambda *so_far: so_far, *so_far), None

        chunks = [x if lists.all() else np.take(x, order, axis=0) for x in (k_chunks, v_chunks, k_places)]
        return finish(md.scan(step, empty_sums(q), (*chunks, np.arange(len(order))))[0], q.dtype)

    counts = lists.sum(axis=1)
    orders = numpy.argsort(~lists, axis=1, stable=True)[:, : counts.max()]  # those in the list are first
    run = md.checkpoint(attend_tile) if shape[0] > 1 else attend_tile  # sums so far are kept for one tile at a time
    return md.map(run, (q_tiles, q_places, orders, counts)).reshape(q.shape)
