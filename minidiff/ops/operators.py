"""Python's operators, and the attributes and methods of `numpy.ndarray`, on tracers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy

from minidiff.core import Tracer, Value
from minidiff.ops import elementwise, indexing, linalg, reduction, shape, sorting, updates
from minidiff.ops.discrete import nonzero

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
    return args[0] if len(args) == 1 and not isinstance(args[0], (int, numpy.integer)) else args


def _transpose(x: Value, *axes: Any) -> Value:
    return shape.transpose(x, _as_arguments(axes) if axes else None)


def _method(name: str) -> Callable:
    """A method that is NumPy's function of that name."""
    return lambda x, *args, **kwargs: getattr(numpy, name)(x, *args, **kwargs)


def _in_place(name: str, instead: str) -> Callable:
    def refuse(x: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"x.{name}() would write into a traced value ({x.type}); instead, {instead}")

    return refuse


def _view(x: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"x.view() would read the bytes of a traced value ({x.type}) as something else; convert it with .astype"
    )


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
    "prod": reduction.prod,
    "cumsum": reduction.cumsum,
    "cumprod": reduction.cumprod,
    "var": reduction.var,
    "std": reduction.std,
    "all": reduction.all,
    "any": reduction.any,
    "nonzero": nonzero,
    "argsort": sorting.argsort,
    "argpartition": sorting.argpartition,
    "searchsorted": sorting.searchsorted,
    "sort": sorting.in_place("sort"),
    "partition": sorting.in_place("partition"),
    "dot": linalg.dot,
    "__iter__": shape.iterate,
    "ravel": shape.ravel,
    "flatten": shape.ravel,
    "squeeze": shape.squeeze,
    "swapaxes": shape.swapaxes,
    "reshape": lambda x, *dims, order="C", copy=None: shape.reshape(x, _as_arguments(dims), order),
    "transpose": _transpose,
    "compress": lambda x, condition, axis=None: indexing.compress(condition, x, axis),
    "tolist": lambda x: numpy.asarray(x.concrete("tolist()")).tolist(),
    "view": _view,
    "fill": _in_place("fill", "x = np.full_like(x, value), or x = x.at[...].set(value)"),
    "put": _in_place("put", "x = x.at[index].set(values)"),
    "resize": _in_place("resize", "x = np.resize(x, shape)"),
    "astype": lambda x, dtype: elementwise.convert(x, dtype),
    "copy": lambda x, order="C": x,
    **{name: _method(name) for name in ("choose", "diagonal", "repeat", "take")},
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
    Tracer.mT = property(shape.matrix_transpose, doc="The transposed matrices: the last two axes exchanged.")
    Tracer.flat = property(shape.ravel, doc="All elements in one dimension, to be read.")
    Tracer.at = property(updates.At, doc="`x.at[index].set(v)`: x with v at index; .add, .multiply and more likewise.")


_attach()
