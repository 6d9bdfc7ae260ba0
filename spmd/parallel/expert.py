"""Expert parallelism: each token is sent to a few of many experts.

The experts of a layer and the tokens are split over the same ranks. A router chooses the experts of each token. An
expert takes at most `capacity` tokens from each rank, so all messages have one size: one `all_to_all` sends the tokens,
another returns the experts' outputs. The results of tokens beyond the capacity are zeros, as a residual connection
around the layer expects. If an expert gets fewer tokens, copies of one token fill the free places.
A layer may also drop no token, see below. (In `spmd.examples.assigned_experts`, all ranks know the experts beforehand.)

An expert may itself be split, along another axis of the mesh: `feed_forward`. Tokens may be split along further axes
(data parallelism), along which the experts are the same. On a mesh of three axes, with E experts, capacity C, tokens of
d features, and `params` the elements of the experts' parameters on one rank, the collectives take, per rank:

==================  =========  ==========  ============  =====  ========
layer               direction  collective  axes          count  elements
==================  =========  ==========  ============  =====  ========
mixture_of_experts  forward    all_to_all  experts       2      2*E*C*d
mixture_of_experts  backward   all_to_all  experts       2      2*E*C*d
mixture_of_experts  backward   psum        data,experts  1      d*E
mixture_of_experts  backward   psum        data          1      params

feed_forward        forward    psum        model         1      E*C*d
feed_forward        backward   psum        model         1      E*C*d
==================  =========  ==========  ============  =====  ========

The psums of a mixture sum gradients: those of the router, which is the same on all ranks, and those of the experts.

Source: Lepikhin et al., "GShard: Scaling giant models with conditional computation and automatic sharding"; Fedus et
al., "Switch transformers: Scaling to trillion parameter models with simple and efficient sparsity".

**Gates** choose experts for tokens, and weights. Losses keep experts equally busy. A gate takes the router's
probabilities [tokens, experts] of its rank's tokens, and does not communicate. The losses are means over the tokens of
all ranks, if they are given the axes along which tokens are split. With E experts, and tokens split along two axes, the
collectives take, per rank:

===================  =========  ==========  ============  =====  ========
loss                 direction  collective  axes          count  elements
===================  =========  ==========  ============  =====  ========
load_balancing_loss  forward    psum        data,experts  1      2*E
router_z_loss        forward    psum        data,experts  1      1
===================  =========  ==========  ============  =====  ========

Source: Shazeer et al., "Outrageously large neural networks: The sparsely-gated mixture-of-experts layer"; Lepikhin et
al., "GShard" (two experts per token); Fedus et al., "Switch transformers" (one; load-balancing loss); Zoph et al.,
"ST-MoE: Designing stable and transferable sparse expert models" (z-loss).

**Without a loss of tokens**, `mixture_of_experts(dropless=True)`, a rank sends each token to its k experts, and nothing
else. It counts the tokens for each expert, and all ranks gather these counts: a small collective, of E integers from
each rank. They are the lengths of the messages. All ranks share the C places that an expert has for each of them, and
if an expert gets more tokens than these, all ranks raise an error. With T tokens on a rank, and R rows that it has room
for (the places of its experts, or all tokens k times if these are fewer), the collectives take, per rank:

========  =========  ====================  ============  =====  ===========
layer     direction  collective            axes          count  elements
========  =========  ====================  ============  =====  ===========
dropless  forward    all_gather_invariant  experts       1      E
dropless  forward    ragged_all_to_all     experts       2      (k*T + R)*d
dropless  backward   ragged_all_to_all     experts       2      (k*T + R)*d
dropless  backward   psum                  data,experts  1      d*E
dropless  backward   psum                  data          1      params
========  =========  ====================  ============  =====  ===========

Results come back from R rows, so reports count R, the most that a rank may send. MPI sends only the rows that have a
token: on average k*T.

Source: Gale et al., "MegaBlocks: Efficient sparse training with mixture-of-experts".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather_invariant, all_to_all, axis_index, axis_size, pmean, psum
from minidiff.core.types import typeof
from minidiff.nn import logsumexp, one_hot, relu, softmax
from minidiff.precision import cast_for

# ---------------------------------------------------------------- gates


def expert_capacity(tokens: int, experts: int, factor: float = 1.25, k: int = 1) -> int:
    """Return the capacity of each expert for `k * tokens` choices of a rank. Balanced ones fill it to 1 / factor.

    Args:
        tokens: the number of a rank's tokens.
        experts: the number of experts.
        factor: the capacity divided by that of balanced choices.
        k: the number of experts of a token.

    >>> expert_capacity(64, experts=8), expert_capacity(64, experts=8, factor=2.0, k=2)
    (10, 32)
    """
    return max(1, math.ceil(factor * k * tokens / experts))


def top_experts(probabilities: Any, k: int) -> Any:
    """Return the k most probable experts of each token, one-hot: [tokens, experts] -> [k, tokens, experts].

    Args:
        probabilities: the router's, [tokens, experts]. Ties go to the first expert.
        k: the number of experts of a token.

    Raises:
        ValueError: if there are fewer than k experts.

    >>> np.argmax(top_experts(np.array([[0.2, 0.3, 0.5]]), 2), axis=-1)
    array([[2],
           [1]])
    """
    experts = typeof(probabilities).shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k!r}: a token must go to at least 1 expert, and at most to all {experts}")
    left, choices = probabilities, []
    for _ in range(k):
        choices.append(one_hot(np.argmax(left, axis=-1), experts, dtype=typeof(left).dtype))
        left = left - 2 * choices[-1]  # below all probabilities that are left
    return np.stack(choices)


def gate_weights(probabilities: Any, k: int = 1) -> Any:
    """Return the weight of each expert in a token's result: [tokens, experts] -> [tokens, experts].

    Args:
        probabilities: the router's, [tokens, experts].
        k: the number of experts of a token. With 1, the weight is the probability of the token's expert (Switch).
            Otherwise it is divided by the sum over the token's k experts (GShard). Other experts have weight zero.

    >>> gate_weights(np.array([[0.25, 0.5, 0.25]])), gate_weights(np.array([[0.2, 0.6, 0.2]]), k=2)
    (array([[0. , 0.5, 0. ]]), array([[0.25, 0.75, 0.  ]]))
    """
    chosen = np.sum(top_experts(probabilities, k), axis=0) * probabilities
    return chosen if k == 1 else chosen / np.sum(chosen, axis=-1, keepdims=True)


def routed(probabilities: Any, capacity: int, k: int = 1, priorities: Any = None) -> Any:
    """Route tokens to their k most probable experts: [tokens, experts] -> [tokens, experts, capacity].

    The result is 1 at each expert of a token and the token's place there, and 0 elsewhere. All first choices get places
    before any second choice. Choices beyond an expert's capacity are dropped.

    Args:
        probabilities: the router's, [tokens, experts].
        capacity: the number of tokens that an expert takes.
        k: the number of experts of a token.
        priorities: numbers [tokens]: those with large ones get places first; by default, tokens in their order. With
            random priorities, the dropped choices are random; with the tokens' largest probabilities, the least certain
            ones.

    Raises:
        ValueError: for a capacity below 1, and priorities of another shape.

    >>> probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    >>> def places(**options):
    ...     return [tuple(map(int, np.argwhere(token)[0])) if token.any() else None
    ...             for token in routed(probabilities, capacity=2, **options)]
    >>> places()
    [(0, 0), (1, 0), (0, 1), None]
    >>> places(priorities=np.random.default_rng(1).random(4))
    [(0, 1), (1, 0), None, (0, 0)]
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity!r}: an expert must take at least 1 token; see expert_capacity")
    choices = top_experts(probabilities, k)
    tokens, experts = choices.shape[1:]
    order = np.arange(tokens) if priorities is None else np.argsort(-priorities, stable=True)
    if order.shape != (tokens,):
        raise ValueError(f"priorities have shape {order.shape}: pass one number for each of the {tokens} tokens")
    queue = choices[:, order].reshape(k * tokens, experts).astype(int)  # first choices stand before second choices
    place = ((np.cumsum(queue, axis=0) - 1) * queue).reshape(choices.shape)[:, np.argsort(order)]
    # one_hot of a place beyond the capacity is zero.
    return np.einsum("kne,knc->nec", choices, one_hot(np.sum(place, axis=-1), capacity, dtype=choices.dtype))


def load_balancing_loss(probabilities: Any, axis: Any = None) -> Any:
    """Return experts * sum over experts of (fraction of tokens * mean probability): [tokens, experts] -> [].

    An expert's fraction is the fraction of tokens for which it is the most probable expert; its derivative is zero. The
    loss is 1 if both are uniform, and at most the number of experts.

    Args:
        probabilities: the router's, [tokens, experts].
        axis: the axes along which tokens are split, if they are: one `psum`.

    >>> [float(load_balancing_loss(np.array(p))) for p in ([[0.75, 0.25], [0.25, 0.75]], [[1.0, 0.0]])]
    [1.0, 2.0]
    """
    means = np.mean(np.stack([top_experts(probabilities, 1)[0], probabilities]), axis=1)
    fraction, probability = means if axis is None else pmean(means, axis)
    return probabilities.shape[-1] * np.sum(fraction * probability)


def router_z_loss(logits: Any, axis: Any = None) -> Any:
    """Return the mean of logsumexp(logits) ** 2, which keeps the router's logits small: [tokens, experts] -> [].

    Args:
        logits: the router's, [tokens, experts].
        axis: the axes along which tokens are split, if they are: one `psum`.

    >>> bool(np.isclose(router_z_loss(np.zeros((3, 4))), np.log(4) ** 2))
    True
    """
    mean = np.mean(logsumexp(logits, axis=-1) ** 2)
    return mean if axis is None else pmean(mean, axis)


# ---------------------------------------------------------------- layers


def mixture_of_experts(
    expert: Callable,
    params: Any,
    router: Any,
    x: Any,
    capacity: int,
    axis: str,
    k: int = 1,
    priorities: Any = None,
    *,
    dropless: bool = False,
) -> Any:
    """Apply a layer of experts, in the body of a `shard_map`: [tokens / ranks, d] -> [tokens / ranks, d].

    A token's result is the sum of its k experts' outputs, times their `gate_weights`.

    Args:
        expert: `expert(params, x)` applies one expert to tokens [n, d].
        params: those of this rank's experts, stacked: leaves [experts / ranks, …].
        router: weights [d, experts], the same on all ranks.
        x: this rank's tokens, [tokens / ranks, d].
        capacity: the number of tokens that an expert takes from a rank.
        axis: the axis of the mesh along which experts and tokens are split.
        k: the number of experts of a token.
        priorities: numbers [tokens / ranks] that decide which tokens are dropped, as in `routed`.
        dropless: whether no token is dropped. An expert then takes `ranks * capacity` tokens, from any ranks, and a
            rank's number of tokens is always enough. Only what is chosen is sent, and `priorities` have no effect.

    Raises:
        ValueError: if the ranks do not divide the experts, or if the params are for another number of experts; and if
            an expert gets too many tokens, where it is dropless, on all ranks.

    >>> import spmd
    >>> mesh, router, x = spmd.make_mesh((2,), ('experts',), backend='simulated'), np.eye(2), np.eye(2)[[0, 1, 0, 0]]
    >>> layer = lambda scale, x: mixture_of_experts(lambda s, x: s * x, scale, router, x, capacity=1, axis='experts')
    >>> mapped = spmd.shard_map(layer, mesh=mesh, in_specs=spmd.P('experts'), out_specs=spmd.P('experts'))
    >>> np.round(np.asarray(mapped(np.array([1.0, 10.0]), x)), 2)  # the second rank sends one of its tokens
    array([[0.73, 0.  ],
           [0.  , 7.31],
           [0.73, 0.  ],
           [0.  , 0.  ]])
    >>> layer = partial(mixture_of_experts, lambda s, x: s * x, capacity=2, axis='experts', dropless=True)
    >>> mapped = spmd.shard_map(layer, mesh=mesh, in_specs=(spmd.P('experts'), spmd.P(), spmd.P('experts')),
    ...                         out_specs=spmd.P('experts'))
    >>> np.round(np.asarray(mapped(np.array([1.0, 10.0]), router, x)), 2)[3]
    array([0.73, 0.  ])
    """
    ranks, experts, local = axis_size(axis), router.shape[-1], {leaf.shape[0] for leaf in md.tree.leaves(params)}
    if local != {experts / ranks}:
        raise ValueError(
            f"mixture_of_experts: router has {experts} experts for {ranks} ranks along {axis!r}, but each has params "
            f"of {', '.join(map(str, sorted(local)))}: split those of a multiple of {ranks}, in_specs=P({axis!r})"
        )
    probabilities = softmax(cast_for("router", x) @ cast_for("router", router))
    if dropless:
        chosen = np.argmax(top_experts(probabilities, k), axis=-1)  # [k, tokens]
        weights = np.take_along_axis(gate_weights(probabilities, k), chosen.T, axis=1)
        results = _send_chosen(expert, params, x, chosen, ranks * capacity, axis)
        return np.einsum("nk,knd->nd", weights.astype(results.dtype), results)
    places = routed(probabilities, capacity, k, priorities)
    sent = x[_tokens_of(places)]
    received = all_to_all(sent, axis, split_axis=0, concat_axis=1, tiled=True)  # [experts/ranks, ranks*capacity, d]
    outputs = all_to_all(md.vmap(expert)(params, received), axis, split_axis=1, concat_axis=0, tiled=True)
    # [tokens/ranks, experts, d]: at the token's place
    results = outputs[np.arange(len(outputs)), np.argmax(places, axis=2)]
    results = np.where(np.any(places, axis=2)[..., None], results, 0)
    # The weights are applied last: where ranks along another axis have terms of `results`, their gradient is summed.
    return np.einsum("ne,ned->nd", gate_weights(probabilities, k).astype(results.dtype), results)


def _send_chosen(expert: Callable, params: Any, x: Any, chosen: Any, room: int, axis: str) -> Any:
    """Return the outputs of the experts that tokens have chosen, [k, tokens] -> [k, tokens, d]; each has some room."""
    ranks, each, (k, tokens) = axis_size(axis), len(md.tree.leaves(params)[0]), chosen.shape
    order = np.argsort(chosen.reshape(-1), stable=True)
    counts = np.sum(one_hot(chosen, ranks * each, dtype=int), axis=(0, 1))
    counts = all_gather_invariant(counts, axis).reshape(ranks, ranks, each)  # from a rank, to a rank, to an expert
    splits, rows = counts.sum(axis=-1), min(each * room, ranks * k * tokens)
    if each > 1:  # a rank has room for its experts' tokens together, but one of them may have too many
        splits = md.pure_callback(partial(_check_room, room=room), splits, counts)
    received = all_to_all(x[order % tokens], axis, 0, 0, splits=splits, capacity=rows)
    counts = np.take(counts, axis_index(axis), axis=1)
    inputs, outputs = _places_of_rows(counts, rows, room)
    received = np.where(np.sum(counts) > 0, received, x[0])  # a rank that receives no token has its own
    computed = md.vmap(expert)(params, received[inputs])
    computed = computed.reshape(-1, *computed.shape[2:])[outputs]
    returned = all_to_all(computed, axis, 0, 0, splits=splits.T, capacity=k * tokens)
    return returned[np.argsort(order)].reshape(k, tokens, *returned.shape[1:])


def _places_of_rows(counts: Any, rows: int, room: int) -> tuple[Any, Any]:
    """Return the row at each place of an expert, [experts, room], and the place of each row, [rows].

    Rows are ordered by the ranks that send them, and then by experts, as `counts` [ranks, experts] says. Free places
    have the row of another token.
    """
    ends, totals = np.cumsum(counts), np.sum(counts, axis=0)
    group = np.searchsorted(ends, np.arange(rows), side="right")
    expert = np.where(group < ends.size, group % totals.size, totals.size)  # of a row; padding is last
    order, first = np.argsort(expert, stable=True), np.cumsum(totals) - totals
    at = first[:, None] + np.minimum(np.arange(room), np.maximum(totals - 1, 0)[:, None])
    inputs = order[np.maximum(np.minimum(at, ends[-1] - 1), 0)]
    expert = np.minimum(expert, totals.size - 1)
    return inputs, expert * room + np.minimum(np.argsort(order) - first[expert], room - 1)


def _check_room(counts: numpy.ndarray, room: int) -> numpy.ndarray:
    """Return the rows from rank to rank, by the counts [ranks, ranks, experts / ranks]; or raise ValueError."""
    totals = counts.sum(axis=0).reshape(-1)
    if totals.max() > room:
        raise ValueError(
            f"mixture_of_experts: expert {totals.argmax()} gets {totals.max()} tokens and has room for {room}: choose "
            f"a capacity of at least {-(-totals.max() // len(counts))}, for each rank"
        )
    return counts.sum(axis=-1)


def _tokens_of(places: Any) -> Any:
    """Return the token at each place: [tokens, experts, capacity] -> integers [experts, capacity].

    A free place gets the expert's first token, or the rank's first if the expert has none.
    """
    return np.where(np.any(places, axis=0), np.argmax(places, axis=0), np.argmax(places[:, :, :1], axis=0))


def feed_forward(params: Any, x: Any, axis: str | None = None) -> Any:
    """Apply an expert of two dense layers, relu between: [n, d] -> [n, d].

    Args:
        params: W [d, hidden], b [hidden], V [hidden, d], c [d].
        x: tokens, [n, d].
        axis: the axis of the mesh along which hidden features are split, if they are: a column-parallel layer, then a
            row-parallel one, as in `tensor.py`, with one `psum`.

    >>> feed_forward((np.eye(2), np.zeros(2), np.eye(2), np.ones(2)), np.array([[2.0, -3.0]]))
    array([[3., 1.]])
    """
    W, b, V, c = params
    result = relu(x @ W + b) @ V
    return (result if axis is None else psum(result, axis)) + c
