"""The functions of NumPy's namespace that NumPy does not hand over when their argument is a traced value."""

from __future__ import annotations

from typing import Any

import numpy

from minidiff.core import Tracer, Value
from minidiff.ops import indexing
from minidiff.ops.elementwise import convert
from minidiff.ops.shape import stack


def array(x: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.array`, of nested lists that may hold traced values."""
    if isinstance(x, (list, tuple)) and _holds_tracer(x):
        x = stack([array(item) for item in x])
    if isinstance(x, Tracer):
        return x if dtype is None else convert(x, dtype)
    return numpy.array(x, dtype, **options)


def asarray(x: Any, dtype: Any = None, **options: Any) -> Value:
    """`numpy.asarray`, of traced values too."""
    if isinstance(x, (list, tuple, Tracer)):
        return array(x, dtype, **options)
    return numpy.asarray(x, dtype, **options)


def take(x: Any, indices: Any, axis: int | None = None, **options: Any) -> Value:
    """`numpy.take`, also of plain arrays at traced indices."""
    if isinstance(x, Tracer) or isinstance(indices, Tracer):
        return indexing.take(x, indices, axis, **options)
    return numpy.take(x, indices, axis, **options)


def _holds_tracer(x: Any) -> bool:
    return isinstance(x, Tracer) or (isinstance(x, (list, tuple)) and any(map(_holds_tracer, x)))
