"""The network of `network.py` in a pipeline that follows a schedule.

    mpirun -n 4 python -m spmd.examples.scheduled_network

The program prints, for each kind of schedule, its ticks, the loss, and the collectives of a gradient.

Loss and gradients communicate:

==========  ======  ========  ===============
collective  axes    count     numbers per rank
==========  ======  ========  ===============
ppermute    stages  2*ticks   2*ticks*N/M*F
psum        stages  5         1 + ends
==========  ======  ========  ===============

There are N examples in M microbatches, and F features between the layers; ends is the number of parameters of the first
and last layers, which all ranks have. The psums are those of the loss and of these layers' gradients; `jit` fuses them
into one. `pipeline_parallel` is a pipeline of the same network, in the order of GPipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import relu
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.network import Layer, axes_of, dense, init_params, squared_error
from spmd.parallel.pipeline import stacked_layers, unstacked_layers
from spmd.pipeline.library import gpipe, interleaved, one_f_one_b
from spmd.pipeline.run import scheduled
from spmd.pipeline.tables import Schedule


def blocked_layers(params: Sequence[Layer], schedule: Schedule) -> tuple:
    """(first, inner, last) layers; the inner ones are stacked, in a block for each chunk of each stage.

    Their weights are [chunks, stages, layers, n, n], their biases [chunks, stages, layers, n]. Raises ValueError if the
    inner layers do not make blocks of one size.

    >>> from spmd.parallel import init_params
    >>> from spmd.pipeline import interleaved
    >>> params = init_params(np.random.default_rng(0), (3, *[4] * 9, 2))
    >>> [x.shape for x in blocked_layers(params, interleaved(2, 4, chunks=2))[1]]
    [(2, 2, 2, 4, 4), (2, 2, 2, 4)]
    """
    first, inner, last = stacked_layers(params)
    blocks = schedule.chunks, schedule.stages
    return first, tuple(_split("blocked_layers", "inner layers", leaf, *blocks) for leaf in inner), last


def unblocked_layers(params: tuple) -> list[Layer]:
    """The inverse of `blocked_layers`: a list of layers.

    >>> from spmd.parallel import init_params
    >>> from spmd.pipeline import one_f_one_b
    >>> params = init_params(np.random.default_rng(0), (3, 4, 4, 4, 2))
    >>> [W.shape for W, b in unblocked_layers(blocked_layers(params, one_f_one_b(2, 4)))]
    [(3, 4), (4, 4), (4, 4), (4, 2)]
    """
    first, inner, last = params
    return unstacked_layers((first, tuple(leaf.reshape(-1, *leaf.shape[3:]) for leaf in inner), last))


def scheduled_value_and_grad(
    mesh: spmd.Mesh, schedule: Schedule, error: Callable = squared_error, **options: Any
) -> Callable:
    """Loss and gradients, as a function of (blocked_layers(params, schedule), (inputs, targets)).

    The blocks of inner layers are split along the mesh's axis. All ranks have the first and last layers, and the batch;
    the first block computes the first layer, the last block the last layer and the error. `error(predictions, targets)`
    is the error of each example; `options` are those of `shard_map`, which must be typed: types tell which branches are
    a rank's own. Raises ValueError if the microbatches do not divide the batch, or the schedule is for another number
    of stages.

    >>> from spmd.parallel import init_params
    >>> from spmd.pipeline import one_f_one_b
    >>> mesh, schedule = spmd.make_mesh((2,), ('stages',), backend='simulated'), one_f_one_b(2, 4)
    >>> params = blocked_layers(init_params(np.random.default_rng(0), (8, 4, 4, 4, 2)), schedule)
    >>> batch = np.ones((16, 8)), np.zeros((16, 2))
    >>> value, gradients = scheduled_value_and_grad(mesh, schedule)(params, batch)
    >>> spmd.communication(scheduled_value_and_grad(mesh, schedule))(params, batch).counts
    {'ppermute': 20, 'psum': 5}
    """
    (axis,) = axes_of(mesh, "scheduled_value_and_grad", "stages")

    def stage(params, x):
        return md.scan(lambda x, layer: (relu(dense(x, *layer)), None), x, tuple(leaf[0] for leaf in params))[0]

    layers = (
        lambda params, inputs: relu(dense(inputs, *params)),
        stage,
        lambda params, x, targets: np.mean(error(dense(x, *params), targets)),
    )

    def on_each_rank(params, batch):
        microbatches = [_split("scheduled_value_and_grad", "examples", x, schedule.microbatches) for x in batch]
        return scheduled(schedule, layers, params, *microbatches, axis)

    split = (P(), P(None, axis), P())
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=(split, P()), out_specs=(P(), split), **options)


def _split(name: str, items: str, x: Any, *parts: int) -> Any:
    """[n, …] -> [*parts, n / product of parts, …]"""
    size = math.prod(parts)
    if len(x) % size:
        raise ValueError(f"{name}: {len(x)} {items} do not split into {size} equal parts: use a multiple of {size}")
    return x.reshape(*parts, len(x) // size, *x.shape[1:])


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Print the loss and the collectives of a gradient in the order of each kind of schedule."""
    rng, stages, count = numpy.random.default_rng(0), mesh.size, 2 * mesh.size
    layers = init_params(rng, (3, *[4] * (2 * stages + 1), 2))
    batch = rng.normal(size=(2 * count, 3)), rng.normal(size=(2 * count, 2))
    for schedule in (gpipe(stages, count), one_f_one_b(stages, count), interleaved(stages, count, chunks=2)):
        step = scheduled_value_and_grad(mesh, schedule)
        loss, _ = print_calls(f"{schedule.ticks} ticks", step, blocked_layers(layers, schedule), batch)
        print(f"loss: {numbers([loss])}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("stages",), argv)


if __name__ == "__main__":
    main()
