"""ZeRO: data parallelism that also splits optimizer states, then gradients, then parameters.

With data parallelism alone, every rank holds all of these, and computes the same update. Here each of p ranks updates
its shards. The optimizer keeps K numbers for each of `params` parameters (2 for Adam). A rank holds, in numbers:

=====  ==========  =========  ==========
stage  parameters  gradients  states
=====  ==========  =========  ==========
1      params      params     K*params/p
2      params      params/p   K*params/p
3      params/p    params/p   K*params/p
=====  ==========  =========  ==========

A step over M microbatches communicates, in addition to a psum of the loss, if all leaves fit into one bucket:

=====  =========  ====================  =====  ==========
stage  for        collective            count  numbers
=====  =========  ====================  =====  ==========
1      gradients  psum                  1      params
1      update     all_gather_invariant  1      params/p
2      gradients  psum_scatter          1      params
2      update     all_gather_invariant  1      params/p
3      forward    all_gather_reduced    M      M*params/p
3      backward   all_gather_reduced    M      M*params/p
3      gradients  psum_scatter          M      M*params
=====  =========  ====================  =====  ==========

- A leaf is split along its first dimension that p divides. Without one it stays whole, and a psum sums its gradient.
- The table counts gradients after their sum. Stages 1 and 2 first add up those of all microbatches, unreduced and
  whole, and sum them over ranks once. At stage 3 the transpose of the gather sums them for each microbatch.
- The loss takes whole parameters, so the forward pass of stage 3 gathers all of them first; `fully_sharded` gathers
  layer by layer. Compiled, stage 3 gathers for the forward passes once, before the loop over microbatches.
- The update is computed on sharded arrays, outside the body, so the norm of the gradients is that of all shards.

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", sections 5 and 7.

**Buckets** make collectives of many arrays fewer and larger. Each function takes a list of arrays. A bucket has arrays
of one dtype that together have at most `bucket_bytes` before they are split, or a single larger array. The last arrays
come first, since a backward pass computes their gradients first.

A psum takes any number of arrays. To gather and scatter, an array that is split along dimension d becomes a matrix with
a row for each rank's shard, and a bucket is such matrices side by side.

Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training", section 3.2.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_size, pbroadcast, pscatter, psum, psum_scatter, reduced, unreduced
from collectives.ops import psum_p
from collectives.passes.fuse_psums import bucket_size
from collectives.passes.order import split_into_buckets
from collectives.passes.variadic import variadic
from minidiff.optim import GradientTransformation, apply_updates
from spmd.mesh.specs import P
from spmd.parallel.data import gathering_again
from spmd.parallel.network import axes_of

# ---------------------------------------------------------------- buckets


Dims = Sequence[int | None]  # for each array, the dimension that is split; None for one that is whole


def split_dimension(shape: Sequence[int], ranks: int) -> int | None:
    """Return the first dimension that the number of ranks divides; None if there is none.

    >>> split_dimension((3, 8), 4), split_dimension((3,), 4)
    (1, None)
    """
    return next((d for d, n in enumerate(shape) if math.prod(shape) and n % ranks == 0), None)


def all_gather_buckets(arrays: list, dims: Dims, axis: str, bucket_bytes: int, to: str = "varying") -> list:
    """Gather each array along its split dimension: [n / ranks, …] -> [n, …]; `to` is that of `all_gather`.

    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda x, y: all_gather_buckets([x, y], (1, 0), 'i', 1000, to='invariant')
    >>> mapped = spmd.shard_map(f, mesh=mesh, in_specs=(spmd.P(None, 'i'), spmd.P('i')), out_specs=spmd.P())
    >>> mapped(np.eye(2), np.arange(4))
    [array([[1., 0.],
           [0., 1.]]), array([0, 1, 2, 3])]
    >>> spmd.communication(mapped)(np.eye(2), np.arange(4.0)).counts
    {'all_gather_invariant': 1}
    """
    gather = functools.partial(all_gather, axis_name=axis, tiled=True, to=to)
    return _apply_to_buckets(gather, arrays, dims, (1, axis_size(axis)), bucket_bytes)


def psum_scatter_buckets(arrays: list, dims: Dims, axis: str, bucket_bytes: int) -> list:
    """Sum each array over ranks, and split it: [n, …] -> [n / ranks, …]. Arrays with dimension None stay the same."""
    return _apply_to_buckets(
        lambda x: psum_scatter(x, axis, tiled=True), arrays, dims, (axis_size(axis), 1), bucket_bytes
    )


def psum_buckets(arrays: list, axis: str, bucket_bytes: int) -> list:
    """Sum the arrays that are unreduced along the axis; compiled, each bucket as soon as its arrays are ready."""
    arrays, parts = list(arrays), [k for k, x in enumerate(arrays) if axis in md.typeof(x).unreduced]
    for bucket in _buckets(arrays, parts, bucket_bytes):
        terms = [arrays[k] for k in bucket]
        for k, total in zip(bucket, variadic(psum_p).bind(*terms, axes=(axis,), size=axis_size(axis))):
            arrays[k] = total
    return arrays


def _buckets(arrays: list, indices: list[int], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield indices of arrays, of one dtype in each bucket."""
    return split_into_buckets(indices, lambda k: arrays[k].dtype, lambda k: arrays[k].nbytes, bucket_bytes)


def _apply_to_buckets(collective: Callable, arrays: list, dims: Dims, rows: tuple[int, int], bucket_bytes: int) -> list:
    """Apply a collective of matrices, [before, w] -> [after, w], to buckets of the split arrays."""
    arrays, (before, after) = list(arrays), rows
    split = {k: d for k, d in enumerate(dims) if d is not None}
    for bucket in _buckets(arrays, [*split], bucket_bytes // after):  # whose bytes are those of whole arrays
        moved = [np.moveaxis(arrays[k], split[k], 0) for k in bucket]
        parts = [np.reshape(x, (before, -1)) for x in moved]
        ends = list(accumulate(x.shape[1] for x in parts))
        results = np.split(collective(np.concatenate(parts, axis=1)), ends[:-1], axis=1)
        for k, x, y in zip(bucket, moved, results):
            arrays[k] = np.moveaxis(np.reshape(y, (-1, *x.shape[1:])), 0, split[k])
    return arrays


# ---------------------------------------------------------------- the step


def zero(
    loss: Callable,
    optimizer: GradientTransformation,
    mesh: spmd.Mesh,
    stage: int = 1,
    microbatches: int = 1,
    bucket_bytes: int | None = None,
) -> tuple[Callable, Callable]:
    """Make `init(params) -> (params, state)` and `step(params, state, batch) -> (loss, params, state)`.

    The batch is split along the mesh's axis; so are the parameters at stage 3, while `init` gathers them at stages 1
    and 2. With `donate_argnums=(0, 1)` a compiled step writes new parameters and states over the old.

    Args:
        loss: `loss(params, batch)` is a mean over examples, of one rank's microbatch.
        optimizer: an optimizer of `md.optim`.
        mesh: a mesh of one axis.
        stage: 1 splits the optimizer's states, 2 gradients, too, 3 parameters, too.
        microbatches: the number of microbatches of a rank, whose gradients are added up.
        bucket_bytes: the most bytes of the leaves that a collective takes, the last first; or it takes one larger leaf.
            By default a sixteenth of the parameters, from 256 KiB to 25 MiB. Pass the same to `jit(step,
            bucket_bytes=...)`, which fuses psums.

    Raises:
        ValueError: for an unknown stage, and for a batch that ranks times microbatches do not divide.

    >>> from spmd.parallel import init_params, loss
    >>> mesh, batch = spmd.make_mesh((4,), ('batch',), backend='simulated'), (np.ones((16, 8)), np.zeros((16, 4)))
    >>> init, step = zero(loss, md.optim.adam(0.1), mesh, stage=2, microbatches=2)
    >>> params, state = init(init_params(np.random.default_rng(0), (8, 4)))
    >>> spmd.communication(step)(params, state, batch).counts
    {'psum_scatter': 1, 'psum': 1, 'all_gather_invariant': 1}
    >>> value, params, state = step(params, state, batch)
    """
    (axis,) = axes_of(mesh, "zero", "batch")
    _check_options(stage, microbatches, bucket_bytes)

    def init(params):
        shards = shards_of(params, mesh)
        return shards if stage == 3 else spmd.gather(params), optimizer.init(shards)

    def step(params, state, batch):
        _check_batch(batch, mesh.size, microbatches)
        structure, (dims, specs) = md.tree.structure(params), specs_of(params, mesh)
        pieces = dims if stage == 3 else [None] * len(dims)
        limit = bucket_bytes or bucket_size(sum(md.typeof(x).nbytes for x in md.tree.leaves(params)))

        def part_of_loss(leaves, block):
            whole = md.tree.unflatten(structure, all_gather_buckets(leaves, pieces, axis, limit, to="reduced"))
            return unreduced(loss(whole, block) / (mesh.size * microbatches), axis)

        def value_and_gradients(leaves, block):
            leaves = [x if d is not None else reduced(x, axis) for x, d in zip(leaves, pieces)]
            gradient = md.value_and_grad(gathering_again(part_of_loss) if stage == 3 else part_of_loss)
            value, gradients = _accumulate(gradient, leaves, block, microbatches, axis)
            if stage == 2:
                gradients = psum_scatter_buckets(gradients, dims, axis, limit)
            gradients = psum_buckets(gradients, axis, limit)  # what is still unreduced
            if stage == 1:
                gradients = [g if d is None else pscatter(g, axis, d, tiled=True) for g, d in zip(gradients, dims)]
            return psum(value, axis), gradients

        specs_in = specs if stage == 3 else P(), P(axis)
        run = spmd.shard_map(value_and_gradients, mesh=mesh, in_specs=specs_in, out_specs=(P(), specs))
        (value, gradients), shards = run(md.tree.leaves(params), batch), shards_of(params, mesh)
        updates, state = optimizer.update(md.tree.unflatten(structure, gradients), state, shards)
        shards = apply_updates(shards, updates)
        if stage == 3:
            return value, shards, state
        return value, _gather_shards(shards, mesh, limit), state

    return init, step


def specs_of(params: Any, mesh: spmd.Mesh) -> tuple[list[int | None], list[P]]:
    """Return the split dimension of each leaf, and its partition spec, along the mesh's only axis."""
    dims = [split_dimension(np.shape(x), mesh.size) for x in md.tree.leaves(params)]
    return dims, [P() if d is None else P(*[None] * d, *mesh.axis_names) for d in dims]


def shards_of(params: Any, mesh: spmd.Mesh) -> Any:
    """Return the parameters, each split as `specs_of` says."""
    leaves, structure = md.tree.flatten(params)
    return md.tree.unflatten(structure, spmd.distribute(leaves, mesh, specs_of(leaves, mesh)[1]))


def _accumulate(gradient: Callable, leaves: list, block: Any, microbatches: int, axis: str) -> tuple[Any, list]:
    """Return the value and gradients, added up over microbatches; unreduced gradients stay unreduced."""
    if microbatches == 1:
        return gradient(leaves, block)
    blocks = md.tree.map(lambda x: np.reshape(x, (microbatches, -1, *x.shape[1:])), block)
    zeros = [(unreduced if md.typeof(x).reduced else pbroadcast)(np.zeros(x.shape, x.dtype), axis) for x in leaves]

    def add(total, block):
        value, gradients = gradient(leaves, block)
        return md.tree.map(np.add, total, gradients), value

    total, values = md.scan(add, zeros, blocks)
    return np.sum(values), total


def _gather_shards(shards: Any, mesh: spmd.Mesh, bucket_bytes: int) -> Any:
    """Return whole parameters, the same on all ranks."""
    leaves, structure = md.tree.flatten(shards)
    (dims, specs), (axis,) = specs_of(leaves, mesh), mesh.axis_names
    gather = functools.partial(all_gather_buckets, dims=dims, axis=axis, bucket_bytes=bucket_bytes, to="invariant")
    leaves = spmd.shard_map(gather, mesh=mesh, in_specs=(specs,), out_specs=P())(leaves)
    return md.tree.unflatten(structure, leaves)


def _check_options(stage: int, microbatches: int, bucket_bytes: int | None) -> None:
    if stage not in (1, 2, 3):
        raise ValueError(f"zero: stage={stage!r}; write 1 to split states, 2 gradients too, 3 parameters too")
    if wrong := [n for n in (microbatches, bucket_bytes or 1) if not isinstance(n, int) or n < 1]:
        raise ValueError(f"zero: microbatches and bucket_bytes are positive integers, got {wrong[0]!r}")


def _check_batch(batch: Any, ranks: int, microbatches: int) -> None:
    for path, x in md.tree.flatten_with_paths(batch, "batch")[0]:
        if not np.shape(x) or np.shape(x)[0] % (ranks * microbatches):
            need = f"{microbatches=} on {ranks} ranks needs a multiple of {ranks * microbatches} examples"
            raise ValueError(f"zero: {path} has the shape {np.shape(x)}, but {need}")
