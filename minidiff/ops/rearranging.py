"""Flip, roll, repeat, pad, diagonals: composed of shapes, slices and gathers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import dimensions
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Linear, axes_fit, convert
from minidiff.ops.dimensions import Dimensions, Types
from minidiff.ops.elementwise import copy, multiply, subtract
from minidiff.ops.indexing import concrete_mask, getitem, slice_along, take, unslice_p
from minidiff.ops.shape import array_and_axis, as_shape, normalize_axes, of_type, resized_shape, without_values
from minidiff.values.dtypes import is_differentiable, is_real_float

# ---------------------------------------------------------------- flip, roll


@implements(numpy.flip)
def flip(m: Value, axis: Any = None) -> Value:
    """`numpy.flip`: reverse the elements along one axis, several, or all."""
    ndim = typeof(m).ndim
    axes = normalize_axes(axis, ndim, "flip")
    return getitem(m, tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(ndim)))


implements(numpy.flipud)(lambda m: flip(m, 0))
implements(numpy.fliplr)(lambda m: flip(m, 1))


@implements(numpy.rot90)
def rot90(m: Value, k: int = 1, axes: Sequence[int] = (0, 1)) -> Value:
    """`numpy.rot90`: rotate k times by 90 degrees, from axes[0] towards axes[1]."""
    if len(axes) != 2:
        raise ValueError(f"rot90: expected two axes, got {axes}")
    a, b = normalize_axes(tuple(axes), typeof(m).ndim, "rot90")
    k %= 4
    if k == 1:
        return numpy.swapaxes(flip(m, b), a, b)
    if k == 3:
        return flip(numpy.swapaxes(m, a, b), b)
    return flip(m, (a, b)) if k else m


#: Elements moved by `shifts` along `axes`; those past one end come back in at the other.
roll_p = Linear(
    "roll",
    lambda x, shifts, axes: numpy.roll(x, shifts, axes),
    lambda x, shifts, axes: (x.shape, x.dtype),
    lambda ct, operands, shifts, axes: [roll_p.bind(ct, shifts=tuple(-s for s in shifts), axes=axes)],
    fits=lambda x, shifts, axes: (
        len(shifts) == len(axes) and axes_fit(x, axes=tuple({*axes})) and all(isinstance(n, int) for n in shifts)
    ),
    sharding=dimensions.elementwise,
    moves="copies",
)


@implements(numpy.roll)
def roll(a: Value, shift: Any, axis: Any = None) -> Value:
    """`numpy.roll` along one axis, several, or the flattened array."""
    t = typeof(a)
    if axis is None:
        return numpy.reshape(roll(numpy.ravel(a), shift, 0), t.shape)
    pairs = list(numpy.broadcast(shift, axis))
    axes = tuple(normalize_axis(int(i), t.ndim, "roll") for _, i in pairs)
    return roll_p.bind(a, shifts=tuple(operator.index(s) for s, _ in pairs), axes=axes)


# ---------------------------------------------------------------- tile, repeat, resize


@implements(numpy.tile)
def tile(A: Value, reps: Any) -> Value:  # NumPy calls it A
    """`numpy.tile`: repeat an array side by side, `reps` times along each axis."""
    A, reps = as_array(A), as_shape(reps)
    ndim = max(len(reps), A.ndim)
    reps, shape = _padded(reps, ndim), _padded(A.shape, ndim)
    apart = numpy.reshape(A, tuple(itertools.chain(*((1, n) for n in shape))))
    copies = numpy.broadcast_to(apart, tuple(itertools.chain(*zip(reps, shape))))
    return numpy.reshape(copy(copies), tuple(r * n for r, n in zip(reps, shape)))


def _padded(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return a shape with axes of size 1 in front, so that there are `ndim`."""
    return (1,) * (ndim - len(shape)) + shape


@implements(numpy.repeat)
def repeat(a: Value, repeats: Any, axis: int | None = None) -> Value:
    """`numpy.repeat`: repeat elements along an axis, by one number or one for each."""
    if isinstance(repeats, Tracer):
        repeats = repeats.concrete("np.repeat (the shape of its result depends on the repeats)")
    a, axis = array_and_axis(a, axis, "repeat")
    shape = typeof(a).shape
    if numpy.size(repeats) != 1:  # NumPy reads a list, an empty one too, as integers
        return take(a, numpy.repeat(numpy.arange(shape[axis]), repeats), axis)
    count = operator.index(numpy.asarray(repeats).item())
    copies = numpy.broadcast_to(numpy.expand_dims(a, axis + 1), (*shape[: axis + 1], count, *shape[axis + 1 :]))
    return numpy.reshape(copy(copies), resized_shape(a, axis, shape[axis] * count))


def _windows_impl(x: numpy.ndarray, axes: Any, sizes: Any, steps: Any, dilations: Any) -> numpy.ndarray:
    shape, strides = list(windows_shape(x, axes, sizes, steps, dilations)[0]), list(x.strides)
    strides += [d * x.strides[a] for a, d in zip(axes, dilations)]
    for a, step in zip(axes, steps):
        strides[a] *= step
    return numpy.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)


def windows_shape(x: Any, axes: Any, sizes: Any, steps: Any, dilations: Any) -> tuple[tuple[int, ...], numpy.dtype]:
    """Return the shape and dtype of the windows of x along axes; see `windows_p`."""
    shape = list(x.shape)
    for a, size, step, d in zip(axes, sizes, steps, dilations):
        shape[a] = (shape[a] - d * (size - 1) - 1) // step + 1
    return (*shape, *sizes), x.dtype


def _unwindows_impl(
    x: numpy.ndarray, axes: Any, sizes: Any, steps: Any, dilations: Any, shape: tuple[int, ...]
) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    places: list = [slice(None)] * len(shape)
    for offset in numpy.ndindex(*sizes):
        for a, k, step, d in zip(axes, offset, steps, dilations):
            places[a] = slice(d * k, d * k + step * (x.shape[a] - 1) + 1, step)
        out[tuple(places)] += x[(..., *offset)]
    return out


def _windows_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Keep the axes of windows whole."""
    few, many = sorted((types[0], outs[0]), key=lambda t: t.ndim)
    labels = tuple(None if d in params["axes"] else d for d in range(few.ndim))
    wide = labels + (None,) * (many.ndim - few.ndim)
    return Dimensions((labels,), (wide,)) if types[0] is few else Dimensions((wide,), (labels,))


#: All windows of `sizes` along `axes`, as a view: strided by `steps`, dilated by `dilations`. The axes of x count the
#: windows; the elements of a window come last.
windows_p = Linear(
    "windows",
    _windows_impl,
    windows_shape,
    lambda ct, operands, **windows: [unwindows_p.bind(ct, shape=operands[0].shape, **windows)],
    fits=lambda x, **windows: min(windows_shape(x, **windows)[0], default=1) >= 0,
    sharding=_windows_dimensions,
    shares_memory=True,
    moves="copies",
)

#: The transpose of `windows`: zeros of `shape`, with each element of a window added at its place.
unwindows_p = Linear(
    "unwindows",
    _unwindows_impl,
    lambda x, axes, sizes, steps, dilations, shape: (shape, x.dtype),
    lambda ct, operands, shape, **windows: [windows_p.bind(ct, **windows)],
    fits=lambda x, shape, **windows: windows_shape(x.update(shape=shape), **windows)[0] == x.shape,
    sharding=_windows_dimensions,
    accumulates=True,
    moves="adds",
)


@implements(numpy.lib.stride_tricks.sliding_window_view)
def sliding_window_view(
    x: Value, window_shape: Any, axis: Any = None, *, subok: bool = False, writeable: bool = False
) -> Value:
    """`numpy.lib.stride_tricks.sliding_window_view`: all windows of a shape, whose elements come last.

    `subok` and `writeable` are ignored.
    """
    ndim, sizes = typeof(x).ndim, numpy.atleast_1d(window_shape).tolist()
    axes = range(ndim) if axis is None else numpy.atleast_1d(axis).tolist()
    axes = [normalize_axis(a, ndim, "sliding_window_view") for a in axes]
    of_type(numpy.lib.stride_tricks.sliding_window_view, typeof(x), without_values(typeof(x)), window_shape, axis)
    for a, size in zip(axes, sizes):  # one by one, since an axis may be given twice
        x = windows_p.bind(x, axes=(a,), sizes=(size,), steps=(1,), dilations=(1,))
    return x


@implements(numpy.resize)
def resize(a: Value, new_shape: Any) -> Value:
    """`numpy.resize`: fill a shape with the elements in order, repeated as needed."""
    t = typeof(a)
    places = numpy.resize(numpy.arange(t.size), new_shape)
    return take(a, places) if t.size else numpy.zeros(new_shape, t.dtype)


# ---------------------------------------------------------------- append, insert, delete, trim_zeros


@implements(numpy.append)
def append(arr: Value, values: Value, axis: int | None = None) -> Value:
    """`numpy.append`: append values to `arr` along an axis, or flattened."""
    return numpy.concatenate([as_array(arr), as_array(values)], axis)


@implements(numpy.insert)
def insert(arr: Value, obj: Any, values: Value, axis: int | None = None) -> Value:
    """`numpy.insert`: insert values before indices `obj` (an int, a slice or ints)."""
    arr, values = as_array(arr), as_array(values)
    if axis is None:
        arr, axis = numpy.ravel(arr), 0
    t = typeof(arr)
    axis = normalize_axis(axis, t.ndim, "insert")
    n = t.shape[axis]
    # Find the positions of the new elements: NumPy inserts -1 among the indices of the old ones.
    if not isinstance(obj, slice):
        obj = numpy.asarray(_index_values(obj, "np.insert"))
        obj = obj if obj.size else obj.astype(int)
    single = not isinstance(obj, slice) and obj.ndim == 0
    values = numpy.reshape(values, _padded(values.shape, t.ndim))
    if single:  # as in NumPy, a single index takes any number of values
        values = numpy.moveaxis(values, 0, axis)
    places = numpy.insert(numpy.arange(n), obj, -1 - numpy.arange(values.shape[axis]) if single else -1)
    count = len(places) - n
    values = numpy.broadcast_to(convert(values, t.dtype), resized_shape(t, axis, count))
    new = places < 0
    if count and numpy.all(numpy.diff(numpy.flatnonzero(new)) == 1):  # one gap: use slices
        start = int(numpy.argmax(new))
        return numpy.concatenate([slice_along(arr, axis, start), values, slice_along(arr, axis, start, None)], axis)
    # With several indices, let NumPy sort out which value goes where.
    order = numpy.insert(numpy.arange(n), obj, n + numpy.arange(count)) if count else places
    return take(numpy.concatenate([arr, values], axis), order, axis)


def _index_values(obj: Any, name: str) -> Any:
    return obj.concrete(f"{name} (the shape of its result depends on the indices)") if isinstance(obj, Tracer) else obj


@implements(numpy.delete)
def delete(arr: Value, obj: Any, axis: int | None = None) -> Value:
    """`numpy.delete`: remove elements at `obj` (an int, a slice, ints or a mask)."""
    if axis is None:
        arr, axis = numpy.ravel(arr), 0
    axis = normalize_axis(axis, typeof(arr).ndim, "delete")
    indices = numpy.delete(numpy.arange(typeof(arr).shape[axis]), _index_values(obj, "np.delete"))
    if indices.size and numpy.all(numpy.diff(indices) == 1):
        return copy(slice_along(arr, axis, int(indices[0]), int(indices[-1]) + 1))
    return take(arr, indices, axis)


@implements(numpy.trim_zeros)
def trim_zeros(filt: Value, trim: str = "fb", axis: Any = None) -> Value:
    """`numpy.trim_zeros` at the front ("f") and back ("b"); needs concrete values."""
    filt = as_array(filt)
    t = typeof(filt)
    if trim.lower() not in ("f", "b", "fb", "bf"):
        raise ValueError(f"trim_zeros: trim must consist of 'f' and 'b', got {trim!r}")
    nonzero = numpy.argwhere(concrete_mask(filt, "np.trim_zeros") != 0)
    axes = normalize_axes(axis, t.ndim, "trim_zeros")
    index = [slice(None)] * t.ndim
    for a in axes:
        if len(nonzero):
            first, last = int(nonzero[:, a].min()), int(nonzero[:, a].max()) + 1
        else:
            first, last = (t.shape[a], t.shape[a]) if "f" in trim.lower() else (0, 0)
        index[a] = slice(first if "f" in trim.lower() else 0, last if "b" in trim.lower() else t.shape[a])
    return getitem(filt, tuple(index))


# ---------------------------------------------------------------- diagonals and triangles


def _embed_impl(x: numpy.ndarray, offset: int, shape: tuple[int, ...]) -> numpy.ndarray:
    out = numpy.zeros(shape, x.dtype)
    diagonal = numpy.diagonal(out, offset, -2, -1)
    diagonal.flags.writeable = True  # NumPy's views of diagonals are read-only
    diagonal[...] = x
    return out


#: A diagonal of the last two axes: x[..., i, i + offset].
diagonal_p = Linear(
    "diagonal",
    lambda x, offset: numpy.diagonal(x, offset, -2, -1),
    lambda x, offset: (without_values(x).diagonal(offset, -2, -1).shape, x.dtype),
    lambda ct, operands, offset: [embed_diagonal_p.bind(ct, offset=offset, shape=operands[0].shape)],
    fits=lambda x, offset: x.ndim > 1,
    sharding=dimensions.batch(2),
    shares_memory=True,
    moves="copies",
)

#: The transpose of `diagonal`: zeros of `shape`, with x on a diagonal of the last two axes.
embed_diagonal_p = Linear(
    "embed_diagonal",
    _embed_impl,
    lambda x, offset, shape: (shape, x.dtype),
    lambda ct, operands, offset, shape: [diagonal_p.bind(ct, offset=offset)],
    fits=lambda x, offset, shape: len(shape) > 1 and x.shape == diagonal_p.shape_rule(x.update(shape=shape), offset)[0],
    sharding=dimensions.batch(1),
    moves="copies",
)


@implements(numpy.diagonal)
def diagonal(a: Value, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Value:
    """`numpy.diagonal` of two axes, `offset` from the main one, as a last axis."""
    of_type(numpy.diagonal, typeof(a), without_values(typeof(a)), offset, axis1, axis2)
    return diagonal_p.bind(numpy.moveaxis(a, (axis1, axis2), (-2, -1)), offset=operator.index(offset))


@implements(numpy.diag)
def diag(v: Value, k: int = 0) -> Value:
    """`numpy.diag`: a matrix's k-th diagonal, or the matrix with this k-th diagonal."""
    t = typeof(v)
    if t.ndim == 2:
        return diagonal(v, k)
    if t.ndim != 1:
        raise ValueError(f"diag: expected a vector or a matrix, got {t}")
    n = t.size + abs(k)
    return embed_diagonal_p.bind(v, offset=operator.index(k), shape=(n, n))


implements(numpy.diagflat)(lambda v, k=0: diag(numpy.ravel(v), k))


@implements(numpy.kron)
def kron(a: Value, b: Value) -> Value:
    """`numpy.kron`: the Kronecker product, a scaled copy of b per element of a."""
    a, b = as_array(a), as_array(b)
    sa, sb = (_padded(x.shape, max(a.ndim, b.ndim)) for x in (a, b))
    apart = multiply(
        numpy.reshape(a, tuple(itertools.chain(*((n, 1) for n in sa)))),
        numpy.reshape(b, tuple(itertools.chain(*((1, n) for n in sb)))),
    )
    return numpy.reshape(apart, tuple(n * m for n, m in zip(sa, sb)))


# ---------------------------------------------------------------- pad

_COPYING = ("edge", "reflect", "symmetric", "wrap")
_STATISTICS: dict[str, Any] = {"maximum": numpy.max, "minimum": numpy.min, "mean": numpy.mean, "median": numpy.median}
_PAD_OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {"constant_values": 0},
    "linear_ramp": {"end_values": 0},
    "edge": {},
    "wrap": {},
    "reflect": {"reflect_type": "even"},
    "symmetric": {"reflect_type": "even"},
    **{mode: {"stat_length": None} for mode in _STATISTICS},
}


@implements(numpy.pad)
def pad(array: Value, pad_width: Any, mode: str = "constant", **kwargs: Any) -> Value:
    """`numpy.pad`, without mode "empty" and functions; constants may be traced."""
    array = as_array(array)
    if not isinstance(mode, str) or mode == "empty":
        raise TypeError(
            f"pad: mode {mode!r} is not supported on traced values: it writes into an array, or leaves it unset; "
            "join arrays with np.concatenate"
        )
    if mode not in _PAD_OPTIONS:
        raise ValueError(f"pad: mode must be one of {', '.join(_PAD_OPTIONS)}, got {mode!r}")
    unknown = set(kwargs) - set(_PAD_OPTIONS[mode])
    if unknown:
        raise ValueError(f"pad: mode {mode!r} takes no {', '.join(sorted(unknown))}")
    options = list((_PAD_OPTIONS[mode] | kwargs).values())
    t = typeof(array)
    widths = [(operator.index(b), operator.index(a)) for b, a in pairs_per_axis(pad_width, t.ndim)]
    if any(n < 0 for pair in widths for n in pair):
        raise ValueError(f"pad: widths cannot be negative, got {widths}")
    if mode == "constant" and isinstance(options[0], (int, float)) and options[0] == 0:
        index = tuple(slice(b, b + n) for (b, _), n in zip(widths, t.shape))
        return unslice_p.bind(array, index=index, shape=tuple(b + n + a for (b, a), n in zip(widths, t.shape)))
    if mode in _STATISTICS or mode in ("constant", "linear_ramp"):
        options = [pairs_per_axis(options[0], t.ndim)]
    if not any(map(any, widths)):
        return copy(array)
    for axis, width in enumerate(widths):
        if any(width):
            array = _pad_axis(array, axis, width, mode, *options)
    return array


def pairs_per_axis(x: Any, ndim: int) -> list:
    """Expand a number, a pair, pairs or a dictionary by axis to a pair per axis."""
    if x is None:
        return [(None, None)] * ndim
    if isinstance(x, dict):
        known = {normalize_axis(a, ndim, "pad"): v if isinstance(v, (tuple, list)) else (v, v) for a, v in x.items()}
        return [tuple(known.get(a, (0, 0))) for a in range(ndim)]
    pairs = numpy.broadcast_to(as_array(x), (ndim, 2))
    return [(pairs[a, 0], pairs[a, 1]) for a in range(ndim)]


def _pad_axis(x: Value, axis: int, width: tuple[int, int], mode: str, *options: Any) -> Value:
    t = typeof(x)
    n = t.shape[axis]
    if not n and mode != "constant":
        raise ValueError(f"pad: axis {axis} of {t} has no elements to extend in mode {mode!r}")
    if mode in _COPYING and (*options, "even")[0] == "even":
        return take(x, numpy.pad(numpy.arange(n), width, mode), axis)
    if mode in _COPYING:
        return _reflect_oddly(x, axis, width, mode)
    before, after = width
    if mode == "constant":
        parts = [
            numpy.broadcast_to(convert(as_array(v), t.dtype), resized_shape(t, axis, k))
            for v, k in zip(options[0][axis], width)
        ]
    elif mode == "linear_ramp":
        first, last = slice_along(x, axis, 0, 1), slice_along(x, axis, n - 1, n)
        start, end = options[0][axis]
        parts = [_ramp(start, first, before, axis), flip(_ramp(end, last, after, axis), axis)]
    else:
        lengths = [n if k is None else min(operator.index(k), n) for k in options[0][axis]]
        if 0 in lengths and mode in ("maximum", "minimum"):
            raise ValueError(f"pad: a stat_length of 0 yields no value in mode {mode!r}")
        sides = slice_along(x, axis, lengths[0]), slice_along(x, axis, n - lengths[1], n)
        parts = [_statistic(mode, side, axis, k) for side, k in zip(sides, width)]
    return numpy.concatenate([part for part, k in ((parts[0], before), (x, 1), (parts[1], after)) if k], axis)


def _statistic(mode: str, side: Value, axis: int, k: int) -> Value:
    t = typeof(side)
    value = _STATISTICS[mode](side, axis=axis, keepdims=True)
    if t.dtype.kind in "iu" and is_real_float(value.dtype):
        value = numpy.rint(value)
    return numpy.broadcast_to(convert(value, t.dtype), resized_shape(t, axis, k))


def _ramp(end: Value, edge: Value, k: int, axis: int) -> Value:
    """k values on a straight line from `end` to just before the edge."""
    t = typeof(edge)
    exact = t.dtype if is_differentiable(t.dtype) else numpy.dtype(float)
    weights = (numpy.arange(k) / max(k, 1)).astype(exact).reshape((k,) + (1,) * (t.ndim - axis - 1))
    end = convert(as_array(end), exact)
    values = multiply(subtract(edge, end), weights) + end
    return convert(numpy.floor(values) if t.dtype.kind in "iu" else values, t.dtype)


def _reflect_oddly(x: Value, axis: int, width: tuple[int, int], mode: str) -> Value:
    """Reflect positions and values at the edge, at most one array length at a time."""
    before, after = width
    keep = 1 if mode == "reflect" else 0  # 1 if the edge itself is not repeated
    n = typeof(x).shape[axis]
    if n == 1 and keep:
        return take(x, numpy.zeros(before + 1 + after, int), axis)
    while before or after:
        n = typeof(x).shape[axis]
        b, a = min(before, n - keep), min(after, n - keep)
        first, last = slice_along(x, axis, 0, 1), slice_along(x, axis, n - 1, n)
        left = flip(slice_along(x, axis, keep, keep + b), axis)
        right = flip(slice_along(x, axis, n - keep - a, n - keep), axis)
        parts = [subtract(multiply(2, first), left)] * bool(b) + [x] + [subtract(multiply(2, last), right)] * bool(a)
        x, before, after = numpy.concatenate(parts, axis), before - b, after - a
    return x


# ---------------------------------------------------------------- functions along axes


@implements(numpy.apply_along_axis)
def apply_along_axis(func1d: Callable, axis: int, arr: Value, *args: Any, **kwargs: Any) -> Value:
    """`numpy.apply_along_axis`: call a function on each vector along an axis."""
    arr = as_array(arr)
    axis = normalize_axis(axis, typeof(arr).ndim, "apply_along_axis")
    rows = numpy.moveaxis(arr, axis, -1)
    outer = typeof(rows).shape[:-1]
    if 0 in outer:
        raise ValueError(f"apply_along_axis: there is no vector along axis {axis} in {typeof(arr)}")
    results = [as_array(func1d(row, *args, **kwargs)) for row in numpy.reshape(rows, (-1, typeof(rows).shape[-1]))]
    count, inner = len(outer), results[0].shape
    out = numpy.reshape(numpy.stack(results), (*outer, *inner))
    return numpy.moveaxis(out, range(count, count + len(inner)), range(axis, axis + len(inner)))


@implements(numpy.apply_over_axes)
def apply_over_axes(func: Callable, a: Value, axes: Any) -> Value:
    """`numpy.apply_over_axes`: apply `func(a, axis)` per axis, keeping dimensions."""
    a = as_array(a)
    ndim = typeof(a).ndim
    for axis in numpy.atleast_1d(axes).tolist():
        axis = normalize_axis(axis, ndim, "apply_over_axes")
        result = func(a, axis)
        a = numpy.expand_dims(result, axis) if typeof(result).ndim < ndim else result
    return a
