"""Set operations: NumPy finds the elements among concrete values, and a gather takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.ops.arrays import as_array
from minidiff.ops.discrete import make_concrete
from minidiff.ops.indexing import getitem
from minidiff.ops.shape import concatenate, ravel


def _elements_of(numpy_function: Callable, count: int, searched: int) -> None:
    """Declare a function of `count` arrays whose first or only result is some of their elements.

    Each element is taken from where it first occurs in the first `searched` arrays.
    """

    def function(*args: Value, **options: Any) -> Any:
        arrays = [ravel(as_array(x)) for x in args[:count]]
        values = [numpy.asarray(make_concrete(x, numpy_function)) for x in arrays]
        found = numpy_function(*values, *args[count:], **options)
        elements = found[0] if isinstance(found, tuple) else found
        distinct, first = numpy.unique(numpy.concatenate(values[:searched]), return_index=True)
        taken = getitem(concatenate(arrays[:searched]), first[numpy.searchsorted(distinct, elements)])
        if hasattr(found, "_replace"):
            return found._replace(values=taken)
        return (taken, *found[1:]) if isinstance(found, tuple) else taken

    implements(numpy_function)(function)


_elements_of(numpy.union1d, 2, 2)
_elements_of(numpy.intersect1d, 2, 1)
_elements_of(numpy.setdiff1d, 2, 1)
_elements_of(numpy.setxor1d, 2, 2)
for _function in (numpy.unique_values, numpy.unique_counts, numpy.unique_all, numpy.unique_inverse):
    _elements_of(_function, 1, 1)
