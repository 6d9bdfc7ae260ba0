"""Operations that reduce axes or accumulate along one: sums, products, means, extrema, quantiles, differences.

The functions that leave out NaNs are those of the same name with `where=`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core import Primitive, ShapedArray, Tracer, Value, implements, typeof
from minidiff.ops import elementwise, indexing
from minidiff.ops.discrete import Discrete
from minidiff.ops.kinds import Linear
from minidiff.ops.shape import (
    as_array,
    broadcast_to,
    broadcast_to_p,
    concatenate,
    normalize_axes,
    normalize_axis,
    ravel,
    reshape,
    reshape_p,
    shift,
    transpose,
)
from minidiff.ops.sorting import INTP, sort

# ---------------------------------------------------------------- what reductions share


def _reduced_shape(x: ShapedArray, axes: tuple[int, ...], keepdims: bool = False) -> tuple[int, ...]:
    if keepdims:
        return tuple([1 if i in axes else n for i, n in enumerate(x.shape)])
    return tuple([n for i, n in enumerate(x.shape) if i not in axes])


def _unreduce(y: Value, x: Value | ShapedArray, axes: tuple[int, ...], keepdims: bool = False) -> Value:
    """A reduced value, repeated along the axes of `x` that were reduced. `x` need only have a shape."""
    if y.shape == x.shape:
        return y
    # Axes that were in front need no place kept for them: that is how broadcasting puts them back.
    if not keepdims and axes != tuple(range(len(axes))):
        y = reshape_p.bind(y, shape=_reduced_shape(x, axes, True))
    return y if y.shape == x.shape else broadcast_to_p.bind(y, shape=x.shape)


def _batch_reduction(primitive, args, batched, axes, **params):
    return primitive.bind(args[0], axes=shift(axes), **params)


def _reduce(primitive: Primitive, x: Value, axis: Any, keepdims: bool, **params) -> Value:
    """Bind a reduction. `keepdims` is a parameter only where it is true: tapes are easier to read so."""
    if keepdims:
        params["keepdims"] = True
    return primitive.bind(x, axes=normalize_axes(axis, len(x.shape), primitive.name), **params)


def _number(x: Any, dtype: numpy.dtype) -> Value:
    """A number of this dtype, from a Python number or any other."""
    return elementwise.convert(x, dtype) if isinstance(x, Tracer) else numpy.asarray(x, dtype)[()]


def _operand(a: Value, dtype: Any, where: Any, fill: Any) -> Value:
    """What is really reduced: `a` of the dtype asked for, with `fill` in place of what is left out."""
    x = a if hasattr(a, "dtype") else numpy.asarray(a)
    if where is not True:
        x = elementwise.where(where, x, fill)
    return x if dtype is None else elementwise.convert(x, dtype)


def _count(x: Value, axis: Any, where: Any, keepdims: bool, what: str) -> Any:
    """How many elements are reduced to one: a number, or with `where` an array of numbers."""
    if where is True:
        return math.prod([x.shape[a] for a in normalize_axes(axis, len(x.shape), what)])
    return sum(broadcast_to(as_array(where), x.shape), axis, keepdims=keepdims)


def _present(a: Value, where: Any) -> Any:
    """The condition `where` of the functions that leave out NaNs; integers have none to leave out."""
    if typeof(a).dtype.kind not in "fc":
        return where
    present = elementwise.logical_not(elementwise.isnan(a))
    return present if where is True else elementwise.logical_and(present, where)


# ---------------------------------------------------------------- sum

sum_p = Linear(
    "sum",
    lambda x, axes, keepdims=False: numpy.add.reduce(x, axis=axes, keepdims=keepdims),
    lambda x, axes, keepdims=False: (_reduced_shape(x, axes, keepdims), _sum_dtype(x.dtype)),
    lambda ct, operands, axes, keepdims=False: [_unreduce(ct, operands[0], axes, keepdims)],
    _batch_reduction,
)


@functools.cache
def _sum_dtype(dtype: numpy.dtype) -> numpy.dtype:
    return numpy.sum(numpy.zeros(1, dtype)).dtype


@implements(numpy.sum)
def sum(a: Value, axis: Any = None, dtype: Any = None, *, keepdims=False, initial: Any = None, where: Any = True):
    """`numpy.sum` over one axis, several, or all."""
    y = _reduce(sum_p, _operand(a, dtype, where, 0), axis, keepdims)
    return y if initial is None else elementwise.add(y, _number(initial, y.dtype))


@implements(numpy.nansum)
def nansum(a: Value, axis: Any = None, dtype: Any = None, *, keepdims=False, initial: Any = None, where: Any = True):
    """`numpy.nansum`: the sum without NaNs."""
    return sum(a, axis, dtype, keepdims=keepdims, initial=initial, where=_present(a, where))


# ---------------------------------------------------------------- mean, average


@implements(numpy.mean)
def mean(a: Value, axis: Any = None, dtype: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
    """`numpy.mean` over one axis, several, or all."""
    x, dtype = _averaged(a, dtype, where)
    count = _count(x, axis, where, keepdims, "mean")
    total = _reduce(sum_p, x, axis, keepdims)
    count = elementwise.convert(count, total.dtype) if hasattr(count, "dtype") else count
    return elementwise.convert(elementwise.divide(total, count), dtype)


def _averaged(a: Value, dtype: Any, where: Any) -> tuple[Value, numpy.dtype]:
    """What is summed for a mean, and the dtype of the mean: integers are summed as f64, f16 as f32."""
    x = _operand(a, dtype, where, 0)
    if x.dtype.kind in "biu":
        x = elementwise.convert(x, float)
    return (elementwise.convert(x, numpy.float32) if x.dtype.char == "e" else x), x.dtype


@implements(numpy.nanmean)
def nanmean(a: Value, axis: Any = None, dtype: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
    """`numpy.nanmean`: the mean without NaNs; NaN where nothing is left."""
    return mean(a, axis, dtype, keepdims=keepdims, where=_present(a, where))


@implements(numpy.average)
def average(a: Value, axis: Any = None, weights: Value | None = None, returned: bool = False, *, keepdims=False):
    """`numpy.average`, differentiable in the weights too. Where they sum to zero the result is not finite."""
    a = as_array(a)
    if weights is None:
        y = mean(a, axis, keepdims=keepdims)
        total = numpy.full(y.shape, _count(a, axis, True, keepdims, "average"), y.dtype)
    else:
        w = _spread_weights(as_array(weights), a.shape, axis)
        dtype = numpy.result_type(a.dtype, w.dtype, *([float] if a.dtype.kind in "biu" else []))
        total = sum(w, axis, dtype, keepdims=keepdims)
        y = elementwise.divide(sum(elementwise.multiply(a, w), axis, dtype, keepdims=keepdims), total)
        total = broadcast_to(total, y.shape)
    return (y, total) if returned else y


def _spread_weights(weights: Value, shape: tuple[int, ...], axis: Any) -> Value:
    """Weights of the elements of an array, from weights of all of them, or of places along `axis`."""
    if weights.shape == shape:
        return weights
    axes = normalize_axes(axis, len(shape), "average")
    if axis is None or weights.shape != tuple(shape[i] for i in axes):
        raise ValueError(
            f"average: weights of shape {weights.shape} fit neither the array's shape {shape} nor its axis {axis}"
        )
    weights = transpose(weights, tuple(int(i) for i in numpy.argsort(axes)))
    return broadcast_to(reshape(weights, tuple(n if i in axes else 1 for i, n in enumerate(shape))), shape)


# ---------------------------------------------------------------- var, std


class Variance(Primitive):
    """`var`: the mean of |x - mean(x)|**2. What a step does to the mean has no part in the derivative: it cancels."""

    def __init__(self):
        super().__init__("var", self._impl, self._shape)

    @staticmethod
    def _impl(x, axes, ddof, keepdims=False):
        return numpy.var(x, axis=axes, ddof=ddof, keepdims=keepdims)

    @staticmethod
    def _shape(x, axes, ddof, keepdims=False):
        return _reduced_shape(x, axes, keepdims), _real_dtype(x.dtype)

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        axes, keepdims = params["axes"], params.get("keepdims", False)
        products = _inner(elementwise.subtract(x, mean(x, axes, keepdims=True)), t)
        freedom = _freedom(_count(x, axes, True, keepdims, "var"), params["ddof"], products.dtype)
        return self.bind(x, **params), elementwise.divide(sum(products, axes, keepdims=keepdims), freedom / 2)

    def batch(self, args, batched, params):
        return _batch_reduction(self, args, batched, **params)


var_p = Variance()


@functools.cache
def _real_dtype(dtype: numpy.dtype) -> numpy.dtype:
    return numpy.zeros(1, dtype).real.dtype


def _inner(x: Value, y: Value) -> Value:
    """Re(conj(x) y): the product of real numbers; of complex ones, as of vectors in the plane."""
    if x.dtype.kind != "c":
        return elementwise.multiply(x, y)
    return elementwise.real(elementwise.multiply(elementwise.conjugate(x), y))


def _freedom(count: Any, ddof: Any, dtype: numpy.dtype) -> Any:
    """Degrees of freedom: the count without `ddof`, not less than 0."""
    if not hasattr(count, "dtype"):
        return count - ddof if count > ddof else 0
    return elementwise.maximum(elementwise.convert(count, dtype) - ddof, 0)


def _ddof(ddof: Any, correction: Any, what: str) -> Any:
    if correction is None:
        return ddof
    if ddof != 0:
        raise ValueError(f"{what}: ddof and correction are names of one thing; give one of them")
    return correction


def _deviations(a: Value, axis: Any, dtype: Any, where: Any, about: Value | None) -> Value:
    """a - mean(a), or a - about; zero for elements that are left out."""
    x = _operand(a, dtype, True, 0)
    about = mean(x, axis, keepdims=True, where=where) if about is None else about
    return _operand(elementwise.subtract(x, about), None, where, 0)


@implements(numpy.var)
def var(
    a: Value,
    axis: Any = None,
    dtype: Any = None,
    *,
    ddof: Any = 0,
    keepdims: bool = False,
    where: Any = True,
    mean: Value | None = None,
    correction: Any = None,
) -> Value:
    """`numpy.var`: the mean square of the deviations from the mean; real, also of complex numbers.

    With `mean=` the deviations are from that, and the derivative in it is its own.
    """
    ddof = _ddof(ddof, correction, "var")
    if where is True and mean is None:
        x = _operand(a, dtype, True, 0)
        return _reduce(var_p, elementwise.convert(x, float) if x.dtype.kind in "biu" else x, axis, keepdims, ddof=ddof)
    d = _deviations(a, axis, dtype, where, mean)
    squares = sum(_inner(d, d), axis, keepdims=keepdims)
    return elementwise.divide(squares, _freedom(_count(d, axis, where, keepdims, "var"), ddof, squares.dtype))


@implements(numpy.nanvar)
def nanvar(a: Value, axis: Any = None, dtype: Any = None, *, ddof: Any = 0, correction: Any = None, **options: Any):
    """`numpy.nanvar`: the variance without NaNs; NaN where not more than `ddof` elements are left."""
    if typeof(a).dtype.kind not in "fc":
        return var(a, axis, dtype, ddof=ddof, correction=correction, **options)
    ddof = _ddof(ddof, correction, "nanvar")
    present = _present(a, options.pop("where", True))
    y = var(a, axis, dtype, ddof=ddof, where=present, **options)
    count = sum(present, axis, keepdims=options.get("keepdims", False))
    return elementwise.where(elementwise.greater(count, ddof), y, numpy.nan)


def _root(y: Value) -> Value:
    """The square root, with derivative 0 at 0: of the slopes that a norm has there, the middle one."""
    zero = elementwise.equal(y, 0)
    return elementwise.where(zero, 0, elementwise.sqrt(elementwise.where(zero, 1, y)))


@implements(numpy.std)
def std(a: Value, axis: Any = None, dtype: Any = None, **options: Any) -> Value:
    """`numpy.std`, the root of :func:`var`, with the same arguments. Where it is 0, so is its derivative."""
    return _root(var(a, axis, dtype, **options))


@implements(numpy.nanstd)
def nanstd(a: Value, axis: Any = None, dtype: Any = None, **options: Any) -> Value:
    """`numpy.nanstd`, the root of :func:`nanvar`, with the same arguments. Where it is 0, so is its derivative."""
    return _root(nanvar(a, axis, dtype, **options))


# ---------------------------------------------------------------- cumsum, cumprod


def _reversed(x: numpy.ndarray, axis: int) -> numpy.ndarray:
    return x[(slice(None),) * axis + (slice(None, None, -1),)]


def _accumulate(ufunc: numpy.ufunc, x: numpy.ndarray, axis: int, reverse: bool = False) -> numpy.ndarray:
    if reverse:
        return _reversed(ufunc.accumulate(_reversed(x, axis), axis, _sum_dtype(x.dtype)), axis)
    return ufunc.accumulate(x, axis, _sum_dtype(x.dtype))


def _accumulate_shape(x, axis, reverse=False):
    return x.shape, _sum_dtype(x.dtype)


def _batch_accumulation(primitive, args, batched, axis, **params):
    size = next(x.shape[0] for x, b in zip(args, batched) if b)
    args = [x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(args, batched)]
    return primitive.bind(*args, axis=axis + 1, **params)


def _turned(reverse: bool) -> dict:
    """The parameter of the opposite direction; it is there only where it is true."""
    return {} if reverse else {"reverse": True}


#: Sums from the first element to each; with `reverse` from each to the last.
cumsum_p = Linear(
    "cumsum",
    functools.partial(_accumulate, numpy.add),
    _accumulate_shape,
    lambda ct, operands, axis, reverse=False: [cumsum_p.bind(ct, axis=axis, **_turned(reverse))],
    _batch_accumulation,
)


class Recurrence(Primitive):
    """y[i] = a[i] y[i-1] + b[i] along an axis, from y[-1] = 0; with `reverse` from the end, y[i] = a[i] y[i+1] + b[i].

    Linear in b. It is what the derivative of `cumprod` is made of, and its own derivatives, so that nothing is
    ever divided by an element that may be zero.
    """

    def __init__(self):
        super().__init__("recurrence", _recurrence_impl, lambda a, b, axis, reverse=False: (b.shape, b.dtype))

    def jvp(self, primals, tangents, params):
        (a, b), (ta, tb) = primals, tangents
        y = self.bind(a, b, **params)
        terms = [] if tb is None else [tb]
        if ta is not None:
            terms.append(elementwise.multiply(ta, _delayed(y, 0, **params)))
        return y, self.bind(a, functools.reduce(elementwise.add, terms), **params) if terms else None

    def transpose(self, ct, operands, params):
        a, _ = operands
        if isinstance(a, ShapedArray):
            return super().transpose(ct, [a], params)
        back = {"axis": params["axis"], **_turned(params.get("reverse", False))}
        return [None, self.bind(_delayed(a, 0, **back), ct, **back)]

    def batch(self, args, batched, params):
        return _batch_accumulation(self, args, batched, **params)


def _recurrence_impl(a: numpy.ndarray, b: numpy.ndarray, axis: int, reverse: bool = False) -> numpy.ndarray:
    if reverse:
        return _reversed(_recurrence_impl(_reversed(a, axis), _reversed(b, axis), axis), axis)
    a, b = numpy.moveaxis(a, axis, 0), numpy.moveaxis(b, axis, 0)
    with numpy.errstate(over="ignore", invalid="ignore"):
        y = _recurrence_by_doubling(a, b)
    if not numpy.isfinite(y).all():  # a product of many a may overflow where no y does: go step by step
        y = b.copy()
        for i in range(1, len(y)):
            y[i] += a[i] * y[i - 1]
    return numpy.moveaxis(y, 0, axis)


def _recurrence_by_doubling(a: numpy.ndarray, b: numpy.ndarray) -> numpy.ndarray:
    """After k rounds each y is right as far as 2**k elements back; log2(n) rounds do instead of n steps."""
    a, y, step = a.copy(), b.copy(), 1
    while step < len(y):
        y[step:] += a[step:] * y[:-step]
        a[step:] = a[step:] * a[:-step]
        step *= 2
    return y


recurrence_p = Recurrence()


def _delayed(x: Value, first: float, axis: int, reverse: bool = False) -> Value:
    """`x` moved one place along an axis, `first` moving in and the last element out; with `reverse` the other way."""
    n = x.shape[axis]
    if not n:
        return x
    start = numpy.full((*x.shape[:axis], 1, *x.shape[axis + 1 :]), first, x.dtype)
    rest = indexing.getitem(x, (slice(None),) * axis + (slice(1, n) if reverse else slice(0, n - 1),))
    return concatenate([rest, start] if reverse else [start, rest], axis)


class CumulativeProduct(Primitive):
    """`cumprod`: y[i] = x[i] y[i-1], so dy[i] = x[i] dy[i-1] + y[i-1] dx[i]; with `reverse` from the end."""

    def __init__(self):
        super().__init__("cumprod", functools.partial(_accumulate, numpy.multiply), _accumulate_shape)

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        y = self.bind(x, **params)
        return y, recurrence_p.bind(x, elementwise.multiply(_delayed(y, 1, **params), t), **params)

    def batch(self, args, batched, params):
        return _batch_accumulation(self, args, batched, **params)


cumprod_p = CumulativeProduct()


def _cumulative(primitive: Primitive, a: Value, axis: Any, dtype: Any, where: Any = True, fill: Any = None) -> Value:
    x = _operand(a, dtype, where, fill)
    if axis is None:
        x, axis = ravel(x), 0
    return primitive.bind(x, axis=normalize_axis(axis, len(x.shape), primitive.name))


@implements(numpy.cumsum)
def cumsum(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
    """`numpy.cumsum`: the sums of the elements up to each."""
    return _cumulative(cumsum_p, a, axis, dtype)


@implements(numpy.cumprod)
def cumprod(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
    """`numpy.cumprod`: the products of the elements up to each; its derivatives are right at zeros too."""
    return _cumulative(cumprod_p, a, axis, dtype)


@implements(numpy.nancumsum)
def nancumsum(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
    """`numpy.nancumsum`: NaNs count as 0."""
    return _cumulative(cumsum_p, a, axis, dtype, _present(a, True), 0)


@implements(numpy.nancumprod)
def nancumprod(a: Value, axis: int | None = None, dtype: Any = None) -> Value:
    """`numpy.nancumprod`: NaNs count as 1."""
    return _cumulative(cumprod_p, a, axis, dtype, _present(a, True), 1)


def _from_initial(cumulative: Callable, initial: int, x: Value, axis: Any, dtype: Any, include_initial: bool) -> Value:
    if axis is None:
        if len(x.shape) != 1:
            raise ValueError(f"cumulative_{cumulative.__name__[3:]}: give an axis for {typeof(x)}")
        axis = 0
    y = cumulative(x, axis, dtype)
    if not include_initial:
        return y
    axis = normalize_axis(axis, len(y.shape), cumulative.__name__)
    return concatenate([numpy.full((*y.shape[:axis], 1, *y.shape[axis + 1 :]), initial, y.dtype), y], axis)


if hasattr(numpy, "cumulative_sum"):  # since NumPy 2.1

    @implements(numpy.cumulative_sum)
    def cumulative_sum(x: Value, /, *, axis: int | None = None, dtype: Any = None, include_initial=False) -> Value:
        """`numpy.cumulative_sum`: `cumsum`, preceded by a zero with `include_initial`."""
        return _from_initial(cumsum, 0, x, axis, dtype, include_initial)

    @implements(numpy.cumulative_prod)
    def cumulative_prod(x: Value, /, *, axis: int | None = None, dtype: Any = None, include_initial=False) -> Value:
        """`numpy.cumulative_prod`: `cumprod`, preceded by a one with `include_initial`."""
        return _from_initial(cumprod, 1, x, axis, dtype, include_initial)


# ---------------------------------------------------------------- prod


def _merged(x: Value, axes: Sequence[int]) -> Value:
    """`x` with some of its axes made one, which stands in front."""
    shape = x.shape
    kept = [i for i in range(len(shape)) if i not in axes]
    x = transpose(x, (*axes, *kept))
    return reshape(x, (math.prod([shape[i] for i in axes]), *[shape[i] for i in kept]))


class Product(Primitive):
    """`prod`: the derivative in each element is the product of the others, before it and after it."""

    def __init__(self):
        super().__init__("prod", self._impl, self._shape)

    @staticmethod
    def _impl(x, axes, keepdims=False):
        return numpy.multiply.reduce(x, axis=axes, keepdims=keepdims)

    @staticmethod
    def _shape(x, axes, keepdims=False):
        return _reduced_shape(x, axes, keepdims), _sum_dtype(x.dtype)

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        x, t = _merged(x, params["axes"]), _merged(t, params["axes"])
        before = _delayed(cumprod_p.bind(x, axis=0), 1, 0)
        after = _delayed(cumprod_p.bind(x, axis=0, reverse=True), 1, 0, reverse=True)
        terms = elementwise.multiply(elementwise.multiply(before, after), t)
        return out, reshape(sum_p.bind(terms, axes=(0,)), out.shape)

    def batch(self, args, batched, params):
        return _batch_reduction(self, args, batched, **params)


prod_p = Product()


@implements(numpy.prod)
def prod(a: Value, axis: Any = None, dtype: Any = None, *, keepdims=False, initial: Any = None, where: Any = True):
    """`numpy.prod`; its derivatives are right at zeros too."""
    y = _reduce(prod_p, _operand(a, dtype, where, 1), axis, keepdims)
    return y if initial is None else elementwise.multiply(y, _number(initial, y.dtype))


@implements(numpy.nanprod)
def nanprod(a: Value, axis: Any = None, dtype: Any = None, *, keepdims=False, initial: Any = None, where: Any = True):
    """`numpy.nanprod`: the product without NaNs."""
    return prod(a, axis, dtype, keepdims=keepdims, initial=initial, where=_present(a, where))


# ---------------------------------------------------------------- max, min


class Extremum(Primitive):
    """`max` and `min`: the derivative is shared equally among the elements that attain it.

    `furthest` is the number that every other one beats; of integers, the last of their range on that side.
    """

    def __init__(self, name: str, ufunc: numpy.ufunc, furthest: float):
        super().__init__(name, functools.partial(_extremum_impl, ufunc), self._shape)
        self.furthest = furthest

    @staticmethod
    def _shape(x, axes, keepdims=False):
        return _reduced_shape(x, axes, keepdims), x.dtype

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        axes, keepdims = params["axes"], params.get("keepdims", False)
        out = self.bind(x, **params)
        attained = elementwise.convert(elementwise.equal(x, _unreduce(out, x, axes, keepdims)), t.dtype)
        count = _unreduce(sum_p.bind(attained, **params), x, axes, keepdims)
        return out, sum_p.bind(elementwise.multiply(elementwise.divide(attained, count), t), **params)

    def batch(self, args, batched, params):
        return _batch_reduction(self, args, batched, **params)

    def identity(self, dtype: numpy.dtype) -> Any:
        if dtype.kind in "fc":
            return self.furthest
        least, most = (0, 1) if dtype.kind == "b" else (numpy.iinfo(dtype).min, numpy.iinfo(dtype).max)
        return dtype.type(most if self.furthest > 0 else least)


def _extremum_impl(ufunc: numpy.ufunc, x: numpy.ndarray, axes: tuple[int, ...], keepdims: bool = False):
    return ufunc.reduce(x, axis=axes, keepdims=keepdims)


max_p = Extremum("max", numpy.maximum, -math.inf)
min_p = Extremum("min", numpy.minimum, math.inf)


@implements(numpy.max, numpy.amax)
def max(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True) -> Value:
    """`numpy.max` over one axis, several, or all; elements that tie share the derivative."""
    return _extremum(max_p, elementwise.maximum, a, axis, keepdims, initial, where)


@implements(numpy.min, numpy.amin)
def min(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True) -> Value:
    """`numpy.min` over one axis, several, or all; elements that tie share the derivative."""
    return _extremum(min_p, elementwise.minimum, a, axis, keepdims, initial, where)


def _extremum(
    primitive: Extremum, of_two: Callable, a: Value, axis: Any, keepdims: bool, initial: Any, where: Any
) -> Value:
    if initial is None:
        if where is not True:
            raise ValueError(f"{primitive.name}: with where= there may be no element left; say with initial= what then")
        _check_not_empty(primitive.name, a, axis)
        return _reduce(primitive, a, axis, keepdims)
    x = _operand(a, None, where, primitive.identity(a.dtype))
    initial = _number(initial, x.dtype)
    axes = normalize_axes(axis, len(x.shape), primitive.name)
    if any_empty(x, axes):
        return broadcast_to(as_array(initial), _reduced_shape(x, axes, keepdims))
    return of_two(_reduce(primitive, x, axis, keepdims), initial)


def any_empty(x: Value, axes: Sequence[int]) -> bool:
    return 0 in [x.shape[i] for i in axes]


def _check_not_empty(what: str, a: Value, axis: Any) -> None:
    axes = normalize_axes(axis, len(a.shape), what)
    if any_empty(a, axes):
        raise ValueError(f"{what}: {typeof(a)} has no element along axes {axes}, and nothing has no {what}")


@implements(numpy.nanmax)
def nanmax(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True) -> Value:
    """`numpy.nanmax`: the maximum without NaNs; NaN where nothing is left."""
    return _nan_extremum(max_p, max, a, axis, keepdims, initial, where)


@implements(numpy.nanmin)
def nanmin(a: Value, axis: Any = None, *, keepdims: bool = False, initial: Any = None, where: Any = True) -> Value:
    """`numpy.nanmin`: the minimum without NaNs; NaN where nothing is left."""
    return _nan_extremum(min_p, min, a, axis, keepdims, initial, where)


def _nan_extremum(primitive, extremum: Callable, a: Value, axis: Any, keepdims, initial: Any, where: Any) -> Value:
    if initial is not None or a.dtype.kind not in "fc":
        return extremum(a, axis, keepdims=keepdims, initial=initial, where=_present(a, where))
    if where is not True:
        return extremum(a, axis, keepdims=keepdims, where=where)  # an error: what if nothing is left?
    present = _present(a, True)
    y = extremum(elementwise.where(present, a, primitive.furthest), axis, keepdims=keepdims)
    return elementwise.where(any(present, axis, keepdims=keepdims), y, numpy.nan)


@implements(numpy.ptp)
def ptp(a: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.ptp`: the maximum less the minimum."""
    return elementwise.subtract(max(a, axis, keepdims=keepdims), min(a, axis, keepdims=keepdims))


# ---------------------------------------------------------------- all, any, count_nonzero


def _truth(name: str, ufunc: numpy.ufunc) -> Discrete:
    return Discrete(
        name,
        lambda x, axes, keepdims=False: ufunc.reduce(x, axis=axes, dtype=bool, keepdims=keepdims),
        lambda x, axes, keepdims=False: (_reduced_shape(x, axes, keepdims), numpy.dtype(bool)),
        _batch_reduction,
    )


all_p, any_p = _truth("all", numpy.logical_and), _truth("any", numpy.logical_or)


@implements(numpy.all)
def all(a: Value, axis: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
    """`numpy.all`: whether all elements are true (not zero)."""
    return _reduce(all_p, _operand(a, None, where, True), axis, keepdims)


@implements(numpy.any)
def any(a: Value, axis: Any = None, *, keepdims: bool = False, where: Any = True) -> Value:
    """`numpy.any`: whether an element is true (not zero)."""
    return _reduce(any_p, _operand(a, None, where, False), axis, keepdims)


@implements(numpy.count_nonzero)
def count_nonzero(a: Value, axis: Any = None, *, keepdims: bool = False) -> Value:
    """`numpy.count_nonzero`: how many elements are not zero."""
    return sum(elementwise.not_equal(a, 0), axis, keepdims=keepdims)


# ---------------------------------------------------------------- argmax, argmin


def _position(numpy_function: Callable) -> Discrete:
    return Discrete(
        numpy_function.__name__,
        lambda x, axis: numpy_function(x, axis),
        lambda x, axis: (_reduced_shape(x, (axis,)), INTP),
        lambda primitive, args, batched, axis: primitive.bind(args[0], axis=axis + 1),
    )


def _position_of(numpy_function: Callable) -> Callable:
    primitive = _position(numpy_function)

    def position(a: Value, axis: int | None = None, *, keepdims: bool = False) -> Value:
        shape = typeof(a).shape
        x, at = (ravel(a), 0) if axis is None else (a, normalize_axis(axis, len(shape), primitive.name))
        y = primitive.bind(x, axis=at)
        axes = range(len(shape)) if axis is None else (at,)
        return reshape(y, tuple(1 if i in axes else n for i, n in enumerate(shape))) if keepdims else y

    position.__name__ = position.__qualname__ = primitive.name
    position.__doc__ = f"`numpy.{primitive.name}`: integers, so no derivative."
    return implements(numpy_function)(position)


argmax, argmin = _position_of(numpy.argmax), _position_of(numpy.argmin)
nanargmax, nanargmin = _position_of(numpy.nanargmax), _position_of(numpy.nanargmin)


# ---------------------------------------------------------------- median, quantiles


@implements(numpy.median)
def median(a: Value, axis: Any = None, *, overwrite_input: bool = False, keepdims: bool = False) -> Value:
    """`numpy.median`: the middle element in order, or the mean of the two in the middle; NaN if there is one."""
    return _of_sorted(_median, a, axis, keepdims, "median")


@implements(numpy.nanmedian)
def nanmedian(a: Value, axis: Any = None, *, overwrite_input: bool = False, keepdims: bool = False) -> Value:
    """`numpy.nanmedian`: the median without NaNs; NaN where nothing is left."""
    return nanquantile(_inexact(a), 0.5, axis, keepdims=keepdims)


def _inexact(a: Value) -> Value:
    return elementwise.convert(a, float) if a.dtype.kind in "biu" else a


def _of_sorted(rule: Callable, a: Value, axis: Any, keepdims: bool, what: str) -> Value:
    """`rule` of the elements in order, along axis 0: its result's last axes are those that stay."""
    a = as_array(a)
    axes = normalize_axes(axis, len(a.shape), what)
    x = _merged(a, axes)
    y = rule(sort(x, 0))
    kept = len(x.shape) - 1
    return reshape(y, (*y.shape[: len(y.shape) - kept], *_reduced_shape(a, axes, True))) if keepdims else y


def _median(s: Value) -> Value:
    n = s.shape[0]
    if not n:
        return mean(s, 0)
    middle = mean(indexing.getitem(s, (slice((n - 1) // 2, n // 2 + 1),)), 0)
    return _nan_of(s, middle)


def _nan_of(s: Value, y: Value) -> Value:
    """`y`, but NaN where a NaN stands among the elements: sorted, it is the last."""
    if s.dtype.kind not in "fc":
        return y
    last = indexing.getitem(s, (-1,))
    return elementwise.where(elementwise.isnan(last), last, y)


def _between(alpha: float, beta: float) -> Callable:
    return lambda n, q: n * q + (alpha + q * (1 - alpha - beta)) - 1


def _averaged_step(n: Any, q: Any) -> Any:
    v = n * q - 1
    return numpy.where(v % 1 == 0, v + 0.5, numpy.ceil(v))


def _nearest_even(n: Any, q: Any) -> Any:
    v = numpy.floor(n * q - 1.5)
    return numpy.where((n * q - 1.5 == v) & (v % 2 == 1), v, v + 1)


#: The place of the quantile q among n elements in order, by each method; where it has a fraction, the quantile
#: lies between two elements.
QUANTILE_METHODS: dict[str, Callable] = {
    "linear": lambda n, q: (n - 1) * q,
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3, 1 / 3),
    "normal_unbiased": _between(3 / 8, 3 / 8),
    "midpoint": lambda n, q: 0.5 * (numpy.floor((n - 1) * q) + numpy.ceil((n - 1) * q)),
    "averaged_inverted_cdf": _averaged_step,
    "inverted_cdf": lambda n, q: numpy.ceil(n * q - 1),
    "closest_observation": _nearest_even,
    "lower": lambda n, q: numpy.floor((n - 1) * q),
    "higher": lambda n, q: numpy.ceil((n - 1) * q),
    "nearest": lambda n, q: numpy.rint((n - 1) * q),
}
#: The methods whose quantile is always one of the elements.
DISCRETE_METHODS = {"inverted_cdf", "closest_observation", "lower", "higher", "nearest"}


@implements(numpy.quantile)
def quantile(
    a: Value, q: Value, axis: Any = None, *, overwrite_input=False, method: str = "linear", keepdims: bool = False
) -> Value:
    """`numpy.quantile`, by each of its methods; differentiable in `a`, and in `q` where the method interpolates."""
    return _quantile(a, q, axis, method, keepdims, False, "quantile")


@implements(numpy.nanquantile)
def nanquantile(
    a: Value, q: Value, axis: Any = None, *, overwrite_input=False, method: str = "linear", keepdims: bool = False
) -> Value:
    """`numpy.nanquantile`: the quantile without NaNs; NaN where nothing is left."""
    return _quantile(a, q, axis, method, keepdims, True, "nanquantile")


@implements(numpy.percentile)
def percentile(
    a: Value, q: Value, axis: Any = None, *, overwrite_input=False, method: str = "linear", keepdims: bool = False
) -> Value:
    """`numpy.percentile`: the quantile of q / 100."""
    return _quantile(a, _hundredth(q), axis, method, keepdims, False, "percentile")


@implements(numpy.nanpercentile)
def nanpercentile(
    a: Value, q: Value, axis: Any = None, *, overwrite_input=False, method: str = "linear", keepdims: bool = False
) -> Value:
    """`numpy.nanpercentile`: the percentile without NaNs; NaN where nothing is left."""
    return _quantile(a, _hundredth(q), axis, method, keepdims, True, "nanpercentile")


def _hundredth(q: Value) -> Value:
    return q / 100 if isinstance(q, (Tracer, int, float)) else numpy.asarray(q) / 100


def _quantile(a: Value, q: Value, axis: Any, method: str, keepdims: bool, skip_nan: bool, what: str) -> Value:
    if method not in QUANTILE_METHODS:
        raise ValueError(f"{what}: method is one of {', '.join(QUANTILE_METHODS)}; got {method!r}")
    if typeof(a).dtype.kind == "c":
        raise TypeError(f"{what}: complex numbers have no order: {typeof(a)}")
    if not isinstance(q, Tracer) and not numpy.all((numpy.asarray(q) >= 0) & (numpy.asarray(q) <= 1)):
        raise ValueError(f"{what}: q is out of range")
    return _of_sorted(lambda s: _quantile_of_sorted(s, q, method, skip_nan), a, axis, keepdims, what)


def _quantile_of_sorted(s: Value, q: Value, method: str, skip_nan: bool) -> Value:
    weak = type(q) in (int, float)  # it does not decide the dtype of the result
    q, n, kept = as_array(q), s.shape[0], s.shape[1:]
    if skip_nan and s.dtype.kind == "f":
        n = sum(elementwise.logical_not(elementwise.isnan(s)), 0)
        q = reshape(q, (*q.shape, *[1] * len(kept)))
    place = QUANTILE_METHODS[method](n, q)
    low = numpy.floor(place)
    below, above = (_at(s, _clipped(i, n), skip_nan) for i in (low, low + 1))
    if method in DISCRETE_METHODS or place.dtype.kind in "iu":
        y = below
    else:
        part = place - low
        part = elementwise.convert(part, s.dtype) if weak and s.dtype.kind == "f" else part
        part = part if skip_nan else reshape(part, (*part.shape, *[1] * len(kept)))
        y = below + (above - below) * part
    return y if skip_nan else _nan_of(s, y)


def _clipped(place: Value, n: Any) -> Value:
    return elementwise.convert(numpy.maximum(numpy.minimum(place, n - 1), 0), INTP)


def _at(s: Value, index: Value, own: bool) -> Value:
    """The elements of each line of `s` at `index`; with `own`, each line has its own: the index's last axes."""
    if not own or s.dtype.kind != "f":
        return indexing.getitem(s, (index,))
    columns = math.prod(s.shape[1:])
    lines, rows = reshape(s, (s.shape[0], columns)), math.prod(index.shape[: len(index.shape) - len(s.shape) + 1])
    return reshape(indexing.getitem(lines, (reshape(index, (rows, columns)), numpy.arange(columns))), index.shape)


# ---------------------------------------------------------------- differences


def _part(x: Value, axis: int, *bounds: int | None) -> Value:
    return indexing.getitem(x, (slice(None),) * axis + (slice(*bounds),))


@implements(numpy.diff)
def diff(a: Value, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Value:
    """`numpy.diff`: the differences of neighbours along an axis, n times over."""
    if n < 0:
        raise ValueError(f"diff: n counts the times, and cannot be {n}")
    if n == 0:
        return a
    a = as_array(a)
    axis = normalize_axis(axis, len(a.shape), "diff")
    if prepend is not None or append is not None:
        parts = [_as_end(prepend, a.shape, axis), a, _as_end(append, a.shape, axis)]
        a = concatenate([x for x in parts if x is not None], axis)
    minus = elementwise.not_equal if a.dtype.kind == "b" else elementwise.subtract
    for _ in range(n):
        a = minus(_part(a, axis, 1, None), _part(a, axis, None, -1 if a.shape[axis] else None))
    return a


def _as_end(x: Any, shape: tuple[int, ...], axis: int) -> Value | None:
    if x is None or len(as_array(x).shape):
        return x
    return broadcast_to(as_array(x), (*shape[:axis], 1, *shape[axis + 1 :]))


@implements(numpy.ediff1d)
def ediff1d(ary: Value, to_end: Any = None, to_begin: Any = None) -> Value:
    """`numpy.ediff1d`: the differences of neighbours in the flattened array, between `to_begin` and `to_end`."""
    d = diff(ravel(as_array(ary)))
    parts = [elementwise.convert(ravel(as_array(x)), d.dtype) if x is not None else None for x in (to_begin, to_end)]
    return concatenate([x for x in (parts[0], d, parts[1]) if x is not None])


@implements(numpy.trapezoid)
def trapezoid(y: Value, x: Value | None = None, dx: Any = 1.0, axis: int = -1) -> Value:
    """`numpy.trapezoid`: the integral along an axis, of values at `x`, or `dx` apart."""
    y = as_array(y)
    axis = normalize_axis(axis, len(y.shape), "trapezoid")
    if x is not None:
        x = as_array(x)
        dx = diff(x, axis=axis if len(x.shape) > 1 else -1)
        if len(x.shape) == 1:
            dx = reshape(dx, [-1 if i == axis else 1 for i in range(len(y.shape))])
    return sum(dx * (_part(y, axis, 1, None) + _part(y, axis, None, -1)) / 2.0, axis)


@implements(numpy.gradient)
def gradient(f: Value, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """`numpy.gradient`: central differences, one-sided at the ends; a tuple of them for several axes."""
    f = _inexact(as_array(f))
    axes = normalize_axes(axis, len(f.shape), "gradient")
    spacings = list(varargs) or [1.0]
    if len(spacings) == 1 and not len(as_array(spacings[0]).shape):
        spacings = spacings * len(axes)
    if len(spacings) != len(axes):
        raise TypeError(f"gradient: {len(varargs)} spacings for {len(axes)} axes; give one for all, or one for each")
    if edge_order not in (1, 2):
        raise ValueError(f"gradient: edge_order is 1 or 2, got {edge_order}")
    out = tuple(_slope(f, i, _steps(h, f.shape[i]), edge_order) for i, h in zip(axes, spacings))
    return out[0] if len(out) == 1 else out


def _steps(spacing: Any, n: int) -> Value:
    """The distances between neighbours: `n - 1` of them from coordinates, else one number."""
    h = as_array(spacing)
    if not h.shape:
        return spacing
    if h.shape != (n,):
        raise ValueError(f"gradient: coordinates of shape {h.shape} for an axis of size {n}")
    return diff(_inexact(h))


def _slope(f: Value, axis: int, h: Value, edge_order: int) -> Value:
    n = f.shape[axis]
    if n < edge_order + 1:
        raise ValueError(f"gradient: axis {axis} of {typeof(f)} needs {edge_order + 1} elements at least")
    uniform = not len(as_array(h).shape)

    def at(*bounds: int | None) -> Value:
        return _part(f, axis, *bounds)

    def step(i: int) -> Value:
        return h if uniform else h[i]

    if uniform:
        middle = (at(2, None) - at(None, -2)) / (2.0 * h)
    else:
        along = [-1 if i == axis else 1 for i in range(len(f.shape))]
        left, right = reshape(h[:-1], along) if n > 2 else 1.0, reshape(h[1:], along) if n > 2 else 1.0
        middle = (
            at(2, None) * (left / (right * (left + right)))
            + at(1, -1) * ((right - left) / (left * right))
            - at(None, -2) * (right / (left * (left + right)))
        )
    if edge_order == 1:
        first, last = (at(1, 2) - at(0, 1)) / step(0), (at(n - 1, n) - at(n - 2, n - 1)) / step(-1)
    else:
        first = _one_sided(at(0, 1), at(1, 2), at(2, 3), step(0), step(1))
        last = -_one_sided(at(n - 1, n), at(n - 2, n - 1), at(n - 3, n - 2), step(-1), step(-2))
    return elementwise.convert(concatenate([first, middle, last], axis), f.dtype)


def _one_sided(f0: Value, f1: Value, f2: Value, h1: Value, h2: Value) -> Value:
    """The slope at f0 of the parabola through three values, `h1` and `h2` apart."""
    return f1 * ((h1 + h2) / (h1 * h2)) - f0 * ((2.0 * h1 + h2) / (h1 * (h1 + h2))) - f2 * (h1 / (h2 * (h1 + h2)))
