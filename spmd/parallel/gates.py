"""Gates: which experts a token goes to, with which weight, and losses that keep experts equally busy.

A gate takes the router's probabilities [tokens, experts] of its rank's tokens, and does not communicate. The losses are
means over the tokens of all ranks, if they are given the axes along which tokens are split. With E experts, and tokens
split along two axes, the collectives take, per rank:

===================  =========  ==========  ============  =====  ========
loss                 direction  collective  axes          count  elements
===================  =========  ==========  ============  =====  ========
load_balancing_loss  forward    psum        data,experts  1      2*E
router_z_loss        forward    psum        data,experts  1      1
===================  =========  ==========  ============  =====  ========

Source: Shazeer et al., "Outrageously large neural networks: The sparsely-gated mixture-of-experts layer"; Lepikhin et
al., "GShard" (two experts per token); Fedus et al., "Switch transformers" (one; load-balancing loss); Zoph et al.,
"ST-MoE: Designing stable and transferable sparse expert models" (z-loss).
"""

from __future__ import annotations

import math
from typing import Any

import minidiff.numpy as np
from collectives import pmean
from minidiff.core.types import typeof
from minidiff.nn import logsumexp, one_hot


def expert_capacity(tokens: int, experts: int, factor: float = 1.25, k: int = 1) -> int:
    """The capacity of each expert for the `k * tokens` choices of one rank. Balanced choices fill it to 1 / factor.

    >>> expert_capacity(64, experts=8), expert_capacity(64, experts=8, factor=2.0, k=2)
    (10, 32)
    """
    return max(1, math.ceil(factor * k * tokens / experts))


def top_experts(probabilities: Any, k: int) -> Any:
    """The k most probable experts of each token, as one-hot vectors: [tokens, experts] -> [k, tokens, experts].

    Ties go to the first expert. Raises ValueError if there are fewer than k experts.

    >>> np.argmax(top_experts(np.array([[0.2, 0.3, 0.5]]), 2), axis=-1)
    array([[2],
           [1]])
    """
    experts = typeof(probabilities).shape[-1]
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k!r}: a token goes to at least 1 expert, and at most to all {experts}")
    left, choices = probabilities, []
    for _ in range(k):
        choices.append(one_hot(np.argmax(left, axis=-1), experts, dtype=typeof(left).dtype))
        left = left - 2 * choices[-1]  # below all probabilities that are left
    return np.stack(choices)


def gate_weights(probabilities: Any, k: int = 1) -> Any:
    """The weight of each expert in a token's result: [tokens, experts] -> [tokens, experts].

    With k = 1 it is the probability of the token's expert (Switch). Otherwise it is divided by the sum over the token's
    k experts (GShard). Other experts have weight zero.

    >>> gate_weights(np.array([[0.25, 0.5, 0.25]])), gate_weights(np.array([[0.2, 0.6, 0.2]]), k=2)
    (array([[0. , 0.5, 0. ]]), array([[0.25, 0.75, 0.  ]]))
    """
    chosen = np.sum(top_experts(probabilities, k), axis=0) * probabilities
    return chosen if k == 1 else chosen / np.sum(chosen, axis=-1, keepdims=True)


def routed(probabilities: Any, capacity: int, k: int = 1, priorities: Any = None) -> Any:
    """Route tokens to their k most probable experts: [tokens, experts] -> [tokens, experts, capacity].

    The result is 1 at each expert of a token and the token's place there, and 0 elsewhere. All first choices get places
    before any second choice, in the order of tokens, or of decreasing `priorities` [tokens]. Choices beyond an expert's
    capacity are dropped. With random priorities, these are random; with the tokens' largest probabilities as
    priorities, they are the least certain ones. Raises ValueError for a capacity below 1, and priorities of another
    shape.

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
        raise ValueError(f"capacity is {capacity!r}: an expert takes at least 1 token; expert_capacity computes one")
    choices = top_experts(probabilities, k)
    tokens, experts = choices.shape[1:]
    order = np.arange(tokens) if priorities is None else np.argsort(-priorities, stable=True)
    if order.shape != (tokens,):
        raise ValueError(f"priorities have shape {order.shape}: give one number for each of the {tokens} tokens")
    queue = choices[:, order].reshape(k * tokens, experts).astype(int)  # first choices stand before second choices
    place = ((np.cumsum(queue, axis=0) - 1) * queue).reshape(choices.shape)[:, np.argsort(order)]
    # one_hot of a place beyond the capacity is zero.
    return np.einsum("kne,knc->nec", choices, one_hot(np.sum(place, axis=-1), capacity, dtype=choices.dtype))


def load_balancing_loss(probabilities: Any, axis: Any = None) -> Any:
    """Experts * sum over experts of (fraction of tokens * mean probability): [tokens, experts] -> [].

    An expert's fraction is the fraction of tokens for which it is the most probable expert; its derivative is zero. The
    loss is 1 if both are uniform, and at most the number of experts. `axis` names the axes along which tokens are
    split: one `psum`.

    >>> [float(load_balancing_loss(np.array(p))) for p in ([[0.75, 0.25], [0.25, 0.75]], [[1.0, 0.0]])]
    [1.0, 2.0]
    """
    means = np.mean(np.stack([top_experts(probabilities, 1)[0], probabilities]), axis=1)
    fraction, probability = means if axis is None else pmean(means, axis)
    return probabilities.shape[-1] * np.sum(fraction * probability)


def router_z_loss(logits: Any, axis: Any = None) -> Any:
    """The mean of logsumexp(logits) ** 2, which keeps the router's logits small: [tokens, experts] -> [].

    `axis` names the axes along which tokens are split: one `psum`.

    >>> bool(np.isclose(router_z_loss(np.zeros((3, 4))), np.log(4) ** 2))
    True
    """
    mean = np.mean(logsumexp(logits, axis=-1) ** 2)
    return mean if axis is None else pmean(mean, axis)
