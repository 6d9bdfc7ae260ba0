"""Data parallelism: the batch is split over the ranks, parameters are not.

The forward pass sums one number, the loss. The parameters are the same on all ranks but used on different examples, so
the backward pass sums their gradients, in one all-reduce.

Source: shard_map tutorial, "8-way batch data parallelism".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd
from collectives import pmean
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of, loss, squared_error


def data_parallel(mesh: spmd.Mesh, error: Callable = squared_error, **options: Any) -> Callable:
    """Return the loss, as a function of (params, (inputs, targets)).

    Parameters are whole, the batch is split along the mesh's axis. `error(predictions, targets)` is the error of each
    example; `options` are those of `shard_map`. Any loss that is a mean over examples can be written as
    `pmean(loss(params, block), axis)`. Raises ValueError if the ranks do not divide the batch size.

    >>> import minidiff as md, minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((4,), ('batch',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> gradient = md.grad(data_parallel(mesh))
    >>> [(row.collective, row.direction, row.bytes) for row in spmd.communication(gradient)(params, batch).rows]
    [('psum', 'forward', 8), ('psum', 'backward', 288)]
    """
    (axis,) = axes_of(mesh, "data_parallel", "batch")

    def on_each_rank(params, block):
        return pmean(loss(params, block, error), axis)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(P(), P(axis)), out_specs=P(), **options)
