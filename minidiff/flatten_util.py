"""All arrays of a tree in one vector: `md.tree.ravel_pytree`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import as_named_value, as_values
from minidiff.values.dtypes import convert_array


def ravel_pytree(pytree: Any) -> tuple[Value, Callable[[Any], Any]]:
    """Flatten a tree of arrays to one vector; return the vector and the inverse function.

    The vector has the dtype to which the leaves promote, and float64 if there are none. The inverse takes a vector of
    its length, [n], and returns a tree like `pytree`, with the shapes and dtypes of its leaves. If all leaves have one
    dtype, the inverse takes vectors of any dtype and keeps it; otherwise it raises TypeError for another dtype than the
    vector's. It raises ValueError for another shape. Raise TypeError, with the path, for a non-array leaf.

    >>> flat, unravel = ravel_pytree({'w': numpy.ones((2, 2)), 'b': 3.0})
    >>> flat
    array([3., 1., 1., 1., 1.])
    >>> tree.map(numpy.shape, unravel(2 * flat))
    {'b': (), 'w': (2, 2)}
    """
    leaves, structure = tree.flatten(pytree)
    values = as_values("tree.ravel_pytree", leaves, lambda: tree.paths(structure, "pytree"))
    types = [typeof(x) for x in values]
    dtype = numpy.result_type(*[t.dtype for t in types]) if types else numpy.dtype(float)
    stops = [*itertools.accumulate(math.prod(t.shape) for t in types)]
    count = stops[-1] if stops else 0
    is_mixed = any(t.dtype != dtype for t in types)

    def unravel(flat: Any) -> Any:
        x = as_named_value(flat, "unravel: flat")
        given = typeof(x)
        if given.shape != (count,):
            raise ValueError(f"unravel takes the {count} numbers of {structure} as one vector, got {given}")
        if is_mixed and given.dtype != dtype:
            raise TypeError(f"unravel takes a vector of {dtype}, to which the leaves' dtypes promote, got {given}")
        pieces = []
        for t, stop in zip(types, stops):
            piece = x[stop - math.prod(t.shape) : stop].reshape(t.shape) if t.shape else x[stop - 1]
            pieces.append(convert_array(piece, t.dtype if is_mixed else given.dtype))
        return tree.unflatten(structure, pieces)

    rows = [numpy.ravel(x).astype(dtype) for x in values]
    return numpy.concatenate(rows) if rows else numpy.zeros(0), unravel
