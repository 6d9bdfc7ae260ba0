"""Indexing: slices, and gathers at integer indices that may themselves be traced."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import ShapedArray, as_plain_operand, typeof
from minidiff.errors import TracerError, VarianceError
from minidiff.inputs.arguments import WEAK_TYPES, normalize_axis, promotion_argument
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Linear, align
from minidiff.ops.dimensions import Dimensions, Label, Labels, Types, broadcast_labels, products
from minidiff.ops.elementwise import copy
from minidiff.ops.shape import array_and_axis, broadcast_to, ravel, reshape, transpose, without_values
from minidiff.values.dtypes import result_type

# ---------------------------------------------------------------- slices: the index is known


def _sliced_shape(x: ShapedArray, index: tuple):
    return without_values(x)[index].shape, x.dtype


def _unslice_impl(x: numpy.ndarray, index: tuple, shape: tuple[int, ...]) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    numpy.copyto(out[(*index, ...)], x)
    return out


def _slice_transpose(ct, operands, index):
    if all(type(i) is slice and i in (slice(None), slice(None, None, -1)) for i in index):
        return [slice_p.bind(ct, index=index)]  # a flip is its own transpose
    return [unslice_p.bind(ct, index=index, shape=operands[0].shape)]


def _show_index(params: dict) -> str:
    def show(i):
        if type(i) is not slice:
            return str(i)
        start, stop, step = ("" if n is None else str(n) for n in (i.start, i.stop, i.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")

    shown = f"[{', '.join(map(show, params['index']))}]"
    return f"{shown}, shape={params['shape']}" if "shape" in params else shown


def is_strided(i: slice, n: int) -> bool:
    """Return whether a slice takes the same places of each shard, if the axis is split into equal shards.

    That is so if it takes every step-th of the n places, to the end.

    >>> is_strided(slice(1, None, 2), 6), is_strided(slice(1, None), 6), is_strided(slice(None, None, -1), 6)
    (True, False, False)
    """
    return _are_strided(range(n)[i], n)


def _are_strided(places: range, n: int) -> bool:
    return 0 <= places.start < places.step and len(places) * places.step == n


def slice_of_shard(i: slice, n: int) -> slice:
    """Return the slice of each shard, for a strided slice of n places, forwards or backwards.

    The length of the shards does not matter.

    >>> slice_of_shard(slice(1, 6, 2), 6), slice_of_shard(slice(4, None, -2), 6), slice_of_shard(slice(0, 6), 6)
    (slice(1, None, 2), slice(-2, None, -2), slice(None, None, None))
    """
    start, _, step = i.indices(n)
    first = start if step > 0 else start - n
    return slice(None if first in (0, -1) else first, None, None if step == 1 else step)


def sliced_labels(
    index: tuple, shape: tuple[int, ...], may_split: Callable[[slice, int], bool] = is_strided
) -> tuple[Labels, Labels, dict]:
    """Return the labels of an array of this shape and of its slice, and the index of a shard.

    A dimension may be split if its slice satisfies `may_split`: it then takes the same places of each shard.
    """
    labels: list = []
    sliced: list = []
    entries = []
    for i in index:
        d = len(labels)
        if i is None:
            sliced.append(None)
        else:
            splits = isinstance(i, slice) and may_split(i, shape[d])
            i = slice_of_shard(i, shape[d]) if splits else i
            labels.append(d if splits else None)
            sliced += [labels[-1]] if isinstance(i, slice) else []
        entries.append(i)
    remaining = range(len(labels), len(shape))
    return (*labels, *remaining), (*sliced, *remaining), {"index": tuple(entries)}


def _slice_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Along a dimension labeled "at", the parts that hold the indexed places give the result.

    The result has this dimension if it consists of the parts' results in reverse order, or if parts exchange what
    crosses from one to another (along dimensions in `params["exchanged"]`).
    """
    (t,) = types
    of_operand, of_result, shard_params = sliced_labels(params["index"], t.shape)
    labels, sliced = list(of_operand), list(of_result)
    entries = [k for k, i in enumerate(params["index"]) if i is not None]  # for each dimension, its entry of the index
    for d, k in enumerate(entries):
        if labels[d] is None:
            labels[d] = ("at", d)
            if d in params.get("exchanged", ()) or is_strided_backwards(params["index"][k], t.shape[d]):
                sliced[sum(not isinstance(i, int) for i in params["index"][:k])] = labels[d]
    return Dimensions((tuple(labels),), (tuple(sliced),), params=shard_params)


def is_strided_backwards(i: int | slice, n: int) -> bool:
    """Return whether a reversed slice takes the same places of each shard, last shard first."""
    return isinstance(i, slice) and range(n)[i].step < 0 and _are_strided(range(n)[i][::-1], n)


def _unslice_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    labels, sliced, shard_params = sliced_labels(params["index"], outs[0].shape)
    labels = tuple(("at", d) if d in params.get("exchanged", ()) else label for d, label in enumerate(labels))
    if params.get("exchanged"):  # pads alone: the index has a slice for each dimension
        sliced = labels
    return Dimensions((sliced,), (labels,), params=shard_params)


#: x[index] for integers, slices and None, without an ellipsis.
slice_p = Linear(
    "slice",
    lambda x, index: x[index],
    _sliced_shape,
    _slice_transpose,
    fits=lambda x, index: type(index) is tuple,
    sharding=_slice_dimensions,
    shares_memory=True,
    show_params=_show_index,
    moves="copies",
)

#: The transpose of `slice`: zeros of `shape`, with x at `index`.
unslice_p = Linear(
    "unslice",
    _unslice_impl,
    lambda x, index, shape: (shape, x.dtype),
    lambda ct, operands, index, shape: [slice_p.bind(ct, index=index)],
    fits=lambda x, index, shape: type(index) is tuple and _sliced_shape(x.update(shape=shape), index)[0] == x.shape,
    sharding=_unslice_dimensions,
    show_params=_show_index,
    moves="copies",
)

# ---------------------------------------------------------------- gathers: the indices are operands


def _scatter_impl(x: numpy.ndarray, *indices: numpy.ndarray, shape: tuple[int, ...]) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    if len(indices) == len(shape) or x.size < 500:
        numpy.add.at(out, indices, x)
    elif are_unique(indices, shape):  # `add.at` is fast on scalars, but slow on rows
        out[indices] = x
    else:
        places = _gather_impl(numpy.arange(out.size).reshape(shape), *indices)
        numpy.add.at(out.reshape(-1), places.reshape(-1), x.reshape(-1))
    return out


def are_unique(indices: Sequence[numpy.ndarray], shape: tuple[int, ...]) -> bool:
    """Return whether known indices name each element of this shape at most once."""
    sizes = shape[: len(indices)]
    places = numpy.arange(math.prod(sizes)).reshape(sizes)[tuple(indices)]
    return not places.size or int(numpy.bincount(places.reshape(-1)).max()) == 1


def _element_indices(indices, batched, size):
    """Indices into batched data, preceded by the index of the batch element."""
    rank = max(numpy.ndim(i) - b for i, b in zip(indices, batched))
    return [numpy.arange(size).reshape((size,) + (1,) * rank), *align(indices, batched)]


def _batch_gather(primitive, args, batched):
    x, *indices = args
    if batched[0]:
        return primitive.bind(x, *_element_indices(indices, batched[1:], x.shape[0]))
    return primitive.bind(x, *align(indices, batched[1:]))


def batch_scatter(count: int) -> Callable:
    """Return the batching rule of a scatter with `count` operands before the indices."""

    def rule(primitive, args, batched, **params):
        size = next(a.shape[0] for a, b in zip(args, batched) if b)
        values = [x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(args[:count], batched)]
        if "shape" in params:
            params = {**params, "shape": (size, *params["shape"])}
        return primitive.bind(*values, *_element_indices(args[count:], batched[count:], size), **params)

    return rule


def _gather_impl(x: numpy.ndarray, *indices: numpy.ndarray) -> numpy.ndarray:
    try:
        by_rows = x.ndim > 1 and len(indices) == 1 and getattr(indices[0], "dtype", x.dtype).kind == "i"
        y = x.take(indices[0], 0) if by_rows else x[indices]  # `take` copies rows in half the time, or less
    except IndexError as error:  # its axes are those of x here, after transposes, with ranks or examples in front
        raise IndexError(re.sub(r"axis \d+ with size", "an axis of size", str(error))) from None
    return y if any(map(numpy.ndim, indices)) else y.copy()  # for scalar indices NumPy returns a view


def counted_dimension(index: Any, n: int, wide: tuple[int, ...]) -> int | None:
    """Return the dimension of the indices' shape `wide` along which a known index counts from 0 to n - 1, or None.

    Along it, `x[index, ...]` is a batch: each element has a part of x.

    >>> counted_dimension(numpy.arange(3)[:, None], 3, (3, 5)), counted_dimension(numpy.array([0, 2, 1]), 3, (3,))
    (0, None)
    """
    if n < 2 or not isinstance(index, numpy.ndarray) or index.size != n or index.shape.count(n) != 1:
        return None
    d = len(wide) - index.ndim + index.shape.index(n)
    counts = wide[d] == n and bool((index.reshape(-1) == numpy.arange(n)).all())
    return d if counts else None


def indexed_labels(indices: Types, params: dict, other: Callable[[int], Label]) -> tuple[list[Label], list[Labels]]:
    """Return the labels of the indexed dimensions, and of each index.

    A dimension whose index counts along a dimension of the indices (`params["counted"]`) corresponds to it. The label
    of dimension d is else `other(d)`.
    """
    wide = numpy.broadcast_shapes(*[t.shape for t in indices])
    counted = params.get("counted", (None,) * len(indices))
    each: list[Labels] = [
        tuple(None if d is None or c is not None else ("index", d) for d in broadcast_labels(t.shape, wide))
        for t, c in zip(indices, counted)
    ]
    return [other(d) if c is None else ("index", c) for d, c in enumerate(counted)], each


def _gather_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Let a shard give 0 for places that it lacks, unless gathering all of x moves less."""
    x, *indices = types
    at, each = indexed_labels(indices, params, lambda d: ("at", d) if outs[0].size <= x.size else None)
    remaining = range(len(indices), x.ndim)
    places = [("index", d) for d in range(outs[0].ndim - len(remaining))]
    return Dimensions(((*at, *remaining), *each), ((*places, *remaining),), products(outs))


def _scatter_add_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Each part adds up its values, then the sums of the parts are added."""
    v, *indices = types
    at, each = indexed_labels(indices, params, lambda d: None)
    remaining = range(len(indices), outs[0].ndim)
    places = [("index", d) for d in range(v.ndim - len(remaining))]
    return Dimensions(((*places, *remaining), *each), ((*at, *remaining),), "sum")


#: `x[i, j]` for integer indices of the first axes. The result's shape is that of the indices, then x's other axes.
gather_p = Linear(
    "gather",
    _gather_impl,
    lambda x, *indices: (
        numpy.broadcast_shapes(*[i.shape for i in indices]) + x.shape[len(indices) :],
        x.dtype,
    ),
    lambda ct, operands: [scatter_add_p.bind(ct, *operands[1:], shape=operands[0].shape)],
    _batch_gather,
    linear_operands=1,
    fits=lambda x, *indices: len(indices) <= x.ndim and all(i.dtype.kind in "iu" for i in indices),
    sharding=_gather_dimensions,
    moves="copies",
)

#: The transpose of `gather`: zeros of `shape` with x added at the indices, once for each occurrence.
scatter_add_p = Linear(
    "scatter_add",
    _scatter_impl,
    lambda x, *indices, shape: (shape, x.dtype),
    lambda ct, operands, shape: [gather_p.bind(ct, *operands[1:])],
    batch_scatter(1),
    linear_operands=1,
    fits=lambda x, *indices, shape: indices_fit(x.update(shape=shape), x, *indices),
    sharding=_scatter_add_dimensions,
    accumulates=True,
    moves="adds",
)


def indices_fit(x: ShapedArray, v: ShapedArray, *indices: ShapedArray) -> bool:
    """Return whether v broadcasts to x at integer indices; `Primitive.fits` of scatters."""
    at = gather_p.shape_rule(x, *indices)[0]
    return gather_p.fits(x, *indices) and can_replace(v, at, x.dtype)


def can_replace(v: ShapedArray, shape: tuple[int, ...], dtype: numpy.dtype) -> bool:
    """Return whether v can replace an array of this shape and dtype."""
    return numpy.broadcast_shapes(v.shape, shape) == shape and numpy.can_cast(v.dtype, dtype, "same_kind")


# ---------------------------------------------------------------- x[...]


class IndexPlan(NamedTuple):
    """The steps that apply an index: `basic`, a gather at `arrays`, and a move to `front`."""

    basic: tuple  # integers, slices and None, one for each dimension; no ellipsis
    arrays: dict[int, Any]  # integers and integer arrays, by the axis of `x[basic]` that they index
    front: int


_BASIC = (int, slice, type(None), type(Ellipsis))
_FULL = slice(None)


def plan(t: ShapedArray, index: Any) -> IndexPlan:
    """Plan how to apply an index to a value of type t; IndexError if it does not fit."""
    entries = index if type(index) is tuple else (index,)
    if all(type(i) in _BASIC for i in entries):
        return IndexPlan(tuple(_make_concrete(i) for i in _expand(entries, t)), {}, 0)
    entries = tuple(_normal(i, t) for i in entries)
    basic: list = []
    arrays: dict[int, Any] = {}
    axis = 0
    for i in _expand(entries, t):
        if _is_mask(i):
            # NumPy lets an empty axis of a mask match any axis.
            if any(m not in (0, n) for m, n in zip(i.shape, t.shape[axis:])):
                raise IndexError(f"a boolean mask of shape {i.shape} does not fit {t} from axis {axis} on")
            # A 0-d mask consumes no axis, but adds one of size 1 or 0.
            for places in numpy.nonzero(i) if i.ndim else [numpy.zeros(int(i), numpy.intp)]:
                arrays[len(basic)] = places
                basic.append(_FULL if i.ndim else None)
        elif isinstance(i, (numpy.ndarray, Tracer)):
            arrays[len(basic)] = i
            basic.append(_FULL)
        else:
            basic.append(_make_concrete(i))
        axis += i.ndim if _is_mask(i) else i is not None
    if not arrays:
        return IndexPlan(tuple(basic), {}, 0)
    for k, i in enumerate(basic):  # integers broadcast with integer arrays
        if type(i) is int:
            arrays[k], basic[k] = i, _FULL
    return IndexPlan(tuple(basic), arrays, min(arrays) if _are_adjacent(entries) else 0)


def getitem(x: Value, index: Any) -> Value:
    """`x[index]`, with all of NumPy's indices; integer arrays may be traced."""
    basic, arrays, front = plan(typeof(x), index)
    x = _slice(x, basic)
    if not arrays:
        by_array = any(isinstance(i, numpy.ndarray) for i in (index if isinstance(index, tuple) else (index,)))
        to_number = type(index) is tuple and not index and not typeof(x).ndim  # x[()] of a 0-d array
        # NumPy treats a 0-d integer array as an integer, except that it copies.
        return copy(x) if by_array or to_number else x
    gathered = sorted(arrays)
    remaining = [k for k in range(len(x.shape)) if k not in arrays]
    indices = check_indices([arrays[k] for k in gathered], [x.shape[k] for k in gathered])
    y = gather_p.bind(transpose(x, (*gathered, *remaining)), *indices)
    count = len(y.shape) - len(remaining)
    axes = (*range(count, count + front), *range(count), *range(count + front, len(y.shape)))
    return transpose(y, axes)


def slice_along(x: Value, axis: int, *bounds: int | None) -> Value:
    """`x[start:stop:step]` along an axis."""
    return getitem(x, (_FULL,) * axis + (slice(*bounds),))


def _slice(x: Value, index: tuple) -> Value:
    if any(i is not None and (type(i) is not slice or i != _FULL) for i in index):
        return slice_p.bind(x, index=index)
    sizes = iter(typeof(x).shape)  # only new axes, if any
    return reshape(x, tuple(1 if i is None else next(sizes) for i in index))


def check_indices(arrays: Sequence[Any], sizes: Sequence[int]) -> list[Value]:
    """Check known indices as NumPy does; traced ones are checked when they are used."""
    indices = [i if isinstance(i, Tracer) else numpy.asarray(as_plain_operand(i)) for i in arrays]
    some = all(i.size for i in indices)  # if one is empty, NumPy checks only single integers
    for i, size in zip(indices, sizes):
        if (some or not i.ndim) and not isinstance(i, Tracer) and not (-size <= i.min() and i.max() < size):
            raise IndexError(f"index {i.tolist()} is out of bounds for an axis of size {size}")
    return indices


def _normal(i: Any, t: ShapedArray) -> Any:
    """Normalize one entry of an index to None, `...`, a slice, an int or an array."""
    if i is None or i is Ellipsis or type(i) in (int, slice):
        return i
    expected = "an index must be an integer, a slice, None, '...', or an array of integers or booleans"
    try:
        if isinstance(i, (list, tuple)):
            i = as_array(i) if len(i) else numpy.zeros(0, numpy.intp)
        elif not isinstance(i, Tracer):
            i = numpy.asarray(as_plain_operand(i))
    except TypeError as error:
        raise IndexError(f"{expected}; {error}") from None
    if i.dtype == bool:
        return numpy.asarray(i.concrete("a boolean mask")) if isinstance(i, Tracer) else i
    if i.dtype.kind not in "iu":
        raise IndexError(f"{expected}; got {typeof(i)} for a value of type {t}")
    return i if i.ndim or isinstance(i, Tracer) else operator.index(i)


def _make_concrete(i: Any) -> Any:
    """Make the bounds of a slice concrete: they are part of the program."""
    if type(i) is not slice or all(type(n) in (int, type(None)) for n in (i.start, i.stop, i.step)):
        return i
    return slice(*[None if n is None else _concrete_bound(n) for n in (i.start, i.stop, i.step)])


def _concrete_bound(n: Any) -> int:
    """Return a bound of a slice as an integer; it must be known, as it sets a shape."""
    if not isinstance(n, Tracer):
        return operator.index(n)
    try:
        return operator.index(n.concrete("a bound of a slice"))
    except (TracerError, VarianceError) as error:
        message = str(error).rstrip(".")
        raise type(error)(
            f"{message}. For a slice of fixed size, write md.dynamic_slice_in_dim(x, start, size, axis)"
        ) from None


def _is_mask(i: Any) -> bool:
    return isinstance(i, numpy.ndarray) and i.dtype == bool


def _expand(index: Sequence, t: ShapedArray) -> list:
    """Expand an index's ellipsis, and add slices for the remaining dimensions."""
    used = sum(i.ndim if _is_mask(i) else 1 for i in index if i is not None and i is not Ellipsis)
    at = [k for k, i in enumerate(index) if i is Ellipsis]
    if len(at) > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    if used > t.ndim:
        raise IndexError(f"too many indices: {used} for an array of {t.ndim} dimensions ({t})")
    place = at[0] if at else len(index)
    return [*index[:place], *[_FULL] * (t.ndim - used), *index[place + 1 :]]


def _are_adjacent(entries: Sequence) -> bool:
    """Return whether the integers and arrays of an index stand side by side; even an empty ellipsis separates them."""
    at = [k for k, i in enumerate(entries) if not (i is None or i is Ellipsis or isinstance(i, slice))]
    return at == list(range(at[0], at[-1] + 1))


# ---------------------------------------------------------------- take, choose, compress, extract


@implements(numpy.take)
def take(a: Value, indices: Value, axis: int | None = None, *, mode: str = "raise") -> Value:
    """`numpy.take`: the elements at `indices` along an axis (None: flattened)."""
    a, axis = array_and_axis(a, axis, "take")
    shape = typeof(a).shape
    taken = (*shape[:axis], *typeof(as_array(indices)).shape, *shape[axis + 1 :])
    if mode != "raise" and not shape[axis] and 0 in taken:
        return reshape(a, taken)  # nothing is taken: NumPy does not look at the indices
    indices = _fold(indices, shape[axis], mode)
    return getitem(a, (slice(None),) * axis + (indices,))


def _fold(indices: Value, size: int, mode: str) -> Value:
    """Apply the `mode` of `take` and `choose`: raise, wrap around, or clip."""
    indices = as_array(indices)
    if not isinstance(indices, Tracer):
        indices = indices.astype(numpy.intp, casting="same_kind") if indices.size else indices.astype(numpy.intp)
    elif indices.dtype.kind == "b":  # here it is no mask
        indices = indices.astype(numpy.intp)
    if mode == "raise":
        return indices
    if not size and typeof(indices).size:
        raise IndexError("take: cannot take elements from an axis of size 0")
    if mode == "wrap":
        return numpy.remainder(indices, size)[...]
    if mode == "clip":
        return numpy.minimum(numpy.maximum(indices, 0), size - 1)[...]
    raise ValueError(f"take: mode must be 'raise', 'wrap' or 'clip', got {mode!r}")


@implements(numpy.take_along_axis)
def take_along_axis(arr: Value, indices: Value, axis: int | None = -1) -> Value:
    """`numpy.take_along_axis`: elements along an axis, indexed per line."""
    if axis is None:
        arr, axis = ravel(arr), 0
    t, ti = typeof(arr), typeof(indices)
    axis = normalize_axis(axis, t.ndim, "take_along_axis")
    if ti.ndim != t.ndim:
        raise ValueError(f"take_along_axis: the array and its indices differ in the number of axes: {t} and {ti}")
    if ti.dtype.kind not in "iu":
        raise IndexError(f"take_along_axis: indices must be integers, got {ti}")
    index: list = list(numpy.ogrid[tuple(slice(n) for n in t.shape)]) if t.ndim > 1 else [None]
    index[axis] = indices
    return getitem(arr, tuple(index))


@implements(numpy.choose)
def choose(a: Value, choices: Any, *, mode: str = "raise") -> Value:
    """`numpy.choose`: each element from the choice whose number is in `a`."""
    # Python numbers promote weakly here, but would not once they are stacked.
    kinds = [promotion_argument(x if type(x) in WEAK_TYPES else as_array(x)) for x in choices]
    a, *choices = numpy.broadcast_arrays(*map(as_array, (a, *choices)))
    numbers = _fold(a, len(choices), mode)
    return take_along_axis(numpy.stack(choices, dtype=result_type(*kinds)), numpy.expand_dims(numbers, 0), 0)[0]


def concrete_mask(condition: Any, name: str) -> numpy.ndarray:
    """Make a condition concrete, since the shape of the result depends on its values."""
    if isinstance(condition, Tracer):
        condition = condition.concrete(f"{name} (the shape of its result depends on values; consider np.where)")
    return numpy.asarray(as_plain_operand(condition))


@implements(numpy.compress)
def compress(condition: Any, a: Value, axis: int | None = None) -> Value:
    """`numpy.compress`: the slices of `a` along an axis where a 1-d condition holds."""
    condition = concrete_mask(condition, "np.compress")
    if condition.ndim != 1:
        raise ValueError(f"compress: the condition must have one dimension, got {condition.ndim}")
    return take(a, numpy.flatnonzero(condition), axis)


@implements(numpy.extract)
def extract(condition: Any, arr: Value) -> Value:
    """`numpy.extract`: the elements of `arr` where a condition holds, flattened."""
    return take(arr, numpy.flatnonzero(concrete_mask(condition, "np.extract")))


@implements(numpy.ix_)
def ix_(*args: Value) -> tuple[Value, ...]:
    """`numpy.ix_`: reshape index vectors so that they index every combination."""
    vectors = [as_array(x) for x in args]
    for x in vectors:
        if typeof(x).ndim != 1:
            raise ValueError(f"ix_: arguments must have one dimension, got {typeof(x)}")
    vectors = [numpy.flatnonzero(concrete_mask(x, "np.ix_")) if x.dtype == bool else x for x in vectors]
    n = len(vectors)
    return tuple(reshape(x, (1,) * i + x.shape + (1,) * (n - i - 1)) for i, x in enumerate(vectors))
