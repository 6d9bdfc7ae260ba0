"""Experts on few nodes: a token goes to at most a few nodes, and once to each, whatever the number of its experts.

    mpirun -n 4 python -m spmd.examples.node_limited_experts

The program prints the rows that a token sends to other nodes in three ways, counted and by formula; then the
collectives of a layer, and its loss and gradients beside those of one rank.

Links between nodes are slower than those within. A gate that may choose k experts anywhere sends most tokens to most
nodes. This one scores a node by the sum of its k / limit best experts for the token, and chooses the k experts within
the `limit` best nodes. Messages take two hops: a token goes once to each of its nodes, with its experts' weights, and
from there to the experts. A node adds up its experts' outputs, so one row comes back. A layer with T tokens of d
features on a rank, n nodes of E/n experts, and room for all tokens takes, per rank and forward:

==========  =======  =====  ==============
collective  axes     count  elements
==========  =======  =====  ==============
all_to_all  nodes    3      2*n*T*d + T*E
all_to_all  experts  2      2*E*T*d
==========  =======  =====  ==============

Source: DeepSeek-AI, "DeepSeek-V2" (device-limited routing) and "DeepSeek-V3 technical report", section 2.1.2, whose
numbers the first lines have: 256 experts on 8 nodes, 8 for each token, on at most 4 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_to_all, axis_size, pmean
from minidiff.nn import one_hot, softmax
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel import feed_forward
from spmd.parallel.expert import gate_weights, top_experts

AXES = ("nodes", "experts")


def limited_weights(probabilities: Any, nodes: int, k: int, limit: int) -> Any:
    """Return the weights of each token's k experts within its best nodes: [tokens, experts] -> [tokens, experts].

    >>> limited_weights(np.array([[0.4, 0.0, 0.3, 0.3]]), nodes=2, k=2, limit=1)
    array([[0. , 0. , 0.5, 0.5]])
    """
    groups = probabilities.reshape(len(probabilities), nodes, -1)
    scores = np.sum(np.sort(groups, axis=-1)[..., -max(1, k // limit) :], axis=-1)
    chosen = np.sum(top_experts(scores / nodes, limit), axis=0)
    return gate_weights((groups * chosen[..., None]).reshape(probabilities.shape), k)


def node_limited_experts(expert: Callable, params: Any, router: Any, x: Any, k: int, limit: int) -> Any:
    """Apply a layer of experts on nodes, in a body: [tokens / ranks, d] -> [tokens / ranks, d].

    `params` are those of this rank's experts, leaves [experts / ranks, …]; `router` is [d, experts].
    """
    nodes, (tokens, d) = axis_size("nodes"), x.shape
    weights = limited_weights(softmax(x @ router), nodes, k, limit).reshape(tokens, nodes, -1)
    to_nodes = _places(np.any(weights > 0, axis=-1))  # [tokens, nodes, place]
    arrived = _exchange(np.einsum("tnc,td->ncd", to_nodes, x)).reshape(-1, d)
    weights = _exchange(np.einsum("tnc,tne->nce", to_nodes, weights)).reshape(len(arrived), -1)
    to_experts = _places(weights > 0)
    sent = all_to_all(np.einsum("tec,td->ecd", to_experts, arrived), "experts", 0, 1, tiled=True)
    outputs = all_to_all(md.vmap(expert)(params, sent), "experts", 1, 0, tiled=True)
    added = np.einsum("tec,te,ecd->td", to_experts, weights, outputs)
    return np.einsum("tnc,ncd->td", to_nodes, _exchange(added.reshape(nodes, tokens, d)))


def _exchange(x: Any) -> Any:
    return all_to_all(x, "nodes", 0, 0, tiled=True)


def _places(chosen: Any) -> Any:
    """Return 1 at each destination of a token and its place there: [tokens, to] -> [tokens, to, tokens]."""
    return one_hot(np.where(chosen, np.cumsum(chosen, axis=0) - 1, -1), len(chosen), dtype=float)


def show(mesh: spmd.Mesh) -> None:
    """Print the rows of a token that leave its node, and what a layer communicates and computes."""
    experts, nodes, k, limit, rng = 256, 8, 8, 4, numpy.random.default_rng(0)
    probabilities = softmax(rng.normal(size=(2000, experts)))
    free, limited = gate_weights(probabilities, k), limited_weights(probabilities, nodes, k, limit)
    reached = [(w.reshape(-1, nodes, experts // nodes) > 0).any(axis=-1).sum(axis=1).mean() for w in (free, limited)]
    formula = nodes * (1 - math.comb(experts - experts // nodes, k) / math.comb(experts, k))
    away = 1 - 1 / nodes
    print(f"a row for each expert: {numbers([(free > 0).sum(axis=1).mean() * away, k * away], 2)} (formula)")
    print(f"one for each node:     {numbers([reached[0] * away, formula * away], 2)} (formula)")
    print(f"one for each of {limit}:     {numbers([reached[1] * away, limit * away], 2)} (at most)")

    d, tokens, experts, limit = 4, 8, 4 * mesh.size, max(1, mesh.shape["nodes"] // 2)
    params = [rng.normal(size=(experts, *shape)) for shape in ((d, 8), (8,), (8, d), (d,))]
    router, x, split = rng.normal(size=(d, experts)), rng.normal(size=(tokens * mesh.size, d)), P(AXES)

    def loss(params: Any, router: Any, x: Any) -> Any:
        return pmean(np.mean(node_limited_experts(feed_forward, params, router, x, 2, limit) ** 2), AXES)

    def one_rank(params: Any, router: Any, x: Any) -> Any:
        weights = limited_weights(softmax(x @ router), mesh.shape["nodes"], 2, limit)
        outputs = md.vmap(feed_forward, (0, None))(params, x)
        return np.mean(np.einsum("te,etd->td", weights, outputs) ** 2)

    program = spmd.shard_map(loss, mesh=mesh, in_specs=(split, P(), split), out_specs=P())
    value, actual = print_calls("gradient", md.value_and_grad(program, (0, 1)), params, router, x)
    expected, wanted = md.value_and_grad(one_rank, (0, 1))(params, router, x)
    same = all(numpy.allclose(spmd.gather(a), b) for a, b in zip(*map(md.tree.leaves, (actual, wanted))))
    print(f"the same gradients: {'yes' if same else 'NO'}; loss: {numbers([value, expected])} (one rank)")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, AXES, argv)


if __name__ == "__main__":
    main()
