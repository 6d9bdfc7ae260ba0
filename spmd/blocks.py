"""Sharded arrays made of the blocks that ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core import ShapedArray, Tracer, Value, typeof
from minidiff.forward import as_named_value, as_value
from spmd.agreement import check_blocks, check_copies, check_types, checks_values, digest_of
from spmd.arrays.reshard import check_mesh, check_no_body, specs_for
from spmd.arrays.sharded_array import ShardedArray
from spmd.mesh import Mesh
from spmd.partition import PartitionSpec, check_ndim, check_spec, check_whole


def from_local(block: Any, mesh: Mesh, spec: Any) -> Any:
    """The `ShardedArray` of which each rank has a block already: this rank's is `block`. No block is moved.

    The inverse of `.local`: where ranks are simulated, `block` is the list of all ranks' blocks. It is a tree of arrays
    (a list of such trees), and `spec` a tree of partition specs that is a prefix of it. The whole is as many times
    larger in a dimension as there are ranks along the axes that split it. What is split along no axis is a plain array.
    Along axes that a spec does not name, ranks have the same block: simulated ones are checked, others in
    `spmd.checking()`.

    Under MPI every rank calls it, and types are compared. Raises ValueError on all ranks, with who has which, where
    blocks have different shapes or dtypes, and where a spec does not fit; TypeError for blocks that are traced:
    derivatives are of whole arrays (`distribute`), or are taken of blocks in the body of a `shard_map`.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> x = from_local([np.array([1, 2]), np.array([3, 4])], mesh, spmd.P('i'))
    >>> x
    ShardedArray([1, 2, 3, 4], P('i'))
    >>> x.local
    [array([1, 2]), array([3, 4])]
    """
    check_mesh("from_local", mesh)
    check_no_body("from_local")
    trees = _of_all_ranks(block, mesh) if mesh.backend == "simulated" else [block]
    flat = [tree.flatten_with_paths(x, "block") for x in trees]
    types = [[f"spec: {spec!r}", *[f"{path}: {_described(x)}" for path, x in leaves]] for leaves, _ in flat]
    check_types("from_local: ranks have blocks of different types", mesh, types)
    specs = specs_for(trees[0], spec)
    paths, structure = tree.paths(flat[0][1], "block"), flat[0][1]
    columns = zip(*[[x for _, x in leaves] for leaves, _ in flat])  # for each leaf, the blocks that are here
    return tree.unflatten(structure, [_joined(*entry, mesh) for entry in zip(paths, columns, specs)])


def _of_all_ranks(blocks: Any, mesh: Mesh) -> Sequence:
    if isinstance(blocks, (list, tuple)) and len(blocks) == mesh.size:
        return blocks
    got = f"{len(blocks)} of them" if isinstance(blocks, (list, tuple)) else f"a {type(blocks).__name__}"
    raise ValueError(
        f"from_local: ranks of {mesh} are simulated, so block is the list of all {mesh.size} ranks' blocks, in their "
        f"order, as .local gives it; got {got}"
    )


def _described(x: Any) -> str:
    """The type of a block, or what else it is: ranks compare it before any of them raises an error of its own."""
    try:
        x = as_value(x)
    except TypeError:
        return f"a {type(x).__name__}"
    return f"{typeof(x)}, traced or sharded" if isinstance(x, Tracer) else str(typeof(x))


def _joined(path: str, blocks: Sequence[Any], spec: PartitionSpec, mesh: Mesh) -> Value:
    """The array of which these are the blocks of the ranks that are here: of all, or of this one."""
    blocks = [as_named_value(x, f"from_local: {path}") for x in blocks]
    type, ranks, every = typeof(blocks[0]), mesh.ranks, mesh.axis_names
    if isinstance(blocks[0], Tracer):
        raise TypeError(
            f"from_local: {path} has type {_described(blocks[0])}, and is no plain array of a rank's own: call it on "
            "data, outside of jit and derivatives, and distribute(x, mesh, spec) on whole arrays"
        )
    check_spec(spec, mesh.shape, "spec")
    check_whole(spec, "spec")
    check_ndim(spec, type.shape, "spec", path)
    held = ranks.ordered(spec.axes)
    if mesh.backend == "simulated":
        check_copies(f"{path}: {type}", mesh, held, [*map(digest_of, blocks)])
        data = ranks.reshard_data(numpy.stack(blocks), every, held) if every else blocks[0].copy()
    else:
        data = blocks[0].copy()
        if checks_values():
            check_blocks(mesh, [(path, data, held)])
    return ShardedArray(mesh, spec, ShapedArray(type.shape, type.dtype), data) if held else data
