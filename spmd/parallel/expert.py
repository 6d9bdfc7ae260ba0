"""Expert parallelism: each token is sent to one of many experts.

The experts of a layer and the tokens are split over the same ranks. A router chooses an expert for each token. An
expert takes at most `capacity` tokens from each rank: so all messages have one size, and one `all_to_all` sends the
tokens, another returns the experts' outputs. Tokens beyond the capacity get zeros, as a residual connection around the
layer expects.

Forward: 2 `all_to_all` of experts * capacity * d numbers on each rank. Backward: as many, the other way; and a `psum`
of the gradient of the router, which is the same on all ranks.

Source: Lepikhin et al., "GShard: Scaling giant models with conditional computation and automatic sharding"; Fedus et
al., "Switch transformers: Scaling to trillion parameter models with simple and efficient sparsity".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_to_all
from minidiff.nn import one_hot, softmax


def routed(probabilities: Any, capacity: int) -> Any:
    """Route tokens to experts: [tokens, experts] -> [tokens, experts, capacity].

    The result is 1 at each token's expert and its place there, else 0. Each token goes to its most probable expert, in
    the order of tokens; tokens beyond an expert's capacity are dropped: all zeros.

    >>> places = routed(np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), capacity=2)
    >>> [tuple(map(int, np.argwhere(token)[0])) if token.any() else None for token in places]
    [(0, 0), (1, 0), (0, 1), None]
    """
    chosen = one_hot(np.argmax(probabilities, axis=-1), probabilities.shape[-1])
    place = (np.cumsum(chosen, axis=0) - 1) * chosen  # among the tokens of its expert
    # one_hot of a place beyond the capacity is zero.
    return np.expand_dims(chosen, -1) * one_hot(np.astype(np.sum(place, axis=-1), int), capacity)[:, None, :]


def mixture_of_experts(expert: Callable, params: Any, router: Any, x: Any, capacity: int, axis: str) -> Any:
    """A layer of experts: [tokens / ranks, d] -> [tokens / ranks, d].

    It is called in the body of a `shard_map`. `expert(params, x)` applies one expert to tokens [n, d]; `params` are
    those of this rank's experts, stacked: leaves [experts / ranks, …]. `router` [d, experts] is the same on all ranks.
    A token's result is its expert's output times the probability that the router gave to this expert.
    """
    probabilities = softmax(x @ router)
    places = routed(probabilities, capacity)
    sent = np.einsum("nec,nd->ecd", places, x)
    received = all_to_all(sent, axis, split_axis=0, concat_axis=1, tiled=True)  # [experts/ranks, ranks*capacity, d]
    made = all_to_all(md.vmap(expert)(params, received), axis, split_axis=1, concat_axis=0, tiled=True)
    return np.einsum("nec,ecd->nd", places * np.expand_dims(probabilities, -1), made)
