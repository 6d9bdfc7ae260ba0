"""Set operations: concrete values select the elements, and a gather takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.ops.arrays import as_array
from minidiff.ops.discrete import concrete
from minidiff.ops.indexing import getitem
from minidiff.ops.shape import concatenate


def _line(x: Any) -> Value:
    return numpy.ravel(as_array(x))


def _first(values: numpy.ndarray) -> numpy.ndarray:
    """The index of each distinct value's first occurrence, in order of the values."""
    return numpy.unique(values, return_index=True)[1]


@implements(numpy.union1d)
def union1d(ar1: Value, ar2: Value) -> Value:
    """`numpy.union1d`: sorted distinct elements of both, preferring the first."""
    both = concatenate([_line(ar1), _line(ar2)], 0)
    return getitem(both, _first(numpy.asarray(concrete(both, numpy.union1d))))


@implements(numpy.intersect1d)
def intersect1d(ar1: Value, ar2: Value, assume_unique: bool = False, return_indices: bool = False) -> Any:
    """`numpy.intersect1d`: sorted distinct elements of the first in the second."""
    x, values = _line(ar1), [numpy.asarray(concrete(_line(y), numpy.intersect1d)) for y in (ar1, ar2)]
    _, first, second = numpy.intersect1d(values[0], values[1], assume_unique=assume_unique, return_indices=True)
    common = getitem(x, first)
    return (common, first, second) if return_indices else common


@implements(numpy.setdiff1d)
def setdiff1d(ar1: Value, ar2: Value, assume_unique: bool = False) -> Value:
    """`numpy.setdiff1d`: sorted distinct elements of the first not in the second."""
    x, (one, two) = _line(ar1), [numpy.asarray(concrete(_line(y), numpy.setdiff1d)) for y in (ar1, ar2)]
    index = numpy.arange(one.size) if assume_unique else _first(one)
    return getitem(x, index[~numpy.isin(one[index], two)])


@implements(numpy.setxor1d)
def setxor1d(ar1: Value, ar2: Value, assume_unique: bool = False) -> Value:
    """`numpy.setxor1d`: sorted distinct elements in exactly one of the two."""
    both = concatenate([_line(ar1), _line(ar2)], 0)
    one, two = [numpy.asarray(concrete(_line(y), numpy.setxor1d)) for y in (ar1, ar2)]
    index = numpy.concatenate([_first(one), one.size + _first(two)])
    _, first, counts = numpy.unique(numpy.concatenate([one, two])[index], return_index=True, return_counts=True)
    return getitem(both, index[first[counts == 1]])


def _unique(numpy_function: Callable) -> None:
    """Declare a NumPy function whose `values` are the distinct elements."""

    def function(x: Value) -> Any:
        x = _line(x)
        values = numpy.asarray(concrete(x, numpy_function))
        found = numpy_function(values)
        distinct = getitem(x, _first(values))
        return found._replace(values=distinct) if hasattr(found, "_replace") else distinct

    implements(numpy_function)(function)


for _function in (numpy.unique_values, numpy.unique_counts, numpy.unique_all, numpy.unique_inverse):
    _unique(_function)
