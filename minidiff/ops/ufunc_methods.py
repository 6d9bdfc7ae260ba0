"""Methods of binary ufuncs on traced values, such as `np.add.reduce`.

If NumPy has an equivalent function (`np.sum`), that is called; otherwise the ufunc is applied slice by slice.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer, Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.arrays import as_array
from minidiff.ops.base import convert, in_float32, reduced_shape
from minidiff.ops.elementwise import copy, exp, isfinite, log, where
from minidiff.ops.indexing import getitem
from minidiff.ops.reduction import max as maximum_of
from minidiff.ops.reduction import merge_axes
from minidiff.ops.reduction import sum as sum_of
from minidiff.ops.shape import moveaxis, reduced_axes, reshape, stack


def _logsumexp(x: Value, axis: Any, keepdims: bool = False) -> Value:
    """log(sum(exp(x))), computed without overflow of the exponentials."""
    top = maximum_of(x, axis, keepdims=True)
    top = where(isfinite(top), top, 0.0)
    total = log(sum_of(exp(x - top), axis, keepdims=keepdims))
    return total + (top if keepdims else reshape(top, total.shape))


#: The functions equivalent to methods of some ufuncs.
REDUCTIONS: dict[numpy.ufunc, Callable] = {
    numpy.add: numpy.sum,
    numpy.multiply: numpy.prod,
    numpy.maximum: numpy.max,
    numpy.minimum: numpy.min,
    numpy.logical_and: numpy.all,
    numpy.logical_or: numpy.any,
}
ACCUMULATIONS: dict[numpy.ufunc, Callable] = {numpy.add: numpy.cumsum, numpy.multiply: numpy.cumprod}


@in_float32
def reduce(
    ufunc: numpy.ufunc, array: Value, axis: Any = 0, dtype: Any = None, *, keepdims=False, initial=None, where=True
) -> Value:
    """`np.<ufunc>.reduce`: combine elements along an axis (None: all) by the ufunc."""
    _check_binary(ufunc, "reduce")
    array, mask = _in_loop(ufunc, array, dtype), where
    function = NUMPY_FUNCTIONS.get(REDUCTIONS[ufunc]) if ufunc in REDUCTIONS else None
    options = {k: v for k, v in (("initial", initial), ("where", mask)) if v is not None and v is not True}
    if ufunc in ACCUMULATIONS and dtype is not None:
        options["dtype"] = dtype
    if function is not None and set(options) <= set(inspect.signature(function).parameters):
        return function(array, axis=axis, keepdims=keepdims, **options)
    t = typeof(array)
    axes = reduced_axes(axis, t.ndim, f"{ufunc.__name__}.reduce")
    if ufunc is numpy.logaddexp and not options and all(t.shape):
        return _logsumexp(array, axes, keepdims)
    if len(axes) > 1 and ufunc.identity is None and ufunc not in (numpy.maximum, numpy.minimum):
        raise ValueError(f"{ufunc.__name__}.reduce: the order matters, so it reduces one axis at a time, got {axis}")
    if mask is not True:
        array = _mask(ufunc, array, mask, initial)
    slices, remaining = list(merge_axes(array, axes)), reduced_shape(t, axes)
    start = ufunc.identity if initial is None and len(slices) < 2 else initial  # np.hypot.reduce([-1]) is 1
    if start is not None:
        slices.insert(
            0, start if isinstance(start, Tracer) else numpy.full(remaining, numpy.array(start).astype(t.dtype))
        )
    if not slices:
        raise ValueError(f"{ufunc.__name__}.reduce: nothing to reduce along {axis} of {t}, and there is no identity")
    out = functools.reduce(NUMPY_FUNCTIONS[ufunc], slices) if len(slices) > 1 else copy(slices[0])
    return reshape(out, reduced_shape(t, axes, True)) if keepdims else out


def _mask(ufunc: numpy.ufunc, array: Value, mask: Any, initial: Any) -> Value:
    """Replace masked-out elements by the ufunc's identity, or else `initial`."""
    neutral = ufunc.identity if ufunc.identity is not None else initial
    if neutral is None:
        raise ValueError(f"{ufunc.__name__}.reduce has no identity, so where= needs initial=")
    return convert(where(mask, array, neutral), array.dtype)


@in_float32
def accumulate(ufunc: numpy.ufunc, array: Value, axis: int = 0, dtype: Any = None) -> Value:
    """`np.<ufunc>.accumulate`: reduce the elements up to each along an axis."""
    _check_binary(ufunc, "accumulate")
    array = _in_loop(ufunc, array, dtype)
    t = typeof(array)
    axis = normalize_axis(axis, t.ndim, f"{ufunc.__name__}.accumulate")
    function = NUMPY_FUNCTIONS.get(ACCUMULATIONS[ufunc]) if ufunc in ACCUMULATIONS else None
    if function is not None:
        return function(array, axis=axis, dtype=dtype)
    if not t.shape[axis]:
        return copy(array)
    sums: list[Value] = []
    for part in moveaxis(array, axis, 0):
        sums.append(NUMPY_FUNCTIONS[ufunc](sums[-1], part) if sums else part)
    return stack(sums, axis)


@in_float32
def reduceat(ufunc: numpy.ufunc, array: Value, indices: Sequence[int], axis: int = 0, dtype: Any = None) -> Value:
    """`np.<ufunc>.reduceat`: reduce from each index to the next.

    Where the next index is not larger, the result is the element at the index.
    """
    _check_binary(ufunc, "reduceat")
    array = _in_loop(ufunc, array, dtype)
    n = typeof(array).shape[axis]
    places = indices.concrete("reduceat") if isinstance(indices, Tracer) else indices
    starts = [int(i) for i in numpy.asarray(places)]
    for i in starts:
        if not 0 <= i < n:
            raise IndexError(f"{ufunc.__name__}.reduceat: index {i} is out of bounds for an axis of size {n}")
    x = moveaxis(array, axis, 0)
    parts = [
        reduce(ufunc, getitem(x, slice(i, j))) if i < j else getitem(x, i) for i, j in zip(starts, [*starts[1:], n])
    ]
    return stack(parts, normalize_axis(axis, typeof(array).ndim, "reduceat"))


def outer(ufunc: numpy.ufunc, A: Value, B: Value, dtype: Any = None) -> Value:
    """`np.<ufunc>.outer`: the ufunc of each pair of an element of A and one of B."""
    _check_binary(ufunc, "outer")
    A, B = as_array(A), as_array(B)
    A = A.reshape(A.shape + (1,) * B.ndim)
    return ufunc(A, B) if dtype is None else ufunc(A, B, dtype=dtype)


def _in_loop(ufunc: numpy.ufunc, array: Value, dtype: Any) -> Value:
    """Convert the array to the dtype that NumPy reduces it in."""
    array = array if dtype is None else convert(array, dtype)
    return convert(array, ufunc.resolve_dtypes((None, typeof(array).dtype, None), reduction=True)[0])


def _check_binary(ufunc: numpy.ufunc, method: str) -> None:
    if ufunc.nin != 2 or ufunc.nout != 1 or ufunc.signature is not None:
        raise ValueError(f"np.{ufunc.__name__}.{method}: only ufuncs with two inputs and one output have this method")
