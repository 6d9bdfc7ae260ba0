"""Tensor parallelism: features and weights are split over the ranks.

All ranks see all examples. There are three kinds of layer, for bodies of `shard_map`. With p ranks along the axis:

======================= ============== ================== ============== ================ =====================
layer                   x              W, b               result         forward          backward
======================= ============== ================== ============== ================ =====================
column_parallel         [n, k]         [k, m/p], [m/p]    [n, m/p]       nothing          psum of x's cotangent
row_parallel            [n, k/p]       [k/p, m], [m]      [n, m]         psum             nothing
row_parallel_scattered  [n, k/p]       [k/p, m], [m/p]    [n, m/p]       psum_scatter     all_gather
======================= ============== ================== ============== ================ =====================

The first two form a pair: a column-parallel layer, an activation, a row-parallel layer, with one all-reduce in each
direction. The third may follow itself: its operand and its result are split along the same axis.

Source: shard_map tutorial, "8-way tensor parallelism (TP)"; Shoeybi et al., "Megatron-LM: Training multi-billion
parameter language models using model parallelism".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import spmd
from collectives import psum, psum_scatter
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of, dense, loss, predict, squared_error


def column_parallel(x: Any, W: Any, b: Any) -> Any:
    """[n, k], [k, m / ranks], [m / ranks] -> [n, m / ranks]: x is whole, each rank has columns of W.

    The forward pass communicates nothing. In the backward pass one `psum` sums the ranks' cotangents of x: it is the
    transpose of the `pbroadcast` that is inserted where x is multiplied by W.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> specs = (P(), P(None, 'i'), P('i'))
    >>> layer = spmd.shard_map(column_parallel, mesh, in_specs=specs, out_specs=P(None, 'i'))
    >>> args = np.ones((3, 4)), np.ones((4, 6)), np.zeros(6)
    >>> layer(*args).shape, spmd.communication(layer)(*args).counts
    ((3, 6), {})
    """
    return dense(x, W, b)


def row_parallel(x: Any, W: Any, b: Any, axis: str) -> Any:
    """[n, k / ranks], [k / ranks, m], [m] -> [n, m]: each rank has rows of W, the result is whole.

    The forward pass takes one `psum` of [n, m], the backward pass nothing.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> specs = (P(None, 'i'), P('i'), P())
    >>> layer = spmd.shard_map(lambda x, W, b: row_parallel(x, W, b, 'i'), mesh, in_specs=specs, out_specs=P())
    >>> args = np.ones((3, 4)), np.ones((4, 6)), np.zeros(6)
    >>> layer(*args).shape, spmd.communication(layer)(*args).counts
    ((3, 6), {'psum': 1})
    """
    return psum(x @ W, axis) + b


def row_parallel_scattered(x: Any, W: Any, b: Any, axis: str) -> Any:
    """[n, k / ranks], [k / ranks, m], [m / ranks] -> [n, m / ranks]: each rank has rows of W.

    The forward pass takes one `psum_scatter` of [n, m], the backward pass one `all_gather` of [n, m / ranks]. Raises
    ValueError if the ranks do not divide m.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> specs, body = (P(None, 'i'), P('i'), P('i')), lambda x, W, b: row_parallel_scattered(x, W, b, 'i')
    >>> layer = spmd.shard_map(body, mesh, in_specs=specs, out_specs=P(None, 'i'))
    >>> args = np.ones((3, 4)), np.ones((4, 6)), np.zeros(6)
    >>> layer(*args).spec, spmd.communication(layer)(*args).counts
    (P(None, 'i'), {'psum_scatter': 1})
    """
    return psum_scatter(x @ W, axis, scatter_dimension=1, tiled=True) + b


def tensor_parallel(mesh: spmd.Mesh, error: Callable = squared_error, **options: Any) -> Callable:
    """The loss, as a function of (params, (inputs, targets)).

    Parameters are split by their first dimension, inputs and targets by their second, along the mesh's axis.
    `error(predictions, targets, axis)` is the error of each example, whose features are split along the axis; `options`
    are those of `shard_map`. Raises ValueError if the ranks do not divide the features of a layer.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((4,), ('feats',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> spmd.communication(md.grad(tensor_parallel(mesh)))(params, batch).counts
    {'psum_scatter': 2, 'psum': 1, 'all_gather': 2}
    """
    (axis,) = axes_of(mesh, "tensor_parallel", "feats")
    forward = functools.partial(predict, dense=functools.partial(row_parallel_scattered, axis=axis))

    def on_each_rank(params, block):
        return loss(params, block, lambda y, targets: error(y, targets, axis), forward)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(P(axis), P(None, axis)), out_specs=P(), **options)
