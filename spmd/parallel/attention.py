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

A *window* hides most tokens from each other. Positions are known before the program runs, and so is which rank sees
which: keys that a rank does not see are neither sent to it nor multiplied. In order, with a causal window of w tokens
and n tokens on a rank, a rank sees ceil((w - 1)/n) ranks before it, and sends its keys to as many, however long the
sequence is. *Segments*, the documents of a packed sequence, are values: they hide single tokens, and save no message.

`attention_by_heads` along one axis and `ring_attention` along another split a sequence over more ranks than there are
heads.

Sources: Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence
transformer models"; Liu et al., "Ring attention with blockwise transformers for near-infinite context"; Brandon et al.,
"Striped attention: Faster ring attention for causal transformers", for the balance; Beltagy et al., "Longformer: The
long-document transformer", for windows and global tokens; Fang and Zhao, "USP: A unified sequence parallelism approach
for long context generative AI", for heads and ring together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
from collectives import all_to_all, axis_index, axis_size, ppermute
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


def accumulate(so_far: tuple, q: Any, k: Any, v: Any, change: Callable = lambda scores: scores) -> tuple:
    """Attend to further keys and values: the largest scores, the sums of weights, and those of weighted values.

    `change(scores)` puts `MASKED` where a query does not attend to a key, for example.
    """
    before, total, result = so_far
    if q.shape[1] != k.shape[1]:
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = change(np.einsum("qhd,thd->hqt", q, k) / math.sqrt(q.shape[-1]))
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
            masked = lambda x: np.where(q_positions[:, None] >= k_positions, x, MASKED) if causal else x  # noqa: E731
            change = masked if score is None else lambda x: masked(score(x, q_positions, k_positions))
            attend = lambda *so_far: accumulate(so_far, q, k, v, change)  # noqa: E731
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


def attention_by_heads(q: Any, k: Any, v: Any, axis: str, causal: bool = False, attend: Callable | None = None) -> Any:
    """Compute `attention` of tokens that are split along an axis, in order.

    Heads are independent, so an `all_to_all` exchanges tokens for heads: each rank has all tokens of some heads, and
    applies attention to these. A second `all_to_all` reverses the exchange.

    Args:
        q: queries of this rank's tokens, [tokens / ranks, heads, d].
        k: their keys, [tokens / ranks, groups, d].
        v: their values, [tokens / ranks, groups, d].
        axis: the axis of the mesh along which tokens are split.
        causal: whether a token attends only to itself and those before.
        attend: `attend(q, k, v)` computes attention of the gathered tokens, for some heads: by default `attention`,
            with `causal`. A `ring_attention` along another axis of the mesh splits the tokens further: tokens are then
            split along both axes, `P((ring, heads))`.

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
    result = attention(q, k, v, *positions) if attend is None else attend(q, k, v)
    return all_to_all(result, axis, split_axis=0, concat_axis=1, tiled=True)


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    axis: str,
    causal: bool = False,
    *,
    window: int | None = None,
    prefix: int = 0,
    segments: Any = None,
    in_order: bool = False,
) -> Any:
    """Compute `attention` of tokens that are split along an axis; in `zigzag` order if `causal`.

    Keys and values go around a ring, by a `ppermute` for each step, and every rank accumulates the weighted values for
    its own queries. No rank ever has all tokens. If a window hides ranks from each other, then keys and values go only
    to the ranks that attend to them, in a `ppermute` for each distance on the ring.

    Args:
        q: queries of this rank's tokens, [tokens / ranks, heads, d].
        k: their keys, [tokens / ranks, groups, d]; groups divide heads.
        v: their values, [tokens / ranks, groups, d].
        axis: the axis of the mesh along which tokens are split.
        causal: whether a token attends only to itself and those before.
        window: a token attends only to tokens that are less than `window` away from it.
        prefix: all tokens attend to the first `prefix` tokens, whatever `causal` and `window` say.
        segments: integers [tokens / ranks], such as the number of a document; a token attends only to tokens of its own
            segment. Or a pair: those of the queries, and those of the keys; keys with another number than all queries
            are padding. They go around with the keys.
        in_order: whether tokens are split in order, also if `causal`: with a window, a rank then attends only to the
            ranks before.

    Returns:
        The means of the values, [tokens / ranks, heads, d]. Each query must have a key.

    Raises:
        ValueError: for other shapes, for a window below 1, and for an odd number of tokens on a rank in zigzag order.

    >>> import spmd
    >>> mesh, q = spmd.make_mesh((4,), ('i',), backend='simulated'), np.ones((8, 2, 4))
    >>> def counts(**options):
    ...     body = lambda q, k, v: ring_attention(q, k, v, 'i', **options)
    ...     f = spmd.shard_map(body, mesh, in_specs=spmd.P('i'), out_specs=spmd.P('i'))
    ...     return f(q, q, q).shape, spmd.communication(f)(q, q, q).counts
    >>> counts()
    ((8, 2, 4), {'ppermute': 3})
    >>> counts(causal=True, window=3, in_order=True)  # two tokens on each rank, of which the next one sees both
    ((8, 2, 4), {'ppermute': 1})
    """
    _check_attention("ring_attention", q, k, v, axis, causal)
    ranks, rank, blocks = axis_size(axis), axis_index(axis), 2 if causal and not in_order else 1
    if len(q) % blocks:
        raise ValueError(f"ring_attention: a rank has two blocks of tokens, but {len(q)} tokens is an odd number")
    labels, k_labels = _check_mask(q, k, window, segments)
    sees = _rule_of(causal, window, prefix)

    def places(rank, tokens, labels):
        """Return the positions and segments of each block of a rank's tokens."""
        positions = [None] * blocks if sees is None else _positions(rank, ranks, tokens, blocks)
        return zip(positions, [None] * blocks if labels is None else np.split(labels, blocks))

    def attended(so_far, keys, source):
        """Attend to the keys and values of a rank, block by block."""
        sums_of_blocks, (pair, k_labels) = [], keys
        for sums, queries, at in zip(so_far, np.split(q, blocks), places(rank, len(q), labels)):
            for (k, v), to in zip(np.split(pair, blocks, axis=1), places(source, pair.shape[1], k_labels)):
                sums = _attend(sums, (queries, k, v), at, to, sees)
            sums_of_blocks.append(sums)
        return sums_of_blocks

    sums = zip(*[np.split(x, blocks, axis=1) for x in empty_sums(q)])
    seen = numpy.ones((ranks, ranks)) if sees is None else _ranks_seen(sees, len(q), len(k), ranks, blocks)
    return np.concatenate(
        [finish(sums, q.dtype) for sums in _send(attended, sums, (np.stack([k, v]), k_labels), axis, seen)]
    )


def _send(attended: Callable, so_far: Any, keys: Any, axis: str, seen: numpy.ndarray) -> list:
    """Attend to the keys of all ranks that a rank has `seen`: its own, and those that others send to it."""
    ranks, rank = len(seen), axis_index(axis)

    def step(carry, i):
        keys, so_far = carry
        keys = shift(keys, axis, 1)
        return (keys, attended(so_far, keys, (rank - i) % ranks)), None

    so_far = attended(so_far, keys, rank)
    if ranks > 1 and seen.all():
        (_, so_far), _ = md.scan(step, (keys, so_far), np.arange(1, ranks))
        return so_far
    for i in range(1, ranks):  # rank r - i sends to rank r if that sees one of its keys
        if perm := [((r - i) % ranks, r) for r in range(ranks) if seen[r, r - i]]:
            so_far = attended(so_far, ppermute(keys, axis, perm), (rank - i) % ranks)
    return so_far


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


def _check_mask(q: Any, k: Any, window: int | None, segments: Any) -> tuple[Any, Any]:
    """Return the segments of queries and of keys; raise ValueError for a window or for segments that do not fit."""
    if window is not None and window < 1:
        raise ValueError(f"ring_attention: window is {window}: at 1, a token attends to itself alone")
    labels = segments if isinstance(segments, tuple) else (segments, segments)
    if segments is not None and [np.shape(x) for x in labels] != [(len(q),), (len(k),)]:
        raise ValueError(
            f"ring_attention: segments have shapes {[*map(np.shape, labels)]}, not [{len(q)}] and [{len(k)}]"
        )
    return labels


def _rule_of(causal: bool, window: int | None, prefix: int) -> Callable | None:
    """Return a function that says whether queries at i to last_i see a key at j to last_j; None if all do."""

    def sees(i, last_i, j, last_j):
        seen = last_i >= j if causal else j - last_i < window
        seen = seen if window is None else seen & (i - last_j < window)
        return seen | (j < prefix) if prefix else seen

    return sees if causal or window is not None else None


def _ranks_seen(sees: Callable, queries: int, keys: int, ranks: int, blocks: int) -> numpy.ndarray:
    """Return whether a rank attends to another, [ranks, ranks]; they have so many queries and keys each."""
    ends = lambda n: numpy.array([[x[[0, -1]] for x in _positions(r, ranks, n, blocks)] for r in range(ranks)])  # noqa: E731
    q, k = ends(queries)[:, :, None, None], ends(keys)
    return numpy.any(sees(q[..., 0], q[..., 1], k[..., 0], k[..., 1]), axis=(1, 3))


def _attend(so_far: tuple, operands: tuple, at: tuple, to: tuple, sees: Callable | None) -> tuple:
    """Attend to a block of keys, or skip it if no query sees it. Each rank chooses for itself."""

    def masked(scores, i, label, j, k_label):
        scores = scores if i is None else np.where(sees(i[:, None], i[:, None], j, j), scores, MASKED)
        return scores if label is None else np.where(label[:, None] == k_label, scores, MASKED)

    def attend(so_far, operands, *places):
        return accumulate(so_far, *operands, change=lambda scores: masked(scores, *places))

    if sees is None:
        return attend(so_far, operands, *at, *to)
    (i, _), (j, _) = at, to
    skip = lambda so_far, *args: so_far  # noqa: E731
    return md.cond(sees(i[0], i[-1], j[0], j[-1]), attend, skip, so_far, operands, *at, *to)


def _positions(rank: Any, ranks: int, tokens: int, blocks: int = 2) -> list:
    """Return the positions of a rank's blocks of tokens: of one in order, or of two in zig-zag order."""
    places = np.arange(tokens // blocks)
    return [block * (tokens // blocks) + places for block in (rank, 2 * ranks - 1 - rank)[:blocks]]


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
