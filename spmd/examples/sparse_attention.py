"""Attention to few of the keys: Reformer's, found by hashing, and BigBird's blocks.

    mpirun -n 4 python -m spmd.examples.sparse_attention

Reformer has one vector for query and key. A random rotation hashes it to the axis that it is nearest to; tokens are
sorted by this bucket, and cut into chunks. Each attends to those of its bucket in its chunk and the one before. Several
rounds with different rotations miss less. Here each rank does its own rounds, and they are combined as parts of a
softmax are. The program prints how far from full attention they are, for tokens in 8 clusters.

BigBird's tokens attend to their neighbors, to a few drawn ones, and to the first ones, which attend to all; in blocks.
Tokens are split over ranks, which exchange them for heads. The program prints the number of blocks for three lengths.

Sources: Kitaev et al., "Reformer: The efficient transformer", 2020; Zaheer et al., "Big Bird: Transformers for longer
sequences", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmax, psum
from minidiff.nn import logsumexp
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.attention import attention_by_heads, chunked_attention

BUCKETS, CHUNK = 8, 16
NEVER, ITSELF = -1e9, -1e5  # scores of what is not attended to; and of a token to itself, if there is no other


def bucket_of(key: Any, x: Any) -> Any:
    """Return the buckets of vectors, [tokens, size]: the nearest of some random directions and their opposites."""
    turned = x @ md.random.normal(key, (x.shape[1], BUCKETS // 2))
    return np.argmax(np.concatenate([turned, -turned], axis=1), axis=1)


def hashed_round(key: Any, qk: Any, v: Any) -> tuple[Any, Any]:
    """Return what tokens attend to in one round of hashing, and the logarithm of the sum of their weights."""
    buckets = md.stop_gradient(bucket_of(key, qk))
    order = np.argsort(buckets, stable=True)
    chunks = lambda x: np.take(x, order, axis=0).reshape(-1, CHUNK, *x.shape[1:])  # noqa: E731
    with_previous = lambda x: np.concatenate([x, np.roll(x, 1, axis=0)], axis=1)  # noqa: E731
    keys = qk / np.sqrt(np.sum(qk * qk, axis=1, keepdims=True))
    q, (k, values) = chunks(qk), (with_previous(chunks(x)) for x in (keys, v))
    place, bucket = chunks(np.arange(len(qk))), chunks(buckets)
    scores = np.einsum("ctd,cjd->ctj", q, k) / qk.shape[1] ** 0.5
    scores = np.where(bucket[:, :, None] == with_previous(bucket)[:, None], scores, NEVER)
    scores = np.where(place[:, :, None] == with_previous(place)[:, None], ITSELF, scores)
    total = logsumexp(scores, axis=2, keepdims=True)
    result = np.einsum("ctj,cjd->ctd", np.exp(scores - total), values)
    back = np.argsort(order)
    return result.reshape(v.shape)[back], total.reshape(-1)[back]


def hashed_attention(key: Any, qk: Any, v: Any, rounds: int, axis: str | None = None) -> Any:
    """Return the result of some rounds on each rank, weighted by the sums of their weights."""
    first = axis_index(axis) * rounds if axis else 0
    keys = [md.random.fold_in(key, first + n) for n in range(rounds)]
    qk, v = (pbroadcast(x, axis) if axis else x for x in (qk, v))
    results, totals = (np.stack(x) for x in zip(*[hashed_round(each, qk, v) for each in keys]))
    largest = md.stop_gradient(np.max(totals, axis=0))
    weights = np.exp(totals - (pmax(largest, axis) if axis else largest))[..., None]
    sums = np.sum(weights * results, axis=0), np.sum(weights, axis=0)
    numerator, denominator = psum(sums, axis) if axis else sums
    return numerator / denominator


def full_attention(qk: Any, v: Any) -> Any:
    """Return attention of one vector for query and key to all tokens but itself."""
    scores = qk @ (qk / np.sqrt(np.sum(qk * qk, axis=1, keepdims=True))).T / qk.shape[1] ** 0.5
    scores = np.where(np.eye(len(qk), dtype=bool), ITSELF, scores)
    return np.exp(scores - logsumexp(scores, axis=1, keepdims=True)) @ v


def bigbird_blocks(count: int, near: int = 1, drawn: int = 2, first: int = 1) -> Any:
    """Return which blocks attend to which, [count, count]: `near` on both sides, `drawn` ones, and the first."""
    i, rng = numpy.arange(count), numpy.random.default_rng(0)
    blocks = abs(i[:, None] - i) <= near
    for row in blocks:
        row[rng.choice(count, drawn, replace=False)] = True
    blocks[:first], blocks[:, :first] = True, True
    return blocks


def show(mesh: spmd.Mesh) -> None:
    """Print errors of rounds of hashing, and numbers of blocks; and compare with one rank and with all pairs."""
    rng, key = numpy.random.default_rng(0), md.random.key(0)
    qk = 6 * rng.normal(size=(8, 8))[rng.integers(8, size=64)] + rng.normal(size=(64, 8))
    v = rng.normal(size=(64, 8))
    for rounds in (1, 4):
        body = partial(hashed_attention, rounds=rounds, axis="ranks")
        f = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
        result = print_calls(f"{rounds * mesh.size} rounds", f, key, qk, v)
        same = numpy.allclose(result, hashed_attention(key, qk, v, rounds * mesh.size))
        off = np.mean(abs(result - full_attention(qk, v))), np.mean(abs(np.mean(v, axis=0) - full_attention(qk, v)))
        print(f"  the same as one rank: {'yes' if same else 'NO'}; error, and that of a mean: {numbers(off, 2)}")
    q, k, v = rng.normal(size=(3, 64, 8, 4))
    attend = partial(chunked_attention, chunk=4, tile=4, blocks=bigbird_blocks(16))
    body = partial(attention_by_heads, axis="ranks", attend=attend)
    f = spmd.shard_map(body, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))
    same = numpy.allclose(spmd.gather(print_calls("BigBird", f, q, k, v)), attend(q, k, v))
    print(f"  the same as one rank: {'yes' if same else 'NO'}")
    print(f"blocks: {', '.join(f'{bigbird_blocks(n).sum()} of {n * n}' for n in (16, 32, 64))}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
