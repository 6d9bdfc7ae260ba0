"""Expert parallelism: each token is sent to a few of many experts.

The experts of a layer and the tokens are split over the same ranks. A router chooses the experts of each token. An
expert takes at most `capacity` tokens from each rank, so all messages have one size: one `all_to_all` sends the tokens,
another returns the experts' outputs. The results of tokens beyond the capacity are zeros, as a residual connection
around the layer expects. If an expert gets fewer tokens, copies of one token fill the free places. Gates, and losses
that keep experts equally busy, are in `gates.py`. `assigned.py` has a layer that drops no tokens, because all ranks
know the experts beforehand.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_to_all, axis_size, psum
from minidiff.nn import relu, softmax
from minidiff.precision import cast_for
from spmd.parallel.gates import gate_weights, routed


def mixture_of_experts(
    expert: Callable, params: Any, router: Any, x: Any, capacity: int, axis: str, k: int = 1, priorities: Any = None
) -> Any:
    """A layer of experts, in the body of a `shard_map`: [tokens / ranks, d] -> [tokens / ranks, d].

    `expert(params, x)` applies one expert to tokens [n, d]; `params` are those of this rank's experts, stacked: leaves
    [experts / ranks, …]. `router` [d, experts] is the same on all ranks. A token's result is the sum of its k experts'
    outputs, times their `gate_weights`; `priorities` [tokens / ranks] decide which tokens are dropped, as in `routed`.
    Raises ValueError if the ranks do not divide the experts, or if the params are for another number of experts.

    >>> import spmd
    >>> mesh, router, x = spmd.make_mesh((2,), ('experts',), backend='simulated'), np.eye(2), np.eye(2)[[0, 1, 0, 0]]
    >>> layer = lambda scale, x: mixture_of_experts(lambda s, x: s * x, scale, router, x, capacity=1, axis='experts')
    >>> mapped = spmd.shard_map(layer, mesh=mesh, in_specs=spmd.P('experts'), out_specs=spmd.P('experts'))
    >>> np.round(np.asarray(mapped(np.array([1.0, 10.0]), x)), 2)  # the second rank sends one of its tokens
    array([[0.73, 0.  ],
           [0.  , 7.31],
           [0.73, 0.  ],
           [0.  , 0.  ]])
    """
    ranks, experts, local = axis_size(axis), router.shape[-1], {leaf.shape[0] for leaf in md.tree.leaves(params)}
    if local != {experts / ranks}:
        raise ValueError(
            f"mixture_of_experts: router has {experts} experts for {ranks} ranks along {axis!r}, but each has params "
            f"of {', '.join(map(str, sorted(local)))}: split those of a multiple of {ranks}, in_specs=P({axis!r})"
        )
    probabilities = softmax(cast_for("router", x) @ cast_for("router", router))
    places = routed(probabilities, capacity, k, priorities)
    sent = x[_tokens_of(places)]
    received = all_to_all(sent, axis, split_axis=0, concat_axis=1, tiled=True)  # [experts/ranks, ranks*capacity, d]
    made = all_to_all(md.vmap(expert)(params, received), axis, split_axis=1, concat_axis=0, tiled=True)
    own = made[np.arange(len(made)), np.argmax(places, axis=2)]  # [tokens/ranks, experts, d]: at the token's place
    own = np.where(np.any(places, axis=2)[..., None], own, 0)
    # The weights are applied last: where ranks along another axis have terms of `made`, their gradient is summed.
    return np.einsum("ne,ned->nd", gate_weights(probabilities, k).astype(own.dtype), own)


def _tokens_of(places: Any) -> Any:
    """The token at each place: [tokens, experts, capacity] -> integers [experts, capacity].

    A free place gets the expert's first token, or the rank's first if the expert has none.
    """
    return np.where(np.any(places, axis=0), np.argmax(places, axis=0), np.argmax(places[:, :, :1], axis=0))


def feed_forward(params: Any, x: Any, axis: str | None = None) -> Any:
    """An expert of two dense layers, relu between: [n, d] -> [n, d].

    `params` are W [d, hidden], b [hidden], V [hidden, d], c [d]. With `axis`, hidden features are split along that axis
    of the mesh: a column-parallel layer, then a row-parallel one, as in `tensor.py`, with one `psum`.

    >>> feed_forward((np.eye(2), np.zeros(2), np.eye(2), np.ones(2)), np.array([[2.0, -3.0]]))
    array([[3., 1.]])
    """
    W, b, V, c = params
    made = relu(x @ W + b) @ V
    return (made if axis is None else psum(made, axis)) + c
