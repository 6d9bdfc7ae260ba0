"""Functional updates: `x.at[index].set(v)` returns a new value.

An index of slices and integers becomes an `update`. Any other index is reduced to integer arrays that index the first
axes (`scatter_set`, `scatter_add`, `scatter_max`, `scatter_min`), or the flattened array if the indexed axes are not
the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.ops import indexing
from minidiff.ops.arrays import as_array
from minidiff.ops.base import General, Linear, add_all, convert, in_float32
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels
from minidiff.ops.elementwise import add, divide, maximum, minimum, multiply, negative, power, subtract, where
from minidiff.ops.shape import broadcast_to, concatenate, expand_dims, ravel, reshape, squeeze, without_values
from minidiff.ops.sorting import argsort
from minidiff.values.dtypes import is_differentiable

# ---------------------------------------------------------------- set


def write_at(x: numpy.ndarray, v: numpy.ndarray, index: tuple) -> numpy.ndarray:
    """Write into x itself, and return it."""
    x[index] = v
    return x


def write_at_indices(x: numpy.ndarray, v: numpy.ndarray, *indices: numpy.ndarray) -> numpy.ndarray:
    """Write into x itself at integer indices, and return it."""
    x[indices] = v
    return x


def _update_transpose(ct, operands, index):
    x, v = operands
    return [
        update_p.bind(ct, 0, index=index) if isinstance(x, ShapedArray) else None,
        indexing.slice_p.bind(ct, index=index) if isinstance(v, ShapedArray) else None,
    ]


def _batch_update(primitive, args, batched, index):
    size = next(a.shape[0] for a, b in zip(args, batched) if b)
    x, v = args
    if not batched[0]:
        x = broadcast_to(x, (size, *x.shape))
    if batched[1]:  # one value per batch element: pad it to the number of dimensions to fill
        fills = numpy.broadcast_to(0, x.shape[1:])[index].ndim + 1
        v = reshape(v, (*v.shape, *(1,) * (fills - v.ndim))) if v.ndim < fills else v
    elif typeof(v).shape:  # a scalar fits every shape
        v = broadcast_to(v, (size, *v.shape))
    return primitive.bind(x, v, index=(slice(None), *index))


def _update_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    x, v = types
    labels, sliced, shard_params = indexing.sliced_labels(
        params["index"], x.shape, lambda i, n: i.indices(n) == (0, n, 1)
    )
    values = tuple(None if n == 1 else label for n, label in zip(v.shape, sliced[len(sliced) - v.ndim :]))
    return Dimensions((labels, values), (labels,), params=shard_params)


def _update_by_select(x: Value, v: Value, index: tuple) -> Value:
    """`update` as an elementwise select: the written value, or the old one."""
    mask, axis = numpy.ones((), bool), 0  # which places are written to; the axis of `v` that comes next
    for i in index:
        if i is None:
            v = squeeze(v, axis) if numpy.ndim(v) else v
            continue
        n = x.shape[axis]
        sources = numpy.full(n, -1)
        sources[i] = numpy.arange(sources[i].size).reshape(sources[i].shape)
        mask = mask & (sources >= 0).reshape(n, *[1] * (x.ndim - axis - 1))
        if numpy.ndim(v) and isinstance(i, int):
            v = expand_dims(v, axis)
        elif numpy.ndim(v) and v.shape[axis] != 1 and (isinstance(i, slice) and range(n)[i].step == 1):
            at, shape = (*[slice(None)] * axis, i), (*v.shape[:axis], n, *v.shape[axis + 1 :])
            v = v if v.shape == shape else indexing.unslice_p.bind(v, index=at, shape=shape)
        elif numpy.ndim(v) and v.shape[axis] != 1:
            v = indexing.take(v, numpy.maximum(sources, 0), axis) if (sources >= 0).any() else numpy.zeros((), x.dtype)
        axis += 1
    return where(mask, v, x)


#: x with v at a known `index`.
update_p = Linear(
    "update",
    lambda x, v, index: write_at(numpy.array(x), v, index),
    lambda x, v, index: (x.shape, x.dtype),
    _update_transpose,
    _batch_update,
    fits=lambda x, v, index: (
        v.shape in ((), indexing.slice_p.shape_rule(x, index)[0])
        and indexing.can_replace(v, v.shape, x.dtype)
        and type(index) is tuple
    ),
    sharding=_update_dimensions,
    decomposed=_update_by_select,
    show_params=indexing.slice_p.show_params,
    moves="copies",
)


def _scatter_set_transpose(ct, operands):
    x, v, *indices = operands
    ct_x = ct_v = None
    if isinstance(x, ShapedArray):
        ct_x = scatter_set_p.bind(ct, zeros_like(v), *indices)
    if isinstance(v, ShapedArray):
        ct_v = where(_winners(v, x, indices), indexing.gather_p.bind(ct, *indices), zeros_like(v))
    return [ct_x, ct_v]


def _winners(v: ShapedArray, x: ShapedArray, indices: list[Value]) -> Value:
    """Return a mask of the values in `v` that are kept: the last where indices repeat."""
    count = v.ndim - (len(x.shape) - len(indices))
    order = numpy.arange(math.prod(v.shape[:count])).reshape(v.shape[:count])
    places = numpy.zeros(x.shape[: len(indices)], order.dtype)
    last = indexing.gather_p.bind(scatter_set_p.bind(places, order, *indices), *indices) == order
    return reshape(last, (*v.shape[:count], *(1,) * (v.ndim - count)))


def _scatter_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Keep the indexed dimensions, and the indices, whole, except where an index counts."""
    x, v, *indices = types
    at, each = indexing.indexed_labels(indices, params, lambda d: None)
    wide = numpy.broadcast_shapes(*[t.shape for t in indices])
    remaining = range(len(indices), x.ndim)
    labels = [label if label in at else None for label in [("index", d) for d in range(len(wide))]] + [*remaining]
    written = broadcast_labels(v.shape, (*wide, *x.shape[len(indices) :]))
    values = tuple(None if d is None else labels[d] for d in written)
    batched = [tuple(label if label in at else None for label in index) for index in each]
    return Dimensions(((*at, *remaining), values, *batched), ((*at, *remaining),))


def _scatter_set_by_select(x: Value, v: Value, *indices: Value, **counted: Any) -> Value:
    """`scatter_set` as an elementwise select: the last value for a place wins."""
    wide = numpy.broadcast_shapes(*[numpy.shape(i) for i in indices])
    count, remaining = math.prod(wide), x.shape[len(indices) :]
    if not count:
        return x
    nowhere, numbers = numpy.full(x.shape[: len(indices)], -1), numpy.arange(count).reshape(wide)
    sources = scatter_set_p.bind(nowhere, numbers, *indices)
    written = reshape(sources >= 0, (*nowhere.shape, *[1] * len(remaining)))
    values = indexing.gather_p.bind(reshape(v, (count, *remaining)), maximum(sources, 0))
    return where(written, values, x)


#: x with v at integer `indices` of its first axes; where they repeat, the last value is kept.
scatter_set_p = Linear(
    "scatter_set",
    lambda x, v, *indices: write_at_indices(numpy.array(x), v, *indices),
    lambda x, v, *indices: (x.shape, x.dtype),
    _scatter_set_transpose,
    indexing.batch_scatter(2),
    linear_operands=2,
    fits=indexing.indices_fit,
    sharding=_scatter_dimensions,
    decomposed=_scatter_set_by_select,
    moves="copies",
)

# ---------------------------------------------------------------- max, min


def _scatter_extremum_tangent(out, primals, tangents, params):
    """Return the mean of the tangents of the elements of x and v that attain the result."""
    (x, v, *indices), (tx, tv, *_) = primals, tangents
    stays = convert(x == out, out.dtype)
    comes = convert(v == indexing.gather_p.bind(out, *indices), out.dtype)
    count = add(stays, indexing.scatter_add_p.bind(comes, *indices, shape=typeof(x).shape))
    terms = [] if tx is None else [multiply(stays, tx)]
    if tv is not None:
        terms.append(indexing.scatter_add_p.bind(multiply(comes, tv), *indices, shape=typeof(x).shape))
    total = add_all(terms)
    return None if total is None else divide(total, count)


def _scatter_extremum(name: str, ufunc: numpy.ufunc) -> General:
    """x with the maximum (minimum) of x and v at indices."""

    def impl(x, v, *indices):
        out = numpy.array(x)
        ufunc.at(out, indices, v)
        return out

    return General(
        name,
        impl,
        lambda x, v, *indices: (x.shape, x.dtype),
        _scatter_extremum_tangent,
        indexing.batch_scatter(2),
        fits=indexing.indices_fit,
        sharding=_scatter_dimensions,
    )


scatter_max_p = _scatter_extremum("scatter_max", numpy.maximum)
scatter_min_p = _scatter_extremum("scatter_min", numpy.minimum)

# ---------------------------------------------------------------- multiply


def _products(v: Value, places: Value, size: int) -> Value:
    """Return the product of the elements of flat `v` for each of `size` places; 1 for none.

    Elements are sorted by place, then multiplied within runs of one place by doubling. Nothing is divided, so
    derivatives of any order are exact at zeros too.
    """
    order = argsort(places, stable=True)
    places, v = indexing.gather_p.bind(places, order), indexing.gather_p.bind(v, order)
    n, step = typeof(v).size, 1
    while step < n:
        same = places[step:] == places[: n - step]
        ahead, behind = v[step:], v[: n - step]
        longer = multiply(ahead, where(same, behind, numpy.ones((), v.dtype)))
        v, step = concatenate([v[:step], longer]), 2 * step
    return scatter_set_p.bind(numpy.ones(size, v.dtype), v, places)


@in_float32
def _apply_products(function: Callable, x: Value, v: Value, places: Value) -> Value:
    return function(x, reshape(_products(ravel(v), places, typeof(x).size), typeof(x).shape))


@in_float32
def _add_at(x: Value, v: Value, *indices: Value) -> Value:
    return add(x, indexing.scatter_add_p.bind(v, *indices, shape=typeof(x).shape))


# ---------------------------------------------------------------- x.at[index]


class At:
    """`x.at`: index it like `x` to choose the elements to update."""

    __slots__ = ("x",)

    def __init__(self, x: Value):
        self.x = x

    def __getitem__(self, index: Any) -> IndexUpdate:
        return IndexUpdate(self.x, index)

    def __repr__(self) -> str:
        return f"<updates of {typeof(self.x)}: .at[index].set(values), .add, .multiply, …>"


@hide_own_frames
class IndexUpdate:
    """`x.at[index]`, whose methods return x with other values at `index`.

    Values broadcast to the shape of `x[index]`, and take the dtype of x. If an index names an element more than once,
    `set` keeps the last value, as NumPy does; all other methods apply every value. Differentiable in x and in the
    values.

    >>> import numpy as np
    >>> at(np.zeros(3))[1:].set(2.0)
    array([0., 2., 2.])
    >>> at(np.zeros(3))[[0, 2, 2]].add(1.0)
    array([1., 0., 2.])
    """

    __slots__ = ("x", "index", "t", "plan")
    name = "at[...]"

    def __init__(self, x: Value, index: Any):
        self.x = x
        self.t = typeof(x)
        self.index = index
        is_traced_mask = isinstance(index, Tracer) and index.dtype == bool
        self.plan: Any = None if is_traced_mask else indexing.plan(self.t, index)

    def get(self) -> Value:
        """`x[index]`."""
        return indexing.getitem(self.x, self.index)

    def set(self, values: Value) -> Value:
        """x with `values` at the index."""
        if self.plan is None:
            return self._where(lambda x, v: v, values, "set")
        v = self._values(values, "set")
        if not self.plan.arrays:
            return update_p.bind(self.x, v, index=self.plan.basic)
        return self._scatter(scatter_set_p.bind, v)

    def add(self, values: Value) -> Value:
        """x with `values` added at the index."""
        return self._combine(add, values, "add", lambda _, v: self._add(v))

    def subtract(self, values: Value) -> Value:
        """x with `values` subtracted at the index."""
        return self._combine(subtract, values, "subtract", lambda _, v: self._add(negative(v)))

    def multiply(self, values: Value) -> Value:
        """x multiplied by `values` at the index."""
        return self._combine(multiply, values, "multiply", self._by_products)

    def divide(self, values: Value) -> Value:
        """x divided by `values` at the index."""
        if not is_differentiable(self.t.dtype):
            raise TypeError(f"at[...].divide: a value of type {self.t} cannot hold quotients; convert it first")
        return self._combine(divide, values, "divide", self._by_products)

    def power(self, values: Value) -> Value:
        """x raised to the power of `values` at the index."""
        return self._combine(power, values, "power", self._by_products)

    def max(self, values: Value) -> Value:
        """x with the maximum of x and `values` at the index."""
        return self._combine(maximum, values, "max", lambda _, v: self._scatter(scatter_max_p.bind, v))

    def min(self, values: Value) -> Value:
        """x with the minimum of x and `values` at the index."""
        return self._combine(minimum, values, "min", lambda _, v: self._scatter(scatter_min_p.bind, v))

    def apply(self, function: Callable) -> Value:
        """x with `function(x[index])` at the index, which must not name an element twice."""
        if self.plan is None:
            return where(_mask_of(self.index, self.t), convert(function(self.x), self.t.dtype), self.x)
        if not self._names_each_once():
            raise ValueError(f"at[...].apply: {self.index!r} may name an element twice; name each one once")
        return self.set(convert(function(self.get()), self.t.dtype))

    # ------------------------------------------------ implementation

    def _values(self, values: Value, name: str) -> Value:
        """Cast values to the dtype of x, and broadcast them to the shape of `x[index]`."""
        v, t = as_array(values), self.t
        weak = isinstance(values, (int, float, complex)) and not isinstance(values, (numpy.generic, bool))
        if not numpy.can_cast(numpy.result_type(t.dtype, values) if weak else v.dtype, t.dtype, "same_kind"):
            raise TypeError(
                f"at[...].{name}: values of type {typeof(v)} cannot go into a value of type {t} without loss; convert "
                "one of them with .astype"
            )
        if self.plan is None:
            return convert(v, t.dtype)
        shape = self._shape()
        extra = typeof(v).ndim - len(shape)
        if extra > 0 and set(typeof(v).shape[:extra]) == {1}:
            v = reshape(v, typeof(v).shape[extra:])
        try:
            return broadcast_to(convert(v, t.dtype), shape)
        except ValueError:
            raise ValueError(
                f"at[...].{name}: values of type {typeof(v)} do not broadcast to {shape}, the shape of x[index] for x "
                f"of type {t}"
            ) from None

    def _shape(self) -> tuple[int, ...]:
        """Return the shape of `x[index]`."""
        basic, arrays, front = self.plan
        shape = without_values(self.t)[basic].shape
        if not arrays:
            return shape
        remaining = tuple(n for k, n in enumerate(shape) if k not in arrays)
        return (
            remaining[:front] + numpy.broadcast_shapes(*[numpy.shape(i) for i in arrays.values()]) + remaining[front:]
        )

    def _scatter(self, bind: Callable, v: Value) -> Value:
        """Call `bind(x, v, *indices)` with integer arrays that index the first axes of x."""
        basic, arrays, _ = self.plan
        if sorted(arrays) == list(range(len(arrays))) and all(i == slice(None) for i in basic):
            indices = indexing.check_indices([arrays[k] for k in range(len(arrays))], self.t.shape)
            return bind(self.x, v, *indices)
        return reshape(bind(ravel(self.x), ravel(v), self._places()), self.t.shape)

    def _places(self) -> Value:
        """Return the flat positions in x of the elements that the index names."""
        numbers = numpy.arange(self.t.size).reshape(self.t.shape)
        with nullcontext() if self._is_traced() else running(EVALUATE):  # keep known indices known
            return ravel(indexing.getitem(numbers, self.index))

    def _is_traced(self) -> bool:
        return any(isinstance(i, Tracer) for i in self.plan.arrays.values())

    def _names_each_once(self) -> bool:
        return not self.plan.arrays or (not self._is_traced() and indexing.are_unique([self._places()], (self.t.size,)))

    def _add(self, v: Value) -> Value:
        if not self.plan.arrays:
            return add(self.x, indexing.unslice_p.bind(v, index=self.plan.basic, shape=self.t.shape))
        return self._scatter(_add_at, v)

    def _combine(self, function: Callable, values: Value, name: str, repeated: Callable) -> Value:
        """Apply `function(x[index], values)`; `repeated(function, values)` if an element may be named twice."""
        if self.plan is None:
            return self._where(function, values, name)
        v = self._values(values, name)
        if name not in ("add", "subtract") and self._names_each_once():
            return self.set(function(self.get(), v))
        return repeated(function, v)

    def _by_products(self, function: Callable, v: Value) -> Value:
        return _apply_products(function, self.x, v, self._places())

    def _where(self, function: Callable, values: Value, name: str) -> Value:
        """Update by `where` for a traced mask, as `x[index]` has no known shape."""
        v = self._values(values, name)
        if typeof(v).ndim:
            raise TypeError(
                f"at[mask].{name}: the mask is traced, so it takes only a single number, not values of "
                f"type {typeof(v)}; use np.where(mask, values, x)"
            )
        return where(_mask_of(self.index, self.t), function(self.x, v), self.x)


def _mask_of(mask: Value, t: ShapedArray) -> Value:
    shape = typeof(mask).shape
    if shape != t.shape[: len(shape)]:
        raise IndexError(f"a boolean mask of shape {shape} does not fit {t} from axis 0 on")
    return reshape(mask, shape + (1,) * (t.ndim - len(shape)))


def at(x: Value) -> At:
    """`x.at` for plain arrays too: `at(x)[index].set(v)`; see `IndexUpdate`.

    >>> import numpy as np
    >>> x = np.arange(4.0)
    >>> at(x)[x > 1].multiply(10), x
    (array([ 0.,  1., 20., 30.]), array([0., 1., 2., 3.]))
    """
    return At(as_array(x))
