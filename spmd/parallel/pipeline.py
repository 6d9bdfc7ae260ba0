"""Pipeline parallelism (GPipe).

A rank is a stage: it has some consecutive layers. At each tick every stage applies its layers to another microbatch.
Then a `ppermute` moves all microbatches to the next stage. With M microbatches and p stages that takes M + p - 1 ticks,
and each stage is busy in M of them. The rest, a fraction (p - 1) / (M + p - 1) of the time, is the bubble: a stage then
computes with copies of microbatches, and neither its result nor its derivative is used. (A layer may warn of NaN there,
if it is not defined at the inputs of the first stage.) With k layers per stage, a rank evaluates k (M + p - 1) layers,
and k (p - 1) of these are wasted.

Source: shard_map tutorial, "SPMD pipeline parallelism (PP)"; Huang et al., "GPipe: Efficient training of giant neural
networks using pipeline parallelism".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, axis_size, pmean
from collectives.ops import shift
from minidiff.nn import relu
from spmd.mesh.specs import P
from spmd.parallel.network import Layer, axes_of, dense, squared_error


def pipeline(layer: Callable, params: Any, microbatches: Any, axis: str) -> Any:
    """Apply the layers of all stages in turn to the microbatches of all stages, in the body of a `shard_map`.

    The first stage takes microbatches from its share; when that is used up, all shares move on by one stage, towards
    the first. Results go into the last stage's share, and move in the same way, so each share arrives where it came
    from. The forward pass has one `ppermute` of a microbatch for each tick but the last, and 2 (stages - 1) of a share.
    The backward pass has the same, in the other direction.

    Args:
        layer: `layer(params, x)` applies one layer; its result has the structure and shapes of x.
        params: those of this stage's layers, stacked: leaves [layers per stage, …].
        microbatches: this stage's share of them, a tree of arrays [k, …].
        axis: the axis of the mesh along which stages are.

    Returns:
        The same share of the results, [k, …].

    >>> mesh = spmd.make_mesh((2,), ('stages',), backend='simulated')
    >>> body = lambda W, x: pipeline(lambda W, x: np.tanh(x @ W), W, x, 'stages')
    >>> f = spmd.shard_map(body, mesh, in_specs=P('stages'), out_specs=P('stages'))
    >>> weights, microbatches = np.ones((4, 3, 3)), np.ones((4, 2, 3))  # of 4 layers; 4, of 2 examples each
    >>> f(weights, microbatches).shape, spmd.communication(f)(weights, microbatches).counts
    ((4, 2, 3), {'ppermute': 6})
    """
    stage, stages, share = axis_index(axis), axis_size(axis), len(md.tree.leaves(microbatches)[0])
    count = share * stages
    # A stage that no microbatch has reached computes on a copy of one: at zeros a layer may not be finite.
    x, results = md.tree.map(lambda leaf: leaf[0], microbatches), md.tree.map(np.zeros_like, microbatches)

    def inject(x, leaf, i):
        return np.where(stage == 0, leaf[i], x)

    def collect(leaf, x, i):
        return np.at(leaf)[i].set(np.where(stage == stages - 1, x, leaf[i]))

    for tick in range(count + stages - 1):
        entering, leaving = tick % share, (tick - stages + 1) % share
        x = md.tree.map(partial(inject, i=entering), x, microbatches)
        operands = x, params
        if tick < stages - 1:
            operands = md.tree.map(partial(_constant_unless, stage <= tick), operands)
        x, _ = md.scan(lambda x, entry: (layer(entry, x), None), *operands)
        results = md.tree.map(partial(collect, i=leaving), results, x)
        if tick == count + stages - 2:
            return results
        x = shift(x, axis, 1)
        if entering == share - 1 and tick < count - 1:
            microbatches = shift(microbatches, axis, -1)
        if leaving == share - 1 and tick >= stages - 1:
            results = shift(results, axis, -1)


@md.custom_jvp
def _constant_unless(reached: Any, x: Any) -> Any:
    """Return `x`; it is a constant until a microbatch has reached the stage: infinity times zero would be NaN."""
    return x


_constant_unless.defjvps(None, lambda t, out, reached, x: np.where(reached, t, np.zeros_like(t)))


def stacked_layers(params: Sequence[Layer]) -> tuple:
    """Return the first, the inner and the last layers; the inner ones are stacked.

    Args:
        params: a list of layers, pairs of weights and biases. Stacked, they are [layers, n, n] and [layers, n].

    >>> from spmd.parallel.network import init_params
    >>> first, inner, last = stacked_layers(init_params(np.random.default_rng(0), (8, 4, 4, 4, 2)))
    >>> [x.shape for x in inner]
    [(2, 4, 4), (2, 4)]
    """
    first, *inner, last = params
    return first, tuple(np.stack(leaves) for leaves in zip(*inner)), last


def unstacked_layers(params: tuple) -> list[Layer]:
    """Invert `stacked_layers`: return a list of layers.

    >>> from spmd.parallel.network import init_params
    >>> params = stacked_layers(init_params(np.random.default_rng(0), (8, 4, 4, 4, 2)))
    >>> [W.shape for W, b in unstacked_layers(params)]
    [(8, 4), (4, 4), (4, 4), (4, 2)]
    """
    first, inner, last = params
    return [first, *zip(*inner), last]


def pipeline_parallel(
    mesh: spmd.Mesh, error: Callable = squared_error, microbatch: int = 8, **options: Any
) -> Callable:
    """Return the loss, as a function of (stacked_layers(params), (inputs, targets)).

    Inner layers are split along the mesh's axis. The first and last layers, which have other shapes, are on all ranks,
    and each rank applies them to its shard of the batch.

    Args:
        mesh: a mesh of one axis.
        error: `error(predictions, targets)` is the error of each example.
        microbatch: the number of examples of a microbatch, of which a shard makes several.
        options: options of `shard_map`.

    Raises:
        ValueError: if the stages do not divide the inner layers or the batch, or `microbatch` a stage's shard.

    >>> from spmd.parallel.network import init_params
    >>> mesh = spmd.make_mesh((2,), ('stages',), backend='simulated')
    >>> params = init_params(np.random.default_rng(0), (8, 4, 4, 4, 2))
    >>> batch = np.ones((16, 8)), np.zeros((16, 2))
    >>> loss = pipeline_parallel(mesh, microbatch=4)
    >>> spmd.communication(loss)(stacked_layers(params), batch).counts
    {'ppermute': 6, 'psum': 1}
    """
    (axis,) = axes_of(mesh, "pipeline_parallel", "stages")

    def on_each_rank(params, block):
        (inputs, targets), (first, inner, last) = block, params
        x = relu(dense(inputs, *first))
        if len(x) % microbatch:
            raise ValueError(
                f"pipeline_parallel: {len(x)} examples of a stage cannot be split into microbatches of {microbatch}: "
                f"choose a microbatch that divides {len(x)}, or a batch that is a multiple of {microbatch} times the "
                "number of stages"
            )
        microbatches = x.reshape(-1, microbatch, x.shape[1])
        x = pipeline(lambda layer, x: relu(dense(x, *layer)), inner, microbatches, axis)
        predictions = dense(x.reshape(len(inputs), -1), *last)
        return pmean(np.mean(error(predictions, targets)), axis)

    specs = ((P(), P(axis), P()), P(axis))
    return spmd.shard_map(on_each_rank, mesh=mesh, in_specs=specs, out_specs=P(), **options)
