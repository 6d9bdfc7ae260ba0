"""Tracers: the values of a traced program, which take its operations to the interpreter that traces it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from minidiff.core.states import ALL_INVARIANT, AxisStates
from minidiff.core.types import Typed
from minidiff.diagnostics.errors import LeakedTracerError, TracerError, leak_message

if TYPE_CHECKING:
    from minidiff.core.interpreter import Interpreter
    from minidiff.core.operation import Primitive


Value = Any  # an array, a scalar, or a Tracer of one
Function = TypeVar("Function", bound=Callable)


#: NumPy function -> its implementation on tracers. `implements` fills it.
NUMPY_FUNCTIONS: dict[Callable, Callable] = {}


#: Ufunc -> its operation, if the implementation only binds that.
OPERATIONS: dict[numpy.ufunc, Primitive] = {}


NO_PARAMS: dict = {}


def implements(*numpy_functions: Callable) -> Callable[[Function], Function]:
    """Decorate the implementation of these NumPy functions on tracers."""

    def register(function):
        for f in numpy_functions:
            NUMPY_FUNCTIONS[f] = function
            if isinstance(f, numpy.ufunc) and hasattr(function, "primitive"):
                OPERATIONS[f] = function.primitive
        return function

    return register


#: Uses of a concrete integer, as errors list them.
SIZE = "a size, an index of a list or range()"


class Tracer(Typed):
    """A value traced by an interpreter. It behaves like an array.

    It has the operators, indexing and methods of `numpy.ndarray` (attached in `minidiff/ops/operators.py`), and NumPy
    functions accept it (by `__array_ufunc__` and `__array_function__`, attached in `minidiff/numpy/dispatch.py`).
    """

    __slots__ = ("interpreter", "__weakref__")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    if TYPE_CHECKING:  # declare the attached operators to type checkers

        def __getattr__(self, name: str) -> Any: ...
        def _operator(self, *operands: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __divmod__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rdivmod__ = __pow__ = __rpow__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _operator
        __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _operator
        __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __getitem__ = __iter__ = __contains__ = _operator
        __setitem__ = __array__ = __array_ufunc__ = __array_function__ = __copy__ = __deepcopy__ = _operator
        __reduce_ex__ = _operator

    def __init__(self, interpreter: Interpreter):
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

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.type.size

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.type.nbytes

    def check_alive(self) -> None:
        """Raise LeakedTracerError if this value's transformation has ended."""
        if self.interpreter.ended:
            raise LeakedTracerError(leak_message(self))

    def check_outside(self) -> None:
        """Raise LeakedTracerError: no transformation is running, so this value has outlived its own."""
        raise LeakedTracerError(leak_message(self))

    def concrete(self, use: str) -> numpy.ndarray:
        """The concrete array for `use` (a Python `if`, say), or raise TracerError."""
        self.check_alive()
        raise TracerError(f"{use} needs a concrete value, but {self.type} is traced by {self.interpreter.name}")

    def __bool__(self) -> bool:
        return bool(self.concrete("a Python condition"))

    def number(self, use: str) -> Any:
        """The concrete value for `use` as a number that carries derivatives: `float()`, `complex()`."""
        return self.concrete(use)

    def __float__(self) -> float:
        return float(self.number("float()"))

    def __int__(self) -> int:
        return int(self.concrete("int()"))

    def __complex__(self) -> complex:
        return complex(self.number("complex()"))

    def __index__(self) -> int:
        return operator.index(self.concrete(SIZE))

    def item(self) -> Any:
        return numpy.asarray(self.concrete("item()")).item()

    def __format__(self, spec: str) -> str:
        return str(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d value")
        return self.shape[0]


def states_of(x: Value) -> AxisStates:
    """The states of `x` along mesh axes."""
    return x.states if isinstance(x, Tracer) else ALL_INVARIANT
