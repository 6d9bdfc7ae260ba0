"""Python's operators, and the attributes and methods of `numpy.ndarray`, on tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minidiff.core import Tracer, Value
from minidiff.ops import elementwise, indexing, linalg, reduction, shape

_BINARY: dict[str, Callable] = {
    "add": elementwise.add,
    "sub": elementwise.subtract,
    "mul": elementwise.multiply,
    "truediv": elementwise.divide,
    "floordiv": elementwise.floor_divide,
    "mod": elementwise.remainder,
    "matmul": linalg.matmul,
}
_COMPARISONS: dict[str, Callable] = {
    "eq": elementwise.equal,
    "ne": elementwise.not_equal,
    "lt": elementwise.less,
    "le": elementwise.less_equal,
    "gt": elementwise.greater,
    "ge": elementwise.greater_equal,
}
_UNARY: dict[str, Callable] = {"neg": elementwise.negative, "abs": elementwise.absolute}


def _power(x: Value, y: Value) -> Value:
    return elementwise.square(x) if type(y) is int and y == 2 else elementwise.power(x, y)


def _as_arguments(args: tuple) -> Any:
    """`x.reshape(2, 3)` and `x.reshape((2, 3))` are the same."""
    return args[0] if len(args) == 1 and not isinstance(args[0], int) else args


_METHODS: dict[str, Callable] = {
    "__pow__": _power,
    "__rpow__": lambda x, y: elementwise.power(y, x),
    "__pos__": lambda x: x,
    "__getitem__": indexing.getitem,
    "sum": reduction.sum,
    "mean": reduction.mean,
    "max": reduction.max,
    "min": reduction.min,
    "argmax": reduction.argmax,
    "argmin": reduction.argmin,
    "dot": linalg.dot,
    "trace": linalg.trace,
    "ravel": shape.ravel,
    "flatten": shape.ravel,
    "squeeze": shape.squeeze,
    "swapaxes": shape.swapaxes,
    "reshape": lambda x, *dims: shape.reshape(x, _as_arguments(dims)),
    "transpose": lambda x, *axes: shape.transpose(x, _as_arguments(axes) if axes else None),
    "astype": lambda x, dtype: elementwise.convert(x, dtype),
    "copy": lambda x: x,
}


def _attach() -> None:
    for name, function in _BINARY.items():
        setattr(Tracer, f"__{name}__", function)
        setattr(Tracer, f"__r{name}__", lambda x, y, f=function: f(y, x))
    for name, function in (_COMPARISONS | _UNARY).items():
        setattr(Tracer, f"__{name}__", function)
    for name, method in _METHODS.items():
        setattr(Tracer, name, method)
    Tracer.T = property(shape.transpose, doc="The transpose: axes in reverse.")


_attach()
