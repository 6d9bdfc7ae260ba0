"""Replacements for functions that NumPy does not dispatch to traced arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer, Value
from minidiff.errors import SIZE
from minidiff.numpy.functions import explain_sizes, look_for_tracers
from minidiff.ops import elementwise
from minidiff.ops.arrays import as_array, holds_tracer
from minidiff.ops.base import convert
from minidiff.ops.elementwise import add, multiply
from minidiff.ops.indexing import getitem
from minidiff.ops.shape import broadcast_to, concatenate, ravel, reshape
from minidiff.ops.updates import at as at

__all__ = [
    *("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite"),
    *("full", "full_like", "arange", "take", "pad", "array_equal", "array_equiv", "vectorize", "r_", "c_", "at"),
]

# ---------------------------------------------------------------- arrays of nested lists


def array(
    object: Any,
    dtype: Any = None,
    *,
    copy: bool | None = True,
    order: str | None = "K",
    subok: bool = False,
    ndmin: int = 0,
    like: Any = None,
) -> Value:
    """`numpy.array`, also for traced values and nested lists that contain them.

    A traced value has no memory order: it is copied where NumPy might copy to change the order.
    """
    if not holds_tracer(object):
        return numpy.array(object, dtype, copy=copy, order=order, subok=subok, ndmin=ndmin, like=like)
    x = as_array(object)
    if dtype is not None:
        x = convert(x, dtype)
    if copy and x is object:
        x = elementwise.copy(x)
    return x if x.ndim >= ndmin else reshape(x, (1,) * (ndmin - x.ndim) + x.shape)


def asarray(a: Any, dtype: Any = None, order: str | None = None, **options: Any) -> Value:
    """`numpy.asarray`, also for traced values; a sharded array is gathered."""
    if holds_tracer(a) and getattr(a, "interpreter", None) is not EVALUATE:
        return array(a, dtype, copy=order in ("C", "F"))
    return numpy.asarray(a, dtype, order, **options)


def asanyarray(a: Any, dtype: Any = None, order: str | None = None, **options: Any) -> Value:
    """`numpy.asanyarray`, also for traced values."""
    if holds_tracer(a):
        return array(a, dtype, copy=order in ("C", "F"))
    return numpy.asanyarray(a, dtype, order, **options)


def ascontiguousarray(a: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.ascontiguousarray`, also for traced values, which are copied."""
    return array(a, dtype, ndmin=1) if holds_tracer(a) else numpy.ascontiguousarray(a, dtype, **options)


def asfortranarray(a: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.asfortranarray`, also for traced values, which are copied."""
    return array(a, dtype, ndmin=1) if holds_tracer(a) else numpy.asfortranarray(a, dtype, **options)


def asarray_chkfinite(a: Any, dtype: Any = None, order: str | None = None) -> Value:
    """`numpy.asarray_chkfinite`, also for traced values with concrete values."""
    if not holds_tracer(a):
        return numpy.asarray_chkfinite(a, dtype, order)
    x = array(a, dtype, copy=None)
    numpy.asarray_chkfinite(x.concrete("asarray_chkfinite"))
    return x


# ---------------------------------------------------------------- filled and counted arrays


@explain_sizes
def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C", **options: Any) -> Value:
    """`numpy.full`, also for a traced value."""
    if not holds_tracer(fill_value):
        return numpy.full(shape, fill_value, dtype, order, **options)
    return elementwise.copy(broadcast_to(asarray(fill_value, dtype), shape))


def arange(start: Any = None, stop: Any = None, step: Any = 1, dtype: Any = None, **options: Any) -> Value:
    """`numpy.arange`; concrete values of a traced start and step give the length."""
    start, stop = (0, start) if stop is None else (0 if start is None else start, stop)
    if not holds_tracer((start, stop, step)):
        return numpy.arange(start, stop, step, dtype, **options)
    known = [x.concrete(SIZE) if isinstance(x, Tracer) else x for x in (start, stop, step)]
    count = max(0, math.ceil((known[1] - known[0]) / known[2]))
    points = add(start, multiply(step, numpy.arange(count)))
    return convert(points, numpy.result_type(*known) if dtype is None else dtype)


# ---------------------------------------------------------------- functions that search lists for traced values


take = look_for_tracers(numpy.take)
full_like = look_for_tracers(numpy.full_like)
pad = look_for_tracers(numpy.pad)
array_equal = look_for_tracers(numpy.array_equal)  # NumPy returns False for arguments that it cannot convert
array_equiv = look_for_tracers(numpy.array_equiv)

# ---------------------------------------------------------------- r_, c_


def _expand_slice(s: slice) -> Value:
    """`r_[start:stop:step]`, where a step of 5j means 5 points."""
    start, step = 0 if s.start is None else s.start, 1 if s.step is None else s.step
    if isinstance(step, complex):
        return NUMPY_FUNCTIONS[numpy.linspace](start, s.stop, int(abs(step)))
    return arange(start, s.stop, step)


def _make_concatenator(template: Any) -> Any:
    """`np.r_` or `np.c_`, also for traced values.

    NumPy concatenates the positions of the elements by its rules; a gather then takes the elements at those positions.
    """

    class Joining(type(template)):
        def __getitem__(self, key: Any) -> Value:
            items = key if isinstance(key, tuple) else (key,)
            items = [
                _expand_slice(i) if isinstance(i, slice) and holds_tracer((i.start, i.stop, i.step)) else i
                for i in items
            ]
            if not holds_tracer(items):
                return super().__getitem__(key)
            positions, parts, count = [], [], 0
            for item in items:
                if not isinstance(item, str):
                    x = super().__getitem__(item) if isinstance(item, slice) else asarray(item)
                    parts.append(ravel(x) if isinstance(x, Tracer) else x.ravel())
                    item = count if not x.shape else numpy.arange(count, count + x.size).reshape(x.shape)
                    count += x.size
                positions.append(item)
            return getitem(concatenate(parts), numpy.asarray(super().__getitem__(tuple(positions))))

    return Joining()


r_ = _make_concatenator(numpy.r_)
c_ = _make_concatenator(numpy.c_)

# ---------------------------------------------------------------- vectorize


class vectorize(numpy.vectorize):
    """`numpy.vectorize`, also for traced values: a loop; `md.vmap` is faster."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not holds_tracer((*args, *kwargs.values())):
            return super().__call__(*args, **kwargs)
        if self.signature is not None:
            raise TypeError("np.vectorize with a signature does not take traced values; use md.vmap")
        arguments = {k: v for k, v in (*enumerate(args), *kwargs.items()) if k not in self.excluded}
        arguments = {k: asarray(v) for k, v in arguments.items()}
        shape = numpy.broadcast_shapes(*[x.shape for x in arguments.values()])
        if 0 in shape:
            raise ValueError("np.vectorize cannot call the function: a traced value has size 0")
        arguments = {k: broadcast_to(x, shape) for k, x in arguments.items()}

        def element(index: tuple[int, ...]) -> Any:
            def item(k, v):
                return arguments[k][index] if k in arguments else v

            return self.pyfunc(*[item(k, v) for k, v in enumerate(args)], **{k: item(k, v) for k, v in kwargs.items()})

        return self._stack([element(index) for index in numpy.ndindex(shape)], shape)

    def _stack(self, results: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """Stack the elements' results to an array, or tuples to a tuple of arrays."""
        dtypes = self.otypes or [None]
        if isinstance(results[0], tuple):
            columns = list(zip(*results))
            dtypes = dtypes if len(dtypes) == len(columns) else [None] * len(columns)
            return tuple(reshape(array(list(c), d), shape) for c, d in zip(columns, dtypes))
        return reshape(array(list(results), dtypes[0]), shape)
