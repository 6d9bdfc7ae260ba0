"""The network of `network.py` in a pipeline that follows a schedule.

The gradient communicates:

==========  ======  ========  ===============
collective  axes    count     numbers per rank
==========  ======  ========  ===============
ppermute    stages  2*ticks   2*ticks*N/M*F
psum        stages  1         1 + ends
==========  ======  ========  ===============

There are N examples in M microbatches, and F features between the layers; ends is the number of parameters of the first
and last layers, which all ranks have. Without `scheduled`'s order, `pipeline_parallel` is the same network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import relu
from spmd.parallel.network import axes_of, dense, squared_error
from spmd.parallel.schedule import Schedule
from spmd.parallel.scheduled import scheduled
from spmd.partition import P


def scheduled_value_and_grad(
    mesh: spmd.Mesh, schedule: Schedule, error: Callable = squared_error, **options: Any
) -> Callable:
    """Loss and gradients, as a function of (stacked_layers(params), (inputs, targets)).

    The inner layers are split into as many blocks as all stages have chunks. The first layer is part of the first
    block's work, the last layer and the error of the last's. `error(predictions, targets)` is the error of each
    example; `options` are those of `shard_map`. Raises ValueError if the blocks do not divide the inner layers, or the
    microbatches the batch.

    >>> from spmd.parallel import init_params, one_f_one_b, stacked_layers
    >>> mesh = spmd.make_mesh((2,), ('stages',), backend='simulated')
    >>> params = stacked_layers(init_params(np.random.default_rng(0), (8, 4, 4, 4, 2)))
    >>> batch = np.ones((16, 8)), np.zeros((16, 2))
    >>> value, gradients = scheduled_value_and_grad(mesh, one_f_one_b(2, 4))(params, batch)
    >>> spmd.communication(scheduled_value_and_grad(mesh, one_f_one_b(2, 4)))(params, batch).counts
    {'ppermute': 20, 'psum': 1}
    """
    (axis,) = axes_of(mesh, "scheduled_value_and_grad", "stages")
    blocks, count = (schedule.chunks, schedule.stages), schedule.microbatches

    def stage(params, x):
        return md.scan(lambda x, layer: (relu(dense(x, *layer)), None), x, params)[0]

    layers = (
        lambda params, inputs: relu(dense(inputs, *params)),
        stage,
        lambda params, x, targets: np.mean(error(dense(x, *params), targets)),
    )

    def on_each_rank(params, inputs, targets):
        first, inner, last = params
        inner = md.tree.map(lambda leaf: leaf[:, 0], inner)  # [chunks, 1, layers, …]
        loss, (first, inner, last) = scheduled(schedule, layers, (first, inner, last), inputs, targets, axis)
        return loss, (first, md.tree.map(lambda leaf: leaf[:, None], inner), last)

    split = (P(), P(None, axis), P())
    mapped = spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(split, P(), P()), out_specs=(P(), split), **options)

    def value_and_grad(params, batch):
        first, inner, last = params
        inner = md.tree.map(lambda leaf: _split("inner layers", leaf, *blocks), inner)
        batch = [_split("examples", x, count) for x in batch]
        loss, (first, inner, last) = mapped((first, inner, last), *batch)
        return loss, (first, md.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), inner), last)

    return value_and_grad


def _split(what: str, x: Any, *parts: int) -> Any:
    """[n, …] -> [*parts, n / product of parts, …]"""
    size = math.prod(parts)
    if len(x) % size:
        raise ValueError(
            f"scheduled_value_and_grad: {len(x)} {what} do not make {size} equal parts: choose a multiple of {size}"
        )
    return x.reshape(*parts, len(x) // size, *x.shape[1:])
