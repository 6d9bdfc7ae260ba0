"""Causal attention by tiles, as FlashAttention computes it, of tokens that may be split over ranks.

    mpirun -n 4 python -m spmd.examples.flash_attention

The program prints how many pairs of tiles a rank computes, the collectives of attention and of its gradient, and
whether these are the same as with all scores at once.

A tile of queries attends to one tile of keys after another. For each query it keeps the sum of weighted values, the sum
of weights, and the largest score so far. The backward pass keeps the result and the logarithm of the sum of weights of
each query, and computes scores again. Tiles of keys that come after the queries are skipped: of n * n pairs of tiles,
n (n + 1) / 2 remain.

With tokens split along an axis, in zigzag order, a rank gathers the keys and values of all ranks (with few heads of
keys these are small), and its queries attend to them. All ranks have the same number of pairs. Per rank, forward:

==========  ======  ====================================
collective  count   elements of the result
==========  ======  ====================================
all_gather  2       2 * batch * all tokens * groups * d
==========  ======  ====================================

and backward a `psum_scatter` of the same for each.

Source: T. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022, algorithms 1
and 4; "The Llama 3 herd of models", section 3.3.2 (gathered keys).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index, axis_size
from spmd import P
from spmd.examples.study import print_calls, run_study
from spmd.parallel.attention import MASKED, attention, zigzag, zigzag_positions


def pairs_of_tiles(tiles: int, ranks: int = 1) -> numpy.ndarray:
    """Return the pairs (tile of queries, tile of keys) of each rank, [ranks, pairs, 2], with tokens in zigzag order.

    >>> pairs_of_tiles(4, 2).tolist()  # rank 0 has the tiles 0 and 3 of the sequence, rank 1 has 1 and 2
    [[[0, 0], [1, 0], [1, 1], [1, 2], [1, 3]], [[0, 0], [0, 2], [1, 0], [1, 2], [1, 3]]]
    """
    if tiles % (2 * ranks) and ranks > 1:
        raise ValueError(f"flash_attention: {tiles} tiles are not a multiple of {2 * ranks}, two for each rank")
    keys = zigzag(tiles, ranks)
    sees = keys.reshape(ranks, -1, 1) >= keys
    return numpy.stack([numpy.argwhere(each) for each in sees])


def flash_attention(q: Any, k: Any, v: Any, tiles: int, axis: str | None = None) -> Any:
    """Compute causal attention, tile by tile.

    Args:
        q: queries, [batch, tokens, groups, heads of a group, d].
        k: keys, [batch, tokens, groups, d].
        v: values, [batch, tokens, groups, d].
        tiles: the number of tiles of the whole sequence; a multiple of two for each rank.
        axis: the axis along which tokens are split, in zigzag order.

    Returns:
        The means of the values, like `q`.

    >>> q = k = np.ones((1, 4, 1, 1, 2))
    >>> flash_attention(q, k[..., 0, :], np.arange(8.0).reshape(1, 4, 1, 2), tiles=2)[0, :, 0, 0, 0]
    array([0., 1., 2., 3.])
    """
    ranks = 1 if axis is None else axis_size(axis)
    places = np.arange(q.shape[1])
    pairs, to = pairs_of_tiles(tiles, ranks), zigzag(q.shape[1] * ranks, ranks)
    if axis is not None and ranks > 1:
        places, pairs = zigzag_positions(q.shape[1], axis), np.take(pairs, axis_index(axis), axis=0)
        k, v = (all_gather(x, axis, axis=1, tiled=True) for x in (k, v))
    at, to = np.reshape(places, (tiles // ranks, -1)), to.reshape(tiles, -1)
    return _attend(q / math.sqrt(q.shape[-1]), k, v, at, to, pairs.reshape(-1, 2))


def _split(x: Any, places: Any) -> Any:
    """[batch, tokens, ...] -> [tiles, batch, tokens of a tile, ...]"""
    return np.moveaxis(x.reshape(len(x), *places.shape, *x.shape[2:]), 1, 0)


def _tile(x: Any, i: Any) -> Any:
    return np.take(x, i, axis=0)


def _join(x: Any, like: Any) -> Any:
    return np.moveaxis(x, 0, 1).reshape(like.shape).astype(like.dtype)


def _scores(q: Any, k: Any, at: Any, to: Any) -> Any:
    scores = md.precision.widen(np.einsum("btgrd,bsgd->bgrts", q, k))
    return np.where(at[:, None] >= to, scores, MASKED)


@md.custom_vjp
def _attend(q: Any, k: Any, v: Any, at: Any, to: Any, pairs: Any) -> Any:
    return _forward(q, k, v, at, to, pairs)[0]


def _forward(q: Any, k: Any, v: Any, at: Any, to: Any, pairs: Any) -> tuple:
    q_tiles, k_tiles, v_tiles = _split(q, at), _split(k, to), _split(v, to)
    zero = md.precision.widen(0 * np.moveaxis(q_tiles, 2, 4))  # [tiles, batch, groups, heads, tokens, d]

    def step(sums: tuple, pair: Any) -> tuple:
        i, j = pair[0], pair[1]
        largest, total, result = (_tile(x, i) for x in sums)
        scores = _scores(q_tiles[i], k_tiles[j], _tile(at, i), _tile(to, j))
        most = np.maximum(largest, np.max(scores, axis=-1, keepdims=True))
        weights, scale = np.exp(scores - most), np.exp(largest - most)
        values = np.einsum("bgrts,bsgd->bgrtd", weights.astype(v.dtype), v_tiles[j])
        total = total * scale + np.sum(weights, axis=-1, keepdims=True)
        return tuple(np.at(x)[i].set(y) for x, y in zip(sums, (most, total, result * scale + values))), None

    (most, total, result), _ = md.scan(step, (zero[..., :1] + MASKED, zero[..., :1], zero), pairs)
    out = _join(np.moveaxis(result / total, 4, 2), q)
    return out, (q, k, v, at, to, pairs, out, most + np.log(total))


def _backward(saved: tuple, cotangent: Any) -> tuple:
    q, k, v, at, to, pairs, out, logarithm = saved
    q_tiles, k_tiles, v_tiles, ct_tiles = _split(q, at), _split(k, to), _split(v, to), _split(cotangent, at)
    ct_logarithm = np.moveaxis(_split(np.sum(md.precision.widen(cotangent * out), axis=-1, keepdims=True), at), 2, 4)

    def step(sums: tuple, pair: Any) -> tuple:
        i, j = pair[0], pair[1]
        weights = np.exp(_scores(q_tiles[i], k_tiles[j], _tile(at, i), _tile(to, j)) - logarithm[i])
        ct_weights = np.einsum("btgrd,bsgd->bgrts", ct_tiles[i], v_tiles[j])
        ct_scores = (weights * (ct_weights - ct_logarithm[i])).astype(q.dtype)
        terms = (
            (i, np.einsum("bgrts,bsgd->btgrd", ct_scores, k_tiles[j])),
            (j, np.einsum("bgrts,btgrd->bsgd", ct_scores, q_tiles[i])),
            (j, np.einsum("bgrts,btgrd->bsgd", weights.astype(v.dtype), ct_tiles[i])),
        )
        return tuple(np.at(x)[n].add(term) for x, (n, term) in zip(sums, terms)), None

    zeros = [md.precision.widen(0 * x) for x in (q_tiles, k_tiles, v_tiles)]
    sums, _ = md.scan(step, tuple(zeros), pairs)
    return *(_join(x, like) for x, like in zip(sums, (q, k, v))), None, None, None


_attend.defvjp(_forward, _backward)


def show(mesh: spmd.Mesh) -> None:
    """Print the pairs of tiles of a rank, the collectives, and whether values and gradients are those of all scores."""
    tiles, order, spec = 2 * mesh.size, zigzag(8 * mesh.size, mesh.size), P(None, "tokens")
    rng = numpy.random.default_rng(0)
    q, k, v, weights = (rng.normal(size=(1, len(order), 2, *shape)) for shape in ((3, 4), (4,), (4,), (3, 4)))
    pairs = pairs_of_tiles(tiles, mesh.size).shape[1]
    print(f"pairs of tiles: {pairs} of {tiles * tiles // mesh.size}")
    attend = partial(flash_attention, tiles=tiles, axis="tokens")
    split = spmd.shard_map(attend, mesh, in_specs=spec, out_specs=spec)

    def whole(q, k, v):
        return attention(q[0].reshape(-1, 6, 4), k[0], v[0], order, order).reshape(q.shape)

    qkv = [x[:, order] for x in (q, k, v)]
    loss = lambda attend: md.value_and_grad(lambda *qkv: np.sum(weights * attend(*qkv)), argnums=(0, 1, 2))  # noqa: E731
    print_calls("forward", split, *qkv)
    values = zip(*(md.tree.leaves(f(*qkv)) for f in (partial(print_calls, "gradient", loss(split)), loss(whole))))
    same = all(np.allclose(spmd.gather(x), y) for x, y in values)
    print(f"the same as with all scores: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
