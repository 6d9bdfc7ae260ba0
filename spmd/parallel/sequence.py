"""Sequence parallelism: a long sequence is split over the ranks, token by token.

Most of a transformer works on each token alone and needs no communication. For attention, in which each token looks at
all others, there are two ways, for bodies of `shard_map`. With p ranks, a rank has t/p tokens; per rank, forward:

==================  ==========  =====  =========================================  ================================
attention           collective  count  elements in all                            a rank holds
==================  ==========  =====  =========================================  ================================
attention_by_heads  all_to_all  2      (3 + 1) * t/p * heads * d                  all tokens of heads/p heads
ring_attention      ppermute    p-1    2*(p-1) * t/p * heads * d                  t/p tokens, and another rank's
==================  ==========  =====  =========================================  ================================

The backward pass has as many collectives, of as many elements, in the other direction.

Source: Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence
transformer models"; Liu et al., "Ring attention with blockwise transformers for near-infinite context".
"""

from __future__ import annotations

import math
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_to_all, axis_size
from collectives.ops import shifted
from minidiff.nn import softmax


def attention(q: Any, k: Any, v: Any) -> Any:
    """The mean of the values v for each query and head.

    The weights say how well the query q matches their keys k.

    [queries, heads, d], [tokens, heads, d], [tokens, heads, d] -> [queries, heads, d].

    >>> q, k, v = np.zeros((1, 1, 2)), np.ones((3, 1, 2)), np.arange(6.0).reshape(3, 1, 2)
    >>> attention(q, k, v)
    array([[[2., 3.]]])
    """
    return np.einsum("hqt,thd->qhd", softmax(_scores(q, k)), v)


def _scores(q: Any, k: Any) -> Any:
    return np.einsum("qhd,thd->hqt", q, k) / math.sqrt(q.shape[-1])


def attention_by_heads(q: Any, k: Any, v: Any, axis: str) -> Any:
    """`attention` of tokens split along `axis`: [tokens / ranks, heads, d] each.

    Heads are independent. So an `all_to_all` exchanges tokens for heads: each rank then has all tokens of some heads,
    and applies attention to these; a second `all_to_all` reverses the exchange. The number of ranks must divide the
    number of heads. The result has the shape of q.
    """
    q, k, v = all_to_all(np.stack([q, k, v]), axis, split_axis=2, concat_axis=1, tiled=True)
    return all_to_all(attention(q, k, v), axis, split_axis=0, concat_axis=1, tiled=True)


def ring_attention(q: Any, k: Any, v: Any, axis: str) -> Any:
    """`attention` of tokens split along `axis`: [tokens / ranks, heads, d] each.

    Keys and values go around a ring, by a `ppermute` for each step, and every rank accumulates the weighted values for
    its own queries. No rank ever has all tokens. The weights are exponentials: they are kept relative to the largest
    score so far, so that none overflows, and the sums are scaled down when a larger score comes. The result has the
    shape of q.
    """
    ranks, pair = axis_size(axis), np.stack([k, v])
    largest, total, result = -np.inf, 0.0, 0.0
    for step in range(ranks):
        scores = _scores(q, pair[0])
        before, largest = largest, np.maximum(largest, np.max(md.stop_gradient(scores), axis=-1, keepdims=True))
        weights, scale = np.exp(scores - largest), np.exp(before - largest)
        total = total * scale + np.sum(weights, axis=-1, keepdims=True)
        result = result * scale + np.einsum("hqt,thd->hqd", weights, pair[1])
        if step < ranks - 1:
            pair = shifted(pair, axis, 1)
    return np.moveaxis(result / total, 0, 1)
