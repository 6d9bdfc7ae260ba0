"""Megatron's sequence parallelism: between tensor-parallel half layers, tokens are split too.

Tensor parallelism (`megatron.py`) keeps the residual stream and the norms whole on every rank. Here each of p ranks has
1/p of the tokens there, and keeps 1/p of the residuals. An all-gather opens each half layer, and a reduce-scatter
closes it. They are each other's transposes, and each is half of the all-reduce that they replace. With L layers, N
tokens in all and F features, the gradient of the loss communicates:

=========  ====================  =====  ================  ================================================
direction  collective            count  numbers per rank  of
=========  ====================  =====  ================  ================================================
forward    all_gather            2*L+1  (2*L+1)*N*F/p     half layers, head
forward    psum_scatter          2*L    2*L*N*F           half layers
forward    psum                  3      N*F+2*N           embedding; two of the cross entropy
forward    pmax                  1      N                 the cross entropy
backward   all_gather            2*L    2*L*N*F/p         half layers
backward   psum_scatter          2*L+1  (2*L+1)*N*F       half layers, head
backward   all_gather_invariant  1      N*F/p             embedding: the transpose of its local slice
backward   psum                  1      (2*L+1)*F         scales of the norms, applied to different tokens
=========  ====================  =====  ================  ================================================

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import spmd
from collectives import all_gather, axis_size, pscatter, psum_scatter
from minidiff.nn import dropout
from spmd.mesh.specs import P
from spmd.parallel.megatron import tensor_parallel_options, tensor_parallel_transformer
from spmd.parallel.transformer import Config
from spmd.parallel.vocabulary import embed


def sequence_parallel_options(axis: str) -> dict[str, Callable]:
    """The options of `next_token_loss` for weights that are split as in `megatron.py`, and tokens split between.

    >>> sorted(sequence_parallel_options('feats'))
    ['combine', 'dropout', 'embed', 'error', 'gather']
    """

    def embed_and_split(table: Any, tokens: Any) -> Any:
        return pscatter(embed(table, tokens, axis), axis, axis=1, tiled=True)

    def dropout_of_tokens(key: Any, x: Any, rate: float) -> Any:
        batch, tokens, features = x.shape
        own = spmd.local_block((batch, tokens * axis_size(axis), features), P(None, axis))
        return dropout(key, x, rate, own)

    return {
        **tensor_parallel_options(axis),
        "dropout": dropout_of_tokens,
        "embed": embed_and_split,
        "gather": partial(all_gather, axis_name=axis, axis=1, tiled=True),
        "combine": partial(psum_scatter, axis_name=axis, scatter_dimension=1, tiled=True),
    }


def sequence_parallel_transformer(mesh: spmd.Mesh, config: Config, **options: Any) -> Callable:
    """`next_token_loss`, as a function of whole arrays (params, (tokens, labels)).

    It is `tensor_parallel_transformer`, but a rank holds the residual stream only for its tokens. Dropout drops the
    same numbers as on one device. Raises ValueError also if the ranks do not divide the tokens of an example.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.transformer import init_transformer
    >>> mesh = spmd.make_mesh((2,), ('feats',), backend='simulated')
    >>> config = Config(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> params, text = init_transformer(np.random.default_rng(0), config), np.array([[0, 1, 2, 3, 4]])
    >>> report = spmd.communication(sequence_parallel_transformer(mesh, config))(params, (text[:, :-1], text[:, 1:]))
    >>> report.counts
    {'psum': 3, 'all_gather': 3, 'psum_scatter': 2, 'pmax': 1}
    """
    return tensor_parallel_transformer(mesh, config, sequence_parallel_options, **options)
