"""The blocks of sharded arrays that this process has, and where they start in the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.backends.base import coordinates_of, index_along
from minidiff.core.types import ShapedArray
from spmd.mesh.specs import block_type
from spmd.sharding.sharded_array import ShardedArray, Sharding, whole_type

Start = tuple[int, ...]  # of a block, in each dimension


def local_starts(sharding: Sharding, block: Sequence[int]) -> list[Start]:
    """Where this process's blocks start: one block, or those of all ranks if they are simulated.

    `block` is a block's shape. Blocks are in mesh order, and one that several ranks have is listed once.
    """
    mesh, spec = sharding.mesh, sharding.spec
    if mesh.backend == "simulated":
        varying = mesh.ranks.sort_axes(spec.split_axes)
        places = [dict(zip(varying, index)) for index in np.ndindex(*[mesh.shape[a] for a in varying])]
    else:
        places = [coordinates_of(mesh.rank, mesh.shape)]
    dims = spec.dims(len(block))
    return [tuple(index_along(axes, c, mesh.shape) * n for axes, n in zip(dims, block)) for c in places]


def blocks_to_save(x: ShardedArray) -> list[tuple[Start, np.ndarray]]:
    """This process's blocks that no rank before it has."""
    mesh, spec = x.mesh, x.spec
    if mesh.backend == "simulated":
        blocks = list(x.data) if x.varying else [x.data]
    else:
        place = coordinates_of(mesh.rank, mesh.shape)
        blocks = [] if any(place[a] for a in mesh.axis_names if a not in spec.split_axes) else [x.data]
    shape = block_type(ShapedArray(x.shape, x.dtype), spec, mesh.shape).shape
    return list(zip(local_starts(Sharding(mesh, spec), shape), blocks))


def from_blocks(t: ShapedArray, sharding: Sharding, blocks: Sequence[np.ndarray]) -> ShardedArray | np.ndarray:
    """The array of this process's blocks, in the order of `local_starts`: a plain one if the spec does not split it."""
    mesh, spec = sharding.mesh, sharding.spec
    if spec.is_trivial:
        return blocks[0]
    stacked = mesh.backend == "simulated" and bool(spec.split_axes)
    block = block_type(ShapedArray(t.shape, t.dtype), spec, mesh.shape)
    return ShardedArray(whole_type(block, mesh, spec), np.stack(blocks) if stacked else blocks[0])
