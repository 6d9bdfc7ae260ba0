"""Functions of NumPy that are composed of other operations: elementwise ones, and arrays of or like traced values."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import WEAK_TYPES, normalize_axis, promotion_argument
from minidiff.ops import dimensions, elementwise, indexing, reduction
from minidiff.ops.arrays import as_array, list_as_array
from minidiff.ops.base import Discrete, Elementwise, General, convert
from minidiff.ops.elementwise import equal, safe_denominator, stop_gradient, where
from minidiff.ops.shape import as_shape, broadcast_to, moveaxis, ravel, reshape, without_values
from minidiff.ops.sorting import searchsorted
from minidiff.values.aliasing import uniform
from minidiff.values.dtypes import finfo, is_differentiable, result_type

# ---------------------------------------------------------------- arithmetic


@implements(numpy.positive)
def positive(x: Value) -> Value:
    """`numpy.positive`: a copy of x. Raises TypeError for booleans, as NumPy does."""
    if _kind(x) == "b":
        raise TypeError("positive: NumPy does not define +x for booleans; write x.astype(int) first, or x.copy()")
    return elementwise.copy(x)


@implements(numpy.copy)
def copy(a: Value, order: str = "K", subok: bool = False) -> Value:
    """`numpy.copy`; `order` and `subok` are ignored."""
    return elementwise.copy(a)


@implements(numpy.float_power)
def float_power(x: Value, y: Value) -> Value:
    """`numpy.float_power`: x**y in double precision at least."""
    dtype = result_type(numpy.dtype(float), *map(promotion_argument, (x, y)))
    return elementwise.power(*[v if isinstance(v, (int, float)) else convert(v, dtype) for v in (x, y)])


@implements(numpy.divmod)
def divmod(x: Value, y: Value) -> tuple[Value, Value]:
    """`numpy.divmod`: the floored quotient and the remainder."""
    quotient = elementwise.floor_divide(x, y)
    return NotImplemented if quotient is NotImplemented else (quotient, elementwise.remainder(x, y))


#: The two results of frexp, x = mantissa * 2**exponent, and the first one of modf.
_mantissa = Elementwise(
    "mantissa", lambda x: numpy.frexp(x)[0], (lambda out, x: safe_denominator(out) / safe_denominator(x),)
)
_exponent = Elementwise("exponent", lambda x: numpy.frexp(x)[1], (None,))
_fraction = Elementwise("fraction", lambda x: numpy.modf(x)[0], (lambda out, x: 1.0,))


@implements(numpy.frexp)
def frexp(x: Value) -> tuple[Value, Value]:
    """`numpy.frexp`: the mantissa, differentiable, and the exponent."""
    return _mantissa.bind(x), _exponent.bind(x)


@implements(numpy.modf)
def modf(x: Value) -> tuple[Value, Value]:
    """`numpy.modf`: the fractional part, differentiable, and the integral one."""
    fraction = _fraction.bind(x)
    return fraction, convert(elementwise.trunc(x), fraction.dtype)


@implements(numpy.angle)
def angle(z: Value, deg: bool = False) -> Value:
    """`numpy.angle`: the argument of complex numbers, in radians or degrees."""
    parts = (elementwise.imag(z), elementwise.real(z)) if _kind(z) == "c" else (0, z)
    angles = elementwise.arctan2(*parts)
    return angles * (180 / math.pi) if deg else angles


def _kind(x: Value) -> str:
    return typeof(x).dtype.kind


# ---------------------------------------------------------------- rounding and clipping


def _rounded(x: numpy.ndarray, decimals: int) -> numpy.ndarray:
    out = numpy.round(x, decimals)
    return numpy.copy(out) if out is x else out  # older versions of NumPy return integers unchanged


round_p = Discrete(
    "round",
    _rounded,
    lambda x, decimals: (x.shape, numpy.round(numpy.ones(1, x.dtype), decimals).dtype),
    sharding=dimensions.elementwise,
)


@implements(numpy.round, numpy.around)
def round(a: Value, decimals: int = 0) -> Value:
    """`numpy.round`: round to a number of decimals; the derivative is zero."""
    return round_p.bind(as_array(a), decimals=operator.index(decimals))


implements(numpy.fix)(lambda x: elementwise.trunc(x))


@implements(numpy.clip)
def clip(a: Value, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Value:
    """`numpy.clip`: limit to an interval; a tie with a limit shares the derivative."""
    a = as_array(a)  # a Python number gets NumPy's dtype, but promotes weakly as a limit
    low, high = [list_as_array(x) for x in (a_min if min is None else min, a_max if max is None else max)]
    if _kind(a) in "iu":  # a Python integer outside the range of the dtype is no limit
        limits = numpy.iinfo(typeof(a).dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
    if low is None and high is None:
        return elementwise.copy(a)
    if low is not None and high is not None:  # promote all three at once: uint8, 1.0 and float32 give float32
        a = convert(a, result_type(*map(promotion_argument, (a, low, high))))
    if low is not None:
        a = elementwise.maximum(a, low)
    return a if high is None else elementwise.minimum(a, high)


@implements(numpy.nan_to_num)
def nan_to_num(x: Value, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Value:
    """`numpy.nan_to_num`: replace non-finite elements; the derivative there is 0."""
    if not is_differentiable(typeof(x).dtype):
        return elementwise.copy(x) if copy else x
    if _kind(x) == "c":
        real, imag = (nan_to_num(f(x), True, nan, posinf, neginf) for f in (elementwise.real, elementwise.imag))
        return real + 1j * imag
    limits = finfo(x.dtype)
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    replaced = where(equal(x, numpy.inf), high, where(equal(x, -numpy.inf), low, x))
    return convert(where(elementwise.isnan(x), nan, replaced), x.dtype)


# ---------------------------------------------------------------- choosing


@implements(numpy.select)
def select(condlist: Sequence[Value], choicelist: Sequence[Value], default: Value = 0) -> Value:
    """`numpy.select`: for each element, the first choice whose condition holds."""
    if len(condlist) != len(choicelist):
        raise ValueError(f"select: {len(condlist)} conditions, but {len(choicelist)} choices")
    values = list(map(list_as_array, (*choicelist, default)))
    dtype = result_type(*[promotion_argument(x) if type(x) in WEAK_TYPES else typeof(x).dtype for x in values])
    *choices, out = [convert(x, dtype) if hasattr(x, "dtype") else numpy.asarray(x, dtype) for x in values]
    for condition, choice in zip(reversed(condlist), reversed(choices)):
        condition = list_as_array(condition)
        if typeof(condition).dtype != bool:
            raise TypeError(f"select: conditions must be booleans, got {typeof(condition)}")
        out = where(condition, choice, out)
    return out


@implements(numpy.piecewise)
def piecewise(x: Value, condlist: Any, funclist: Sequence[Any], *args: Any, **kw: Any) -> Value:
    """`numpy.piecewise`: a function or number per condition, and a default.

    Each function is called on an array of the shape of x that holds only values for which its condition is true.
    """
    alone = numpy.isscalar(condlist) or (typeof(x).ndim and not numpy.ndim(condlist[0]))
    conditions = [list_as_array(c) for c in ([condlist] if alone else condlist)]
    if len(funclist) == len(conditions) + 1:
        conditions.append(elementwise.logical_not(functools.reduce(elementwise.logical_or, conditions)))
    if len(funclist) != len(conditions):
        raise ValueError(f"piecewise: {len(funclist)} functions for {len(conditions)} conditions")
    out = 0
    for condition, f in zip(conditions, funclist):
        out = where(condition, f(_inside(condition, x), *args, **kw) if callable(f) else f, out)
    return convert(out, typeof(x).dtype)


def _inside(condition: Value, x: Value) -> Value:
    """Replace the elements of x where the condition is false by one where it is true."""
    t = typeof(x)
    if not t.size:
        return x
    first = reduction.argmax(broadcast_to(condition, t.shape))
    return where(condition, x, stop_gradient(ravel(x)[first]))


# ---------------------------------------------------------------- interpolation


@implements(numpy.interp)
def interp(x: Value, xp: Value, fp: Value, left: Any = None, right: Any = None, period: float | None = None) -> Value:
    """`numpy.interp`: piecewise linear interpolation through the points (xp, fp).

    Differentiable in x, xp, fp, left and right. At a point, the derivative is the one from the right.
    """
    x, xp, fp = map(as_array, (x, xp, fp))
    x, xp, fp = x.astype(float), xp.astype(float), fp.astype(complex if _kind(fp) == "c" else float)
    if xp.ndim != 1 or xp.shape != fp.shape or not xp.size:
        raise ValueError(f"interp: xp and fp must be vectors of equal length, got {typeof(xp)} and {typeof(fp)}")
    if period is not None:
        x, xp, fp = _sort_periodic(x, xp, fp, abs(period))
        left = right = None
    # The interval from xp[i] to xp[j] contains x, or is the nearest to it.
    j = elementwise.maximum(elementwise.minimum(searchsorted(xp, x, "right"), len(xp) - 1), 1)
    i, j = j - 1, j if len(xp) > 1 else 0
    (x0, x1), (f0, f1) = ((indexing.getitem(v, i), indexing.getitem(v, j)) for v in (xp, fp))
    y = f0 + (f1 - f0) / safe_denominator(x1 - x0) * (x - x0)
    y = where(elementwise.greater(x, xp[-1]), fp[-1] if right is None else right, y)
    return where(elementwise.less(x, xp[0]), fp[0] if left is None else left, y)


def _sort_periodic(x: Value, xp: Value, fp: Value, period: float) -> tuple[Value, Value, Value]:
    """Sort periodic points into one period, and add one point on either side."""
    if not period:
        raise ValueError("interp: period must not be 0")
    x, xp = x % period, xp % period
    order = numpy.argsort(xp.concrete("np.interp with a period") if isinstance(xp, Tracer) else xp)
    around = numpy.concatenate([order[-1:], order, order[:1]])
    shifts = numpy.concatenate([[-period], numpy.zeros(order.size), [period]])
    return x, xp[around] + shifts, fp[around]


#: `numpy.unwrap` adds multiples of the period, so tangents pass unchanged.
unwrap_p = General(
    "unwrap",
    lambda p, **params: numpy.unwrap(p, **params),
    lambda p, axis, **params: (p.shape, numpy.unwrap(numpy.ones(2, p.dtype), **params).dtype),
    lambda out, primals, tangents, params: convert(tangents[0], out.dtype),
    sharding=dimensions.axiswise("axis"),
)


@implements(numpy.unwrap)
def unwrap(p: Value, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Value:
    """`numpy.unwrap`: remove jumps of more than half a period along an axis."""
    axis = normalize_axis(axis, typeof(p).ndim, "unwrap")
    return unwrap_p.bind(p, discont=discont, axis=axis, period=period)


# ---------------------------------------------------------------- comparing


@implements(numpy.isclose)
def isclose(a: Value, b: Value, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Value:
    """`numpy.isclose`: whether |a - b| <= atol + rtol * |b|."""
    a, b = stop_gradient(list_as_array(a)), stop_gradient(list_as_array(b))
    b = convert(b, result_type(typeof(b).dtype, 1.0))  # differences of unsigned integers would wrap around
    distance = elementwise.absolute(elementwise.difference(a, b))
    near = elementwise.less_equal(distance, atol + rtol * elementwise.absolute(b))
    return elementwise.logical_or(elementwise.logical_and(near, elementwise.isfinite(b)), _same(a, b, equal_nan))


@implements(numpy.allclose)
def allclose(a: Value, b: Value, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Value:
    """`numpy.allclose`: whether all elements are close."""
    return reduction.all(isclose(a, b, rtol, atol, equal_nan))


@implements(numpy.array_equal)
def array_equal(a1: Value, a2: Value, equal_nan: bool = False) -> Value:
    """`numpy.array_equal`: whether two arrays have the same shape and elements."""
    a1, a2 = list_as_array(a1), list_as_array(a2)
    return typeof(a1).shape == typeof(a2).shape and reduction.all(_same(a1, a2, equal_nan))


@implements(numpy.array_equiv)
def array_equiv(a1: Value, a2: Value) -> Value:
    """`numpy.array_equiv`: whether two arrays are equal when they are broadcast."""
    a1, a2 = list_as_array(a1), list_as_array(a2)
    try:
        numpy.broadcast_shapes(typeof(a1).shape, typeof(a2).shape)
    except ValueError:
        return False
    return reduction.all(_same(a1, a2, False))


def _same(x: Value, y: Value, equal_nan: bool) -> Value:
    same = equal(x, y)
    if not equal_nan:
        return same
    return elementwise.logical_or(same, elementwise.logical_and(elementwise.isnan(x), elementwise.isnan(y)))


implements(numpy.isposinf)(lambda x: equal(x, numpy.inf))
implements(numpy.isneginf)(lambda x: equal(x, -numpy.inf))
implements(numpy.iscomplex)(lambda x: elementwise.not_equal(elementwise.imag(x), 0))
implements(numpy.isreal)(lambda x: equal(elementwise.imag(x), 0))


# ---------------------------------------------------------------- dtypes


@implements(numpy.astype)
def astype(
    x: Value, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
) -> Value:
    """`numpy.astype`: convert x to a dtype; from complex to real, take the real part."""
    if not numpy.can_cast(typeof(x).dtype, dtype, casting):
        raise TypeError(f"astype: {typeof(x)} cannot be cast to {numpy.dtype(dtype)} with casting={casting!r}")
    return elementwise.copy(x) if copy and typeof(x).dtype == dtype else convert(x, dtype)


@implements(numpy.real_if_close)
def real_if_close(a: Value, tol: float = 100) -> Value:
    """`numpy.real_if_close`: real if imaginary parts are tiny; needs concrete values."""
    if _kind(a) != "c" or numpy.iscomplexobj(numpy.real_if_close(a.concrete("np.real_if_close"), tol)):
        return a
    return elementwise.real(a)


def _of_types(numpy_function: Callable) -> None:
    """Declare a function that depends on the types of its arguments alone: it gets arrays without values."""

    def plain(x: Any) -> Any:
        return without_values(typeof(x)) if isinstance(x, Tracer) else x

    def function(*args: Value, **kwargs: Any) -> Any:
        try:
            return numpy_function(*map(plain, args), **{k: plain(x) for k, x in kwargs.items()})
        except ValueError as error:
            types = [str(typeof(x)) for x in (*args, *kwargs.values()) if isinstance(x, Tracer)]
            raise ValueError(f"{numpy_function.__name__}: {error}, got {', '.join(types)}") from None

    implements(numpy_function)(function)


for _function in (numpy.result_type, numpy.can_cast, numpy.common_type, numpy.iscomplexobj, numpy.isrealobj):
    _of_types(_function)
for _function in (numpy.tril_indices_from, numpy.triu_indices_from, numpy.diag_indices_from):
    _of_types(_function)
implements(numpy.min_scalar_type)(lambda x: typeof(x).dtype)


# ---------------------------------------------------------------- arrays of points


@implements(numpy.linspace)
def linspace(
    start: Value, stop: Value, num: int = 50, endpoint=True, retstep=False, dtype: Any = None, axis: int = 0
) -> Value:
    """`numpy.linspace`: `num` evenly spaced points; with `retstep`, also the step."""
    start, stop, num = list_as_array(start), list_as_array(stop), operator.index(num)
    steps = num - 1 if endpoint else num
    weights = numpy.arange(num) / steps if steps > 0 else numpy.zeros(num)
    work = result_type(*map(promotion_argument, (start, stop)), float(num))
    weights = weights.astype(work).reshape(num, *(1,) * max(numpy.ndim(start), numpy.ndim(stop)))
    points = start * (1 - weights) + stop * weights  # exact at both ends
    if dtype is not None and numpy.issubdtype(dtype, numpy.integer):
        points = elementwise.floor(points)
    points = moveaxis(convert(points, work if dtype is None else dtype), 0, axis)
    return (points, (stop - start) / (steps if steps > 0 else numpy.nan)) if retstep else points


@implements(numpy.logspace)
def logspace(
    start: Value, stop: Value, num: int = 50, endpoint=True, base: Value = 10.0, dtype: Any = None, axis: int = 0
) -> Value:
    """`numpy.logspace`: powers of `base` with evenly spaced exponents."""
    start, stop, base = list_as_array(start), list_as_array(stop), list_as_array(base)
    if numpy.ndim(base):
        shape = numpy.broadcast_shapes(*[numpy.shape(x) for x in (start, stop, base)])
        start, base = numpy.broadcast_to(start, shape), numpy.expand_dims(numpy.broadcast_to(base, shape), axis)
    points = numpy.power(base, numpy.linspace(start, stop, num, endpoint, axis=axis))
    return points if dtype is None else convert(points, dtype)


@implements(numpy.geomspace)
def geomspace(start: Value, stop: Value, num: int = 50, endpoint=True, dtype: Any = None, axis: int = 0) -> Value:
    """`numpy.geomspace`: points from `start` to `stop` with a constant ratio."""
    start, stop = list_as_array(start), list_as_array(stop)
    # NumPy computes in double precision, whatever the precision of the end points.
    work = result_type(*map(promotion_argument, (start, stop)), numpy.dtype(float))
    start, stop = convert(start, work), convert(stop, work)
    size = numpy.absolute(start)
    direction = start / size if typeof(start).dtype.kind == "c" else numpy.sign(start)
    exponents = numpy.linspace(numpy.log(size), numpy.log(stop / direction), num, endpoint, axis=axis)
    points = (numpy.expand_dims(direction, axis) if numpy.ndim(direction) else direction) * numpy.exp(exponents)
    return points if dtype is None else convert(points, dtype)


# ---------------------------------------------------------------- matrices


def _triangle(triangle: Callable) -> None:
    """Declare `numpy.tril` or `numpy.triu`, which keep a triangle of a matrix."""

    def function(m: Value, k: int = 0) -> Value:
        t = typeof(m)
        if not t.ndim:
            raise ValueError(f"{triangle.__name__}: expected an array of at least one dimension, got {t}")
        return where(triangle(numpy.ones((t.shape[-2:] * 2)[:2], bool), k), m, numpy.zeros(1, t.dtype))

    implements(triangle)(function)


_triangle(numpy.tril)
_triangle(numpy.triu)


@implements(numpy.vander)
def vander(x: Value, N: int | None = None, increasing: bool = False) -> Value:
    """`numpy.vander`: a matrix whose columns are powers of a vector."""
    x = as_array(x)
    if typeof(x).ndim != 1:
        raise ValueError(f"vander: expected a vector, got {typeof(x)}")
    powers = numpy.arange(typeof(x).size if N is None else N)
    return elementwise.power(reshape(x, (-1, 1)), powers if increasing else powers[::-1])


# ---------------------------------------------------------------- full_like and the like


def _like(like: Callable, value: float) -> None:
    """Declare a function of shape and dtype alone, whose result is a plain array."""

    def function(a, dtype=None, order="K", subok=True, shape=None, *, device=None):
        t = typeof(a)
        shape = t.shape if shape is None else as_shape(shape)
        return uniform(value, shape, dtype or t.dtype)

    implements(like)(function)


_like(numpy.zeros_like, 0)
_like(numpy.ones_like, 1)
_like(numpy.empty_like, 0)


@implements(numpy.full_like)
def full_like(
    a: Value, fill_value: Value, dtype: Any = None, order="K", subok=True, shape: Any = None, *, device: Any = None
) -> Value:
    """`numpy.full_like`, differentiable in the fill value."""
    t = typeof(a)
    value = convert(as_array(fill_value), dtype or t.dtype)
    return elementwise.copy(broadcast_to(value, t.shape if shape is None else shape))
