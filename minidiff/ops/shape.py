"""Shape operations, which move elements without changing them; all are linear."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.core.ranks import cast_like
from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import dimensions, elementwise
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Linear, axes_fit, broadcast_to_p, convert, reshape_p, unbroadcast
from minidiff.ops.dimensions import Dimensions, Types, dimension_labels


def as_several(x: Any) -> Sequence[Any]:
    """Return a shape, axes or sizes, given as one integer or several, as a sequence."""
    if isinstance(x, (tuple, list, range)):
        return x
    return x.tolist() if isinstance(x, numpy.ndarray) and x.ndim else (x,)


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of Python integers; raises TypeError for non-integers."""
    return tuple(map(operator.index, as_several(shape)))


def normalize_axes(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """Return a tuple of non-negative axes, from None (all axes), an integer, or several."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(normalize_axis(a, ndim, name) for a in as_several(axis))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: an axis is named twice in {axis}")
    return axes


def reduced_axes(axis: Any, ndim: int, name: str) -> tuple[int, ...]:
    """Like `normalize_axes`, but allow axis 0 or -1 of a scalar, as ufuncs do."""
    return () if ndim == 0 and axis in (0, -1) else normalize_axes(axis, ndim, name)


def array_and_axis(a: Value, axis: int | None, name: str, scalars: bool = True) -> tuple[Value, int]:
    """Return an array, flattened if the axis is None, and a non-negative axis of it.

    A scalar becomes a vector of one element, along axis 0 or -1 only if `scalars`.
    """
    ndim = typeof(a).ndim
    flat = axis is None or (scalars and ndim == 0 and axis in (0, -1))
    return (ravel(a), 0) if flat else (a, normalize_axis(axis, ndim, name))


def resized_shape(x: Value | ShapedArray, axis: int, *n: int) -> tuple[int, ...]:
    """Return the shape of x with another size along an axis, or without the axis."""
    return (*x.shape[:axis], *n, *x.shape[axis + 1 :])


implements(numpy.shape)(lambda x: typeof(x).shape)
implements(numpy.ndim)(lambda x: typeof(x).ndim)
implements(numpy.size)(lambda x: typeof(x).size)

# ---------------------------------------------------------------- reshape


@implements(numpy.reshape)
def reshape(a: Value, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: bool | None = None) -> Value:
    """`numpy.reshape`; traced values have no memory order, so "A" means "C"."""
    t, to = typeof(a), newshape if shape is None else shape
    to = as_shape(to)
    if to.count(-1) == 1:
        known = math.prod(n for n in to if n != -1)
        if known and t.size % known == 0:
            to = tuple(t.size // known if n == -1 else n for n in to)
    if math.prod(to) != t.size or any(n < 0 for n in to):
        raise ValueError(f"reshape: {t} has {t.size} elements, which do not fill the shape {to}")
    if to == t.shape:
        return a
    if _order(order, "reshape") == "F":
        return transpose(reshape_p.bind(transpose(a), shape=to[::-1]))
    return reshape_p.bind(a, shape=to)


def _order(order: str, name: str) -> str:
    if order not in ("C", "F", "A", "K"):
        raise ValueError(f"{name}: order must be 'C', 'F', 'A' or 'K', got {order!r}")
    return "F" if order == "F" else "C"


@implements(numpy.ravel)
def ravel(a: Value, order: str = "C") -> Value:
    """`numpy.ravel`: flatten; orders "A" and "K" mean "C" (see `reshape`)."""
    a = as_array(a)
    return reshape(a if _order(order, "ravel") == "C" else transpose(a), (typeof(a).size,))


@functools.lru_cache(4096)
def without_values(t: ShapedArray) -> numpy.ndarray:
    """Return an array of a type that takes no memory, of which NumPy tells what depends on types alone."""
    return numpy.broadcast_to(numpy.empty((), t.dtype), t.shape)


def _reshaping(numpy_function: Callable) -> Callable:
    """Declare a function that changes the shape alone: NumPy tells the shape of its result."""

    def function(a: Value, *args: Any, **kwargs: Any) -> Value:
        t = typeof(a)
        shape = of_type(numpy_function, t, without_values(t), *args, **kwargs).shape
        return a if shape == t.shape else reshape_p.bind(a, shape=shape)

    return implements(numpy_function)(function)


def of_type(numpy_function: Callable, t: ShapedArray, *args: Any, **kwargs: Any) -> Any:
    """Call a function of NumPy; its errors say that the operand has type t. Raises TracerError for traced axes."""
    for x in args:
        if isinstance(x, Tracer):
            operator.index(x)
    try:
        return numpy_function(*args, **kwargs)
    except ValueError as error:
        raise type(error)(f"{numpy_function.__name__}: {error}, got {t}") from None


expand_dims, squeeze = _reshaping(numpy.expand_dims), _reshaping(numpy.squeeze)


def _at_least(numpy_function: Callable) -> Callable:
    def function(*arys: Value) -> Any:
        arrays = [as_array(x) for x in arys]
        arrays = [reshape(x, numpy_function(without_values(typeof(x))).shape) for x in arrays]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    return implements(numpy_function)(function)


atleast_1d, atleast_2d, atleast_3d = map(_at_least, (numpy.atleast_1d, numpy.atleast_2d, numpy.atleast_3d))

# ---------------------------------------------------------------- transpose


@functools.lru_cache(maxsize=4096)
def inverse_permutation(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


transpose_p = Linear(
    "transpose",
    lambda x, axes: numpy.transpose(x, axes),
    lambda x, axes: (tuple(x.shape[a] for a in axes), x.dtype),
    lambda ct, operands, axes: [transpose_p.bind(ct, axes=inverse_permutation(axes))],
    lambda primitive, args, batched, axes: primitive.bind(args[0], axes=(0, *[a + 1 for a in axes])),
    fits=lambda x, axes: sorted(axes) == list(range(x.ndim)),
    sharding=lambda types, outs, params: Dimensions(dimension_labels(types), (tuple(params["axes"]),)),
    is_view=True,
    shares_memory=True,
    moves="copies",
)


@functools.cache
def _numbered_axes(ndim: int) -> numpy.ndarray:
    """Return an array without elements whose sizes are the numbers of its axes."""
    return numpy.empty(range(ndim))


def _permuting(*numpy_functions: Callable) -> Callable:
    """Declare a function that permutes axes: NumPy tells where they go."""

    def function(a: Value, *args: Any, **kwargs: Any) -> Value:
        t = typeof(a)
        axes = of_type(numpy_functions[0], t, _numbered_axes(t.ndim), *args, **kwargs).shape
        return a if axes == tuple(range(t.ndim)) else transpose_p.bind(a, axes=axes)

    return implements(*numpy_functions)(function)


transpose, moveaxis, rollaxis = map(_permuting, (numpy.transpose, numpy.moveaxis, numpy.rollaxis))
swapaxes = _permuting(numpy.swapaxes)
matrix_transpose = _permuting(numpy.matrix_transpose, numpy.linalg.matrix_transpose)


# ---------------------------------------------------------------- broadcast_to


@implements(numpy.broadcast_to)
def broadcast_to(array: Value, shape: Any) -> Value:
    """`numpy.broadcast_to`: broadcast an array to a shape."""
    shape = as_shape(shape)
    t = typeof(array)
    if len(t.shape) > len(shape) or any(n not in (1, m) for n, m in zip(t.shape[::-1], shape[::-1])):
        raise ValueError(f"broadcast_to: {t} cannot be broadcast to the shape {shape}")
    return array if shape == t.shape else broadcast_to_p.bind(array, shape=shape)


@implements(numpy.broadcast_arrays)
def broadcast_arrays(*args: Value) -> tuple[Value, ...]:
    """`numpy.broadcast_arrays`: broadcast arrays to their common shape."""
    arrays = [as_array(x) for x in args]
    shape = numpy.broadcast_shapes(*[typeof(x).shape for x in arrays])
    return tuple(broadcast_to(x, shape) for x in arrays)


@implements(numpy.meshgrid)
def meshgrid(*xi: Value, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Value, ...]:
    """`numpy.meshgrid`: a grid of coordinates from vectors, one axis for each."""
    if indexing not in ("xy", "ij"):
        raise ValueError(f"meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}")
    vectors = [ravel(x) for x in xi]
    n = len(vectors)
    grid = tuple(reshape(x, (1,) * i + (-1,) + (1,) * (n - i - 1)) for i, x in enumerate(vectors))
    if indexing == "xy" and n > 1:
        grid = tuple(swapaxes(x, 0, 1) for x in grid)
    grid = grid if sparse else broadcast_arrays(*grid)
    return tuple(map(elementwise.copy, grid)) if copy else grid


# ---------------------------------------------------------------- concatenate


def _concatenate_shape(*types: ShapedArray, axis: int):
    return resized_shape(types[0], axis, sum(t.shape[axis] for t in types)), numpy.result_type(
        *[t.dtype for t in types]
    )


def _concatenate_transpose(ct, operands, axis):
    parts = split_p.bind(ct, sizes=tuple([x.shape[axis] for x in operands]), axis=axis)
    return [unbroadcast(part, x) if isinstance(x, ShapedArray) else None for part, x in zip(parts, operands)]


concatenate_p = Linear(
    "concatenate",
    lambda *arrays, axis: numpy.concatenate(arrays, axis),
    _concatenate_shape,
    _concatenate_transpose,
    sharding=dimensions.axiswise("axis"),
    moves="copies",
)


@implements(numpy.concatenate)
def concatenate(arrays: Sequence[Value], /, axis: int | None = 0, *, dtype: Any = None, casting: str = "same_kind"):
    """`numpy.concatenate`: concatenate arrays along an existing axis."""
    arrays = [as_array(x) for x in arrays]
    if dtype is not None:
        for x in arrays:
            if not numpy.can_cast(x.dtype, dtype, casting):
                raise TypeError(f"{typeof(x)} cannot be cast to {numpy.dtype(dtype)} with casting={casting!r}")
        arrays = [convert(x, dtype) for x in arrays]
    if axis is None:
        arrays, axis = [ravel(x) for x in arrays], 0
    if not arrays:
        raise ValueError("concatenate: expected at least one array")
    types = [typeof(x) for x in arrays]
    axis = normalize_axis(axis, types[0].ndim, "concatenate")
    for t in types[1:]:
        if t.ndim != types[0].ndim or any(n != m for i, (n, m) in enumerate(zip(t.shape, types[0].shape)) if i != axis):
            raise ValueError(f"concatenate: shapes {types[0].shape} and {t.shape} differ outside axis {axis}")
    return concatenate_p.bind(*arrays, axis=axis)


@implements(numpy.stack)
def stack(arrays: Sequence[Value], axis: int = 0, *, dtype: Any = None, casting: str = "same_kind") -> Value:
    """`numpy.stack`: concatenate arrays of one shape along a new axis."""
    arrays = [as_array(x) for x in arrays]
    shapes = {typeof(x).shape for x in arrays}
    if len(shapes) != 1:
        raise ValueError(f"stack: all arrays must have one shape, got {sorted(shapes)}")
    return concatenate([expand_dims(x, axis) for x in arrays], axis, dtype=dtype, casting=casting)


@implements(numpy.vstack)
def vstack(tup: Sequence[Value], *, dtype: Any = None, casting: str = "same_kind") -> Value:
    """`numpy.vstack`: stack arrays vertically, vectors as rows."""
    return concatenate([atleast_2d(x) for x in tup], 0, dtype=dtype, casting=casting)


@implements(numpy.hstack)
def hstack(tup: Sequence[Value], *, dtype: Any = None, casting: str = "same_kind") -> Value:
    """`numpy.hstack`: stack arrays along axis 1, vectors along axis 0."""
    arrays = [atleast_1d(x) for x in tup]
    axis = 0 if arrays and typeof(arrays[0]).ndim == 1 else 1
    return concatenate(arrays, axis, dtype=dtype, casting=casting)


@implements(numpy.dstack)
def dstack(tup: Sequence[Value]) -> Value:
    """`numpy.dstack`: stack arrays along a third axis."""
    return concatenate([atleast_3d(x) for x in tup], 2)


@implements(numpy.column_stack)
def column_stack(tup: Sequence[Value]) -> Value:
    """`numpy.column_stack`: stack vectors, as columns, and matrices horizontally."""
    arrays = [as_array(x) for x in tup]
    return concatenate([atleast_2d(x).T if typeof(x).ndim < 2 else x for x in arrays], 1)


@implements(numpy.block)
def block(arrays: Any) -> Value:
    """`numpy.block`: assemble nested lists; the innermost are along the last axis."""
    depth = _depth(arrays)
    if not depth:
        return elementwise.copy(as_array(arrays))
    return _block(arrays, depth, max(depth, _most_axes(arrays)), 0)


def _depth(arrays: Any) -> int:
    if not isinstance(arrays, list):
        return 0
    depths = {_depth(x) for x in arrays}
    if len(depths) != 1:
        raise ValueError("block: all lists must be nested to the same depth, and none may be empty")
    return 1 + depths.pop()


def _most_axes(arrays: Any) -> int:
    return max(map(_most_axes, arrays)) if isinstance(arrays, list) else typeof(as_array(arrays)).ndim


def _block(arrays: Any, depth: int, ndim: int, level: int) -> Value:
    if level == depth:
        x = as_array(arrays)
        return reshape(x, (1,) * (ndim - typeof(x).ndim) + typeof(x).shape)
    return concatenate([_block(x, depth, ndim, level + 1) for x in arrays], ndim - depth + level)


# ---------------------------------------------------------------- split


def _split_impl(x: numpy.ndarray, sizes: tuple[int, ...], axis: int) -> list[numpy.ndarray]:
    bounds, before = itertools.accumulate(sizes, initial=0), (slice(None),) * axis
    return [x[(*before, slice(*part))] for part in itertools.pairwise(bounds)]


def _split_shapes(x: ShapedArray, sizes: tuple[int, ...], axis: int):
    return [(resized_shape(x, axis, n), x.dtype) for n in sizes]


def _split_transpose(cts, operands, sizes, axis):
    return [concatenate(_with_zeros(cts, _split_shapes(operands[0], sizes, axis)), axis)]


def _with_zeros(cts: Sequence[Value | None], types: Sequence[tuple]) -> list[Value]:
    """Replace each None by zeros, in the states of the others: unused slices of one shape share them."""
    like = typeof(next(ct for ct in cts if ct is not None))
    zeros = {t: cast_like(zeros_like(ShapedArray(*t)), like) for ct, t in zip(cts, types) if ct is None}
    return [zeros[t] if ct is None else ct for ct, t in zip(cts, types)]


#: Consecutive slices along an axis, as one primitive, so that its transpose allocates one array, not one per slice.
split_p = Linear(
    "split",
    _split_impl,
    _split_shapes,
    _split_transpose,
    fits=lambda x, sizes, axis: axes_fit(x, axis=axis) and sum(sizes) == x.shape[axis],
    sharding=dimensions.axiswise("axis"),
    multiple_results=True,
    shares_memory=True,
    moves="copies",
)


def _static_points(indices_or_sections: Any) -> int | list[int]:
    """Return the number of parts, or the points between them. Raises TracerError for traced ones."""
    if numpy.ndim(indices_or_sections):
        return [operator.index(point) for point in indices_or_sections]
    return operator.index(indices_or_sections)


@implements(numpy.array_split)
def array_split(ary: Value, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """`numpy.array_split`: split into parts of nearly equal size, or at given points."""
    ary = as_array(ary)
    t = typeof(ary)
    axis, indices_or_sections = normalize_axis(axis, t.ndim, "array_split"), _static_points(indices_or_sections)
    parts = of_type(numpy.array_split, t, without_values(t), indices_or_sections, axis)
    sizes = tuple(part.shape[axis] for part in parts)
    if sum(sizes) == t.shape[axis]:
        return split_p.bind(ary, sizes=sizes, axis=axis) if len(sizes) > 1 else [ary]
    points = itertools.pairwise((0, *indices_or_sections, t.shape[axis]))  # which are not in order
    return [ary[(slice(None),) * axis + (slice(*bounds),)] for bounds in points]


@implements(numpy.split)
def split(ary: Value, indices_or_sections: Any, axis: int = 0) -> list[Value]:
    """`numpy.split`: split into equal parts, or at given points."""
    parts, t = array_split(ary, indices_or_sections, axis), typeof(as_array(ary))
    of_type(numpy.split, t, without_values(t), _static_points(indices_or_sections), axis)
    return parts


def _split_along(numpy_function: Callable, axis: int) -> Callable:
    """Declare the split along this axis, or the last one; NumPy checks the number of dimensions."""

    def function(ary: Value, indices_or_sections: Any) -> list[Value]:
        t = typeof(as_array(ary))
        of_type(numpy_function, t, without_values(t), _static_points(indices_or_sections))
        return array_split(ary, indices_or_sections, min(axis, t.ndim - 1))

    return implements(numpy_function)(function)


hsplit, vsplit, dsplit = _split_along(numpy.hsplit, 1), _split_along(numpy.vsplit, 0), _split_along(numpy.dsplit, 2)


def _unstack_transpose(cts, operands, axis):
    types = [(resized_shape(operands[0], axis), operands[0].dtype)] * len(cts)
    return [stack_p.bind(*_with_zeros(cts, types), axis=axis)]  # the cotangent is stacked once, and not summed


#: The slices of x along an axis, with that axis removed: the transpose of `stack_p`.
unstack_p = Linear(
    "unstack",
    lambda x, axis: list(numpy.moveaxis(x, axis, 0)),
    lambda x, axis: [(resized_shape(x, axis), x.dtype)] * x.shape[axis],
    _unstack_transpose,
    sharding=dimensions.axiswise("axis"),
    multiple_results=True,
    shares_memory=True,
    is_view=True,
    moves="copies",
)


def _stack_transpose(ct, operands, axis):
    parts = unstack_p.bind(ct, axis=axis)
    return [convert(part, x.dtype) if isinstance(x, ShapedArray) else None for part, x in zip(parts, operands)]


def _stack_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    (labels, *_), axis = dimension_labels(types), params["axis"]
    return Dimensions(dimension_labels(types), ((*labels[:axis], None, *labels[axis:]),))


#: Stacks values of one shape, whatever their dtypes, along a new axis.
stack_p = Linear(
    "stack",
    lambda *arrays, axis: numpy.stack(arrays, axis),
    lambda *types, axis: (
        (*typeof(types[0]).shape[:axis], len(types), *typeof(types[0]).shape[axis:]),
        numpy.result_type(*[typeof(t).dtype for t in types]),
    ),
    _stack_transpose,
    fits=lambda *types, axis: len({t.shape for t in types}) == 1 and 0 <= axis <= types[0].ndim,
    sharding=_stack_dimensions,
    moves="copies",
)


def unstack(x: Value, /, *, axis: int = 0) -> tuple[Value, ...]:
    """`numpy.unstack`: the slices of x along an axis, with that axis removed."""
    if not typeof(x).ndim:
        raise ValueError(f"unstack: a value of type {typeof(x)} has no axis to split along")
    axis = normalize_axis(axis, typeof(x).ndim, "unstack")
    return tuple(unstack_p.bind(x, axis=axis)) if typeof(x).shape[axis] else ()


if hasattr(numpy, "unstack"):
    implements(numpy.unstack)(unstack)


def iterate(x: Value) -> Iterator[Value]:
    """`iter(x)`: iterate along the first axis."""
    if not typeof(x).ndim:
        raise TypeError(f"iteration over a 0-d value ({typeof(x)})")
    return iter(unstack(x))
