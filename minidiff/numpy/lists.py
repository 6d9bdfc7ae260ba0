"""NumPy's functions, which here also take lists that hold traced values.

NumPy hands a call over to a traced value that is an argument, but makes a plain array of a list, which a traced value
in it refuses. The functions of `minidiff.numpy` call NumPy's; where that was refused, they make arrays of the lists and
apply the operation. No call looks for lists in advance. Where the first argument is traced, NumPy's dispatch is left
out, so that these calls are faster than NumPy's own functions; those with plain arrays take 0.1 or 0.2 µs longer.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy

from minidiff.core import NUMPY_FUNCTIONS, Tracer, TracerError
from minidiff.numpy.coverage import CREATION, FROM_VALUES, full_name
from minidiff.ops.shape import as_array

_METHODS = ("reduce", "accumulate", "reduceat", "outer")


def namespace(module: ModuleType) -> dict[str, Any]:
    """What a module of NumPy has under its public names; of functions on arrays, those that accept lists."""
    return {name: _ours(x) if callable(x) else x for name, x in vars(module).items() if name in module.__all__}


def _ours(x: Callable) -> Callable:
    if x in NUMPY_FUNCTIONS or full_name(x)[3:] in FROM_VALUES:
        return accepting_lists(x)
    return explaining_sizes(x) if full_name(x)[3:] in CREATION else x


@functools.cache
def accepting_lists(numpy_function: Callable) -> Callable:
    """The NumPy function, which also takes lists that hold traced values wherever NumPy takes arrays."""
    function = (_of_ufunc if isinstance(numpy_function, numpy.ufunc) else _of_function)(numpy_function)
    function.__module__, function.__qualname__ = f"minidiff.{numpy_function.__module__}", numpy_function.__name__
    return function


def _of_function(numpy_function: Callable) -> Callable:
    @functools.wraps(numpy_function)
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is not numpy.ndarray and isinstance(args[0], Tracer):
            return args[0].__array_function__(numpy_function, (), args, kwargs)
        try:
            return numpy_function(*args, **kwargs)
        except TracerError:
            x = _tracer_in_lists((*args, *kwargs.values()))
            if x is None:
                raise
        return _handed_over(x, numpy_function, args, kwargs)

    return from_numpy


def explaining_sizes(numpy_function: Callable) -> Callable:
    """The function, whose errors say what to do about a traced size: NumPy says only that it is no integer."""

    @functools.wraps(numpy_function)
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        try:
            return numpy_function(*args, **kwargs)
        except TypeError:
            x = _tracer_in_lists((args, tuple(kwargs.values())))
            if x is not None:
                operator.index(x)
            raise

    return from_numpy


def looking_for_tracers(numpy_function: Callable) -> Callable:
    """As `accepting_lists`, for a function that computes something else where NumPy sees no traced value."""

    @functools.wraps(numpy_function)
    def from_numpy(*args: Any, **kwargs: Any) -> Any:
        x = _tracer_in_lists((args, tuple(kwargs.values())))
        return numpy_function(*args, **kwargs) if x is None else _handed_over(x, numpy_function, args, kwargs)

    return from_numpy


def _handed_over(x: Tracer, numpy_function: Callable, args: tuple, kwargs: dict) -> Any:
    """The call as NumPy hands it over to `x`, with arrays for lists."""
    if operation := NUMPY_FUNCTIONS.get(numpy_function):
        args, kwargs = arguments_as_arrays(operation, args, kwargs) or (args, kwargs)
    return x.__array_function__(numpy_function, (), args, kwargs)


def _of_ufunc(numpy_function: numpy.ufunc) -> Callable:
    """As `accepting_lists`. The function has the attributes and methods of the ufunc.

    Calls of one or two operands without keywords, which nearly all are, have a way of their own: ufuncs are fast.
    """
    general = _retrying(numpy_function)

    def unary(x: Any, /, *out: Any, **kwargs: Any) -> Any:
        if out or kwargs:
            return general(x, *out, **kwargs)
        if type(x) is not numpy.ndarray and isinstance(x, Tracer):
            return x.__array_ufunc__(numpy_function, "__call__", x)
        try:
            return numpy_function(x)
        except TracerError:
            return general(x)

    def binary(x: Any, y: Any, /, *out: Any, **kwargs: Any) -> Any:
        if out or kwargs:
            return general(x, y, *out, **kwargs)
        if type(x) is not numpy.ndarray and isinstance(x, Tracer):
            result = x.__array_ufunc__(numpy_function, "__call__", x, y)
            return general(x, y) if result is NotImplemented else result
        try:
            return numpy_function(x, y)
        except TracerError:
            return general(x, y)

    function = functools.wraps(numpy_function)({1: unary, 2: binary}.get(numpy_function.nin, general))
    vars(function).update(
        {name: getattr(numpy_function, name) for name in dir(numpy_function) if not name.startswith("_")}
    )
    vars(function).update({name: _retrying(getattr(numpy_function, name)) for name in _METHODS})
    return function


def _retrying(numpy_function: Callable) -> Callable:
    """A ufunc, or a method of one, which is called again with arrays for the lists that hold traced values."""

    @functools.wraps(numpy_function)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return numpy_function(*args, **kwargs)
        except TracerError:
            if _tracer_in_lists(args) is None:
                raise
        return numpy_function(*map(_array_of_traced, args), **kwargs)

    return function


def _tracer_in_lists(arguments: tuple) -> Tracer | None:
    """The first traced value that stands in a list among the arguments."""
    for x in arguments:
        if isinstance(x, (list, tuple)):
            for item in x:
                found = item if isinstance(item, Tracer) else _tracer_in_lists((item,))
                if found is not None:
                    return found
    return None


def _array_of_traced(x: Any) -> Any:
    return x if _tracer_in_lists((x,)) is None else as_array(x)


def arguments_as_arrays(operation: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments with arrays for lists where the operation takes an array; None if there are no such lists.

    It takes one for each parameter whose type is `Value`. Shapes and axes, and lists of arrays, are of other types.
    """
    positional, rest, names = _array_parameters(operation)
    places = [i for i in range(len(args)) if (positional[i] if i < len(positional) else rest)]
    places = [i for i in places if isinstance(args[i], (list, tuple))]
    keys = [k for k, x in kwargs.items() if k in names and isinstance(x, (list, tuple))]
    if not places and not keys:
        return None
    arrays = {i: as_array(args[i]) for i in places}
    return tuple(arrays.get(i, x) for i, x in enumerate(args)), kwargs | {k: as_array(kwargs[k]) for k in keys}


@functools.cache
def _array_parameters(operation: Callable) -> tuple[list[bool], bool, set[str]]:
    """Which positional parameters of an operation are arrays, whether all further ones are, and the names of such."""
    parameters = inspect.signature(operation).parameters.values()
    arrays = {p.name: p.annotation in ("Value", "Value | None", p.empty) for p in parameters}
    positional = [arrays[p.name] for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = any(arrays[p.name] for p in parameters if p.kind is p.VAR_POSITIONAL)
    return positional, rest, {name for name, yes in arrays.items() if yes}
