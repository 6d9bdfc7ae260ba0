"""Fully sharded data parallelism (FSDP, ZeRO-3): the batch is split over the ranks, and so are the parameters.

A layer's parameters are gathered just before their use, and not kept for the backward pass: there they are gathered
again. So a rank holds its part of all parameters, and one layer whole. Gradients are summed and split in one step,
by the transpose of the gather: a `psum_scatter`.

Source: shard_map tutorial, "8-way fully sharded data parallelism (FSDP)"; Rajbhandari et al., "ZeRO: Memory
optimizations toward training trillion parameter models".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pmean
from spmd.parallel.network import axes_of, dense, predict, squared_error
from spmd.partition import P


def gathered(params: Any, axis: str) -> Any:
    """Arrays whole, of which this rank has its part of the first dimension: leaves [n / ranks, …] -> [n, …].

    Forward one `all_gather` for each leaf; backward one `psum_scatter`.
    """
    return md.tree.map(lambda part: all_gather(part, axis, tiled=True), params)


def gathering(dense: Callable, axis: str) -> Callable:
    """A layer whose parameters are split along `axis` by their first dimension, from one that takes them whole.

    (x, W [inputs / ranks, outputs], b [outputs / ranks]) -> what `dense` makes of x, W and b.
    """
    return lambda x, *parts: dense(x, *gathered(parts, axis))


def not_gathered(operation: Any, *_: Any, **__: Any) -> bool:
    """The policy for `checkpoint`: the backward pass keeps the results of all operations but those of `all_gather`."""
    return str(operation) != "all_gather"


#: `checkpoint`, keeping all but what was gathered: that is gathered again.
gathering_again = functools.partial(md.checkpoint, policy=not_gathered)


def fully_sharded(
    mesh: spmd.Mesh, error: Callable = squared_error, checkpoint: Callable = gathering_again, **options: Any
) -> Callable:
    """The loss, as a function of (params, (inputs, targets)): all of these split along the mesh's axis.

    `error(predictions, targets)` is that of each example; `checkpoint` says what the backward pass keeps (with
    `lambda f: f`, everything); `options` are those of `shard_map`. Raises ValueError where ranks do not divide the
    batch, or the first dimension of a parameter.

    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((4,), ('batch',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4))
    >>> batch = np.ones((16, 8)), np.zeros((16, 4))
    >>> report = spmd.communication(md.grad(fully_sharded(mesh)))(params, batch)
    >>> [(row.collective, row.direction, row.count) for row in report.rows if row.direction == 'backward']
    [('all_gather', 'backward', 1), ('psum_scatter', 'backward', 4)]
    """
    (axis,) = axes_of(mesh, "fully_sharded", "batch")

    @checkpoint
    def predict_from_parts(params, inputs):
        return predict(params, inputs, gathering(dense, axis))

    def on_each_rank(params, block):
        inputs, targets = block
        return pmean(np.mean(error(predict_from_parts(params, inputs), targets)), axis)

    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=P(axis), out_specs=P(), **options)
