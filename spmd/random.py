"""Random numbers in shards: each rank draws its block of a large array."""

from __future__ import annotations

from collections.abc import Sequence

from collectives import axis_index
from minidiff.core import current_scope
from minidiff.errors import UnboundAxisError
from minidiff.random import Block
from spmd.partition import PartitionSpec, check_sharding, part_count


def local_block(shape: Sequence[int], spec: PartitionSpec) -> Block:
    """The rank's block of a draw of this shape that is split by `spec`, in the body of a `shard_map`.

    Give it to a function of `minidiff.random` in place of a shape. The numbers equal the block's of the whole draw, and
    vary along the axes that the spec names; no rank draws the whole. Raises ValueError if the spec does not fit.

    >>> import minidiff as md
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> draw = lambda key: md.random.randint(key, local_block((2, 3), spmd.P('i')), 0, 100)
    >>> spmd.shard_map(draw, mesh=mesh, in_specs=spmd.P(), out_specs=spmd.P('i'))(md.random.key(0))
    ShardedArray([[30, 57, 89],
                  [66, 90, 45]], P('i'))
    >>> md.random.randint(md.random.key(0), (2, 3), 0, 100)
    array([[30, 57, 89],
           [66, 90, 45]])
    """
    scope, shape = current_scope(), tuple(shape)
    if scope is None:
        raise UnboundAxisError(f"local_block({shape}, {spec}) is for the body of a shard_map, on whose mesh axes are")
    check_sharding(spec, shape, scope.axes, "the draw")
    dims = spec.dims(len(shape))
    sizes = tuple(n // part_count(axes, scope.axes) for n, axes in zip(shape, dims))
    return Block(sizes, tuple(axis_index(axes) * n if axes else 0 for n, axes in zip(sizes, dims)), shape)
