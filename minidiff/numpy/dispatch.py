"""Calls of NumPy functions on traced values that need more than a table lookup.

These are ufuncs with keywords, ufunc methods (`np.add.reduce`), and functions of concrete values. Unsupported calls
raise an error that says what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.tracer import NUMPY_FUNCTIONS, OPERATIONS, Tracer, Value, WeakTracer, unwrap_weak
from minidiff.core.types import typeof
from minidiff.errors import did_you_mean
from minidiff.errors.other_libraries import suggestions
from minidiff.errors.tracebacks import hide_own_frames_of_lambda, trim_traceback
from minidiff.inputs.arguments import normalize_axis
from minidiff.numpy.functions import FROM_VALUES, arguments_as_arrays, full_name, public_callables
from minidiff.ops import declare_all
from minidiff.ops.arrays import as_array, make_concrete
from minidiff.ops.base import convert, defers_to, in_float32, reduced_shape
from minidiff.ops.reduction import apply_mask, merge_axes
from minidiff.ops.shape import reduced_axes

# ---------------------------------------------------------------- NumPy's protocols


def array_ufunc(self: Tracer, ufunc, method, *inputs, **kwargs):
    try:
        interpreter = current_interpreter()
        if interpreter is EVALUATE:
            self.check_outside()
        if method == "__call__" and not kwargs:  # the fast path, for nearly all calls
            primitive, function = OPERATIONS.get(ufunc), None
            try:
                if primitive is not None and interpreter.scope is None:
                    return interpreter.process(primitive, inputs, {})
                function = NUMPY_FUNCTIONS.get(ufunc)
                if function is not None:
                    return function(*inputs)
            except (AttributeError, TypeError) as error:
                if any(map(defers_to, inputs)):
                    return NotImplemented
                converted = in_another_form(ufunc, NUMPY_FUNCTIONS[ufunc], inputs, {})
                if converted is None:
                    raise error
                return self.__array_ufunc__(ufunc, method, *converted[0])
        return call_ufunc(ufunc, method, inputs, kwargs)
    except BaseException as error:
        trim_traceback(error)
        raise


def array_function(self: Tracer, func, types, args, kwargs):
    try:
        function = NUMPY_FUNCTIONS.get(func)
        if function is None:
            return call_otherwise(func, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError):
            converted = in_another_form(func, function, args, kwargs)
            if converted is None:
                raise
        return array_function(self, func, types, *converted)
    except BaseException as error:
        trim_traceback(error)
        raise


def ufunc_of_number(self: WeakTracer, ufunc, method, *inputs, **kwargs):
    """Call a ufunc of a traced Python number: the result is an array. One operand alone is not promoted."""
    try:
        if len(inputs) == 1:
            x = self.value
            return x.__array_ufunc__(ufunc, method, x, **kwargs) if kwargs else x.__array_ufunc__(ufunc, method, x)
        return unwrap_weak(array_ufunc(self, ufunc, method, *inputs, **kwargs))
    except BaseException as error:
        trim_traceback(error)
        raise


@hide_own_frames_of_lambda
def function_of_number(self: WeakTracer, func, types, args, kwargs):
    return unwrap_weak(array_function(self, func, types, args, kwargs))


Tracer.__array_ufunc__, WeakTracer.__array_ufunc__ = array_ufunc, ufunc_of_number
Tracer.__array_function__, WeakTracer.__array_function__ = array_function, function_of_number

# ---------------------------------------------------------------- ufuncs


def call_ufunc(ufunc: numpy.ufunc, method: str, inputs: tuple, kwargs: dict) -> Any:
    """Evaluate `np.<ufunc>.<method>(*inputs, **kwargs)` on traced values.

    Return NotImplemented if an operand's class takes precedence.
    """
    if any(map(defers_to, inputs)):
        return NotImplemented
    function = NUMPY_FUNCTIONS.get(ufunc) or _function_of_scipy(ufunc)
    if function is None:
        raise unsupported_error(ufunc, inputs)
    kwargs = _without_out(full_name(ufunc), kwargs)
    if method == "__call__":
        return _call_with_keywords(ufunc, function, inputs, kwargs)
    if getattr(numpy, ufunc.__name__, None) is not ufunc:
        raise TypeError(f"{_import_path(ufunc)}.{method} is not supported on traced values: write md.scan")
    if method == "at":
        raise TypeError(
            f"{full_name(ufunc)}.at writes into an existing array, which traced values do not support; write "
            "y = np.at(x)[i].add(v) of minidiff.numpy, or .multiply, .min, .max, .set"
        )
    if ufunc.nin != 2 or ufunc.nout != 1 or ufunc.signature is not None:
        raise ValueError(f"{full_name(ufunc)}.{method}: only ufuncs with two inputs and one output have this method")
    kwargs = {k: v for k, v in kwargs.items() if v is not numpy._NoValue}
    return _METHODS[method](ufunc, *inputs, **kwargs)


def _function_of_scipy(ufunc: numpy.ufunc) -> Callable | None:
    """Declare and return the operation of a ufunc of `scipy.special`; None for other ufuncs."""
    if getattr(sys.modules.get("scipy.special"), ufunc.__name__, None) is not ufunc or ufunc.nout > 1:
        return None
    importlib.import_module("minidiff.scipy.special").function_of(ufunc.__name__)
    return NUMPY_FUNCTIONS[ufunc]


def _without_out(name: str, kwargs: dict) -> dict:
    """Drop an `out` that is None from the keywords; raise TypeError for any other."""
    if "out" not in kwargs:
        return kwargs
    out = kwargs["out"]
    if any(o is not None for o in (out if isinstance(out, tuple) else (out,))):
        raise TypeError(
            f"{name} cannot write a traced value into an existing array (out= or an in-place operator such as "
            f"a += x); write y = {name}(...) without out=, or a = a + x; for a[i] += x, a = np.at(a)[i].add(x) of "
            "minidiff.numpy"
        )
    return {k: v for k, v in kwargs.items() if k != "out"}


def _call_with_keywords(ufunc: numpy.ufunc, function: Callable, inputs: tuple, kwargs: dict) -> Any:
    """Call a ufunc with keywords; `order` and `subok` are ignored."""
    kwargs = dict(kwargs)
    dtype, casting = kwargs.pop("dtype", None), kwargs.pop("casting", "same_kind")
    kwargs.pop("order", None)
    kwargs.pop("subok", None)
    if kwargs.get("where") is True:
        del kwargs["where"]
    if "where" in kwargs:
        name = full_name(ufunc)
        raise TypeError(f"{name} on traced values does not take where=; write np.where(mask, {name}(x), x)")
    if form := in_another_form(ufunc, function, inputs, kwargs):
        inputs, kwargs = form
    if dtype is not None:
        inputs = _in_dtype(ufunc, inputs, dtype, casting)
    return function(*inputs, **kwargs)


def _in_dtype(ufunc: numpy.ufunc, inputs: tuple, dtype: Any, casting: str) -> list:
    """Convert the operands as NumPy does when the ufunc is called with `dtype`."""
    operands = [x if isinstance(x, Tracer) or type(x) in (int, float, complex) else as_array(x) for x in inputs]
    wanted = (*[None] * ufunc.nin, *[numpy.dtype(dtype)] * ufunc.nout)
    dtypes = [getattr(x, "dtype", type(x)) for x in operands]
    try:
        loop = ufunc.resolve_dtypes((*dtypes, *[None] * ufunc.nout), signature=wanted, casting=casting)
    except TypeError as error:
        name, shown = full_name(ufunc), numpy.dtype(dtype)
        raise TypeError(
            f"{name} of {', '.join(getattr(d, '__name__', str(d)) for d in dtypes)} cannot be computed in "
            f"dtype={shown} ({error}); convert the result: {name}(x).astype({str(shown)!r})"
        ) from None
    return [convert(x, d) if isinstance(x, Tracer) else numpy.asarray(x, d) for x, d in zip(operands, loop)]


# ---------------------------------------------------------------- functions


def call_otherwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a non-operation on concrete values, or raise the error that refuses it."""
    name = full_name(func)
    if name[3:] in FROM_VALUES:
        weights = kwargs.get("weights")
        if isinstance(weights, Tracer):
            raise TypeError(f"{name} on traced values has no derivative, so its weights cannot be traced")
        return func(*make_concrete(args, func), **make_concrete(kwargs, func))
    declare_all()
    if function := NUMPY_FUNCTIONS.get(func):
        return function(*args, **kwargs)
    raise unsupported_error(func, (*args, *kwargs.values()))


def in_another_form(func: Callable, function: Callable, args: tuple, kwargs: dict) -> tuple | None:
    """Convert arguments that `function` rejected to a form that it accepts.

    Drop keywords that have NumPy's default, and convert lists of numbers to arrays. Return None if the arguments have
    the right form already, so that the error has another cause. Raise TypeError if they cannot be converted.
    """
    if form := arguments_as_arrays(function, args, kwargs):
        return form
    if _misfit(function, args, kwargs) is None:
        return None
    kwargs = _without_out(full_name(func), kwargs)
    defaults = _defaults(func)
    kwargs = {k: v for k, v in kwargs.items() if k not in defaults or v is not defaults[k]}
    misfit = _misfit(function, args, kwargs)
    if misfit is None:
        return args, kwargs
    name = full_name(func)
    raise TypeError(f"{name} on traced values: {misfit}; it takes {name}{_show_signature(function)}") from None


def _misfit(function: Callable, args: tuple, kwargs: dict) -> str | None:
    """Return Python's error if the arguments do not fit the function's signature, else None."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _defaults(func: Callable) -> dict:
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # a ufunc has no signature before NumPy 2.4
        return {}
    return {k: p.default for k, p in parameters.items() if p.default is not p.empty}


def _show_signature(function: Callable) -> str:
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


# ---------------------------------------------------------------- errors


def _import_path(ufunc: numpy.ufunc) -> str:
    """Return the import path of a ufunc, which itself has only the last part (`expit`)."""
    name = ufunc.__name__
    modules = [m for m, module in [*sys.modules.items()] if getattr(module, "__dict__", {}).get(name) is ufunc]
    modules.sort(key=lambda m: (m == "__main__", "._" in m, len(m)))
    return ".".join([*modules[:1], name])


def _unsupported_ufunc_error(ufunc: numpy.ufunc, shown: str) -> TypeError:
    """Return the error for a ufunc of another package or of `np.frompyfunc`."""
    refused = suggestions("numpy")["numpy"]
    if ufunc.__name__.endswith(" (vectorized)"):
        return TypeError(f"a ufunc of np.frompyfunc is not supported on traced values{shown}: {refused['frompyfunc']}")
    path, arguments = _import_path(ufunc), ", ".join("xyzabcdefgh"[: ufunc.nin])
    message = f"{path} is a compiled ufunc without a derivative rule, and is not supported on traced values{shown}"
    each = "" if ufunc.nin == 1 else ", and so for each argument"
    return TypeError(
        f"{message}. Under grad, declare its derivative: f = md.custom_jvp({path}), then "
        f"f.defjvps(lambda t, out, {arguments}: slope * t{each}), and call f. Under jit, vmap, checkpoint and in a "
        "shard_map there are no plain arrays to call it on: write it in NumPy's functions"
    )


def unsupported_error(func: Callable, args: Iterable[Any]) -> TypeError:
    """Return the error for an unsupported function, which suggests another."""
    shown = ", ".join(str(x.type) for x in args if isinstance(x, Tracer))
    shown = f" ({shown})" if shown else ""
    if isinstance(func, numpy.ufunc) and func not in public_callables().values():
        return _unsupported_ufunc_error(func, shown)
    name = full_name(func)
    message = f"{name} is not supported on traced values{shown}"
    if advice := suggestions("numpy")["numpy"].get(name[3:]):
        return TypeError(f"{message}: {advice}")
    supported = [n for n, f in public_callables().items() if f in NUMPY_FUNCTIONS]
    return TypeError(message + did_you_mean(name[3:], supported, "np."))


# ---------------------------------------------------------------- methods of binary ufuncs, such as `np.add.reduce`

# If NumPy has an equivalent function, that is called; otherwise the ufunc is applied slice by slice.
_REDUCTIONS: dict[numpy.ufunc, Callable] = {
    numpy.add: numpy.sum,
    numpy.multiply: numpy.prod,
    numpy.maximum: numpy.max,
    numpy.minimum: numpy.min,
    numpy.logical_and: numpy.all,
    numpy.logical_or: numpy.any,
}
_ACCUMULATIONS: dict[numpy.ufunc, Callable] = {numpy.add: numpy.cumsum, numpy.multiply: numpy.cumprod}


@in_float32
def reduce(
    ufunc: numpy.ufunc, array: Value, axis: Any = 0, dtype: Any = None, *, keepdims=False, initial=None, where=True
) -> Value:
    """`np.<ufunc>.reduce`: combine elements along an axis (None: all) by the ufunc."""
    array = _in_loop(ufunc, array, dtype)
    function = NUMPY_FUNCTIONS.get(_REDUCTIONS.get(ufunc))
    options = {k: v for k, v in (("initial", initial), ("where", where)) if v is not None and v is not True}
    if ufunc in _ACCUMULATIONS and dtype is not None:
        options["dtype"] = dtype
    if function is not None and set(options) <= set(inspect.signature(function).parameters):
        return function(array, axis=axis, keepdims=keepdims, **options)
    t = typeof(array)
    axes = reduced_axes(axis, t.ndim, f"{ufunc.__name__}.reduce")
    if ufunc is numpy.logaddexp and not options and all(t.shape):
        return _logsumexp(array, axes, keepdims)
    if len(axes) > 1 and ufunc.identity is None and ufunc not in (numpy.maximum, numpy.minimum):
        raise ValueError(f"{ufunc.__name__}.reduce: the order matters: reduce one axis at a time, not {axis}")
    if where is not True:
        neutral = ufunc.identity if ufunc.identity is not None else initial
        if neutral is None:
            raise ValueError(f"{ufunc.__name__}.reduce has no identity, so where= needs initial=")
        array = convert(apply_mask(array, where, neutral), t.dtype)
    slices, remaining = list(merge_axes(array, axes)), reduced_shape(t, axes)
    start = ufunc.identity if initial is None and len(slices) < 2 else initial  # np.hypot.reduce([-1]) is 1
    if start is not None:
        plain = not isinstance(start, Tracer)
        slices.insert(0, numpy.full(remaining, numpy.array(start).astype(t.dtype)) if plain else start)
    if not slices:
        raise ValueError(f"{ufunc.__name__}.reduce: {t} is empty along {axis}, and there is no identity: pass initial=")
    out = functools.reduce(ufunc, slices) if len(slices) > 1 else numpy.copy(slices[0])
    return out.reshape(reduced_shape(t, axes, True)) if keepdims else out


def _logsumexp(x: Value, axes: tuple[int, ...], keepdims: bool) -> Value:
    """log(sum(exp(x))), computed without overflow of the exponentials."""
    top = numpy.max(x, axes, keepdims=True)
    top = numpy.where(numpy.isfinite(top), top, 0.0)
    total = numpy.log(numpy.sum(numpy.exp(x - top), axes, keepdims=True)) + top
    return total if keepdims else numpy.squeeze(total, axes)


@in_float32
def accumulate(ufunc: numpy.ufunc, array: Value, axis: int = 0, dtype: Any = None) -> Value:
    """`np.<ufunc>.accumulate`: reduce the elements up to each along an axis."""
    array = _in_loop(ufunc, array, dtype)
    axis = normalize_axis(axis, typeof(array).ndim, f"{ufunc.__name__}.accumulate")
    function = NUMPY_FUNCTIONS.get(_ACCUMULATIONS.get(ufunc))
    if function is not None:
        return function(array, axis=axis, dtype=dtype)
    if not typeof(array).shape[axis]:
        return numpy.copy(array)
    return numpy.stack([*itertools.accumulate(numpy.moveaxis(array, axis, 0), ufunc)], axis)


@in_float32
def reduceat(ufunc: numpy.ufunc, array: Value, indices: Sequence[int], axis: int = 0, dtype: Any = None) -> Value:
    """`np.<ufunc>.reduceat`: reduce from each index to the next.

    Where the next index is not larger, the result is the element at the index.
    """
    array = _in_loop(ufunc, array, dtype)
    n = typeof(array).shape[axis]
    places = indices.concrete("reduceat") if isinstance(indices, Tracer) else indices
    starts = [int(i) for i in numpy.asarray(places)]
    for i in starts:
        if not 0 <= i < n:
            raise IndexError(f"{ufunc.__name__}.reduceat: index {i} is out of bounds for an axis of size {n}")
    x = numpy.moveaxis(array, axis, 0)
    parts = [reduce(ufunc, x[i:j]) if i < j else x[i] for i, j in zip(starts, [*starts[1:], n])]
    return numpy.stack(parts, normalize_axis(axis, typeof(array).ndim, "reduceat"))


def outer(ufunc: numpy.ufunc, A: Value, B: Value, dtype: Any = None) -> Value:
    """`np.<ufunc>.outer`: the ufunc of each pair of an element of A and one of B."""
    A, B = as_array(A), as_array(B)
    A = A.reshape(A.shape + (1,) * B.ndim)
    return ufunc(A, B) if dtype is None else ufunc(A, B, dtype=dtype)


def _in_loop(ufunc: numpy.ufunc, array: Value, dtype: Any) -> Value:
    """Convert the array to the dtype that NumPy reduces it in."""
    array = array if dtype is None else convert(array, dtype)
    return convert(array, ufunc.resolve_dtypes((None, typeof(array).dtype, None), reduction=True)[0])


_METHODS: dict[str, Callable] = {f.__name__: f for f in (reduce, accumulate, reduceat, outer)}
