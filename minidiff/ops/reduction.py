"""Sums, products, means, extrema, differences and slopes along axes.

The functions that ignore NaNs call the ones that do not, with `where=`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import base, dimensions, elementwise, indexing
from minidiff.ops.arrays import as_array
from minidiff.ops.dimensions import Dimensions, Types
from minidiff.ops.shape import array_and_axis, normalize_axes, reduced_axes, reshape, resized_shape
from minidiff.ops.sorting import INTP
from minidiff.values.dtypes import is_differentiable

# ---------------------------------------------------------------- helpers of reductions


def bind_reduction(primitive: Primitive, x: Value, axis: Any, keepdims: bool, **params) -> Value:
    """Bind a reduction, with `keepdims` only if true, to keep tapes readable."""
    if keepdims:
        params["keepdims"] = True
    return primitive.bind(x, axes=reduced_axes(axis, len(x.shape), primitive.name), **params)


def _number(x: Any, dtype: numpy.dtype) -> Value:
    """Convert a number to a dtype."""
    return elementwise.convert(x, dtype) if isinstance(x, Tracer) else numpy.asarray(x, dtype)[()]


def operand_of(a: Value, dtype: Any, where: Any, fill: Any) -> Value:
    """Return the array to reduce: `a` cast to the dtype, and `fill` where `where` is false."""
    x = as_array(a) if where is True else apply_mask(as_array(a), where, fill)
    return x if dtype is None else elementwise.convert(x, dtype)


def apply_mask(x: Value, mask: Value, fill: Any, name: str = "where") -> Value:
    """Return `x`, and `fill` where the mask is False; the mask, an argument of this name, must broadcast to `x`."""
    shape, of_mask = typeof(x).shape, as_array(mask).shape
    pairs = () if of_mask == shape else zip(of_mask[::-1], shape[::-1])
    if len(of_mask) > len(shape) or [m for m, n in pairs if m not in (1, n)]:
        raise ValueError(
            f"{name}= has shape {of_mask}, which does not broadcast to that of the array, {shape}; "
            f"give it the array's shape: {name}=mask.reshape(x.shape), say"
        )
    return elementwise.where(mask, x, fill)


def as_inexact(a: Value) -> Value:
    """Convert integers to f64; return other arrays unchanged."""
    return elementwise.convert(a, float) if a.dtype.kind in "biu" else a


def size_along(x: Value | ShapedArray, axes: tuple[int, ...]) -> int:
    return math.prod(map(x.shape.__getitem__, axes))


def count_of(x: Value, axis: Any, where: Any, keepdims: bool, name: str) -> Any:
    """Return the number of elements reduced to one; an array of such numbers with `where`."""
    if where is True:
        return size_along(x, normalize_axes(axis, len(x.shape), name))
    return sum(numpy.broadcast_to(as_array(where), x.shape), axis, keepdims=keepdims)


def where_not_nan(a: Value, where: Any) -> Any:
    """Return the condition `where` of the functions that ignore NaNs; integers have no NaNs."""
    if not is_differentiable(typeof(a).dtype):
        return where
    numbers = elementwise.logical_not(elementwise.isnan(a))
    return numbers if where is True else elementwise.logical_and(numbers, where)


def _ignoring_nans(function: Callable, numpy_function: Callable) -> Callable:
    """Declare a reduction that ignores NaNs, with the parameters of the one that does not."""

    @functools.wraps(function)
    def of_numbers(a: Value, *args: Any, where: Any = True, **options: Any) -> Value:
        return function(a, *args, where=where_not_nan(a, where), **options)

    of_numbers.__name__ = of_numbers.__qualname__ = numpy_function.__name__
    return implements(numpy_function)(of_numbers)


# ---------------------------------------------------------------- sum


def _total(primitive: Primitive, combine: Callable, identity: int, numpy_function: Callable, ignoring_nans: Callable):
    """Declare a sum or product over one axis, several, or all, and one that ignores NaNs."""

    @implements(numpy_function)
    def total(a: Value, axis: Any = None, dtype: Any = None, *, keepdims=False, initial: Any = None, where: Any = True):
        def reduced(x: Value) -> Value:
            y = bind_reduction(primitive, x, axis, keepdims)
            return y if initial is None else combine(y, _number(initial, y.dtype))

        x = operand_of(a, dtype, where, identity)
        y = reduced(x) if primitive.accumulates and initial is None else base.run_in_float32(reduced, x)
        return y if dtype is None else elementwise.convert(y, dtype)  # NumPy accumulates in a larger one

    return total, _ignoring_nans(total, ignoring_nans)


sum, nansum = _total(base.sum_p, elementwise.add, 0, numpy.sum, numpy.nansum)

# ---------------------------------------------------------------- mean


#: The mean of floating-point or complex numbers.
mean_p = base.Linear(
    "mean",
    lambda x, axes, keepdims=False: numpy.add.reduce(x, axis=axes, keepdims=keepdims) / size_along(x, axes),
    lambda x, axes, keepdims=False: (base.reduced_shape(x, axes, keepdims), x.dtype),
    lambda ct, operands, axes, keepdims=False: [
        base.broadcast_back(elementwise.divide(ct, size_along(operands[0], axes)), operands[0], axes, keepdims)
    ],
    fits=lambda x, axes, **params: base.axes_fit(x, axes=axes) and is_differentiable(x.dtype),
    sharding=dimensions.reduction("mean"),
    decomposed=lambda x, axes, **params: elementwise.divide(
        base.sum_p.bind(x, axes=axes, **params), size_along(x, axes)
    ),
    accumulates=True,
)


@implements(numpy.mean)
def mean(a: Value, axis: Any = None, dtype: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
    """`numpy.mean` over one axis, several, or all."""
    if dtype is not None and not is_differentiable(dtype):  # a sum of integers, divided and truncated
        total = sum(a, axis, dtype, keepdims=keepdims, where=where)
        count = count_of(as_array(a), axis, where, keepdims, "mean")
        return elementwise.convert(elementwise.divide(total, count), dtype)
    x = as_inexact(operand_of(a, dtype, where, 0))
    if where is True:
        axes = normalize_axes(axis, len(x.shape), "mean")
        return mean_p.bind(x, axes=axes, keepdims=True) if keepdims else mean_p.bind(x, axes=axes)

    def divided(x: Value) -> Value:
        count = elementwise.convert(count_of(x, axis, where, keepdims, "mean"), x.dtype)
        return elementwise.divide(bind_reduction(base.sum_p, x, axis, keepdims), count)

    return base.run_in_float32(divided, x)


nanmean = _ignoring_nans(mean, numpy.nanmean)


# ---------------------------------------------------------------- cumsum, cumprod


def _reverse(x: numpy.ndarray, axis: int) -> numpy.ndarray:
    return x[(slice(None),) * axis + (slice(None, None, -1),)]


def _accumulate(ufunc: numpy.ufunc, x: numpy.ndarray, axis: int, reverse: bool = False) -> numpy.ndarray:
    if reverse:
        return _reverse(_accumulate(ufunc, _reverse(x, axis), axis), axis)
    return ufunc.accumulate(x, axis, base.sum_dtype(x.dtype))


def _opposite_direction(reverse: bool) -> dict:
    """Return the parameter `reverse` of the opposite direction, which tapes show only if it is true."""
    return {} if reverse else {"reverse": True}


#: Sums from the first element to each; with `reverse`, from each to the last.
cumsum_p = base.Linear(
    "cumsum",
    functools.partial(_accumulate, numpy.add),
    lambda x, axis, reverse=False: (x.shape, base.sum_dtype(x.dtype)),
    lambda ct, operands, axis, reverse=False: [cumsum_p.bind(ct, axis=axis, **_opposite_direction(reverse))],
    sharding=dimensions.cumulative,
    accumulates=True,
)


def _recurrence_tangent(out, primals, tangents, params):
    a, (ta, tb) = primals[0], tangents
    if ta is not None:
        term = elementwise.multiply(ta, _shift_by_one(out, 0, **params))
        tb = term if tb is None else tb + term
    return recurrence_p.bind(a, tb, **params)


def _recurrence_transpose(ct, operands, axis, reverse=False):
    back = {"axis": axis, **_opposite_direction(reverse)}
    return [recurrence_p.bind(_shift_by_one(operands[0], 0, **back), ct, **back)]


def _recurrence_impl(a: numpy.ndarray, b: numpy.ndarray, axis: int, reverse: bool = False) -> numpy.ndarray:
    if reverse:
        return _reverse(_recurrence_impl(_reverse(a, axis), _reverse(b, axis), axis), axis)
    a, b = numpy.moveaxis(a, axis, 0), numpy.moveaxis(b, axis, 0)
    with numpy.errstate(over="ignore", invalid="ignore"):
        y = _recurrence_by_doubling(a, b)
    if not numpy.isfinite(y).all():  # a product of many a may overflow although no y does: go step by step
        y = b.copy()
        for i in range(1, len(y)):
            y[i] += a[i] * y[i - 1]
    return numpy.moveaxis(y, 0, axis)


def _recurrence_by_doubling(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """Solve the recurrence in log2(n) rounds; round k reaches 2**k elements back."""
    a, y, step = a.copy(), b.copy(), 1
    while step < len(y):
        y[step:] += a[step:] * y[:-step]
        a[step:] = a[step:] * a[:-step]
        step *= 2
    return y


#: y[i] = a[i] y[i-1] + b[i] along an axis, from y[-1] = 0; with `reverse` from the end: y[i] = a[i] y[i+1] + b[i].
#: It is linear in b. Its derivatives and those of `cumprod` are recurrences, so nothing divides by an element that may
#: be zero.
recurrence_p = base.General(
    "recurrence",
    _recurrence_impl,
    lambda a, b, axis, reverse=False: (b.shape, b.dtype),
    _recurrence_tangent,
    transpose_rule=_recurrence_transpose,
    sharding=dimensions.axiswise("axis"),
)


def _shift_by_one(x: Value, first: float, axis: int, reverse: bool = False) -> Value:
    """Shift `x` by one along an axis, inserting `first` (`reverse`: at the end)."""
    n = x.shape[axis]
    if not n:
        return x
    start = numpy.full(resized_shape(x, axis, 1), first, x.dtype)
    shifted = indexing.slice_along(x, axis, 1, n) if reverse else indexing.slice_along(x, axis, 0, n - 1)
    return numpy.concatenate([shifted, start] if reverse else [start, shifted], axis)


def _cumprod_tangent(out, primals, tangents, params):
    """Return the tangent of y[i] = x[i] y[i-1]: dy[i] = x[i] dy[i-1] + y[i-1] dx[i]."""
    (x,), (t,) = primals, tangents
    return recurrence_p.bind(x, elementwise.multiply(_shift_by_one(out, 1, **params), t), **params)


cumprod_p = base.General(
    "cumprod",
    functools.partial(_accumulate, numpy.multiply),
    cumsum_p.shape_rule,
    _cumprod_tangent,
    sharding=dimensions.cumulative,
)


def _cumulative(primitive: Primitive, initial: int, numpy_function: Callable, ignoring_nans: Callable) -> tuple:
    """Declare a cumulative sum or product of all elements, and one where NaNs count as `initial`.

    The third function is the array API's, whose result may start with `initial`.
    """
    name = numpy_function.__name__

    def bound(a: Value, axis: int | None, dtype: Any, where: Any = True) -> Value:
        x, axis = array_and_axis(operand_of(a, dtype, where, initial), axis, name)
        bind = functools.partial(primitive.bind, axis=axis)
        y = bind(x) if primitive.accumulates else base.run_in_float32(bind, x)
        return y if dtype is None else elementwise.convert(y, dtype)

    @implements(numpy_function)
    def of_all(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
        return bound(a, axis, dtype)

    @implements(ignoring_nans)
    def of_numbers(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
        return bound(a, axis, dtype, where_not_nan(a, True))

    def from_initial(x: Value, /, *, axis: int | None = None, dtype: Any = None, include_initial=False) -> Value:
        if axis is None:
            if len(x.shape) > 1:
                raise ValueError(f"cumulative_{name[3:]}: pass an axis for {typeof(x)}")
            axis = 0
        y = bound(x, axis, dtype)
        if not include_initial:
            return y
        axis = normalize_axis(axis, len(y.shape), name)
        return numpy.concatenate([numpy.full(resized_shape(y, axis, 1), initial, y.dtype), y], axis)

    return of_all, of_numbers, from_initial


cumsum, nancumsum, _cumulative_sum = _cumulative(cumsum_p, 0, numpy.cumsum, numpy.nancumsum)
cumprod, nancumprod, _cumulative_prod = _cumulative(cumprod_p, 1, numpy.cumprod, numpy.nancumprod)

if hasattr(numpy, "cumulative_sum"):  # since NumPy 2.1
    implements(numpy.cumulative_sum)(_cumulative_sum)
    implements(numpy.cumulative_prod)(_cumulative_prod)


# ---------------------------------------------------------------- prod


def merge_axes(x: Value, axes: Sequence[int]) -> Value:
    """Merge some axes of `x` into one leading axis."""
    shape = x.shape
    remaining = [i for i in range(len(shape)) if i not in axes]
    x = x.transpose((*axes, *remaining))
    return reshape(x, (math.prod([shape[i] for i in axes]), *[shape[i] for i in remaining]))


def _prod_tangent(out, primals, tangents, params):
    """Multiply the tangent of x[i] by the product of all elements before and after it, which is correct at zeros too.

    >>> from minidiff import grad
    >>> grad(prod)(numpy.array([2.0, 0.0, 3.0]))
    array([0., 6., 0.])
    """
    x, t = (merge_axes(v, params["axes"]) for v in (*primals, *tangents))
    before = _shift_by_one(cumprod_p.bind(x, axis=0), 1, 0)
    after = _shift_by_one(cumprod_p.bind(x, axis=0, reverse=True), 1, 0, reverse=True)
    terms = elementwise.multiply(elementwise.multiply(before, after), t)
    return reshape(base.sum_p.bind(terms, axes=(0,)), out.shape)


prod_p = base.General(
    "prod",
    lambda x, axes, keepdims=False: numpy.multiply.reduce(x, axis=axes, keepdims=keepdims),
    base.sum_p.shape_rule,
    _prod_tangent,
    sharding=dimensions.reduction("prod"),
)


prod, nanprod = _total(prod_p, elementwise.multiply, 1, numpy.prod, numpy.nanprod)

# ---------------------------------------------------------------- max, min


class ExtremumAlong(base.General):
    """`max` and `min`: tied elements share the derivative equally.

    `infinity`, of one sign, is the identity of the reduction; for integers it is that end of their range.

    >>> from minidiff import grad
    >>> grad(max)(numpy.array([1.0, 3.0, 3.0]))
    array([0. , 0.5, 0.5])
    """

    def __init__(self, name: str, ufunc: numpy.ufunc, infinity: float):
        impl = lambda x, axes, keepdims=False: ufunc.reduce(x, axis=axes, keepdims=keepdims)  # noqa: E731
        super().__init__(name, impl, self._shape, self._tangent, sharding=dimensions.reduction(name))
        self.infinity = infinity

    def _shape(self, x, axes, keepdims=False):
        if not size_along(x, axes):
            raise ValueError(f"{self.name}: {x} is empty along axes {axes}; pass the result as initial=")
        return base.reduced_shape(x, axes, keepdims), x.dtype

    def _tangent(self, out, primals, tangents, params):
        (x,), (t,) = primals, tangents
        axes, keepdims = params["axes"], params.get("keepdims", False)
        best = out if keepdims else reshape(out, base.reduced_shape(x, axes, True))

        def shared(t):
            attained = elementwise.convert(elementwise.equal(x, best), t.dtype)
            total = base.sum_p.bind(elementwise.multiply(attained, t), **params)
            return elementwise.divide(total, base.sum_p.bind(attained, **params))

        return base.run_in_float32(shared, t)

    def identity(self, dtype: numpy.dtype) -> Any:
        if is_differentiable(dtype):
            return self.infinity
        least, most = (0, 1) if dtype.kind == "b" else (numpy.iinfo(dtype).min, numpy.iinfo(dtype).max)
        return dtype.type(most if self.infinity > 0 else least)


max_p = ExtremumAlong("max", numpy.maximum, -math.inf)
min_p = ExtremumAlong("min", numpy.minimum, math.inf)


def _extrema(primitive: ExtremumAlong, combine: Callable, numpy_functions: Sequence, of_numbers: Callable) -> tuple:
    """Declare an extremum over one axis, several, or all, and one that ignores NaNs."""

    def extremum(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True):
        if initial is None:
            if where is not True:
                raise ValueError(f"{primitive.name}: where= may select no element; pass the result as initial=")
            return bind_reduction(primitive, a, axis, keepdims)
        x = operand_of(a, None, where, primitive.identity(a.dtype))
        initial = _number(initial, x.dtype)
        axes = reduced_axes(axis, len(x.shape), primitive.name)
        if not size_along(x, axes):
            return elementwise.copy(numpy.broadcast_to(as_array(initial), base.reduced_shape(x, axes, keepdims)))
        return combine(bind_reduction(primitive, x, axis, keepdims), initial)

    def ignoring_nans(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True):
        if initial is not None or not is_differentiable(a.dtype):
            return extremum(a, axis, keepdims=keepdims, initial=initial, where=where_not_nan(a, where))
        if where is not True:
            return extremum(a, axis, keepdims=keepdims, where=where)  # raises, since nothing may be left
        numbers = where_not_nan(a, True)
        y = extremum(elementwise.where(numbers, a, primitive.infinity), axis, keepdims=keepdims)
        return elementwise.where(any(numbers, axis, keepdims=keepdims), y, numpy.nan)

    return implements(*numpy_functions)(extremum), implements(of_numbers)(ignoring_nans)


max, nanmax = _extrema(max_p, elementwise.maximum, (numpy.max, numpy.amax), numpy.nanmax)
min, nanmin = _extrema(min_p, elementwise.minimum, (numpy.min, numpy.amin), numpy.nanmin)


@implements(numpy.ptp)
def ptp(a: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.ptp`: the maximum minus the minimum."""
    return elementwise.subtract(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


# ---------------------------------------------------------------- all, any, count_nonzero


def _truth(numpy_function: Callable, ufunc: numpy.ufunc, identity: bool, combine: str) -> Callable:
    """Declare whether all, or any, elements are true (not 0)."""
    primitive = base.Discrete(
        numpy_function.__name__,
        lambda x, axes, keepdims=False: ufunc.reduce(x, axis=axes, dtype=bool, keepdims=keepdims),
        lambda x, axes, keepdims=False: (base.reduced_shape(x, axes, keepdims), numpy.dtype(bool)),
        sharding=dimensions.reduction(combine),
    )

    def truth(a: Value, axis: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
        return bind_reduction(primitive, operand_of(a, None, where, identity), axis, keepdims)

    return implements(numpy_function)(truth)


all, any = _truth(numpy.all, numpy.logical_and, True, "min"), _truth(numpy.any, numpy.logical_or, False, "max")


@implements(numpy.count_nonzero)
def count_nonzero(a: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.count_nonzero`: the number of nonzero elements."""
    return sum(elementwise.not_equal(a, 0), axis, keepdims=keepdims)


# ---------------------------------------------------------------- argmax, argmin


def _position_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    (labels,) = dimensions.dimension_labels(types)
    return Dimensions((labels,), (tuple(d for d in labels if d != params["axis"]),))


def _position(numpy_function: Callable, sharding: Callable) -> base.Discrete:
    return base.Discrete(
        numpy_function.__name__,
        lambda x, axis: numpy_function(x, axis),
        lambda x, axis: (base.reduced_shape(x, (axis,)), INTP),
        fits=lambda x, axis: base.axes_fit(x, axis=axis) and x.shape[axis] > 0,
        sharding=sharding,
    )


def _position_of(numpy_function: Callable, primitive: base.Discrete) -> Callable:
    def position(a: Value, axis: int | None = None, *, keepdims: bool = False) -> Value:
        t = typeof(a)
        x, at = array_and_axis(a, axis, primitive.name)
        y = primitive.bind(x, axis=at)
        return reshape(y, base.reduced_shape(t, range(t.ndim) if axis is None else (at,), True)) if keepdims else y

    return implements(numpy_function)(position)


argmax_p, argmin_p = _position(numpy.argmax, _position_dimensions), _position(numpy.argmin, _position_dimensions)
argmax, argmin = _position_of(numpy.argmax, argmax_p), _position_of(numpy.argmin, argmin_p)
nanargmax, nanargmin = [  # which raise where all are NaNs: of a block, they may be
    _position_of(f, _position(f, dimensions.axiswise("axis"))) for f in (numpy.nanargmax, numpy.nanargmin)
]


# ---------------------------------------------------------------- differences, slopes, integrals


@implements(numpy.diff)
def diff(a: Value, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Value:
    """`numpy.diff`: the differences of neighbors along an axis, taken n times."""
    if n < 0:
        raise ValueError(f"diff: n must not be negative, got {n}")
    if n == 0:
        return a
    a = as_array(a)
    axis = normalize_axis(axis, len(a.shape), "diff")
    if prepend is not None or append is not None:
        parts = [as_array(x) for x in (prepend, a, append) if x is not None]
        a = numpy.concatenate([x if x.shape else numpy.broadcast_to(x, resized_shape(a, axis, 1)) for x in parts], axis)
    minus = elementwise.not_equal if a.dtype.kind == "b" else elementwise.subtract
    for _ in range(n):
        end = -1 if a.shape[axis] else None
        a = minus(indexing.slice_along(a, axis, 1, None), indexing.slice_along(a, axis, None, end))
    return a


@implements(numpy.ediff1d)
def ediff1d(ary: Value, to_end: Any = None, to_begin: Any = None) -> Value:
    """`numpy.ediff1d`: flattened differences between `to_begin` and `to_end`."""
    d = diff(numpy.ravel(ary))
    parts = [numpy.ravel(as_array(x)) for x in (to_begin, d, to_end) if x is not None]
    return numpy.concatenate([elementwise.convert(x, d.dtype) for x in parts])


@implements(numpy.trapezoid)
@base.in_float32
def trapezoid(y: Value, x: Value | None = None, dx: Any = 1.0, axis: int = -1) -> Value:
    """`numpy.trapezoid`: the integral of values at points `x`, or spaced by `dx`."""
    y = as_array(y)
    of_y = normalize_axis(axis, len(y.shape), "trapezoid")  # x may have more axes; `axis` counts its own
    if x is not None:
        x = as_array(x)
        dx = diff(x, axis=axis if len(x.shape) > 1 else -1)
        if len(x.shape) == 1:
            dx = reshape(dx, [-1 if i == of_y else 1 for i in range(len(y.shape))])
    return sum(dx * (indexing.slice_along(y, of_y, 1, None) + indexing.slice_along(y, of_y, None, -1)) / 2.0, axis)


@implements(numpy.gradient)
def gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """`numpy.gradient`: central differences along axes, one-sided at the ends."""
    f = as_inexact(as_array(f))
    axes = normalize_axes(axis, len(f.shape), "gradient")
    spacings = list(varargs) or [1.0]
    if len(spacings) == 1 and not len(as_array(spacings[0]).shape):
        spacings = spacings * len(axes)
    if len(spacings) != len(axes):
        raise TypeError(f"gradient: {len(varargs)} spacings for {len(axes)} axes; pass one for all, or one for each")
    if edge_order not in (1, 2):
        raise ValueError(f"gradient: edge_order must be 1 or 2, got {edge_order}")
    out = tuple(_slope(f, i, _steps(h, f.shape[i]), edge_order) for i, h in zip(axes, spacings))
    return out[0] if len(out) == 1 else out


def _steps(spacing: Any, n: int) -> Value:
    """Return the `n - 1` distances between coordinates, or one number."""
    h = as_array(spacing)
    if not h.shape:
        return spacing
    if h.shape != (n,):
        raise ValueError(f"gradient: coordinates of shape {h.shape} for an axis of size {n}")
    return diff(as_inexact(h))


def _slope(f: Value, axis: int, h: Value, edge_order: int) -> Value:
    n = f.shape[axis]
    if n < edge_order + 1:
        raise ValueError(f"gradient: axis {axis} of {typeof(f)} needs at least {edge_order + 1} elements")
    uniform = not len(as_array(h).shape)
    if uniform and edge_order == 1 and typeof(f).sharding is not None:
        return elementwise.convert(_slope_by_shifts(f, axis, h), f.dtype)

    def at(*bounds: int | None) -> Value:
        return indexing.slice_along(f, axis, *bounds)

    def step(i: int) -> Value:
        return h if uniform else h[i]

    if uniform:
        middle = (at(2, None) - at(None, -2)) / (2.0 * h)
    else:
        shape = [-1 if i == axis else 1 for i in range(len(f.shape))]
        left, right = reshape(h[:-1], shape) if n > 2 else 1.0, reshape(h[1:], shape) if n > 2 else 1.0
        middle = (
            at(2, None) * (left / (right * (left + right)))
            + at(1, -1) * ((right - left) / (left * right))
            - at(None, -2) * (right / (left * (left + right)))
        )
    if edge_order == 1:
        first, last = (at(1, 2) - at(0, 1)) / step(0), (at(n - 1, n) - at(n - 2, n - 1)) / step(-1)
    else:
        first = _one_sided_slope(at(0, 1), at(1, 2), at(2, 3), step(0), step(1))
        last = -_one_sided_slope(at(n - 1, n), at(n - 2, n - 1), at(n - 3, n - 2), step(-1), step(-2))
    return elementwise.convert(numpy.concatenate([first, middle, last], axis), f.dtype)


def _slope_by_shifts(f: Value, axis: int, h: Value) -> Value:
    """Return differences of f and its shifts, which are as long as f: a dimension that is split stays so."""
    before, after = numpy.roll(f, 1, axis), numpy.roll(f, -1, axis)
    place = numpy.arange(f.shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(f.shape))])
    at_ends = numpy.where(place == 0, after - f, f - before) / h
    return numpy.where((place > 0) & (place < f.shape[axis] - 1), (after - before) / (2.0 * h), at_ends)


def _one_sided_slope(f0: Value, f1: Value, f2: Value, h1: Value, h2: Value) -> Value:
    """Return the slope at f0 of the parabola through values with spacings h1 and h2."""
    return f1 * ((h1 + h2) / (h1 * h2)) - f0 * ((2.0 * h1 + h2) / (h1 * (h1 + h2))) - f2 * (h1 / (h2 * (h1 + h2)))
