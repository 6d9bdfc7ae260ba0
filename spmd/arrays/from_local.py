"""Make sharded arrays from the ranks' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from collectives.operands import convert_booleans
from minidiff import tree
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.inputs.arguments import as_named_value, as_value
from spmd.arrays.reshard import check_mesh, check_no_body, specs_for
from spmd.checks.agreement import check_agreement, check_blocks, check_copies, checks_values, compare_lines, digest_of
from spmd.mesh.checks import check_ndim, check_not_summed, check_spec
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec
from spmd.sharding.sharded_array import ShardedArray, whole_type


def from_local(block: Any, mesh: Mesh, spec: Any) -> Any:
    """Make a `ShardedArray` from the blocks that the ranks already have.

    `block` is a function from a rank's number, in mesh order, to its block. It is called for the ranks of this process:
    for all if they are simulated, and under MPI for this one, so the same program runs on both. No block moves. Each is
    copied. It is the inverse of `.local`, whose forms it takes too: under MPI this rank's block, and the list of all
    ranks' blocks if they are simulated.

    A block is a tree of arrays, and `spec` a tree of partition specs that is a prefix of it. In each dimension the
    whole is as many times larger as there are ranks along the axes that split it. An array that its spec does not split
    is plain. Along axes that a spec does not name, ranks must have the same block: this is checked for simulated ranks,
    and for MPI ranks within `spmd.checking()`.

    Under MPI every rank must call it, and types are compared. Raises ValueError on all ranks if blocks have different
    shapes or dtypes, saying which ranks have which, or if a spec does not fit; TypeError for traced blocks:
    differentiate with respect to whole arrays (`distribute`), or to blocks in the body of a `shard_map`.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> x = from_local(lambda rank: np.array([1, 2]) + 2 * rank, mesh, spmd.P('i'))
    >>> x
    ShardedArray([1, 2, 3, 4], P('i'))
    >>> x.local
    [array([1, 2]), array([3, 4])]
    >>> from_local(x.local, mesh, spmd.P('i'))
    ShardedArray([1, 2, 3, 4], P('i'))
    """
    check_mesh("from_local", mesh)
    check_no_body("from_local")
    trees = blocks_here(block, mesh)
    flat = [tree.flatten_with_paths(x, "block") for x in trees]
    types = [[f"spec: {spec!r}", *[f"{path}: {_describe(x)}" for path, x in leaves]] for leaves, _ in flat]
    problem = "from_local: ranks have blocks of different types"
    check_agreement(problem, mesh, types)
    compare_lines(problem, mesh, types[0])
    return assemble(trees, mesh, spec)


def assemble(trees: Sequence[Any], mesh: Mesh, spec: Any) -> Any:
    """Return a tree of the arrays whose blocks are the leaves of trees in this process. Their types must be one."""
    structure = tree.flatten(trees[0])[1]
    columns = zip(*map(tree.leaves, trees))  # for each leaf, the blocks in this process
    entries = zip(tree.paths(structure, "block"), columns, specs_for(trees[0], spec))
    return tree.unflatten(structure, [_from_blocks(*entry, mesh) for entry in entries])


def blocks_here(block: Any, mesh: Mesh) -> Sequence:
    """The blocks in this process: those of all ranks, if they are simulated, or of this one."""
    simulated = mesh.backend == "simulated"
    if callable(block):
        return [block(rank) for rank in (range(mesh.size) if simulated else [mesh.rank])]
    if not simulated:
        return [block]
    if isinstance(block, (list, tuple)) and len(block) == mesh.size:
        return block
    got = f"{len(block)} of them" if isinstance(block, (list, tuple)) else f"a {type(block).__name__}"
    raise ValueError(
        f"from_local: ranks of {mesh} are simulated, so all {mesh.size} of them need a block, and got {got}; pass a "
        "function of the rank's number, from_local(lambda rank: block, mesh, spec), which runs on MPI ranks too, or "
        "the list of the ranks' blocks in rank order, like .local"
    )


def _describe(x: Any) -> str:
    """Describe a block's type without raising, since ranks compare these before any of them raises."""
    try:
        x = as_value(x)
    except TypeError:
        return f"a {type(x).__name__}"
    return f"{typeof(x)}, traced or sharded" if isinstance(x, Tracer) else str(typeof(x))


def _from_blocks(path: str, blocks: Sequence[Any], spec: PartitionSpec, mesh: Mesh) -> Value:
    """The array made from the blocks in this process: those of all simulated ranks, or this rank's."""
    blocks = [as_named_value(x, f"from_local: {path}") for x in blocks]
    blocks = [convert_booleans(x) if spec.unreduced and not isinstance(x, Tracer) else x for x in blocks]
    type, ranks, every = typeof(blocks[0]), mesh.ranks, mesh.axis_names
    if isinstance(blocks[0], Tracer):
        raise TypeError(
            f"from_local: {path} has type {_describe(blocks[0])}, but must be a rank's plain array: call it on "
            "data, outside of jit and derivatives; for whole arrays, call distribute(x, mesh, spec)"
        )
    check_spec(spec, mesh.shape, "spec")
    check_not_summed(spec, "spec")
    check_ndim(spec, type.shape, "spec", path)
    varying = ranks.sort_axes(spec.split_axes)
    if mesh.backend == "simulated":
        check_copies(f"{path}: {type}", mesh, varying, [*map(digest_of, blocks)])
        data = ranks.reshard_data(numpy.stack(blocks), every, varying) if every else blocks[0].copy()
    else:
        data = blocks[0].copy()
        if checks_values():
            check_blocks(mesh, [(path, data, varying)])
    if spec.is_trivial:
        return data
    return ShardedArray(whole_type(ShapedArray(type.shape, type.dtype), mesh, spec), data)
