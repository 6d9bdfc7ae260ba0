"""Operations on sharded arrays: each runs as a `shard_map` of itself.

An operation declares how the dimensions of its operands and results correspond, by labels
(`minidiff/ops/dimensions.py`). All dimensions of a label may be split along the same mesh axes, and each rank computes
its block. What lacks a label that is split is reduced, first on each rank, then between ranks.

How the labels are split follows from how the operands are. Each label takes the axes that split it, if no other label
has them: labels of the results before those that are summed over, larger operands before smaller ones. Axes that split
a dimension that must be whole split another one of the operand instead, if they can. The operands are then resharded to
fit; if none needs to be, none is.

All of this is one operation, `shard_map`, whose body reshards blocks, computes and reduces: so it is typed, counted
and differentiated like any other. Its transpose gives each operand a cotangent with the operand's sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

import collectives
from minidiff.axis_states import VARYING
from minidiff.core import Evaluate, Interpreter, Primitive, Tracer, Value, cast_to, current_scope, running
from minidiff.dtypes import is_scalar_constant
from minidiff.errors import LeakedTracerError, check_unreduced, leak_message
from minidiff.forward import JVP
from minidiff.ops import elementwise
from minidiff.ops.dimensions import Dimensions, Label, Labels
from minidiff.ops.elementwise import add, equal, greater_equal, less, multiply, subtract, where
from minidiff.ops.indexing import gather_p, in_step_backwards, of_part, slice_p
from minidiff.ops.reduction import prod_p
from minidiff.ops.shape import reshape
from minidiff.types import ShapedArray, typeof
from spmd.arrays.reshard import Dims, Route, follow, redistribute, route
from spmd.arrays.sharded_array import ShardedArray, reshard_p
from spmd.mesh import Mesh
from spmd.partition import P, PartitionSpec, part_count
from spmd.primitive import everywhere, shard_map_p

Way = dict[Label, tuple[str, ...]]  # the axes that labels are split along; labels without an entry are whole

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
            taken = known != axes[: k - 1] or any(axis in others for others in way.values())
            if taken or any(n % part_count(axes[:k], sizes) for n in lengths[label]):
                return False
            way[label] = axes[:k]
        return True

    operands = sorted(zip(dimensions.operands, types, have), key=lambda operand: -operand[1].nbytes)
    kept = {label for labels in dimensions.results for label in labels}
    for summed in (False, True):
        for labels, _, dims in operands:
            for label, axes in zip(labels, dims):
                if label is not None and (label not in kept) is summed:
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


# ---------------------------------------------------------------- operations that must know which block they have


def _slice_block(way: Way, whole: ShapedArray, x: Value, index: tuple, entries: tuple) -> Value:
    """Slice an array of type `whole` at `index`, given its block.

    `entries` is the index, with those entries of split dimensions that are in step for a block. Along the others, the
    rank that has all places sends them; if no rank has, the dimension is gathered first. Reversed blocks change places.
    """
    places = [k for k, i in enumerate(index) if i is not None]  # for each dimension, its entry of the index
    sent, moved, at = [], [], list(entries)
    for d, k in enumerate(places):
        if ("at", d) not in way:
            continue
        axes, n, length = way["at", d], whole.shape[d], x.shape[d]
        if in_step_backwards(index[k], n):
            at[k] = of_part(index[k], n)
            moved.append((axes, n // length - 1))
        elif (place := _in_one_block(index[k], n, length)) is not None:
            at[k] = place[1]
            sent.append((axes, place[0]))
        else:
            x = collectives.all_gather_invariant(x, axes, axis=d, tiled=True)
    x = slice_p.bind(x, index=tuple(at))
    for axes, last in moved:
        x = collectives.ppermute(x, axes, [(rank, last - rank) for rank in range(last + 1)])
    for axes, rank in sent:
        x = collectives.broadcast(x, axes, rank)
    return x


def _in_one_block(i: int | slice, n: int, length: int) -> tuple[int, int | slice] | None:
    """The block that has all places of `i`, of n in blocks of this length, and their index in it; None if none has."""
    if isinstance(i, int):
        return divmod(i % n, length)
    places = range(n)[i]
    if not places:
        return 0, slice(0, 0)
    block = places[0] // length
    if places[-1] // length != block:
        return None
    start, stop = places.start - block * length, places.stop - block * length
    return block, slice(start, stop if stop >= 0 else None, None if places.step == 1 else places.step)


def _gather_block(way: Way, whole: ShapedArray, x: Value, *indices: Value) -> Value:
    """x[indices] for an array of type `whole`, where this rank's block has the place, else 0."""
    places, known = list(indices), []
    for d, length in enumerate(whole.shape[: len(indices)]):
        if ("at", d) not in way:
            continue
        given = elementwise.convert(indices[d], numpy.intp)
        i = where(less(given, 0), add(given, length), given)
        place = subtract(i, multiply(collectives.axis_index(way["at", d]), x.shape[d]))
        nearest = elementwise.minimum(elementwise.maximum(place, 0), x.shape[d] - 1)
        known.append(equal(place, nearest))
        there = elementwise.logical_and(greater_equal(i, 0), less(i, length))
        places[d] = where(there, nearest, given)  # an index out of bounds stays so, and raises
    found = gather_p.bind(x, *places)
    if not known:
        return found
    mine = functools.reduce(elementwise.logical_and, known)
    mine = reshape(mine, (*mine.shape, *[1] * (x.ndim - len(places))))
    return where(mine, found, numpy.zeros((), found.dtype)[()])


#: How a result is reduced between ranks, by `Dimensions.combine`.
COMBINE = {
    "sum": collectives.psum,
    "mean": collectives.pmean,
    "max": collectives.pmax,
    "min": collectives.pmin,
    # No collective multiplies: gather the factors.
    "prod": lambda x, axes: prod_p.bind(collectives.all_gather_invariant(x, axes), axes=(0,)),
}

# ---------------------------------------------------------------- the operation


def dispatch_to_shards(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Run an operation on sharded operands as a `shard_map` of it.

    Returns None if no operand is sharded. If the operands are on several meshes, those on another mesh than the first
    one's are gathered. Raises LeakedTracerError for tracers of a transformation that has ended.
    """
    if interpreter.scope is not None:
        return None
    shardings = [typeof(x).sharding if isinstance(x, Tracer) else None for x in args]
    if any(sharding is not None and sharding.is_element for sharding in shardings):
        return None  # `vmap`, beneath, runs it on all elements at once
    if primitive is reshard_p:  # its operand was found not to be batched
        with running(interpreter):
            return redistribute(*args, **params)
    if primitive.has_effect and not isinstance(interpreter, Evaluate):
        return None
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    if isinstance(interpreter, Evaluate):
        for x in args:
            if isinstance(x, Tracer) and not isinstance(x, ShardedArray):
                raise LeakedTracerError(leak_message(x))
        if primitive.has_effect:  # it sees sharded arrays as the user does
            return primitive.impl(*args, **params)
    if not meshes:
        return None
    mesh = meshes[0]
    if not all(other.is_like(mesh) for other in meshes):
        here = [t is None or t.mesh.is_like(mesh) for t in shardings]
        with running(interpreter):
            args = [x if yes else t.gathered(x) for x, t, yes in zip(args, shardings, here)]
        shardings = [t if yes else None for t, yes in zip(shardings, here)]
    types = [typeof(x) for x in args]
    specs = [WHOLE if sharding is None else sharding.spec for sharding in shardings]
    dims_of = [spec.dims(t.ndim) for spec, t in zip(specs, types)]
    operands = tuple((type(x) if type(x) in _WEAK else t, dims) for x, t, dims in zip(args, types, dims_of))
    what = primitive, operands, tuple(params.items()), tuple(mesh.shape.items())
    plan = (_known_plan if _can_be_hashed(what) else _plan)(*what)
    if plan.combine in ("max", "min") and isinstance(interpreter, JVP):
        return None  # the derivative depends on the whole result
    with running(interpreter):
        if plan.decomposed:
            return primitive.decomposed(*args, **params)
        return _mapped(primitive, args, mesh, specs, plan)


def _can_be_hashed(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:  # slices cannot
        return False
    return True


WHOLE = P()
_WEAK = (bool, int, float, complex)  # Python's numbers promote weakly: a plan depends on their type alone


class Plan(NamedTuple):
    """How an operation runs on blocks of given types and shardings."""

    routes: list[Route]  # one for each operand
    run: Callable  # computes the results of resharded blocks
    varying: frozenset  # the axes that labels are split along
    over: tuple[str, ...]  # the axes of labels that the results lack
    combine: str | None
    out_specs: tuple[PartitionSpec, ...]
    decomposed: bool  # whether the operation has a composition for how its first operand is split


def _plan(primitive: Primitive, operands: tuple[tuple[Any, Dims], ...], params: tuple, mesh_shape: tuple) -> Plan:
    """The plan for operands of these types and shardings.

    The types of Python's numbers are Python's.
    """
    given, sizes = dict(params), dict(mesh_shape)
    weak = [t if isinstance(t, ShapedArray) else t(0) for t, _ in operands]
    types = [typeof(t) for t in weak]
    outs = primitive.typecheck(weak, given)
    if primitive.sharding is None:
        raise TypeError(
            f"{primitive.name} does not say how its dimensions correspond, so its operands cannot be sharded: declare "
            "it with sharding=, a rule of minidiff.ops.dimensions (gather, if it needs its operands whole)"
        )
    dimensions = primitive.sharding(types, outs, given)
    have = [dims for _, dims in operands]
    if any(t.unreduced for t in types):  # they may be so along an axis that splits another operand
        split = [frozenset(a for axes in dims for a in axes) for dims in have]
        blocks = [t.update(states=t.states.with_state(a, VARYING)) for t, a in zip(types, split)]
        check_unreduced(primitive, [w if type(w) in _WEAK else t for w, t in zip(weak, blocks)])
    way = split_labels(dimensions, types, outs, have, sizes)
    out_shardings = [_sharding(way, labels) for labels in dimensions.results]
    kept = {label for labels in dimensions.results for label in labels}
    on_blocks = {**given, **dimensions.params}
    if "shape" in given:
        on_blocks["shape"] = tuple(n // part_count(axes, sizes) for n, axes in zip(outs[0].shape, out_shardings[0]))
    if primitive is slice_p:
        run = functools.partial(_slice_block, way, types[0], index=given["index"], entries=on_blocks["index"])
    elif primitive is gather_p:
        run = functools.partial(_gather_block, way, types[0])
    else:
        run = functools.partial(primitive.bind, **on_blocks)
    needed = [axes for label, axes in zip(dimensions.operands[0], have[0]) if label is None]
    split = frozenset(a for axes in way.values() for a in axes)
    return Plan(
        routes=[
            route(dims, _sharding(way, labels), t.nbytes, sizes)
            for labels, t, dims in zip(dimensions.operands, types, have)
        ],
        run=run,
        varying=split,
        over=tuple(a for label, axes in way.items() if label not in kept for a in axes),
        combine=dimensions.combine,
        out_specs=tuple(
            PartitionSpec.of_dims(dims, t.unreduced, t.reduced - split) for dims, t in zip(out_shardings, outs)
        ),
        decomposed=primitive.decomposed is not None and any(needed),
    )


_known_plan = functools.lru_cache(maxsize=4096)(_plan)


def _mapped(
    primitive: Primitive,
    args: Sequence[Value],
    mesh: Mesh,
    specs: Sequence[PartitionSpec],
    plan: Plan,
) -> Any:
    """Run the operation as a `shard_map` with its arguments' specs as `in_specs`."""
    arrays = [i for i, x in enumerate(args) if not is_scalar_constant(x)]

    def body(*blocks: Value) -> tuple:
        current_scope().function = primitive.name
        values = list(args)
        for i, block in zip(arrays, blocks):
            values[i] = follow(plan.routes[i], block, plan.varying)
        found = plan.run(*values)
        found = found if primitive.multiple_results else [found]
        if plan.over and plan.combine is not None:
            found = [COMBINE[plan.combine](x, plan.over) for x in found]
        return [cast_to(x, spec.states) for x, spec in zip(found, plan.out_specs)], plan.out_specs

    in_specs = tuple(specs[i] for i in arrays)
    found = shard_map_p.bind(*[args[i] for i in arrays], body=body, in_specs=in_specs, **everywhere(mesh))
    return found if primitive.multiple_results else found[0]
