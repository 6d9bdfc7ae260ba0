"""Expert parallelism: a layer is many experts, of which each token is sent to one; experts are split over the ranks.

Tokens are split over the same ranks. A router says for each token which expert is to work on it. An expert takes so
many tokens of each rank and no more, its capacity: then all that is sent has one size, and one `all_to_all` sends it,
another sends back what the experts made of it. Tokens beyond the capacity get nothing, zeros, as a residual connection
around the layer expects.

Forward: 2 `all_to_all` of experts * capacity * d numbers on each rank. Backward: as many, the other way; and a `psum`
of the gradient of the router, which all ranks have alike.

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
    """Who goes where: [tokens, experts] -> [tokens, experts, capacity], 1 at the token's expert, and its place there.

    Each token goes to its most probable expert, in the order of tokens; those that come when all places are taken go
    nowhere.

    >>> places = routed(np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]), capacity=2)
    >>> [tuple(map(int, np.argwhere(token)[0])) if token.any() else None for token in places]
    [(0, 0), (1, 0), (0, 1), None]
    """
    chosen = one_hot(np.argmax(probabilities, axis=-1), probabilities.shape[-1])
    place = (np.cumsum(chosen, axis=0) - 1) * chosen  # among the tokens of its expert
    # A place beyond the last is none: its row is zero.
    return np.expand_dims(chosen, -1) * one_hot(np.astype(np.sum(place, axis=-1), int), capacity)[:, None, :]


def mixture_of_experts(expert: Callable, params: Any, router: Any, x: Any, capacity: int, axis: str) -> Any:
    """A layer of experts, for the body of a `shard_map`: [tokens / ranks, d] -> [tokens / ranks, d].

    `expert(params, x)` is what one makes of tokens [n, d]; `params` are those of this rank's experts, stacked: leaves
    [experts / ranks, …]. `router` [d, experts] is the same on all ranks. What a token gets is what its expert made of
    it, times the probability that the router gave to this expert.
    """
    probabilities = softmax(x @ router)
    places = routed(probabilities, capacity)
    sent = np.einsum("nec,nd->ecd", places, x)
    received = all_to_all(sent, axis, split_axis=0, concat_axis=1, tiled=True)  # [experts/ranks, ranks*capacity, d]
    made = all_to_all(md.vmap(expert)(params, received), axis, split_axis=1, concat_axis=0, tiled=True)
    return np.einsum("nec,ecd->nd", places * np.expand_dims(probabilities, -1), made)
