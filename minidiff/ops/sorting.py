"""Sorting, searching, counting and sets.

Sorting permutes an array, and its tangent in the same way. Where elements tie, the derivative goes to the element that
the algorithm put in that position.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import dimensions, elementwise, indexing
from minidiff.ops.arrays import as_array, make_concrete
from minidiff.ops.base import Discrete, Linear, axes_fit
from minidiff.ops.dimensions import Dimensions, Types
from minidiff.ops.shape import array_and_axis, concatenate, ravel

INTP = numpy.dtype(numpy.intp)

# ---------------------------------------------------------------- permutations


def _permute_impl(x: numpy.ndarray, indices: numpy.ndarray, axis: int, inverse: bool) -> numpy.ndarray:
    # The same as `numpy.take_along_axis` and `numpy.put_along_axis`, which take ten times as long for few elements.
    places = tuple(
        indices if a == axis else numpy.arange(n).reshape((n,) + (1,) * (x.ndim - a - 1)) for a, n in enumerate(x.shape)
    )
    if not inverse:
        return x[places]
    out = numpy.empty_like(x)
    out[places] = x
    return out


#: Permutes x along an axis; `indices` holds a permutation for each line. Its transpose is the inverse permutation.
permute_p = Linear(
    "permute",
    _permute_impl,
    lambda x, indices, axis, inverse: (x.shape, x.dtype),
    lambda ct, operands, axis, inverse: [permute_p.bind(ct, operands[1], axis=axis, inverse=not inverse)],
    linear_operands=1,
    fits=lambda x, indices, axis, inverse: (
        axes_fit(x, axis=axis) and indices.shape == x.shape and indices.dtype.kind in "iu"
    ),
    sharding=dimensions.axiswise("axis"),
    moves="copies",
)

argsort_p = Discrete(
    "argsort",
    lambda x, axis, stable: numpy.argsort(x, axis, kind="stable" if stable else None),
    lambda x, axis, stable: (x.shape, INTP),
    sharding=dimensions.axiswise("axis"),
)

argpartition_p = Discrete(
    "argpartition",
    lambda x, kth, axis: numpy.argpartition(x, kth, axis),
    lambda x, kth, axis: (x.shape, INTP),
    sharding=dimensions.axiswise("axis"),
)

# ---------------------------------------------------------------- sort, partition


@implements(numpy.sort)
def sort(a: Value, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None) -> Value:
    """`numpy.sort` along an axis, or of all elements if it is None.

    >>> from minidiff import grad
    >>> grad(lambda x: sort(x)[0])(numpy.array([5.0, 3.0, 7.0]))
    array([0., 1., 0.])
    """
    x, axis = array_and_axis(a, axis, "sort", scalars=False)
    return permute_p.bind(x, argsort(x, axis, kind, stable=stable), axis=axis, inverse=False)


@implements(numpy.argsort)
def argsort(a: Value, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None) -> Value:
    """`numpy.argsort`: the indices that sort an array along an axis."""
    if kind not in (None, "quicksort", "heapsort", "mergesort", "stable"):
        raise ValueError(f"sort: kind must be 'quicksort', 'heapsort', 'mergesort' or 'stable', got {kind!r}")
    x, axis = array_and_axis(a, axis, "argsort")
    return argsort_p.bind(x, axis=axis, stable=bool(stable) or kind in ("mergesort", "stable"))


@implements(numpy.partition)
def partition(a: Value, kth: Any, axis: int | None = -1, kind: str = "introselect") -> Value:
    """`numpy.partition`: put `kth` elements in sorted position, smaller ones before."""
    x, axis = array_and_axis(a, axis, "partition", scalars=False)
    return permute_p.bind(x, argpartition(x, kth, axis, kind), axis=axis, inverse=False)


@implements(numpy.argpartition)
def argpartition(a: Value, kth: Any, axis: int | None = -1, kind: str = "introselect") -> Value:
    """`numpy.argpartition`: the indices that partition an array."""
    x, axis = array_and_axis(a, axis, "argpartition")
    size = typeof(x).shape[axis]
    kth = tuple(map(int, kth)) if numpy.ndim(kth) else (operator.index(kth),)
    for k in kth:
        if not -size <= k < size:
            raise ValueError(f"partition: kth={k} is out of bounds for an axis of size {size}")
    return argpartition_p.bind(x, kth=tuple(k % size for k in kth), axis=axis)


@implements(numpy.sort_complex)
def sort_complex(a: Value) -> Value:
    """`numpy.sort_complex`: sort along the last axis, as complex numbers."""
    return elementwise.convert(sort(a), numpy.sort_complex(numpy.zeros(1, typeof(a).dtype)).dtype)


# ---------------------------------------------------------------- lexsort, searchsorted, digitize, isin


lexsort_p = Discrete(
    "lexsort",
    lambda *keys, axis: numpy.lexsort(keys, axis),
    lambda *keys, axis: (keys[0].shape, INTP),
    sharding=dimensions.axiswise("axis"),
)


@implements(numpy.lexsort)
def lexsort(keys: Any, axis: int = -1) -> Value:
    """`numpy.lexsort`: the indices that sort by the last key, then the one before."""
    keys = list(map(as_array, keys))
    if len({typeof(k).shape for k in keys}) != 1:
        raise ValueError(f"lexsort: all keys must have one shape, got {', '.join(str(typeof(k)) for k in keys)}")
    if not typeof(keys[0]).ndim:  # NumPy allows axis 0 or -1 for scalars too
        normalize_axis(axis, 1, "lexsort")
        return INTP.type(0)
    return lexsort_p.bind(*keys, axis=normalize_axis(axis, typeof(keys[0]).ndim, "lexsort"))


def batch_sequentially(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """Apply a primitive to one element of a batch after the other."""
    return sequential_map_p.bind(*args, of=primitive, along=tuple(batched), params=params)


def _sequential_map_impl(*args, of, along, params):
    size = next(len(x) for x, b in zip(args, along) if b)
    results = [of.impl(*[x[i] if b else x for x, b in zip(args, along)], **params) for i in range(size)]
    if results:
        return numpy.stack(results)
    shape, dtype = _sequential_map_shape(*map(typeof, args), of=of, along=along, params=params)
    return numpy.zeros(shape, dtype)


def _sequential_map_shape(*types, of, along, params):
    size = next(t.shape[0] for t, b in zip(types, along) if b)
    shape, dtype = of.shape_rule(*[t.update(shape=t.shape[1:]) if b else t for t, b in zip(types, along)], **params)
    return (size, *shape), dtype


def _sequential_map_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """The batch may be split; each element is whole."""
    batch = [(0 if b else None, *[None] * (t.ndim - 1)) if t.ndim else () for t, b in zip(types, params["along"])]
    return Dimensions(tuple(batch), ((0, *[None] * (outs[0].ndim - 1)),))


#: Applies the primitive `of` to one element after the other; `along` says which operands are batched.
sequential_map_p = Discrete(
    "sequential_map",
    _sequential_map_impl,
    _sequential_map_shape,
    batch_sequentially,
    sharding=_sequential_map_dimensions,
)


def _search(numpy_function: Callable, table: int, dtype: Any = INTP) -> Discrete:
    """Declare a search for each element of one operand in the other, the `table`."""

    def batch(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params: Any) -> Value:
        if batched[table]:
            return batch_sequentially(primitive, args, batched, **params)
        return primitive.bind(*args, **params)

    return Discrete(
        numpy_function.__name__,
        lambda x, y, **params: numpy_function(x, y, **params),
        lambda *types, **params: (numpy.shape(types[1 - table]), dtype),
        batch,
        sharding=dimensions.look_up(table),
    )


searchsorted_p, digitize_p = _search(numpy.searchsorted, 0), _search(numpy.digitize, 1)
isin_p = _search(numpy.isin, 1, numpy.dtype(bool))


@implements(numpy.searchsorted)
def searchsorted(a: Value, v: Value, side: str = "left", sorter: Value | None = None) -> Value:
    """`numpy.searchsorted`: where to insert elements of `v` into the sorted `a`."""
    a = as_array(a) if sorter is None else indexing.getitem(as_array(a), (sorter,))
    if typeof(a).ndim != 1:
        raise ValueError(f"searchsorted: the sorted array must have one dimension, got {typeof(a)}")
    return searchsorted_p.bind(a, as_array(v), side=side)


@implements(numpy.digitize)
def digitize(x: Value, bins: Value, right: bool = False) -> Value:
    """`numpy.digitize`: the index of the bin that each element of `x` is in."""
    return digitize_p.bind(as_array(x), as_array(bins), right=bool(right))


@implements(numpy.isin)
def isin(
    element: Value, test_elements: Value, assume_unique: bool = False, invert: bool = False, *, kind: str | None = None
) -> Value:
    """`numpy.isin`; the hints `assume_unique` and `kind` are ignored."""
    return isin_p.bind(as_array(element), as_array(test_elements), invert=bool(invert))


# ---------------------------------------------------------------- counting


@implements(numpy.bincount)
def bincount(x: Value, /, weights: Value | None = None, minlength: int = 0) -> Value:
    """`numpy.bincount`: each integer's count in `x`, or the sum of its `weights`.

    Differentiable in the weights. The length of the result depends on the integers, so they must be concrete (not on a
    tape, nor batched).
    """
    x = numpy.asarray(as_array(make_concrete(x, numpy.bincount)))
    if weights is None:
        return numpy.bincount(x, minlength=minlength)
    size = max(numpy.bincount(x).size, minlength)
    return indexing.scatter_add_p.bind(elementwise.convert(as_array(weights), float), x.astype(INTP), shape=(size,))


@implements(numpy.unique)
def unique(ar: Value, return_index=False, return_inverse=False, return_counts=False, axis=None, **options: Any) -> Any:
    """`numpy.unique`, differentiable; elements come from their first occurrence.

    Their number depends on the values, which must be concrete (not on a tape, nor batched).
    """
    values = make_concrete(ar, numpy.unique)
    _, index, *more = numpy.unique(values, True, return_inverse, return_counts, axis, **options)
    elements = indexing.take(ar, index, axis)
    results = (elements, *([index] if return_index else []), *more)
    return results if len(results) > 1 else elements


# ---------------------------------------------------------------- sets


def _elements_of(numpy_function: Callable, count: int, searched: int) -> None:
    """Declare a function of `count` arrays whose first or only result is some of their elements.

    Each element is taken from where it first occurs in the first `searched` arrays.
    """

    def function(*args: Value, **options: Any) -> Any:
        arrays = [ravel(as_array(x)) for x in args[:count]]
        values = [numpy.asarray(make_concrete(x, numpy_function)) for x in arrays]
        result = numpy_function(*values, *args[count:], **options)
        elements = result[0] if isinstance(result, tuple) else result
        distinct, first = numpy.unique(numpy.concatenate(values[:searched]), return_index=True)
        taken = indexing.getitem(concatenate(arrays[:searched]), first[numpy.searchsorted(distinct, elements)])
        if hasattr(result, "_replace"):
            return result._replace(values=taken)
        return (taken, *result[1:]) if isinstance(result, tuple) else taken

    implements(numpy_function)(function)


_elements_of(numpy.union1d, 2, 2)
_elements_of(numpy.intersect1d, 2, 1)
_elements_of(numpy.setdiff1d, 2, 1)
_elements_of(numpy.setxor1d, 2, 2)
for _function in (numpy.unique_values, numpy.unique_counts, numpy.unique_all, numpy.unique_inverse):
    _elements_of(_function, 1, 1)
