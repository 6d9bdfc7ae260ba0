"""Data parallelism: the batch is split over the ranks; parameters are copied to all, or split too (FSDP).

The forward pass sums one number, the loss. The parameters are the same on all ranks but used on different examples, so
the backward pass sums their gradients, in one all-reduce.

Source: shard_map tutorial, "8-way batch data parallelism".

**Fully sharded** data parallelism (FSDP, ZeRO-3) splits the parameters, too. A layer's parameters are gathered just
before their use, and again in the backward pass. So a rank holds its shard of all parameters, and one whole layer at a
time. The transpose of the gather, a `psum_scatter`, sums and splits gradients in one step.

Source: shard_map tutorial, "8-way fully sharded data parallelism (FSDP)"; Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import minidiff as md
import spmd
from collectives import all_gather, pmean
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of, dense, loss, predict, squared_error


def data_parallel(mesh: spmd.Mesh, error: Callable = squared_error, **options: Any) -> Callable:
    """Return the loss, as a function of (params, (inputs, targets)).

    Parameters are whole, the batch is split along the mesh's axis. Any loss that is a mean over examples can be written
    as `pmean(loss(params, block), axis)`.

    Args:
        mesh: a mesh of one axis.
        error: `error(predictions, targets)` is the error of each example.
        options: options of `shard_map`.

    Raises:
        ValueError: if the ranks do not divide the batch size.

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


# ---------------------------------------------------------------- with fully sharded parameters


def gathered(params: Any, axis: str) -> Any:
    """Gather arrays split by their first dimension: leaves [n / ranks, …] -> [n, …], with one `all_gather` each.

    Args:
        params: a tree of this rank's parts.
        axis: the axis of the mesh along which they are split.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> body = lambda params: gathered(params, 'i')['w'].sum()[None]
    >>> spmd.shard_map(body, mesh, in_specs=P('i'), out_specs=P('i'))({'w': np.arange(4.0)})
    ShardedArray([6., 6.], P('i'))
    """
    return md.tree.map(lambda part: all_gather(part, axis, tiled=True), params)


def gathering(dense: Callable, axis: str) -> Callable:
    """Return a layer that gathers its parameters along `axis`, and then applies `dense`.

    Args:
        dense: a layer, `dense(x, W, b)`.
        axis: the axis of the mesh along which W [inputs / ranks, outputs] and b [outputs / ranks] are split.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> layer = spmd.shard_map(gathering(dense, 'i'), mesh, in_specs=P('i'), out_specs=P('i'))
    >>> args = np.ones((6, 8)), np.ones((8, 4)), np.ones(4)
    >>> layer(*args).shape, spmd.communication(layer)(*args).counts
    ((6, 4), {'all_gather': 2})
    """
    return lambda x, *parts: dense(x, *gathered(parts, axis))


#: Gathers, and operations that only rearrange an array before or after one.
GATHERED = (
    *("all_gather", "all_gather_reduced", "pbroadcast"),
    *("reshape", "transpose", "broadcast_to", "split", "concatenate"),
)


def not_gathered(operation: Any, *_: Any, **__: Any) -> bool:
    """Return the `checkpoint` policy that keeps all results but gathered arrays, in whatever shape."""
    return str(operation) not in GATHERED


def gathering_again(f: Callable) -> Callable:
    """Checkpoint a function: keep all residuals but gathered arrays, which the backward pass gathers again.

    Args:
        f: the function; its arguments and result do not change.

    >>> import numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> body = lambda w: (all_gather(w, 'i', tiled=True) ** 2).sum()
    >>> for f in (body, gathering_again(body)):
    ...     loss = spmd.shard_map(lambda w: pmean(f(w), 'i'), mesh, in_specs=P('i'), out_specs=P())
    ...     print(spmd.communication(md.grad(loss))(np.ones(4)).counts)
    {'all_gather': 1, 'psum': 1, 'psum_scatter': 1}
    {'all_gather': 2, 'psum': 1, 'psum_scatter': 1}
    """
    return md.checkpoint(f, policy=not_gathered)


def fully_sharded(
    mesh: spmd.Mesh, error: Callable = squared_error, checkpoint: Callable = gathering_again, **options: Any
) -> Callable:
    """Return the loss, as a function of (params, (inputs, targets)).

    Parameters and batch are split along the mesh's axis, by their first dimension.

    Args:
        mesh: a mesh of one axis.
        error: `error(predictions, targets)` is the error of each example.
        checkpoint: decides what the backward pass keeps; with `lambda f: f`, everything.
        options: options of `shard_map`.

    Raises:
        ValueError: if the ranks do not divide the batch size, or the first dimension of a parameter.

    >>> import minidiff.numpy as np
    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((4,), ('batch',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> report = spmd.communication(md.grad(fully_sharded(mesh)))(params, batch)
    >>> [(row.collective, row.direction, row.count) for row in report.rows if row.direction == 'backward']
    [('all_gather', 'backward', 1), ('psum_scatter', 'backward', 4)]
    """
    (axis,) = axes_of(mesh, "fully_sharded", "batch")

    forward = checkpoint(functools.partial(predict, dense=gathering(dense, axis)))

    def on_each_rank(params, block):
        return pmean(loss(params, block, error, forward), axis)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=P(axis), out_specs=P(), **options)
