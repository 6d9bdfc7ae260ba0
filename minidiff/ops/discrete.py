"""Functions with integer or boolean results, which carry no derivative.

Functions whose result shape follows from the argument types are primitives (`Discrete`). The others are applied
to the concrete values of tracers; they are listed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import typeof
from minidiff.ops.base import General, no_tangent
from minidiff.ops.dimensions import gather

# ---------------------------------------------------------------- operations


class Discrete(General):
    """A primitive without a derivative."""

    def __init__(self, name: str, impl: Callable, shape_rule: Callable, *rules, **others):
        super().__init__(name, impl, shape_rule, no_tangent, *rules, **others)


def batch_sequentially(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """The batching rule of a primitive that NumPy cannot apply to a batch."""
    return sequential_map_p.bind(*args, of=primitive, along=tuple(batched), params=params)


def _sequential_map_impl(*args, of, along, params):
    size = next(len(x) for x, b in zip(args, along) if b)
    results = [of.impl(*[x[i] if b else x for x, b in zip(args, along)], **params) for i in range(size)]
    if results:
        return numpy.stack(results)
    shape, dtype = _sequential_map_shape(*map(typeof, args), of=of, along=along, params=params)
    return numpy.zeros(shape, dtype)


def _sequential_map_shape(*types, of, along, params):
    size = next(t.shape[0] for t, b in zip(types, along) if b)
    shape, dtype = of.shape_rule(*[t.update(shape=t.shape[1:]) if b else t for t, b in zip(types, along)], **params)
    return (size, *shape), dtype


#: Applies the primitive `of` to one element after the other; `along` says which operands are batched.
sequential_map_p = Discrete(
    "sequential_map", _sequential_map_impl, _sequential_map_shape, batch_sequentially, sharding=gather
)


# ---------------------------------------------------------------- functions of values


def make_concrete(x: Any, numpy_function: Callable) -> Any:
    """Replace the tracers in `x`, also in lists and tuples, by their concrete arrays.

    Raises TracerError, which names the function, for a tracer without a concrete array: on a tape, or under vmap.
    """
    use = f"np.{numpy_function.__name__}"
    return tree.map(lambda leaf: leaf.concrete(use) if isinstance(leaf, Tracer) else leaf, x)


def of_values(numpy_function: Callable) -> Callable:
    """Register a NumPy function, without derivative, of tracers' concrete arrays."""

    def function(*args: Any, **options: Any) -> Any:
        return numpy_function(*make_concrete(args, numpy_function), **make_concrete(options, numpy_function))

    function.__name__ = function.__qualname__ = numpy_function.__name__
    function.__doc__ = f"`numpy.{numpy_function.__name__}` of the concrete values of tracers; the result is not traced."
    return implements(numpy_function)(function)


nonzero, flatnonzero, argwhere = map(of_values, (numpy.nonzero, numpy.flatnonzero, numpy.argwhere))
