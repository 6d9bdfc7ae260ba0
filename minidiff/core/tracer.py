"""Tracers: the values of a traced program, which take its operations to the interpreter that traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy

from minidiff.core.states import ALL_INVARIANT, AxisStates
from minidiff.core.types import ShapedArray, Typed
from minidiff.errors import LeakedTracerError, TracerError, leak_message
from minidiff.values.operators import ArrayOperators

Value = Any  # an array, a scalar, or a Tracer of one
Function = TypeVar("Function", bound=Callable)

#: NumPy function -> its implementation on tracers. `implements` fills it.
NUMPY_FUNCTIONS: dict[Callable, Callable] = {}

#: Ufunc -> its operation, if the implementation only binds that.
OPERATIONS: dict[numpy.ufunc, Any] = {}


def implements(*numpy_functions: Callable) -> Callable[[Function], Function]:
    """Decorate the implementation of these NumPy functions on tracers."""

    def register(function):
        for f in numpy_functions:
            NUMPY_FUNCTIONS[f] = function
            if isinstance(f, numpy.ufunc) and hasattr(function, "primitive"):
                OPERATIONS[f] = function.primitive
        return function

    return register


class Tracer(Typed, ArrayOperators):
    """A value traced by an interpreter. It behaves like an array.

    It has the operators, indexing and methods of `numpy.ndarray` (attached in `minidiff/ops/operators.py`), and NumPy
    functions accept it (by `__array_ufunc__` and `__array_function__`, attached in `minidiff/numpy/dispatch.py`).
    """

    __slots__ = ("interpreter", "__weakref__")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, interpreter: Any):
        self.interpreter = interpreter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> numpy.dtype:
        return self.type.dtype

    @property
    def states(self) -> AxisStates:
        return self.type.states

    def check_alive(self) -> None:
        """Raise LeakedTracerError if this value's transformation has ended."""
        if self.interpreter.ended:
            raise LeakedTracerError(leak_message(self))

    def check_outside(self) -> None:
        """Raise LeakedTracerError: no transformation is running, so this value has outlived its own."""
        raise LeakedTracerError(leak_message(self))

    def concrete(self, use: str) -> numpy.ndarray:
        """Return the concrete array for `use` (a Python `if`, say), or raise TracerError."""
        self.check_alive()
        raise TracerError(f"{use} needs a concrete value, but {self.type} is traced by {self.interpreter.name}")

    def number(self, use: str) -> Any:
        """Return the concrete value for `use` as a number that carries derivatives: `float()`, `complex()`."""
        return self.concrete(use)


class WeakTracer(Tracer):
    """A traced Python number, which wraps the tracer of its value.

    It promotes as Python numbers do in NumPy (NEP 50). Combined with an array it takes the array's precision (2.0 with
    float32 is float32); a Python operator on weak numbers gives a weak number (`minidiff/ops/operators.py`); anything
    else makes it float64, int64 or complex128. Only the user's function sees it: interpreters and tapes get its
    `value`, converted (`Primitive.strong`).
    """

    __slots__ = ("value", "is_bool")
    __hash__ = object.__hash__
    interpreter = property(lambda self: self.value.interpreter)

    def __init__(self, value: Tracer, is_bool: bool = False):
        self.value = value
        self.is_bool = is_bool

    @property
    def type(self) -> ShapedArray:
        return self.value.type

    def concrete(self, use: str) -> Any:
        return self.value.concrete(use)

    def number(self, use: str) -> Any:
        return self.value.number(use)


def unwrap_weak(x: Any) -> Any:
    """Unwrap a `WeakTracer`; return anything else unchanged."""
    return x.value if type(x) is WeakTracer else x


def states_of(x: Value) -> AxisStates:
    """Return the states of `x` along mesh axes."""
    return x.states if isinstance(x, Tracer) else ALL_INVARIANT
