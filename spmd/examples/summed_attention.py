"""Attention as sums over keys: Efficient attention and Hydra on ranks; and how much rank the scores of a head have.

    mpirun -n 4 python -m spmd.examples.summed_attention

If weights are products of functions of the query and of the key, the sum over keys is the same for all queries. So
tokens are split over ranks, and ranks add up a matrix for each head (Efficient attention), or a row (Hydra, with as
many heads as features). The program prints the collectives of a gradient, and that its bytes do not depend on the
number of tokens.

The scores of a softmax have the rank of a head at most, which is its size. The program draws weights of 16 queries, and
prints how far from them weights with scores of smaller rank are: with many heads, each is small.

Sources: Shen et al., "Efficient attention: Attention with linear complexities", 2021; Bolya et al., "Hydra attention:
Efficient attention with many heads", 2022; Bhojanapalli et al., "Low-rank bottleneck in multi-head attention", 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmax, psum
from minidiff.nn import softmax
from spmd.examples.study import print_calls, run_study
from spmd.mesh.specs import P


def efficient_attention(q: Any, k: Any, v: Any, axis: str | None = None) -> Any:
    """Weigh features by the softmax of a query, and tokens by that of the keys: [tokens / ranks, heads, size]."""
    add, largest = (partial(f, axis_name=axis) if axis else lambda x: x for f in (psum, pmax))
    weights = np.exp(k - largest(md.stop_gradient(np.max(k, axis=0))))
    sums, total = add((np.einsum("thf,thd->hfd", weights, v), np.sum(weights, axis=0)))
    return np.einsum("thf,hfd->thd", softmax(q), sums / total[..., None])


def hydra_attention(q: Any, k: Any, v: Any, axis: str | None = None) -> Any:
    """Attend with a head for each feature, by cosine similarity: [tokens / ranks, features]."""
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True)) for x in (q, k))
    total = np.sum(k * v, axis=0)
    return q * (psum(total, axis) if axis else total)


def nearest_weights(weights: Any, rank: int) -> Any:
    """Return the weights whose scores are the nearest ones of this rank, in the sum of squares.

    A softmax ignores what is added to a row of scores, so the mean of each row is taken out first.
    """
    scores = np.log(weights) - np.mean(np.log(weights), axis=1, keepdims=True)
    u, s, v = numpy.linalg.svd(scores)
    return softmax(u[:, :rank] * s[:rank] @ v[:rank])


def show(mesh: spmd.Mesh) -> None:
    """Print what ranks send, whether they agree with one rank, and what small heads cannot express."""
    rng, split = numpy.random.default_rng(0), P("tokens")
    for f, heads in ((efficient_attention, (4, 8)), (hydra_attention, (32,))):
        on_ranks = spmd.shard_map(partial(f, axis="tokens"), mesh=mesh, in_specs=(split,) * 3, out_specs=split)
        loss = lambda args, f: np.sum(np.sin(f(*args)))  # noqa: E731
        gradient = md.value_and_grad(partial(loss, f=on_ranks))
        args = tuple(rng.normal(size=(3, 4 * mesh.size, *heads)))
        results = [print_calls(f.__name__, gradient, args), md.value_and_grad(partial(loss, f=f))(args)]
        same = all(map(numpy.allclose, *map(md.tree.leaves, results)))
        longer = tuple(rng.normal(size=(3, 40 * mesh.size, *heads)))
        sent = [spmd.communication(gradient)(each).bytes for each in (args, longer)]
        print(
            f"  the same as one rank: {'yes' if same else 'NO'}; bytes of a rank, and for ten times the tokens: {sent}"
        )
    weights = softmax(2.0 * rng.normal(size=(16, 16)))
    for size in (1, 2, 4, 8, 15):
        off = np.mean(np.sum(abs(nearest_weights(weights, size) - weights), axis=1)) / 2
        print(f"heads of size {size:2}: {off:.0%} of the weight is misplaced")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
