"""Attention on one rank: of all tokens at once, or a chunk of keys at a time.

A query attends to keys by weights, the softmax of scores. With `causal` positions it attends only to keys at its own
position or before. There may be fewer heads of keys and values than of queries (grouped-query attention): each then
serves as many heads of queries.

The weights of t queries for t keys are heads * t * t numbers. `attention` has them all at once, and keeps them for the
backward pass. `chunked_attention` has those of one chunk of keys, and computes them again in the backward pass; it
keeps the sums so far, a result's size for each chunk. The softmax is taken in parts by `accumulated`: weights are
relative to the largest score so far, so that none overflows, and the sums are scaled down when a larger score comes.

Sources: Ainslie et al., "GQA: Training generalized multi-query transformer models from multi-head checkpoints"; Rabe
and Staats, "Self-attention does not need O(n²) memory".
"""

from __future__ import annotations

import math
from typing import Any

import minidiff as md
import minidiff.numpy as np
from minidiff.nn import softmax

MASKED = -1e30  # the score of a key that is not attended to: finite, so that differences of scores are numbers


def attention(q: Any, k: Any, v: Any, q_positions: Any = None, k_positions: Any = None) -> Any:
    """The mean of the values v for each query and head.

    The weights say how well the query q matches their keys k. [queries, heads, d], [tokens, groups, d],
    [tokens, groups, d] -> [queries, heads, d], where groups divide heads. With positions [queries] and [tokens],
    integers, a query attends only to keys whose position is at most its own; there must be one.

    >>> q, k, v = np.zeros((1, 1, 2)), np.ones((3, 1, 2)), np.arange(6.0).reshape(3, 1, 2)
    >>> attention(q, k, v)
    array([[[2., 3.]]])
    >>> attention(q, k, v, np.array([1]), np.arange(3))
    array([[[1., 2.]]])
    """
    weights = softmax(scores(q, k, q_positions, k_positions))
    return np.einsum("hqt,thd->qhd", weights, _for_heads(v, q))


def scores(q: Any, k: Any, q_positions: Any = None, k_positions: Any = None) -> Any:
    """How well queries match keys, [heads, queries, tokens]; `MASKED` where a key is after the query."""
    found = np.einsum("qhd,thd->hqt", q, _for_heads(k, q)) / math.sqrt(q.shape[-1])
    if q_positions is None:
        return found
    return np.where(q_positions[:, None] >= k_positions, found, MASKED)


def _for_heads(x: Any, q: Any) -> Any:
    """Repeat the groups of keys or values for the heads of the queries that they serve."""
    heads, groups = q.shape[1], x.shape[1]
    if heads % groups:
        raise ValueError(
            f"attention: {groups} heads of keys and values cannot serve {heads} heads of queries equally; their number "
            f"must divide {heads}"
        )
    return x if heads == groups else np.repeat(x, heads // groups, axis=1)


def nothing_yet(q: Any) -> tuple:
    """The sums of `accumulated` before the first keys, in float32 at least."""
    result = md.precision.widen(np.moveaxis(0 * q, 0, 1))
    return np.full((*result.shape[:2], 1), MASKED, result.dtype), np.zeros((*result.shape[:2], 1), result.dtype), result


def accumulated(so_far: tuple, q: Any, k: Any, v: Any, q_positions: Any = None, k_positions: Any = None) -> tuple:
    """Attend to further keys and values: the largest scores, the sums of weights, and those of weighted values."""
    before, total, result = so_far
    found = scores(q, k, q_positions, k_positions)
    largest = np.maximum(before, np.max(md.stop_gradient(found), axis=-1, keepdims=True))
    weights, scale = np.exp(found - largest), np.exp(before - largest)
    result = result * scale + np.einsum("hqt,thd->hqd", weights, _for_heads(v, q))
    return largest, total * scale + np.sum(weights, axis=-1, keepdims=True), result


def finished(so_far: tuple, dtype: Any) -> Any:
    """The result of attention, [queries, heads, d]."""
    _, total, result = so_far
    return np.moveaxis(result / total, 0, 1).astype(dtype)


def chunked_attention(q: Any, k: Any, v: Any, chunk: int, causal: bool = False) -> Any:
    """`attention` of one sequence to itself, `chunk` keys at a time: a scan that recomputes its weights.

    Raises ValueError if `chunk` does not divide the number of tokens.

    >>> q = k = v = np.arange(8.0).reshape(4, 1, 2)
    >>> bool(np.allclose(chunked_attention(q, k, v, chunk=2), attention(q, k, v)))
    True
    """
    tokens = len(k)
    if tokens % chunk:
        raise ValueError(f"chunked_attention: chunks of {chunk} do not divide {tokens} tokens; choose a divisor")
    places = np.arange(tokens)
    chunks = [x.reshape(tokens // chunk, chunk, *x.shape[1:]) for x in (k, v, places)]

    @md.checkpoint
    def step(so_far: tuple, keys: tuple) -> tuple:
        k, v, k_positions = keys
        positions = (places, k_positions) if causal else ()
        return accumulated(so_far, q, k, v, *positions), None

    return finished(md.scan(step, nothing_yet(q), tuple(chunks))[0], q.dtype)
