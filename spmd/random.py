"""Random numbers in shards: each rank draws its block of a large array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives import axis_index, pscatter
from minidiff import tree
from minidiff.api.recording import stage_flat
from minidiff.core.interpreter import current_scope
from minidiff.core.ranks import vary_along
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.errors import UnboundAxisError
from minidiff.inputs.arguments import check_function
from minidiff.ops.base import convert
from minidiff.ops.elementwise import add
from minidiff.random import Block, random_bits_p
from spmd.arrays.reshard import specs_for
from spmd.mesh.checks import check_sharding
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, PartitionSpec, part_count
from spmd.shard_map.shard_map import shard_map
from spmd.sharding.block_operations import MUST_KNOW_BLOCK
from spmd.sharding.routes import Dims


def local_block(shape: Sequence[int], spec: PartitionSpec) -> Block:
    """Return the rank's block of a draw of this shape, in the body of a `shard_map`.

    Give it to a function of `minidiff.random` in place of a shape. A rank then draws only its block of the whole draw.
    The numbers vary along the axes that the spec names.

    Args:
        shape: the shape of the whole draw.
        spec: the partition spec by which it is split.

    Raises:
        ValueError: if the spec does not fit.
        UnboundAxisError: outside of a body.

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
        raise UnboundAxisError(f"local_block({shape}, {spec}) needs mesh axes: call it in the body of a shard_map")
    check_sharding(spec, shape, scope.axes, "the draw")
    dims = spec.dims(len(shape))
    sizes = tuple(n // part_count(axes, scope.axes) for n, axes in zip(shape, dims))
    return Block(sizes, tuple(axis_index(axes) * n if axes else 0 for n, axes in zip(sizes, dims)), shape)


def initialize(f: Callable, mesh: Mesh, specs: Any) -> Callable:
    """Return a function that computes `f(*args)` in shards: sharded arrays, equal to `spmd.distribute(f(*args), …)`.

    A rank computes only its own blocks of the results, and of their operands, as far back as operations can be split.
    Everything before that it computes whole, and slices. Nothing is communicated.

    Args:
        f: a function, whose arguments are whole.
        mesh: the mesh over which its results are split.
        specs: a tree of partition specs that is a prefix of the result.

    Raises:
        ValueError: if a spec does not fit.

    >>> import minidiff as md, numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> init = lambda key: {'w': md.random.normal(key, (4, 3)) / 2, 'b': np.zeros(3)}
    >>> params = initialize(init, mesh, {'w': spmd.P('i'), 'b': spmd.P()})(md.random.key(0))
    >>> params['w'].spec, bool((params['w'].gather() == init(md.random.key(0))['w']).all())
    (P('i'), True)
    """
    check_function("initialize", f)

    def initialized(*args: Any) -> Any:
        tape, _, structure = stage_flat(f, args, "initialize")
        shapes = tree.unflatten(structure, tape.out_types)
        dims = []
        for spec, t in zip(specs_for(shapes, specs), tape.out_types):
            check_sharding(spec, t.shape, mesh.shape, f"the result {t}")
            dims.append(spec.dims(t.ndim))

        def body(*args: Any) -> Any:
            return tree.unflatten(structure, _in_blocks(tape, tree.leaves(args), dims, mesh.shape))

        return shard_map(body, mesh=mesh, in_specs=P(), out_specs=specs)(*args)

    return initialized


def _in_blocks(tape: Tape, args: Sequence[Value], outs: Sequence[Dims], sizes: dict[str, int]) -> list[Value]:
    """Run a tape in the body of a `shard_map`, for the blocks of its results that `outs` describes."""
    needed: dict[Var, Dims] = {}

    def need(a: Atom, dims: Dims) -> None:
        if isinstance(a, Var):
            needed[a] = dims if needed.get(a, dims) == dims else _as_whole(a)

    for a, dims in zip(tape.outputs, outs):
        need(a, dims)
    operands = {}
    for eqn in reversed(tape.equations):  # uses come before definitions
        operands[eqn] = _operand_dims(eqn, [needed.get(v, _as_whole(v)) for v in eqn.outputs], sizes)
        for a, dims in zip(eqn.inputs, operands[eqn] or map(_as_whole, eqn.inputs)):
            need(a, dims)

    have: dict[Var, tuple[Value, Dims]] = {v: (x, _as_whole(v)) for v, x in zip(tape.inputs, args)}

    def block(a: Atom, dims: Dims) -> Value:
        x, have_dims = have[a] if isinstance(a, Var) else (a, _as_whole(a))
        return x if have_dims == dims else _local_slice(x, dims)

    for eqn in tape.equations:
        split = operands[eqn]
        values = [block(a, d) for a, d in zip(eqn.inputs, split or map(_as_whole, eqn.inputs))]
        if split is None:
            results = eqn.primitive.bind(*values, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
            have.update((v, (x, _as_whole(v))) for v, x in zip(eqn.outputs, results))
        else:
            have[eqn.outputs[0]] = _block_of(eqn, values, needed[eqn.outputs[0]], sizes), needed[eqn.outputs[0]]
    return [vary_along(block(a, dims), sum(dims, ())) for a, dims in zip(tape.outputs, outs)]  # equal blocks, too


def _as_whole(a: Atom) -> Dims:
    return ((),) * typeof(a).ndim


def _local_slice(x: Value, dims: Dims) -> Value:
    """The rank's block of a value that is whole."""
    for d, axes in enumerate(dims):
        x = pscatter(x, axes, axis=d, tiled=True) if axes else x
    return x


def _operand_dims(eqn: Equation, outs: Sequence[Dims], sizes: dict[str, int]) -> list[Dims] | None:
    """Return the operands' dimensions if the result is split; None if it is whole, or needs whole operands."""
    primitive, types = eqn.primitive, [typeof(a) for a in eqn.inputs]
    if not any(map(any, outs)) or len(outs) > 1 or primitive.sharding is None or primitive in MUST_KNOW_BLOCK:
        return None
    labeled = primitive.sharding(types, [v.type for v in eqn.outputs], eqn.params)
    axes_of = {label: axes for label, axes in zip(labeled.results[0], outs[0]) if axes}
    lengths = [pair for labels, t in zip(labeled.operands, types) for pair in zip(labels, t.shape)]
    operand_labels = {label for label, _ in lengths}
    makes_any_shape = primitive is random_bits_p or "shape" in eqn.params
    if None in axes_of or not (makes_any_shape or operand_labels.issuperset(axes_of)):
        return None
    if any(n % part_count(axes_of.get(label, ()), sizes) for label, n in lengths):
        return None
    return [tuple(axes_of.get(label, ()) for label in labels) for labels in labeled.operands]


def _block_of(eqn: Equation, values: list[Value], dims: Dims, sizes: dict[str, int]) -> Value:
    """The rank's block of the result, of the operands' blocks."""
    t, params = eqn.outputs[0].type, dict(eqn.params)
    params.update(eqn.primitive.sharding([typeof(a) for a in eqn.inputs], [t], eqn.params).params)
    if "shape" in params:
        params["shape"] = tuple(n // part_count(axes, sizes) for n, axes in zip(t.shape, dims))
    if eqn.primitive is random_bits_p:
        block = local_block(params["sizes"], PartitionSpec.of_dims(dims[t.ndim - len(params["sizes"]) :]))
        first = sum(start * stride for start, stride in zip(block.starts, params["strides"]))
        values[2], params["sizes"] = add(values[2], convert(first, values[2].dtype)), block.shape
    return eqn.primitive.bind(*values, **params)
