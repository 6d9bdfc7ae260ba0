"""FSDP and tensor parallelism on a mesh of two axes.

Examples and parameters are split along the batch axis, features along the other. Each rank has a shard of the weights'
rows for its features. It gathers these rows along the batch axis, multiplies, and sums and scatters the products along
the feature axis.

Source: shard_map tutorial, "FSDP + TP, with shard_map at the top level".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import spmd
from collectives import pmean
from spmd.mesh.specs import P
from spmd.parallel.fully_sharded import gathering, gathering_again
from spmd.parallel.network import axes_of, loss, predict, squared_error
from spmd.parallel.tensor import row_parallel_scattered


def fully_sharded_tensor_parallel(
    mesh: spmd.Mesh, error: Callable = squared_error, checkpoint: Callable = gathering_again, **options: Any
) -> Callable:
    """The loss, as a function of (params, (inputs, targets)).

    The mesh has an axis for the batch and one for features. Parameters are split by their first dimension over both
    axes, `P((features, batch))`; inputs and targets `P(batch, features)`. The arguments are those of `fully_sharded`
    and `tensor_parallel`. Raises ValueError if the number of ranks does not divide the dimensions that they split.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((2, 2), ('batch', 'feats'), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> report = spmd.communication(md.grad(fully_sharded_tensor_parallel(mesh)))(params, batch)
    >>> report.counts
    {'all_gather': 7, 'psum_scatter': 6, 'psum': 2}
    """
    batch_axis, features = axes_of(mesh, "fully_sharded_tensor_parallel", "batch", "feats")
    layer = gathering(functools.partial(row_parallel_scattered, axis=features), batch_axis)
    forward = checkpoint(functools.partial(predict, dense=layer))

    def on_each_rank(params, block):
        return pmean(loss(params, block, lambda y, targets: error(y, targets, features), forward), batch_axis)

    specs = (P((features, batch_axis)), P(batch_axis, features))
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)
