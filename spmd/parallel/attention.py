"""Attention: on one rank, for all tokens or a chunk of keys at a time; and of tokens that are split over ranks.

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

**Sequence parallelism** splits a long sequence over the ranks, token by token. Most of a transformer works on each
token alone and needs no communication. Attention, in which each token looks at all others, has two forms for bodies of
`shard_map`. With p ranks, a rank has t/p tokens, with h heads of queries and g of keys and values; per rank, forward:

==================  ==========  =====  =========================================  ================================
attention           collective  count  elements in all                            a rank holds
==================  ==========  =====  =========================================  ================================
attention_by_heads  all_to_all  4      (2 h + 2 g) * t/p * d                      all tokens of h/p heads
ring_attention      ppermute    p-1    2 (p-1) * g * t/p * d                      t/p tokens, and another rank's
==================  ==========  =====  =========================================  ================================

(If h = g, `attention_by_heads` sends queries, keys and values at once: 2 all_to_all.) The backward pass has as many
collectives, of as many elements, in the other direction.

With `causal`, a token attends to itself and those before. A ring then skips the blocks that are after a rank's own
tokens. If tokens were split in order, all would wait for the last rank, which skips none. So `ring_attention` takes
them in zig-zag order: of 2 p blocks, rank r has blocks r and 2 p - 1 - r. Of the 4 pairs of a block of queries and a
block of keys, in each step of the ring, every rank then computes 2 (in the first step, of its own tokens, 3).

Sources: Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence
transformer models"; Liu et al., "Ring attention with blockwise transformers for near-infinite context"; Brandon et al.,
"Striped attention: Faster ring attention for causal transformers", for the balance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
from collectives import all_to_all, axis_index, axis_size
from collectives.ops import shift
from minidiff.core.types import typeof
from minidiff.nn import dot_product_attention

MASKED = -1e30  # the score of a key that is not attended to: finite, so that differences of scores are numbers


def attention(q: Any, k: Any, v: Any, q_positions: Any = None, k_positions: Any = None) -> Any:
    """Return the mean of the values for each query and head, weighted by how well the query matches their keys.

    Args:
        q: queries, [queries, heads, d].
        k: keys, [tokens, groups, d]; groups divide heads.
        v: values, [tokens, groups, d].
        q_positions: integers [queries]. A query then attends only to keys at or before its own position; there must be
            at least one.
        k_positions: integers [tokens].

    Returns:
        The means, [queries, heads, d].

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

    Args:
        q: queries, [tokens, heads, d].
        k: keys, [tokens, groups, d]; groups divide heads.
        v: values, [tokens, groups, d].
        chunk: the number of keys at a time.
        causal: whether a token attends only to itself and those before. Chunks after a tile are then skipped.
        tile: the number of queries at a time; by default all. [heads, tile, chunk] scores exist at once, and the
            backward pass keeps the sums of one tile.
        score: `score(scores, q_positions, k_positions)` changes scores: it adds a bias of the positions, or puts
            `MASKED` where a query does not attend to a key. Each query must have a key.
        blocks: a plain boolean array [tokens / tile, tokens / chunk]; a tile of queries skips a chunk of keys where it
            is False.

    Returns:
        The means of the values, [tokens, heads, d].

    Raises:
        ValueError: if `chunk` or `tile` does not divide the number of tokens, or for other `blocks`.

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
        """Attend to the first `count` chunks of the tile's list."""
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


# ---------------------------------------------------------------- tokens split over ranks


def attention_by_heads(q: Any, k: Any, v: Any, axis: str, causal: bool = False) -> Any:
    """Compute `attention` of tokens that are split along an axis, in order.

    Heads are independent, so an `all_to_all` exchanges tokens for heads: each rank has all tokens of some heads, and
    applies attention to these. A second `all_to_all` reverses the exchange.

    Args:
        q: queries of this rank's tokens, [tokens / ranks, heads, d].
        k: their keys, [tokens / ranks, groups, d].
        v: their values, [tokens / ranks, groups, d].
        axis: the axis of the mesh along which tokens are split.
        causal: whether a token attends only to itself and those before.

    Returns:
        The means of the values, [tokens / ranks, heads, d].

    Raises:
        ValueError: if the ranks do not divide the heads of queries, or of keys and values.

    >>> import spmd
    >>> mesh, q = spmd.make_mesh((2,), ('i',), backend='simulated'), np.ones((8, 2, 4))
    >>> body = lambda q, k, v: attention_by_heads(q, k, v, 'i', causal=True)
    >>> f = spmd.shard_map(body, mesh, in_specs=spmd.P('i'), out_specs=spmd.P('i'))
    >>> f(q, q, q).shape, spmd.communication(f)(q, q, q).counts
    ((8, 2, 4), {'all_to_all': 2})
    """
    _check_attention("attention_by_heads", q, k, v, axis, causal)
    ranks, heads, groups = axis_size(axis), q.shape[1], k.shape[1]
    if heads % ranks or groups % ranks:
        raise ValueError(
            f"attention_by_heads: {ranks} ranks along {axis!r} cannot share {heads} heads of q ({typeof(q)}) and "
            f"{groups} of k and v ({typeof(k)}): use multiples of {ranks}, or call ring_attention, which keeps heads"
        )
    by_heads = lambda x: all_to_all(x, axis, split_axis=x.ndim - 2, concat_axis=x.ndim - 3, tiled=True)  # noqa: E731
    q, k, v = by_heads(np.stack([q, k, v])) if q.shape == k.shape else (by_heads(q), by_heads(k), by_heads(v))
    positions = (np.arange(len(q)),) * 2 if causal else ()
    return all_to_all(attention(q, k, v, *positions), axis, split_axis=0, concat_axis=1, tiled=True)


def ring_attention(q: Any, k: Any, v: Any, axis: str, causal: bool = False) -> Any:
    """Compute `attention` of tokens that are split along an axis; in `zigzag` order if `causal`.

    Keys and values go around a ring, by a `ppermute` for each step, and every rank accumulates the weighted values for
    its own queries. No rank ever has all tokens.

    Args:
        q: queries of this rank's tokens, [tokens / ranks, heads, d].
        k: their keys, [tokens / ranks, groups, d]; groups divide heads.
        v: their values, [tokens / ranks, groups, d].
        axis: the axis of the mesh along which tokens are split.
        causal: whether a token attends only to itself and those before.

    Returns:
        The means of the values, [tokens / ranks, heads, d].

    Raises:
        ValueError: for other shapes, and for an odd number of tokens on a rank, if `causal`.

    >>> import spmd
    >>> mesh, q = spmd.make_mesh((4,), ('i',), backend='simulated'), np.ones((8, 2, 4))
    >>> body = lambda q, k, v: ring_attention(q, k, v, 'i')
    >>> f = spmd.shard_map(body, mesh, in_specs=spmd.P('i'), out_specs=spmd.P('i'))
    >>> f(q, q, q).shape, spmd.communication(f)(q, q, q).counts
    ((8, 2, 4), {'ppermute': 3})
    """
    _check_attention("ring_attention", q, k, v, axis, causal)
    ranks, rank, tokens, blocks = axis_size(axis), axis_index(axis), len(q), 2 if causal else 1
    if causal and tokens % 2:
        raise ValueError(f"ring_attention: a rank has two blocks of tokens, but {tokens} tokens is an odd number")

    def positions(rank):
        return _positions(rank, ranks, tokens) if causal else [None]

    def attended(so_far, pair, source):
        """Attend to the keys and values of a rank, block by block."""
        sums_of_blocks = []
        for sums, queries, at in zip(so_far, np.split(q, blocks), positions(rank)):
            for (k, v), places in zip(np.split(pair, blocks, axis=1), positions(source)):
                sums = _attend(sums, queries, k, v, at, places)
            sums_of_blocks.append(sums)
        return sums_of_blocks

    def step(carry, i):
        pair, so_far = carry
        pair = shift(pair, axis, 1)
        return (pair, attended(so_far, pair, (rank - i) % ranks)), None

    pair = np.stack([k, v])
    sums = [np.split(x, blocks, axis=1) for x in empty_sums(q)]
    so_far = attended(zip(*sums), pair, rank)
    if ranks > 1:
        (_, so_far), _ = md.scan(step, (pair, so_far), np.arange(1, ranks))
    return np.concatenate([finish(sums, q.dtype) for sums in so_far])


def _check_attention(name: str, q: Any, k: Any, v: Any, axis: str, causal: bool) -> None:
    """Raise ValueError unless the shapes are [tokens, heads, d] and twice [tokens, groups, d]; groups divide heads.

    With `causal`, queries and keys have the same number of tokens.
    """
    queries, keys, values = (typeof(x).shape for x in (q, k, v))
    fit = len(queries) == len(keys) == 3 and keys == values and queries[2] == keys[2]
    shapes = f"q {typeof(q)}, k {typeof(k)} and v {typeof(v)} on each of the {axis_size(axis)} ranks along {axis!r}"
    if not (fit and keys[1] and queries[1] % keys[1] == 0):
        raise ValueError(
            f"{name}: {shapes} do not match: they must be [tokens, heads, d] and twice [tokens, groups, d], "
            "where heads is a multiple of groups"
        )
    if causal and queries[0] != keys[0]:
        raise ValueError(
            f"{name}: {shapes} do not match causal=True, where queries and keys are of the same tokens, not of "
            f"{queries[0]} and {keys[0]}; attention to another sequence is not causal"
        )


def _attend(so_far: tuple, q: Any, k: Any, v: Any, q_positions: Any, k_positions: Any) -> tuple:
    """Attend to a block of keys, or skip it if all of it is after the queries. Each rank chooses for itself."""
    if q_positions is None:
        return accumulate(so_far, q, k, v)
    attend = lambda *args: accumulate(args[:3], *args[3:])  # noqa: E731
    skip = lambda *args: args[:3]  # noqa: E731
    return md.cond(q_positions[-1] >= k_positions[0], attend, skip, *so_far, q, k, v, q_positions, k_positions)


def _positions(rank: Any, ranks: int, tokens: int) -> list:
    """Return the positions of a rank's two blocks of tokens in zig-zag order."""
    half = np.arange(tokens // 2)
    return [block * (tokens // 2) + half for block in (rank, 2 * ranks - 1 - rank)]


def zigzag_positions(tokens: int, axis: str) -> Any:
    """Return the positions of a rank's tokens in `zigzag` order, [tokens], where it has `tokens` of them."""
    return np.concatenate(_positions(axis_index(axis), axis_size(axis), tokens))


def zigzag(tokens: int, ranks: int) -> numpy.ndarray:
    """Return the order of tokens for a causal `ring_attention`: `x[zigzag(t, p)]` is split evenly over p ranks.

    `numpy.argsort` of it restores the order.

    Args:
        tokens: the number of tokens.
        ranks: the number p of ranks.

    Raises:
        ValueError: unless 2 p divides the number of tokens.

    >>> zigzag(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if tokens % (2 * ranks):
        raise ValueError(
            f"zigzag: {tokens} tokens cannot be split into two blocks for each of {ranks} ranks; pad them to a "
            f"multiple of {2 * ranks}, with np.pad"
        )
    blocks = numpy.arange(tokens).reshape(2 * ranks, -1)
    return blocks[[b for rank in range(ranks) for b in (rank, 2 * ranks - 1 - rank)]].ravel()
