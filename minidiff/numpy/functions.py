"""Public NumPy functions: their classes, by their behavior on traced values, and wrappers that accept lists.

Each function is in one class:

- an *operation*: registered by `implements`. Most are differentiable; those with integer or boolean results have no
  derivative;
- *replaced*: NumPy does not dispatch it, so `minidiff.numpy` defines a function of the same name;
- *from values*: NumPy computes it on concrete values, so it fails on a tape and under `vmap`. The results are integers,
  booleans, text or edges of bins, and carry no derivative;
- *plain*: it takes no argument that could be traced (all others);
- *refused*: it raises an error that says what to use instead (the table "numpy" in `suggestions.json`).

NumPy dispatches a call to a traced argument. It converts a list to a plain array, which raises an error if a traced
value is in the list. The functions of `minidiff.numpy` call NumPy's; on that error they convert the lists to arrays and
apply the operation, so no call searches for lists in advance. If the first argument is traced, they skip NumPy's
dispatch, which makes these calls faster than NumPy's own. Calls with plain arrays take 0.1 or 0.2 µs longer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer
from minidiff.errors import TracerError
from minidiff.errors.tracebacks import hide_own_frames_of_lambda, trim_traceback
from minidiff.ops import declare_all
from minidiff.ops.arrays import as_array, holds_tracer
from minidiff.values.dtypes import accumulator_dtype

# ---------------------------------------------------------------- classes of functions


def _names(text: str) -> list[str]:
    return text.split()


FROM_VALUES = _names(
    """nonzero flatnonzero argwhere array_str array_repr array2string histogram2d histogramdd ravel_multi_index
    unravel_index packbits unpackbits shares_memory may_share_memory in1d"""
)

CREATION = _names(
    """zeros ones empty tri eye identity indices fromfunction fromiter diag_indices tril_indices triu_indices
    mask_indices bartlett blackman hanning hamming kaiser fft.fftfreq fft.rfftfreq"""
)

#: Functions that add or multiply many numbers: of plain 16-bit floats, as of traced ones, they accumulate in float32.
SUMS = _names(
    """sum nansum prod nanprod mean nanmean average var nanvar std nanstd cumsum nancumsum cumprod nancumprod
    cumulative_sum cumulative_prod trace dot vdot inner tensordot einsum matmul vecdot matvec vecmat convolve correlate
    cov corrcoef trapezoid polymul polyval linalg.norm linalg.vector_norm linalg.matrix_norm linalg.trace linalg.matmul
    linalg.tensordot linalg.vecdot linalg.multi_dot linalg.matrix_power"""
)

#: Functions that write into their first argument.
MUTATING = _names("copyto putmask place put put_along_axis fill_diagonal")


def full_name(f: Callable) -> str:
    """Return the name of a NumPy function with its namespace: `np.linalg.svd`."""
    module = getattr(f, "__module__", None) or "numpy"
    name = getattr(f, "__name__", str(f))
    return f"np.{module[6:]}.{name}" if module.startswith("numpy.") else f"np.{name}"


@functools.cache
def mutating_functions() -> frozenset[Callable]:
    """Return the NumPy functions that write into their first argument."""
    return frozenset(getattr(numpy, name) for name in MUTATING)


@functools.cache
def public_callables() -> dict[str, Callable]:
    """Return all public NumPy functions by name (`linalg.svd`), without scalar types."""
    return {
        prefix + name: f
        for prefix, namespace in {"": numpy, "linalg.": numpy.linalg, "fft.": numpy.fft}.items()
        for name in namespace.__all__
        if not name.startswith("_")
        if callable(f := getattr(namespace, name)) and not (isinstance(f, type) and issubclass(f, numpy.generic))
    }


# ---------------------------------------------------------------- functions that accept lists of traced values

_METHODS = ("reduce", "accumulate", "reduceat", "outer")


def wrap(x: Any) -> Any:
    """Return what `minidiff.numpy` has for an attribute of NumPy: its functions accept lists.

    Each is made at its first use, because making them all takes as long as importing NumPy.
    """
    if not callable(x):
        return x
    name = full_name(x)[3:]
    if x in NUMPY_FUNCTIONS or name in FROM_VALUES:
        return accept_lists(x)
    if isinstance(x, type) or name in CREATION:
        return explain_sizes(x) if name in CREATION else x
    declare_all()
    return accept_lists(x) if x in NUMPY_FUNCTIONS else x


@functools.cache
def accept_lists(numpy_function: Callable) -> Callable:
    """Wrap a NumPy function to accept lists of traced values in place of arrays."""
    function = _of_ufunc(numpy_function) if isinstance(numpy_function, numpy.ufunc) else _of_function(numpy_function)
    module = getattr(numpy_function, "__module__", "numpy")  # ufuncs of NumPy 2.0 do not name theirs
    function.__module__, function.__qualname__ = f"minidiff.{module}", numpy_function.__name__
    return function


def _add_in_float32(numpy_function: Callable, ufunc: numpy.ufunc | None = None) -> Callable:
    """Wrap a function that adds numbers (of a ufunc: a method of it) to add plain 16-bit floats as traced ones are."""

    @functools.wraps(numpy_function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not any(map(_has_16_bits, values)) or holds_tracer(values):
            return numpy_function(*args, **kwargs)
        dispatch = importlib.import_module("minidiff.numpy.dispatch")  # which imports this module
        out = kwargs.pop("out", None)
        with running(EVALUATE):
            if ufunc is None:
                y = dispatch.array_function(None, numpy_function, (), args, kwargs)
            else:
                name = numpy_function.__name__
                y = dispatch.call_ufunc(ufunc, "__call__" if numpy_function is ufunc else name, args, kwargs)
        if out is None:
            return y[()] if getattr(y, "shape", None) == () else y
        (out,) = out if isinstance(out, tuple) else (out,)
        numpy.copyto(out, y, "same_kind")
        return out

    return plain


def _has_16_bits(x: Any) -> bool:
    """Return whether `x` is an array of 16-bit floats, or a list of arrays that begins with one."""
    x = x[0] if isinstance(x, (list, tuple)) and x else x
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, numpy.dtype) and dtype.itemsize == 2 and accumulator_dtype(dtype) != dtype


#: Functions whose default values NumPy does not ask whether they are arrays of another kind.
_OVERLOOKING = (numpy.interp, numpy.select)


def _of_function(numpy_function: Callable) -> Callable:
    plain = _add_in_float32(numpy_function) if full_name(numpy_function)[3:] in SUMS else numpy_function
    first = 1 if numpy_function is numpy.einsum else 0  # the position of the first array

    @functools.wraps(numpy_function)
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        try:
            x = args[first] if len(args) > first else None
            if type(x) is not numpy.ndarray and isinstance(x, Tracer):
                return x.__array_function__(numpy_function, (), args, kwargs)
            try:
                return plain(*args, **kwargs)
            except TracerError:
                values = (*args, *kwargs.values())
                x = _tracer_in_lists((values,) if numpy_function in _OVERLOOKING else values)
                if x is None:
                    raise
            return _dispatch(x, numpy_function, args, kwargs)
        except BaseException as error:
            trim_traceback(error)
            raise

    return from_numpy


def explain_sizes(numpy_function: Callable) -> Callable:
    """Wrap a function so that its error for a traced size says what to do."""

    @functools.wraps(numpy_function)
    @hide_own_frames_of_lambda
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        try:
            return numpy_function(*args, **kwargs)
        except TypeError:
            if (size := _tracer_in_lists((args, tuple(kwargs.values())))) is not None:
                operator.index(size)
            raise

    return from_numpy


def look_for_tracers(numpy_function: Callable) -> Callable:
    """Wrap a function to accept lists, if NumPy's returns a wrong result for them and raises no error."""

    @functools.wraps(numpy_function)
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        x = _tracer_in_lists((args, tuple(kwargs.values())))
        return numpy_function(*args, **kwargs) if x is None else _dispatch(x, numpy_function, args, kwargs)

    return from_numpy


def _dispatch(x: Tracer, numpy_function: Callable, args: tuple, kwargs: dict) -> Any:
    """Dispatch the call to `x` as NumPy does, with lists converted to arrays."""
    if operation := NUMPY_FUNCTIONS.get(numpy_function):
        args, kwargs = arguments_as_arrays(operation, args, kwargs) or (args, kwargs)
    return x.__array_function__(numpy_function, (), args, kwargs)


def _of_ufunc(numpy_function: numpy.ufunc) -> Callable:
    """Wrap a ufunc to accept lists, and keep its attributes and methods.

    Calls of one or two operands without keywords, the common case, have a fast path, since ufuncs are fast; those of
    plain arrays come first.
    """
    sums = full_name(numpy_function)[3:] in SUMS
    plain: Callable = _add_in_float32(numpy_function, numpy_function) if sums else numpy_function
    general = _retry_with_arrays(plain)
    ndarray = numpy.ndarray  # a name of this function is found faster than one of a module

    def unary(x: Any, /, *out: Any, **kwargs: Any) -> Any:
        try:
            if type(x) is ndarray and not (out or kwargs):
                return numpy_function(x)
            if out or kwargs:
                return general(x, *out, **kwargs)
            if isinstance(x, Tracer):
                return x.__array_ufunc__(numpy_function, "__call__", x)
            try:
                return numpy_function(x)
            except TracerError:
                return general(x)
        except BaseException as error:
            trim_traceback(error)
            raise

    def binary(x: Any, y: Any, /, *out: Any, **kwargs: Any) -> Any:
        try:
            if type(x) is type(y) is ndarray and not (out or kwargs):
                return plain(x, y)
            if out or kwargs:
                return general(x, y, *out, **kwargs)
            if isinstance(x, Tracer):
                result = x.__array_ufunc__(numpy_function, "__call__", x, y)
                return general(x, y) if result is NotImplemented else result
            try:
                return numpy_function(x, y)
            except TracerError:
                return general(x, y)
        except BaseException as error:
            trim_traceback(error)
            raise

    function = functools.wraps(numpy_function)({1: unary, 2: binary}.get(numpy_function.nin, general))
    vars(function).update(_attributes_of(numpy_function))
    return function


def _attributes_of(ufunc: numpy.ufunc) -> dict[str, Any]:
    """Return the public attributes of a ufunc; its methods take lists, and those that add do so in float32."""
    attributes = {name: getattr(ufunc, name) for name in dir(ufunc) if not name.startswith("_")}
    methods = {name: attributes[name] for name in _METHODS}
    wide = {name: _add_in_float32(methods[name], ufunc) for name in _METHODS[:3]}
    return attributes | {name: _retry_with_arrays(method) for name, method in (methods | wide).items()}


def _retry_with_arrays(numpy_function: Callable) -> Callable:
    """Wrap a ufunc or its method to retry failed calls with lists as arrays."""

    @functools.wraps(numpy_function)
    @hide_own_frames_of_lambda
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return numpy_function(*args, **kwargs)
        except TracerError:
            if _tracer_in_lists(args) is None:
                raise
        return numpy_function(*[x if _tracer_in_lists((x,)) is None else as_array(x) for x in args], **kwargs)

    return function


def _tracer_in_lists(arguments: tuple) -> Tracer | None:
    """Return the first traced value inside a list among the arguments."""
    for x in arguments:
        if isinstance(x, (list, tuple)):
            for item in x:
                tracer = item if isinstance(item, Tracer) else _tracer_in_lists((item,))
                if tracer is not None:
                    return tracer
    return None


def arguments_as_arrays(operation: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Convert lists to arrays where the operation takes arrays; None without lists.

    Parameters annotated with `Value` take arrays. Shapes, axes and lists of arrays have other annotations.
    """
    positional, variadic, names = _array_parameters(operation)
    takes_array = [*positional, *[variadic] * (len(args) - len(positional))]
    lists = (list, tuple, range)
    arrays = {i: as_array(x) for i, (x, takes) in enumerate(zip(args, takes_array)) if takes and isinstance(x, lists)}
    keywords = {k: as_array(x) for k, x in kwargs.items() if k in names and isinstance(x, lists)}
    if not arrays and not keywords:
        return None
    return tuple(arrays.get(i, x) for i, x in enumerate(args)), kwargs | keywords


@functools.cache
def _array_parameters(operation: Callable) -> tuple[list[bool], bool, set[str]]:
    """Return whether each positional parameter takes an array, and whether `*args` do; and the names of all that do."""
    parameters = inspect.signature(operation).parameters.values()
    arrays = {p.name: p.annotation in ("Value", "Value | None", p.empty) for p in parameters}
    positional = [arrays[p.name] for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(arrays[p.name] for p in parameters if p.kind is p.VAR_POSITIONAL)
    return positional, variadic, {name for name, takes_array in arrays.items() if takes_array}
