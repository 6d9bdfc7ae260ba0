"""Reading parts of arrays: slices, and gathers at integer indices that may themselves be traced."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff import ops  # its families are looked up when a rule runs
from minidiff.core import ShapedArray, Tracer, Value, implements, typeof
from minidiff.ops.kinds import Linear

# ---------------------------------------------------------------- slices: the index is known


def _sliced_shape(x: ShapedArray, index: tuple):
    # A view of one number has any shape: NumPy itself works the shape out, and no data is touched.
    return numpy.broadcast_to(numpy.empty((), x.dtype), x.shape)[index].shape, x.dtype


def _unslice_impl(x: numpy.ndarray, index: tuple, shape: tuple[int, ...]) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    numpy.copyto(out[(*index, ...)], x)
    return out


slice_p = Linear(
    "slice",
    lambda x, index: x[index],
    _sliced_shape,
    lambda ct, operands, index: [unslice_p.bind(ct, index=index, shape=operands[0].shape)],
    lambda primitive, args, batched, index: primitive.bind(args[0], index=(slice(None), *index)),
)

slice_p.shares_memory = True

#: The transpose of `slice`: zeros of `shape`, with x at `index`.
unslice_p = Linear(
    "unslice",
    _unslice_impl,
    lambda x, index, shape: (shape, x.dtype),
    lambda ct, operands, index, shape: [slice_p.bind(ct, index=index)],
    lambda primitive, args, batched, index, shape: primitive.bind(
        args[0], index=(slice(None), *index), shape=(args[0].shape[0], *shape)
    ),
)

# ---------------------------------------------------------------- gathers: the indices are operands


def _scatter_impl(x: numpy.ndarray, *indices: numpy.ndarray, shape: tuple[int, ...]) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    numpy.add.at(out, indices, x)
    return out


def _align_indices(indices, batched):
    """Batched indices, reshaped so that their batch axis stays in front when they broadcast; and their rank."""
    rank = max(numpy.ndim(i) - b for i, b in zip(indices, batched))
    return [
        i.reshape((i.shape[0],) + (1,) * (rank - numpy.ndim(i) + 1) + tuple(i.shape[1:])) if b else i
        for i, b in zip(indices, batched)
    ], rank


def _element_indices(indices, batched, size):
    """Indices into batched data: in front of them, which element of the batch is meant."""
    indices, rank = _align_indices(indices, batched)
    return [numpy.arange(size).reshape((size,) + (1,) * rank), *indices]


def _batch_gather(primitive, args, batched):
    x, *indices = args
    if batched[0]:
        return primitive.bind(x, *_element_indices(indices, batched[1:], x.shape[0]))
    return primitive.bind(x, *_align_indices(indices, batched[1:])[0])


def _batch_scatter(primitive, args, batched, shape):
    x, *indices = args
    size = next(a.shape[0] for a, b in zip(args, batched) if b)
    if not batched[0]:
        x = ops.shape.broadcast_to(x, (size, *x.shape))
    return primitive.bind(x, *_element_indices(indices, batched[1:], size), shape=(size, *shape))


#: x at integer `indices` of its first axes: `x[i, j]`, whose result has the shape of the indices, then the rest of x's.
gather_p = Linear(
    "gather",
    lambda x, *indices: x[indices],
    lambda x, *indices: (
        numpy.broadcast_shapes(*[i.shape for i in indices]) + x.shape[len(indices) :],
        x.dtype,
    ),
    lambda ct, operands: [scatter_add_p.bind(ct, *operands[1:], shape=operands[0].shape)],
    _batch_gather,
    linear_operands=1,
)

#: The transpose of `gather`: zeros of `shape`, to which x is added at the indices (as often as they occur).
scatter_add_p = Linear(
    "scatter_add",
    _scatter_impl,
    lambda x, *indices, shape: (shape, x.dtype),
    lambda ct, operands, shape: [gather_p.bind(ct, *operands[1:])],
    _batch_scatter,
    linear_operands=1,
)

# ---------------------------------------------------------------- x[...]


def _is_integer_array(i: Any) -> bool:
    return isinstance(i, (Tracer, numpy.ndarray)) and not _is_static_integer(i)


def _is_static_integer(i: Any) -> bool:
    if isinstance(i, (Tracer, bool, numpy.bool_)) or (isinstance(i, numpy.ndarray) and i.ndim):
        return False
    try:
        operator.index(i)
    except TypeError:
        return False
    return True


def _normal(i: Any) -> Any:
    """One entry of an index: lists and tuples as arrays, a traced mask as its value."""
    if isinstance(i, (list, tuple)):
        i = numpy.asarray(i) if len(i) else numpy.zeros(0, numpy.intp)
    return numpy.asarray(i.concrete("a boolean mask")) if isinstance(i, Tracer) and i.dtype == bool else i


def _is_mask(i: Any) -> bool:
    return isinstance(i, numpy.ndarray) and i.dtype == bool and i.ndim > 0


def _expand(index: Sequence, ndim: int) -> list:
    """The index with its ellipsis written out and a slice for each dimension that it does not mention."""
    used = sum(i.ndim if _is_mask(i) else 1 for i in index if i is not None and i is not Ellipsis)
    if sum(1 for i in index if i is Ellipsis) > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    if used > ndim:
        raise IndexError(f"too many indices: {used} for an array of {ndim} dimensions")
    rest = [slice(None)] * (ndim - used)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return [*index[:at], *rest, *index[at + 1 :]]


def _split_masks(index: Sequence, x: ShapedArray) -> list:
    """The expanded index with boolean masks replaced by the integer indices of their true elements."""
    out, axis = [], 0
    for i in index:
        if not _is_mask(i):
            out.append(i)
            axis += i is not None
            continue
        if i.shape != x.shape[axis : axis + i.ndim]:
            raise IndexError(f"a boolean mask of shape {i.shape} does not fit {x} from axis {axis} on")
        out.extend(numpy.nonzero(i))
        axis += i.ndim
    return out


def _check_indices(index: list) -> None:
    for i in index:
        if not (i is None or isinstance(i, slice) or _is_static_integer(i)) and typeof(i).dtype.kind not in "iu":
            raise IndexError(
                f"an index is an integer, a slice, None, '...', or an array of integers or booleans; got {typeof(i)}"
            )


def getitem(x: Value, index: Any) -> Value:
    """`x[index]`: integers, slices, None, an ellipsis, boolean masks, integer arrays (traced ones too)."""
    t = typeof(x)
    entries = [_normal(i) for i in (index if isinstance(index, tuple) else (index,))]
    index = _split_masks(_expand(entries, t.ndim), t)
    _check_indices(index)
    advanced = [k for k, i in enumerate(index) if _is_integer_array(i)]
    if not advanced:
        index = tuple(operator.index(i) if _is_static_integer(i) else i for i in index)
        if all(isinstance(i, slice) and i == slice(None) for i in index):
            return x
        return slice_p.bind(x, index=index)
    return _gather(x, index, advanced, _stand_together(entries))


@implements(numpy.take)
def take(x: Value, indices: Value, axis: int | None = None) -> Value:
    """`numpy.take`: the elements of x at `indices` along an axis; along x flattened where that is None."""
    if axis is None:
        return getitem(ops.shape.ravel(x), (indices,))
    axis = ops.shape.normalize_axis(axis, typeof(x).ndim, "take")
    return getitem(x, (slice(None),) * axis + (indices,))


def _stand_together(entries: Sequence) -> bool:
    """Whether integers and arrays stand side by side. An ellipsis parts them, even where it stands for nothing."""
    at = [k for k, i in enumerate(entries) if not (i is None or i is Ellipsis or isinstance(i, slice))]
    return at == list(range(at[0], at[-1] + 1))


def _gather(x: Value, index: list, advanced: list[int], together: bool) -> Value:
    """Integer arrays among slices: slice first, bring the gathered axes to the front, gather, put the result back."""
    # Integers beside integer arrays broadcast with them, as in NumPy.
    gathered = [k for k, i in enumerate(index) if k in advanced or _is_static_integer(i)]
    x = getitem(x, tuple(slice(None) if k in gathered else i for k, i in enumerate(index)))
    sizes = [x.shape[k] for k in gathered]
    indices = [_wrap(index[k], n) for k, n in zip(gathered, sizes)]
    rest = [k for k in range(len(x.shape)) if k not in gathered]
    y = gather_p.bind(ops.shape.transpose(x, (*gathered, *rest)), *indices)
    front = gathered[0] if together else 0  # where NumPy puts the gathered dimensions
    count = len(y.shape) - len(rest)
    axes = (*range(count, count + front), *range(count), *range(count + front, len(y.shape)))
    return ops.shape.transpose(y, axes)


def _wrap(i: Any, size: int) -> Value:
    """Known indices are checked here, as NumPy checks them; traced ones when they are used."""
    if isinstance(i, Tracer):
        return i
    i = numpy.asarray(i)
    if i.size and not (-size <= i.min() and i.max() < size):
        raise IndexError(f"index {i.tolist()} is out of bounds for an axis of size {size}")
    return i
