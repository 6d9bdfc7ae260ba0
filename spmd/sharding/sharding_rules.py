"""Sharding rules: how an operation runs on the blocks of sharded operands.

An operation declares how the dimensions of its operands and results correspond, by labels
(`minidiff/ops/dimensions.py`). All dimensions of a label may be split along the same mesh axes, and each rank computes
its block. A result that lacks a split label is reduced, first on each rank, then between ranks.

How the labels are split follows from how the operands are split. Each label takes the axes that split it, if no other
label has them: labels of the results come before those that are summed over, larger operands before smaller ones. If a
dimension must be whole, its axes split another dimension of the operand instead, where they can. Operands that do not
fit are then resharded.

All of this is a plan, which depends on types and shardings alone. `dispatch.py` follows it for sharded arrays, and
`spmd/shard_map/auto_axes.py` for values that are sharded in the body of a `shard_map`, along axes that it does not map
over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

import collectives
from collectives.typing_rules import check_unreduced
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import vary_along
from minidiff.core.states import VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops import elementwise
from minidiff.ops.dimensions import Dimensions, Label, Labels, Types
from minidiff.ops.indexing import counted_dimension, slice_p, unslice_p
from minidiff.ops.reduction import prod_p
from minidiff.values.dtypes import accumulator_dtype
from spmd.mesh.specs import PartitionSpec, part_count
from spmd.sharding.block_operations import INDEXED, Way, exchanged_dimensions, operation_on_blocks
from spmd.sharding.routes import Dims, Route, follow, route

# ---------------------------------------------------------------- how labels are split


def split_labels(
    dimensions: Dimensions,
    types: Sequence[ShapedArray],
    outs: Sequence[ShapedArray],
    have: Sequence[Dims],
    sizes: dict[str, int],
) -> Way:
    """The axes that split each label, for operands that are split as `have`."""
    way: Way = {}
    lengths: dict[Label, list[int]] = {}
    for labels, t in zip((*dimensions.operands, *dimensions.results), (*types, *outs)):
        for label, n in zip(labels, t.shape):
            lengths.setdefault(label, []).append(n)

    def split(label: Label, axes: tuple[str, ...]) -> bool:
        """Split a label along axes, as far as no other label has them and they divide its dimensions."""
        for k, axis in enumerate(axes, 1):
            known = way.get(label, ())
            if known[:k] == axes[:k]:
                continue
            taken = known != axes[: k - 1] or any(axis in taken_axes for taken_axes in way.values())
            if taken or any(n % part_count(axes[:k], sizes) for n in lengths[label]):
                return False
            way[label] = axes[:k]
        return True

    operands = sorted(zip(dimensions.operands, types, have), key=lambda operand: -operand[1].nbytes)
    result_labels = {label for labels in dimensions.results for label in labels}
    for summed in (False, True):
        for labels, _, dims in operands:
            for label, axes in zip(labels, dims):
                if label is not None and (label not in result_labels) is summed:
                    split(label, axes)
    for labels, _, dims in operands:
        for axis in [a for label, axes in zip(labels, dims) if label is None for a in axes]:
            for label in reversed(labels):
                if label is not None and split(label, (*way.get(label, ()), axis)):
                    break
    return way


def _sharding(way: Way, labels: Labels) -> Dims:
    """The sharding of an array with these labels."""
    return tuple(way.get(label, ()) for label in labels)


# ---------------------------------------------------------------- reductions between ranks, collectives


#: How a result is reduced between ranks, by `Dimensions.combine`.
COMBINE = {
    "sum": collectives.psum,
    "mean": collectives.pmean,
    "max": collectives.pmax,
    "min": collectives.pmin,
    # No collective multiplies: gather the factors.
    "prod": lambda x, axes: prod_p.bind(collectives.all_gather_invariant(x, axes), axes=(0,)),
}


def sharding_of_collective(types: Types, outs: Types, params: dict) -> Dimensions:
    """The rule of collectives, for values that are sharded along axes other than the collective's.

    Dimensions that ranks join or split must be whole: blocks of blocks would be in another order.
    """
    named = [params[name] for name in ("axis", "split_axis", "concat_axis") if name in params]
    operands: list[list] = [[(i, d) for d in range(t.ndim)] for i, t in enumerate(types)]
    results: list[list] = [list(labels) for labels in operands]
    if named and params.get("tiled", True):
        for d in named:
            operands[0][d] = results[0][d] = None
    elif named:  # a dimension is removed, or inserted, or both
        if "split_axis" in params or outs[0].ndim < types[0].ndim:
            operands[0][named[0]] = None
            del results[0][named[0]]
        if "concat_axis" in params or outs[0].ndim > types[0].ndim:
            results[0].insert(named[-1], None)
    return Dimensions(tuple(map(tuple, operands)), tuple(map(tuple, results)))


# ---------------------------------------------------------------- plans


class BlockPlan(NamedTuple):
    """The plan of an operation on blocks of given types and shardings."""

    routes: list[Route]  # one for each operand
    run: Callable  # computes the results of resharded blocks
    varying: frozenset  # the axes that labels are split along
    over: tuple[str, ...]  # the axes of labels that the results lack
    combine: str | None
    narrow: numpy.dtype | None  # a result of 16-bit floats that is summed over ranks: it is rounded after the sum
    out_specs: tuple[PartitionSpec, ...]
    decomposed: bool  # whether the operation has a composition for how its first operand is split

    def on_blocks(self, blocks: Sequence[Value]) -> list[Value]:
        """Compute the results' blocks from those of the operands, in the body of a `shard_map`."""
        operands = [follow(route, x, self.varying) for route, x in zip(self.routes, blocks)]
        if self.narrow is not None:
            operands = [
                elementwise.convert(x, accumulator_dtype(x.dtype)) if hasattr(x, "dtype") else x for x in operands
            ]
        results = self.run(*operands)
        results = results if isinstance(results, (list, tuple)) else [results]
        if self.over and self.combine is not None:
            results = [COMBINE[self.combine](x, self.over) for x in results]
        if self.narrow is not None:
            results = [elementwise.convert(x, self.narrow) for x in results]
        return [vary_along(x, spec.axes) for x, spec in zip(results, self.out_specs)]


_WEAK = (bool, int, float, complex)  # Python's numbers promote weakly: a plan depends on their type alone


def plan_of(
    primitive: Primitive, args: Sequence[Value], dims: Sequence[Dims], params: dict, sizes: dict[str, int]
) -> BlockPlan:
    """Return the plan for these operands, which are sharded as `dims` says, on a mesh of these sizes."""
    operands = tuple((type(x) if type(x) in _WEAK else _type_alone(typeof(x)), split) for x, split in zip(args, dims))
    params = with_counted(primitive, args, params)
    key = primitive, operands, tuple(params.items()), tuple(sizes.items())
    return (_known_plan if _can_be_hashed(key) else _plan)(*key)


def with_counted(primitive: Primitive, args: Sequence[Value], params: dict) -> dict:
    """Add to the parameters of a gather or scatter the dimension along which each index counts, or None.

    A plan depends on types and parameters alone, but whether an index counts depends on its value.
    """
    if primitive not in INDEXED or "counted" in params:
        return params
    indices = args[INDEXED[primitive] :]
    wide = numpy.broadcast_shapes(*map(numpy.shape, indices))
    lengths = params["shape"] if "shape" in params else args[0].shape
    counted = [counted_dimension(i, n, wide) for i, n in zip(indices, lengths)]
    return {**params, "counted": tuple(None if d in counted[:k] else d for k, d in enumerate(counted))}


def _type_alone(t: ShapedArray) -> ShapedArray:
    """The type without its sharding: with it, the plans that are kept would keep meshes. (Errors need it.)"""
    return t if t.sharding is None or t.unreduced else ShapedArray(t.shape, t.dtype, t.states)


def _can_be_hashed(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:  # slices cannot
        return False
    return True


def _plan(
    primitive: Primitive, operands: tuple[tuple[Any, Dims], ...], parameters: tuple, mesh_shape: tuple
) -> BlockPlan:
    """Return the plan for operands of these types and shardings; the types of Python's numbers are Python's."""
    params, sizes = dict(parameters), dict(mesh_shape)
    weak = [t if isinstance(t, ShapedArray) else t(0) for t, _ in operands]
    types = [typeof(t) for t in weak]
    plain = {name: value for name, value in params.items() if name != "counted"}
    outs = primitive.typecheck(weak, plain)
    have = [dims for _, dims in operands]
    if primitive in (slice_p, unslice_p):
        shape, parts = params.get("shape", types[0].shape), [part_count(axes, sizes) for axes in have[0]]
        params["exchanged"] = exchanged_dimensions(params["index"], shape, parts, primitive is unslice_p)
    dimensions = _rule(primitive)(types, outs, params)
    if any(t.unreduced for t in types):
        _check_unreduced_blocks(primitive, weak, have)
    way = split_labels(dimensions, types, outs, have, sizes)
    out_shardings = [_sharding(way, labels) for labels in dimensions.results]
    result_labels = {label for labels in dimensions.results for label in labels}
    on_blocks = {**plain, **dimensions.params}
    if "shape" in params:
        on_blocks["shape"] = tuple(n // part_count(axes, sizes) for n, axes in zip(outs[0].shape, out_shardings[0]))
    over = tuple(a for label, axes in way.items() if label not in result_labels for a in axes)
    summed = bool(over) and dimensions.combine in ("sum", "mean")
    needed = [axes for label, axes in zip(dimensions.operands[0], have[0]) if label is None]
    along = frozenset(a for axes in way.values() for a in axes)
    return BlockPlan(
        routes=[
            route(dims, _sharding(way, labels), t.nbytes, sizes)
            for labels, t, dims in zip(dimensions.operands, types, have)
        ],
        run=operation_on_blocks(primitive, way, types[0] if types else None, params, on_blocks),
        varying=along,
        over=over,
        combine=dimensions.combine,
        narrow=outs[0].dtype if summed and accumulator_dtype(outs[0].dtype) != outs[0].dtype else None,
        out_specs=tuple(
            PartitionSpec.of_dims(dims, t.unreduced, t.reduced - along) for dims, t in zip(out_shardings, outs)
        ),
        decomposed=primitive.decomposed is not None and any(needed),
    )


def _rule(primitive: Primitive) -> Callable:
    """Return the rule by which the dimensions of operands and results correspond. Raises TypeError if there is none."""
    if primitive.on_ranks:
        return sharding_of_collective
    if primitive.sharding is None:
        raise TypeError(
            f"{primitive.name} does not say how its dimensions correspond, so its operands cannot be sharded: declare "
            "it with sharding=, a rule of minidiff.ops.dimensions (gather, if it needs whole operands)"
        )
    return primitive.sharding


def _check_unreduced_blocks(primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dims]) -> None:
    """Raise VarianceError for unreduced operands that the operation is not linear in, where others may be split."""
    split = [frozenset(a for axes in of_operand for a in axes) for of_operand in dims]
    blocks = [typeof(t).update(states=typeof(t).states.with_state(a, VARYING)) for t, a in zip(operands, split)]
    check_unreduced(primitive, [w if type(w) in _WEAK else t for w, t in zip(operands, blocks)])


_known_plan = functools.lru_cache(maxsize=4096)(_plan)
