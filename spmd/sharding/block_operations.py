"""Operations that must know which block of an array they have: slices, and look-ups at indices.

A dimension that such an operation labels "at" may be split: each rank looks up the places that its block has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import collectives
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.ops import elementwise, indexing
from minidiff.ops.base import sum_p
from minidiff.ops.dimensions import Label
from minidiff.ops.elementwise import add, equal, greater_equal, less, multiply, subtract, where
from minidiff.ops.indexing import gather_p, slice_along, slice_p, take_along_axis, unslice_p
from minidiff.ops.rearranging import roll_p
from minidiff.ops.reduction import argmax_p, argmin_p, cumprod_p, cumsum_p, prod_p
from minidiff.ops.shape import expand_dims, reshape, squeeze
from minidiff.ops.updates import scatter_max_p, scatter_min_p, scatter_set_p
from minidiff.values.dtypes import is_differentiable
from spmd.halo import HaloDimension, reach

Way = dict[Label, tuple[str, ...]]  # the axes that labels are split along; labels without an entry are whole

#: Operations at integer indices, and the number of operands before these.
INDEXED = {gather_p: 1, indexing.scatter_add_p: 1, scatter_set_p: 2, scatter_max_p: 2, scatter_min_p: 2}

#: Cumulative operations, and how a block goes on from the totals of others.
CUMULATIVE: dict[Primitive, tuple[Callable, Primitive, int]] = {
    cumsum_p: (add, sum_p, 0),
    cumprod_p: (multiply, prod_p, 1),
}


def slice_block(_: Any, way: Way, whole: ShapedArray, x: Value, index: tuple, entries: tuple, shifted: Any) -> Value:
    """Slice an array of type `whole` at `index`, given its block.

    `entries` is the index, with those entries of split dimensions that are in step for a block. Along `shifted` ones,
    ranks exchange what crosses from one block to another. Along the others, the rank that has all places sends them; if
    no rank has, the dimension is gathered first. Reversed blocks change places.
    """
    places = [k for k, i in enumerate(index) if i is not None]  # for each dimension, its entry of the index
    sent, moved, at = [], [], list(entries)
    for d, k in enumerate(places):
        if ("at", d) not in way:
            continue
        axes, n, length = way["at", d], whole.shape[d], x.shape[d]
        if indexing.is_strided_backwards(index[k], n):
            at[k] = indexing.slice_of_shard(index[k], n)
            moved.append((axes, collectives.axis_size(axes) - 1))
        elif d in shifted:
            part = range(n)[index[k]]
            x, at[k] = HaloDimension(d, axes, "zeros").part(x, part.start, len(part) * length // n), slice(None)
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


def exchanged_dimensions(
    index: tuple, shape: tuple[int, ...], parts: Sequence[int], pads: bool = False
) -> tuple[int, ...]:
    """The dimensions of an array of this shape, in so many parts, along which a slice of it is made of shifted parts.

    Ranks exchange what crosses from one to another, if that is less than if all came from one rank, or from all. An
    array that is padded to this shape is the opposite: its place in the whole is the index.
    """
    if pads and not all(isinstance(i, slice) for i in index):
        return ()
    entries = [i for i in index if i is not None]
    return tuple(d for d, (i, n, k) in enumerate(zip(entries, shape, parts)) if k > 1 and _crosses_less(i, n, k, pads))


def _crosses_less(i: int | slice, n: int, parts: int, pads: bool) -> bool:
    places = range(n)[i] if isinstance(i, slice) else range(0)
    m = len(places)
    if places.step != 1 or not m or n % parts or m % parts:
        return False
    if pads:
        return sum(reach(-places.start, m // parts, n // parts, parts)) < m - m // parts
    all_places = m if _in_one_block(i, n, n // parts) else n - n // parts
    return sum(reach(places.start, n // parts, m // parts, parts)) < all_places


def unslice_block(_: Any, way: Way, whole: ShapedArray, x: Value, index: tuple, shape: tuple[int, ...]) -> Value:
    """The block of zeros of `shape`, with an array of type `whole` at `index`, given its block."""
    places = list(index)
    for d in range(whole.ndim):
        if ("at", d) in way:
            halo = HaloDimension(d, way["at", d], "zeros")
            x = halo.part(x, -range(shape[d] * halo.size)[index[d]].start, shape[d])
            places[d] = slice(None)
    return unslice_p.bind(x, index=tuple(places), shape=shape)


def roll_block(
    _: Primitive, way: Way, whole: ShapedArray, x: Value, shifts: tuple[int, ...], axes: tuple[int, ...]
) -> Value:
    """Roll an array of type `whole`, given its block."""
    for d, shift in zip(axes, shifts):
        if d in way and x.shape[d]:
            x = HaloDimension(d, way[d], "periodic").rolled(x, shift % whole.shape[d])
        else:
            x = roll_p.bind(x, shifts=(shift,), axes=(d,))
    return x


def accumulate_block(primitive: Primitive, way: Way, _: ShapedArray, x: Value, axis: int, **reverse: bool) -> Value:
    """Accumulate along a dimension, given a block: each goes on from the totals of those before it."""
    y, n = primitive.bind(x, axis=axis, **reverse), x.shape[axis]
    if axis not in way or not n:
        return y
    combine, reduce, unit = CUMULATIVE[primitive]
    total = slice_along(y, axis, 0, 1) if reverse else slice_along(y, axis, n - 1, n)
    totals, rank = collectives.all_gather(total, way[axis]), collectives.axis_index(way[axis])
    numbers = numpy.arange(collectives.axis_size(way[axis])).reshape(-1, *[1] * x.ndim)
    is_before = elementwise.greater(numbers, rank) if reverse else less(numbers, rank)
    return combine(y, reduce.bind(where(is_before, totals, numpy.array(unit, y.dtype)[()]), axes=(0,)))


def position_block(primitive: Primitive, way: Way, _: ShapedArray, x: Value, axis: int) -> Value:
    """Return the positions of extrema along a dimension, given a block: of those in each block, the first extremum."""
    place = primitive.bind(x, axis=axis)
    if axis not in way:
        return place
    values = squeeze(take_along_axis(x, expand_dims(place, axis), axis), axis)
    place = add(place, multiply(collectives.axis_index(way[axis]), x.shape[axis]))
    values, places = (collectives.all_gather_invariant(y, way[axis]) for y in (values, place))
    return squeeze(take_along_axis(places, expand_dims(primitive.bind(values, axis=0), 0), 0), 0)


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


def run_indexed(run: Callable, before: int, counted: Sequence[int | None], *operands: Value, **params: Any) -> Value:
    """Run a gather or scatter on blocks, with `before` operands before its indices; those that count do so in a block.

    For each index, `counted` has the dimension along which it counts, or None.
    """
    indices = operands[before:]
    ndim, lengths = max(map(numpy.ndim, indices)), params.get("shape", operands[0].shape)
    counts = [
        i if d is None else numpy.arange(n).reshape(n, *[1] * (ndim - d - 1))
        for i, n, d in zip(indices, lengths, counted)
    ]
    return run(*operands[:before], *counts, **params)


def gather_block(way: Way, whole: ShapedArray, x: Value, *indices: Value) -> Value:
    """x[indices] for an array of type `whole` where this rank's block has the place, and zeros elsewhere."""
    places, is_in_block = list(indices), []
    for d, length in enumerate(whole.shape[: len(indices)]):
        if ("at", d) not in way:
            continue
        index = elementwise.convert(indices[d], numpy.intp)
        i = where(less(index, 0), add(index, length), index)
        place = subtract(i, multiply(collectives.axis_index(way["at", d]), x.shape[d]))
        nearest = elementwise.minimum(elementwise.maximum(place, 0), x.shape[d] - 1)
        is_in_block.append(equal(place, nearest))
        there = elementwise.logical_and(greater_equal(i, 0), less(i, length))
        places[d] = where(there, nearest, index)  # an index out of bounds stays so, and raises
    values = gather_p.bind(x, *places)
    if not is_in_block:
        return values
    is_local = functools.reduce(elementwise.logical_and, is_in_block)
    is_local = reshape(is_local, (*is_local.shape, *[1] * (x.ndim - len(places))))
    nothing = numpy.zeros((), values.dtype)[()]
    return where(is_local, values, -nothing if is_differentiable(values.dtype) else nothing)  # 0.0 would change -0.0


#: How an operation runs on a block; INDEXED ones are run by `run_indexed`.
ON_BLOCKS: dict[Primitive, Callable] = dict.fromkeys(CUMULATIVE, accumulate_block)
ON_BLOCKS |= {slice_p: slice_block, unslice_p: unslice_block, roll_p: roll_block}
ON_BLOCKS |= {argmax_p: position_block, argmin_p: position_block}

MUST_KNOW_BLOCK = {*ON_BLOCKS, *INDEXED}


def operation_on_blocks(primitive: Primitive, way: Way, whole: Any, params: dict, on_blocks: dict) -> Callable:
    """Return the function that runs an operation on blocks, the first of which is of an array of type `whole`."""
    if primitive in INDEXED:
        run = functools.partial(gather_block, way, whole) if primitive is gather_p else primitive.bind
        return functools.partial(run_indexed, run, INDEXED[primitive], params["counted"], **on_blocks)
    if primitive is slice_p:
        on_blocks = {"index": params["index"], "entries": on_blocks["index"], "shifted": params["exchanged"]}
    if primitive in ON_BLOCKS:
        return functools.partial(ON_BLOCKS[primitive], primitive, way, whole, **on_blocks)
    return functools.partial(primitive.bind, **on_blocks)
