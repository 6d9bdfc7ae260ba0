"""The functions of NumPy's namespace that NumPy does not hand over when their argument is a traced value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core import Tracer, Value
from minidiff.ops import indexing, rearranging
from minidiff.ops.elementwise import convert
from minidiff.ops.shape import as_array, holds_tracer
from minidiff.ops.updates import at

__all__ = ["array", "asanyarray", "asarray", "ascontiguousarray", "asfortranarray", "at", "full", "full_like"]
__all__ += ["require", "take"]


def array(x: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.array`, of nested lists that may hold traced values."""
    if holds_tracer(x):
        x = as_array(x)
        return x if dtype is None else convert(x, dtype)
    return numpy.array(x, dtype, **options)


def _conversion(name: str) -> Callable:
    numpy_function = getattr(numpy, name)

    def function(x: Any, dtype: Any = None, *args: Any, **options: Any) -> Value:
        if holds_tracer(x):
            return array(x, dtype)
        return numpy_function(x, dtype, *args, **options)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`numpy.{name}`, of traced values too, which have no layout in memory."
    return function


asarray = _conversion("asarray")
asanyarray = _conversion("asanyarray")
ascontiguousarray = _conversion("ascontiguousarray")
asfortranarray = _conversion("asfortranarray")
require = _conversion("require")


def take(x: Any, indices: Any, axis: int | None = None, **options: Any) -> Value:
    """`numpy.take`, also of plain arrays at traced indices."""
    if isinstance(x, Tracer) or isinstance(indices, Tracer):
        return indexing.take(x, indices, axis, **options)
    return numpy.take(x, indices, axis, **options)


def full(shape: Any, fill_value: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.full`, also of a traced value."""
    if isinstance(fill_value, Tracer):
        return rearranging.full(shape, fill_value, dtype)
    return numpy.full(shape, fill_value, dtype, **options)


def full_like(x: Any, fill_value: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.full_like`, also of a traced value."""
    if isinstance(x, Tracer) or isinstance(fill_value, Tracer):
        return rearranging.full_like(x, fill_value, dtype, **options)
    return numpy.full_like(x, fill_value, dtype, **options)
