"""Python's operators, and `numpy.ndarray`'s attributes and methods, on tracers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy

from minidiff.core.tracer import Tracer, Value, WeakTracer
from minidiff.errors import CONDITION, SIZE, LeakedTracerError, TracerError, VarianceError, location
from minidiff.errors.other_libraries import scipy_function
from minidiff.errors.tracebacks import hide_own_frames, hide_own_frames_of_lambda, trim_traceback
from minidiff.inputs.arguments import WEAK_TYPES, as_weak
from minidiff.ops import composed, elementwise, indexing, linalg, reduction, shape, sorting, statistics, updates
from minidiff.values.dtypes import is_differentiable

_BINARY: dict[str, Callable] = {
    "add": elementwise.add,
    "sub": elementwise.subtract,
    "mul": elementwise.multiply,
    "truediv": elementwise.divide,
    "floordiv": elementwise.floor_divide,
    "mod": elementwise.remainder,
    "divmod": hide_own_frames(composed.divmod),
    "and": elementwise.bitwise_and,
    "or": elementwise.bitwise_or,
    "xor": elementwise.bitwise_xor,
    "lshift": elementwise.left_shift,
    "rshift": elementwise.right_shift,
    "matmul": hide_own_frames(linalg.matmul),
}
_COMPARISONS: dict[str, Callable] = {
    "eq": elementwise.equal,
    "ne": elementwise.not_equal,
    "lt": elementwise.less,
    "le": elementwise.less_equal,
    "gt": elementwise.greater,
    "ge": elementwise.greater_equal,
}
_UNARY: dict[str, Callable] = {
    "neg": elementwise.negative,
    "pos": hide_own_frames(composed.positive),
    "abs": elementwise.absolute,
    "invert": elementwise.invert,
}
#: Exponents for which NumPy's `**` also calls another function.
_POWERS: dict[float, Callable] = {2: elementwise.square, 0.5: elementwise.sqrt, -1: elementwise.reciprocal}


@hide_own_frames
def _power(x: Value, y: Value) -> Value:
    if type(y) in (int, float) and y in _POWERS:
        # NumPy squares an array of booleans as int8, and a scalar as an integer.
        square_of_any = y == 2 and type(y) is int and (x.shape or x.dtype.kind != "b")
        if square_of_any or is_differentiable(x.dtype):
            return _POWERS[y](x)
    return elementwise.power(x, y)


def _round(x: Value, ndigits: int | None = None) -> Value:
    """`round(x)` of a number is an integer, as in Python."""
    y = composed.round(x, ndigits or 0)
    return elementwise.convert(y, int) if ndigits is None and not x.shape and x.dtype.kind != "c" else y


def _conjugate(x: Value) -> Value:
    """Return the conjugate of complex numbers, and others unchanged; `numpy.conjugate` turns booleans into integers."""
    return elementwise.conjugate(x) if x.dtype.kind == "c" else x


def _as_arguments(args: tuple) -> Any:
    """Accept `x.reshape(2, 3)` as well as `x.reshape((2, 3))`."""
    return args[0] if len(args) == 1 and not isinstance(args[0], (int, numpy.integer)) else args


def _method(name: str) -> Callable:
    """Return a method that calls the NumPy function of the same name."""
    return lambda x, *args, **kwargs: getattr(numpy, name)(x, *args, **kwargs)


def _refusing(message: str, error: type[Exception] = TypeError) -> Callable:
    """Return a method that raises an error; the message names the type of the value as `{}`."""

    def refuse(x: Tracer, *args: Any, **kwargs: Any) -> NoReturn:
        raise error(message.format(x.type))

    return refuse


def _in_place(name: str, instead: str) -> Callable:
    return _refusing(f"x.{name}() would write into a traced value ({{}}); instead, {instead}")


def _missing_attribute(x: Tracer, name: str) -> str:
    """Return the message that an attribute is missing, without the name of the class."""
    written = name.startswith("__i") and hasattr(type(x), f"__{name[3:]}")  # `__iadd__`, beside `__add__`
    advice = "; it is immutable: x += y makes a new value, as x = x + y does" if written else ""
    return f"a traced value has no attribute {name!r}{advice}"


def _explains_assignment(convert: Callable) -> Callable:
    """Explain a failed conversion to a plain number or array in the user's terms if the user wrote `y[i] = x`."""

    @functools.wraps(convert)
    @hide_own_frames
    def converted(x: Tracer, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(x, *args, **kwargs)
        except (TracerError, VarianceError) as error:
            if isinstance(error, LeakedTracerError):
                raise
            called = scipy_function()
            if not called and not location.assigns_an_item():
                raise
        if called:
            raise TracerError(f"{called[0]} is not supported on traced values ({x.type}): {called[1]}")
        raise TracerError(
            f"y[i] = x cannot write a traced value x ({x.type}) into a plain array y. Make a new array instead: "
            "y = np.at(y)[i].set(x), where np is minidiff.numpy; or build it from a list that may hold traced "
            "values: np.stack([x, ...]), or np.array([x, ...])"
        )

    return converted


def _as_array(x: Tracer, dtype: Any = None, copy: Any = None) -> numpy.ndarray:
    x.check_alive()
    if location.called_by("_matmul_dispatch"):  # of a sparse matrix of SciPy, which leaves A @ x to x.__rmatmul__ then
        return numpy.array(None)
    if dtype is not None:  # as in np.float32(x), and in np.asarray(x, dtype)
        return _as_plain(x, numpy.dtype(dtype))
    if x.dtype.kind in "biu":  # no derivative to lose
        raise TracerError(
            f"a traced value ({x.type}) cannot become a plain NumPy array: in {x.interpreter.name} it has no value. "
            "To index a plain array a with it, write np.take(a, x), or np.asarray(a)[x] in a list of indices; to build "
            "an array out of traced values, np.array or np.stack, where np is minidiff.numpy."
        )
    raise TracerError(
        f"a traced value ({x.type}) cannot become a plain NumPy array: its derivative would be lost. "
        "Call functions on it directly; to build an array out of traced values, use minidiff.numpy.array or "
        "np.stack; to index a plain array with it, minidiff.numpy.take. Other kinds of arrays convert their right "
        "operand: write m.filled(value) for a masked one, table.to_numpy(), sparse.toarray()."
    )


def _as_plain(x: Tracer, dtype: numpy.dtype) -> numpy.ndarray:
    """Convert to an integer or boolean array; TracerError for other dtypes."""
    why = "its derivative would be lost"
    if dtype.kind in "biu":
        try:
            return numpy.asarray(x.concrete(f"a plain array of dtype {dtype}")).astype(dtype)
        except TracerError:
            why = f"in {x.interpreter.name} it has no value"
    raise TracerError(
        f"a traced value ({x.type}) cannot become a plain NumPy array of dtype {dtype}: {why}. To convert it, "
        f"write x.astype({dtype.name!r}); to build an array, use minidiff.numpy.array or np.stack."
    )


def _len(x: Tracer) -> int:
    if not x.shape:
        raise TypeError("len() of a 0-d value")
    return x.shape[0]


#: How a traced value becomes a plain number or array, where it has a concrete value.
_CONVERSIONS: dict[str, Callable] = {
    "__bool__": lambda x: bool(x.concrete(CONDITION)),
    "__float__": lambda x: float(x.number("float()")),
    "__int__": lambda x: int(x.concrete("int()")),
    "__complex__": lambda x: complex(x.number("complex()")),
    "__index__": lambda x: operator.index(x.concrete(SIZE)),
    "__array__": _as_array,
}
_SIZES: dict[str, Callable] = {
    "ndim": lambda x: len(x.shape),
    "size": lambda x: x.type.size,
    "itemsize": lambda x: x.dtype.itemsize,
    "nbytes": lambda x: x.type.nbytes,
}
#: Methods that are functions of the same name, by the module of the functions.
_SAME_NAMES = {
    composed: "astype clip copy round",
    linalg: "dot trace",
    reduction: "all any argmax argmin cumprod cumsum max mean min prod sum",
    shape: "ravel squeeze swapaxes",
    sorting: "argpartition argsort searchsorted",
    statistics: "std var",
}
_METHODS: dict[str, Callable] = {
    "__copy__": lambda x: x,  # it is immutable
    "__deepcopy__": lambda x, memo: x,
    "__reduce_ex__": _refusing(
        "a traced value ({}) cannot be pickled: it is only valid within its transformation. "
        "Return it from the function, and pickle the result; or, for its plain number, md.stop_gradient(x).item()",
        TracerError,
    ),
    "__setitem__": _refusing(
        "a traced value ({}) cannot be written into: x[i] = v would change a value that is "
        "already in use. Make a new value instead: x = x.at[i].set(v), and for x[i] += v, x = x.at[i].add(v); or "
        "x = minidiff.numpy.at(x)[i].set(v), which takes plain arrays, too."
    ),
    "__format__": lambda x, spec: str(x),
    "__len__": _len,
    "__round__": _round,
    "__rpow__": lambda x, y: elementwise.power(y, x),
    "__getitem__": indexing.getitem,
    **{name: getattr(module, name) for module, names in _SAME_NAMES.items() for name in names.split()},
    "sort": _in_place("sort", "x = np.sort(x)"),
    "partition": _in_place("partition", "x = np.partition(x, kth)"),
    "__iter__": shape.iterate,
    "__contains__": lambda x, value: bool(reduction.any(elementwise.equal(x, value))),
    "flatten": lambda x, order="C": shape.ravel(elementwise.copy(x), order),
    "reshape": lambda x, *dims, order="C", copy=None: shape.reshape(x, _as_arguments(dims), order),
    "transpose": lambda x, *axes: shape.transpose(x, _as_arguments(axes) if axes else None),
    "compress": lambda x, condition, axis=None: indexing.compress(condition, x, axis),
    "item": lambda x: numpy.asarray(x.number("item()")).item(),
    "tolist": lambda x: numpy.asarray(x.number("tolist()")).tolist(),
    "view": _refusing("x.view() would read the bytes of a traced value ({}) as another type; convert it with .astype"),
    "fill": _in_place("fill", "x = np.full_like(x, value), or x = x.at[...].set(value)"),
    "put": _in_place("put", "x = x.at[index].set(values)"),
    "resize": _in_place("resize", "x = np.resize(x, shape)"),
    **{name: _method(name) for name in ("choose", "diagonal", "nonzero", "repeat", "take")},
    "conj": _conjugate,
    "conjugate": _conjugate,
}


def _of_number(function: Callable, arithmetic: bool, name: str = "") -> Callable:
    """Return an operator that returns a Python number for (traced) Python numbers.

    As in Python, arithmetic treats a boolean as an integer. With an array, the operator is that of any traced value. A
    class of these may have a quicker one, of the same name.
    """

    @hide_own_frames_of_lambda
    def unary(x: WeakTracer) -> Value:
        value = elementwise.convert(x.value, int) if arithmetic and x.is_bool else x.value
        return as_weak(getattr(type(value), name, function)(value))

    def binary(x: WeakTracer, y: Value) -> Value:
        try:  # as `hide_own_frames`, but 4 % faster on gradients of numbers
            operate = getattr(type(x.value), name)
            if type(y) is numpy.float64 and x.dtype.kind == "c" and not name.startswith("__r"):
                y = float(y)  # as `complex.__add__` does, which takes it for the Python float that it is
            if type(y) not in WEAK_TYPES:
                return operate(x, y)
            second = y.value if type(y) is WeakTracer else y
            if arithmetic and x.is_bool:
                out = function(elementwise.convert(x.value, int), second)
            else:
                out = operate(x.value, second)
            return WeakTracer(out) if arithmetic and isinstance(out, Tracer) else as_weak(out)
        except BaseException as error:
            trim_traceback(error)
            raise

    return unary if function in (*_UNARY.values(), *_PARTS.values()) else binary


#: Attributes of a Python number that are Python numbers too.
_PARTS = {"real": elementwise.real, "imag": elementwise.imag, "conjugate": elementwise.conjugate}


def _attach_to_numbers() -> None:
    for name in (*_BINARY, *_COMPARISONS, *_UNARY, "pow"):
        arithmetic = name not in ("and", "or", "xor", *_COMPARISONS)
        for attribute in {f"__{name}__", f"__r{name}__"} & vars(Tracer).keys():
            setattr(WeakTracer, attribute, _of_number(vars(Tracer)[attribute], arithmetic, attribute))
    WeakTracer.__round__ = lambda x, ndigits=None: as_weak(
        elementwise.convert(composed.round(x.value), int) if ndigits is None else composed.round(x.value, ndigits)
    )
    WeakTracer.__divmod__ = lambda x, y: (x // y, x % y)
    WeakTracer.__rdivmod__ = lambda x, y: (y // x, y % x)
    WeakTracer.conjugate = _of_number(_PARTS["conjugate"], True)
    for name, write in {"__repr__": repr, "__str__": str, "__format__": format}.items():
        setattr(WeakTracer, name, lambda x, *spec, write=write: write(x.value, *spec))
    for name in ("real", "imag"):
        setattr(WeakTracer, name, property(_of_number(_PARTS[name], True), doc=getattr(Tracer, name).__doc__))


def _reverse_operands(function: Callable) -> Callable:
    return hide_own_frames_of_lambda(lambda x, y: function(y, x))


def _attach() -> None:
    for name, convert in _CONVERSIONS.items():
        setattr(Tracer, name, _explains_assignment(convert))
    for name, function in _BINARY.items():
        setattr(Tracer, f"__{name}__", function)
        setattr(Tracer, f"__r{name}__", _reverse_operands(function))
    for name, function in (_COMPARISONS | _UNARY | {"pow": _power}).items():
        setattr(Tracer, f"__{name}__", function)
    for name, method in _METHODS.items():
        if "<" in method.__qualname__:  # a lambda, or a function made by another: errors of calls show its name
            method.__name__ = method.__qualname__ = name
        setattr(Tracer, name, hide_own_frames(method))
    for name, read in _SIZES.items():
        setattr(Tracer, name, property(read))
    Tracer.missing_attribute = _missing_attribute
    Tracer.T = property(shape.transpose, doc="The transpose: axes in reverse.")
    Tracer.mT = property(shape.matrix_transpose, doc="The transposed matrices: the last two axes swapped.")
    Tracer.flat = property(shape.ravel, doc="All elements in one dimension, read-only.")
    Tracer.at = property(updates.At, doc="`x.at[index].set(v)`: x with v at index; likewise .add, .multiply and more.")
    Tracer.real = property(elementwise.real, doc="The real part.")
    Tracer.imag = property(elementwise.imag, doc="The imaginary part.")


_attach()
_attach_to_numbers()
