"""Arguments as arrays: numbers, and nested lists that may hold traced values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.tracer import Tracer, Value, unwrap_weak
from minidiff.core.types import as_plain_operand


def as_array(x: Any) -> Value:
    """Convert a number or nested lists, which may hold traced values, to an array."""
    if isinstance(x, Tracer):
        return unwrap_weak(x)
    if isinstance(x, (list, tuple)) and holds_tracer(x):
        parts: list[Value] = []
        shape = _collect(x, parts)
        return numpy.concatenate(parts).reshape(shape)
    x = as_plain_operand(x)
    return x if hasattr(x, "dtype") else numpy.asarray(x)


def holds_tracer(x: Any) -> bool:
    """Return whether x is a traced value, or a nested list that contains one."""
    return isinstance(x, Tracer) or (isinstance(x, (list, tuple)) and any(map(holds_tracer, x)))


def lists_as_arrays(values: Iterable[Any]) -> list[Any] | None:
    """Convert the lists among the values to arrays; return None if there are none.

    Operations call this only after a list has caused an error, so that calls with arrays alone need no search.
    """
    values = list(values)
    if not any(isinstance(x, (list, tuple, range)) for x in values):
        return None
    return list(map(list_as_array, values))


def list_as_array(x: Any) -> Any:
    """Convert a list or tuple to an array; return any other argument unchanged."""
    return as_array(x) if isinstance(x, (list, tuple, range)) else x


def _collect(x: Any, parts: list[Value]) -> tuple[int, ...]:
    """Append the elements of x to `parts`, flattened, and return the shape of x."""
    if isinstance(x, (list, tuple)) and holds_tracer(x):
        shapes = [_collect(item, parts) for item in x]
        if len(set(shapes)) > 1:
            raise ValueError(f"array: the elements of a list must have one shape, got {' and '.join(map(str, shapes))}")
        return (len(x), *shapes[0])
    x = as_array(x)
    parts.append(x.reshape((x.size,)))
    return x.shape


# ---------------------------------------------------------------- functions of values


def make_concrete(x: Any, numpy_function: Callable) -> Any:
    """Replace the tracers in `x`, also in lists and tuples, by their concrete arrays.

    Raises TracerError, which names the function, for a tracer without a concrete array: on a tape, or under vmap.
    """
    use = f"np.{numpy_function.__name__}"
    return tree.map(lambda leaf: leaf.concrete(use) if isinstance(leaf, Tracer) else leaf, x)
