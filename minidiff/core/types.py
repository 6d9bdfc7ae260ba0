"""The type of a value: its shape, dtype and states along mesh axes, as in `f64[3,4]{i}`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

from minidiff.core.states import ALL_INVARIANT, NONE, AxisStates
from minidiff.values.aliasing import uniform
from minidiff.values.dtypes import ARRAYS, array_name, as_plain, as_shape, check_dtype


class Typed:
    """The base class of tracers and variables, which have a `.type`."""

    __slots__ = ()

    @property
    def type(self) -> ShapedArray:
        raise NotImplementedError


class ShapedArray:
    """The type of a value: its shape, dtype and states along mesh axes, as in `f64[3,4]{i}`.

    `variance` is the set of mesh axes along which the value may differ from rank to rank, `unreduced` those along which
    ranks hold partial sums, `reduced` those along which they hold the same value and its cotangent is unreduced.
    Along all others it is invariant. An `AxisStates` (see `minidiff.core.states`) may be given in place of the three.
    `sharding` is the sharding of an array that `spmd` distributes over a mesh, and None for every other value.
    Comparing types ignores it.

    >>> ShapedArray((3, 4), 'float32', {'i'}, unreduced={'j'}, reduced={'k'})
    f32[3,4]{i,U:j,R:k}
    """

    __slots__ = ("shape", "dtype", "states", "sharding")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        variance: Iterable[str] | AxisStates = NONE,
        sharding: Any = None,
        **axes: Iterable[str],
    ):
        self.shape = as_shape(shape)
        self.dtype = dtype if isinstance(dtype, numpy.dtype) else numpy.dtype(dtype)
        if self.dtype.itemsize == 2:
            check_dtype(self.dtype)  # from now on, operations look for 16-bit floats
        self.states = variance if isinstance(variance, AxisStates) else AxisStates.of(variance, **axes)
        self.sharding = sharding

    @property
    def variance(self) -> frozenset:
        return self.states.varying

    @property
    def unreduced(self) -> frozenset:
        return self.states.unreduced

    @property
    def reduced(self) -> frozenset:
        return self.states.reduced

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def cotangent(self) -> ShapedArray:
        """The type of the value's cotangent: where the one is unreduced, the other is reduced."""
        states = self.states
        if states is ALL_INVARIANT or not (states.unreduced or states.reduced):
            return self
        return self.update(states=self.states.cotangent(), sharding=self.sharding and self.sharding.cotangent())

    def update(self, *, states: AxisStates | None = None, **changes: Any) -> ShapedArray:
        """Return a copy with other fields, and no sharding unless that is given."""
        axes = dict(zip(("variance", "unreduced", "reduced"), states or self.states))
        return ShapedArray(**{"shape": self.shape, "dtype": self.dtype, **axes, **changes})

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShapedArray)
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self.states == other.states
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.states))

    def __repr__(self) -> str:
        return array_name(self.shape, self.dtype) + (repr(self.states) if self.states != ALL_INVARIANT else "")


@functools.lru_cache(maxsize=4096)
def array_type(shape: tuple[int, ...], dtype: numpy.dtype) -> ShapedArray:
    """Return the type of plain arrays of a shape and dtype: a cached, shared object."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype, ALL_INVARIANT)


class Var(Typed):
    """A variable on a tape: a type and an identity."""

    __slots__ = ("type",)
    type: ShapedArray

    def __init__(self, type: ShapedArray):
        self.type = type


def typeof(x: Any) -> ShapedArray:
    """Return the type of an array, a scalar, a tracer or a variable.

    >>> typeof(numpy.zeros((3, 4)))
    f64[3,4]
    """
    if type(x) in ARRAYS:
        return array_type(x.shape, x.dtype)
    if isinstance(x, Typed):
        return x.type
    if isinstance(x, ShapedArray):
        return x
    x = numpy.asarray(as_plain(x))
    return array_type(x.shape, x.dtype)


PYTHON_NUMBERS = (bool, int, float, complex)


def operand_type(x: Any) -> Any:
    """Return the type of an operand, or the Python number itself, which promotes weakly."""
    return x if type(x) in PYTHON_NUMBERS else typeof(x)


def as_plain_operand(x: Any) -> Any:
    """Apply `as_plain` to an operand, which may also be a tracer or a type; make lists of numbers an array."""
    if isinstance(x, (list, tuple, range)):
        for item in x if type(x) is not range else ():
            as_plain_operand(item)
        return numpy.asarray(x)
    return x if isinstance(x, (Typed, ShapedArray)) else as_plain(x)


def zeros_like(x: Any) -> numpy.ndarray:
    """Return a constant zero with the shape and dtype of a value or type."""
    t = typeof(x)
    return uniform(0, t.shape, t.dtype)
