"""Statistics: weighted averages, variances, medians and quantiles, histograms, covariances."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import typeof
from minidiff.inputs.arguments import WEAK_TYPES
from minidiff.ops import dimensions, elementwise, indexing, reduction
from minidiff.ops.arrays import as_array, make_concrete
from minidiff.ops.base import General, axes_fit, convert, in_float32, reduced_shape
from minidiff.ops.linalg import adjoint, matmul
from minidiff.ops.reduction import as_inexact, bind_reduction, count_of, merge_axes, operand_of, where_not_nan
from minidiff.ops.shape import broadcast_to, concatenate, normalize_axes, ravel, reshape, squeeze, transpose
from minidiff.ops.sorting import INTP, searchsorted, sort
from minidiff.values.dtypes import is_differentiable, is_real_float, result_type

# ---------------------------------------------------------------- average


@implements(numpy.average)
@in_float32
def average(a: Value, axis: Any = None, weights: Value | None = None, returned: bool = False, *, keepdims=False):
    """`numpy.average`, differentiable in the weights; not finite if they sum to 0."""
    a = as_array(a)
    if weights is None:
        y = reduction.mean(a, axis, keepdims=keepdims)
        total = numpy.full(y.shape, count_of(a, axis, True, keepdims, "average"), y.dtype)
    else:
        w = _expand_weights(as_array(weights), a.shape, axis)
        dtype = result_type(a.dtype, w.dtype, *([float] if a.dtype.kind in "biu" else []))
        total = reduction.sum(w, axis, dtype, keepdims=keepdims)
        y = elementwise.divide(reduction.sum(elementwise.multiply(a, w), axis, dtype, keepdims=keepdims), total)
        total = broadcast_to(total, y.shape)
    return (y, total) if returned else y


def _expand_weights(weights: Value, shape: tuple[int, ...], axis: Any) -> Value:
    """Expand weights, of all elements or along `axis`, to the array's shape."""
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


def _var_tangent(out, primals, tangents, params):
    """Return the tangent of the mean of |x - mean(x)|**2, from which the mean's own tangent cancels."""
    (x,), (t,) = primals, tangents
    axes, keepdims = params["axes"], params.get("keepdims", False)
    products = _inner(elementwise.subtract(x, reduction.mean(x, axes, keepdims=True)), t)
    freedom = _freedom(count_of(x, axes, True, keepdims, "var"), params["ddof"], products.dtype)
    return elementwise.divide(reduction.sum(products, axes, keepdims=keepdims), freedom / 2)


var_p = General(
    "var",
    lambda x, axes, ddof, keepdims=False: numpy.var(x, axis=axes, ddof=ddof, keepdims=keepdims),
    lambda x, axes, ddof, keepdims=False: (reduced_shape(x, axes, keepdims), elementwise.real_dtype(x.dtype)),
    _var_tangent,
    fits=lambda x, axes, ddof, keepdims=False: (
        axes_fit(x, axes=axes) and is_differentiable(x.dtype) and isinstance(ddof, (int, float, numpy.generic))
    ),
    sharding=dimensions.reduction(None),
    decomposed=lambda x, axes, ddof, keepdims=False: _var_about(
        reduction.mean(x, axes, keepdims=True), x, axes, ddof, keepdims
    ),
)


def _inner(x: Value, y: Value) -> Value:
    """Re(conj(x) y): the product, or for complex numbers that of plane vectors."""
    if x.dtype.kind != "c":
        return elementwise.multiply(x, y)
    return elementwise.real(elementwise.multiply(elementwise.conjugate(x), y))


def _freedom(count: Any, ddof: Any, dtype: numpy.dtype) -> Any:
    """Return the degrees of freedom: the count minus `ddof`, at least 0."""
    if not hasattr(count, "dtype"):
        return count - ddof if count > ddof else 0
    return elementwise.maximum(elementwise.convert(count, dtype) - ddof, 0)


def _ddof(ddof: Any, correction: Any, name: str) -> Any:
    if correction is None:
        return ddof
    if ddof != 0:
        raise ValueError(f"{name}: ddof and correction are the same parameter; pass only one of them")
    return correction


@implements(numpy.var)
@in_float32
def var(
    a: Value, axis: Any = None, dtype: Any = None, *, ddof=0, keepdims=False, where=True, mean=None, correction=None
) -> Value:
    """`numpy.var`: the mean squared deviation; real, also for complex numbers.

    With `mean=`, deviations are from that value, which is differentiated as a separate argument.
    """
    ddof, x = _ddof(ddof, correction, "var"), operand_of(a, dtype, True, 0)
    if where is True and mean is None:
        return bind_reduction(var_p, as_inexact(x), normalize_axes(axis, len(x.shape), "var"), keepdims, ddof=ddof)
    about = reduction.mean(x, axis, keepdims=True, where=where) if mean is None else mean
    return _var_about(about, x, axis, ddof, keepdims, where)


def _var_about(about: Value, x: Value, axis: Any, ddof: Any, keepdims: bool, where: Any = True) -> Value:
    """Return the variance as if `about` were the mean, of the elements where `where` is true."""
    d = operand_of(elementwise.subtract(x, about), None, where, 0)
    squares = reduction.sum(_inner(d, d), axis, keepdims=keepdims)
    return elementwise.divide(squares, _freedom(count_of(d, axis, where, keepdims, "var"), ddof, squares.dtype))


@implements(numpy.nanvar)
@in_float32
def nanvar(a: Value, axis: Any = None, dtype: Any = None, *, ddof: Any = 0, correction: Any = None, **options: Any):
    """`numpy.nanvar`: ignores NaNs; NaN where at most `ddof` elements are left."""
    if not is_differentiable(typeof(a).dtype):
        return var(a, axis, dtype, ddof=ddof, correction=correction, **options)
    ddof = _ddof(ddof, correction, "nanvar")
    numbers = where_not_nan(a, options.pop("where", True))
    y = var(a, axis, dtype, ddof=ddof, where=numbers, **options)
    count = reduction.sum(numbers, axis, keepdims=options.get("keepdims", False))
    return elementwise.where(elementwise.greater(count, ddof), y, numpy.nan)


@implements(numpy.std)
@in_float32
def std(a: Value, axis: Any = None, dtype: Any = None, **options: Any) -> Value:
    """`numpy.std`: the root of `var`; where it is 0, so is its derivative."""
    y = var(a, axis, dtype, **options)
    alone = y.size == typeof(a).size and options.get("mean") is None  # the variance of one number is 0, and so its root
    return y if alone else elementwise.safe_root(y)


@implements(numpy.nanstd)
@in_float32
def nanstd(a: Value, axis: Any = None, dtype: Any = None, **options: Any) -> Value:
    """`numpy.nanstd`: the root of `nanvar`; where 0, so is its derivative."""
    return elementwise.safe_root(nanvar(a, axis, dtype, **options))


# ---------------------------------------------------------------- median, quantiles


@implements(numpy.median)
def median(a: Value, axis: Any = None, *, overwrite_input: bool = False, keepdims: bool = False) -> Value:
    """`numpy.median`: the middle element, or the mean of two; NaN if any is NaN."""
    return _apply_to_sorted(_median_of_sorted, a, axis, keepdims, "median")


@implements(numpy.nanmedian)
def nanmedian(a: Value, axis: Any = None, *, overwrite_input: bool = False, keepdims: bool = False) -> Value:
    """`numpy.nanmedian`: the median, ignoring NaNs; NaN where nothing is left."""
    return nanquantile(as_inexact(a), 0.5, axis, keepdims=keepdims)


def _apply_to_sorted(rule: Callable, a: Value, axis: Any, keepdims: bool, name: str) -> Value:
    """Merge and sort the reduced axes as axis 0; apply `rule`, keeping the others."""
    a = as_array(a)
    axes = normalize_axes(axis, len(a.shape), name)
    x = merge_axes(a, axes)
    y = rule(sort(x, 0))
    remaining = len(x.shape) - 1
    return reshape(y, (*y.shape[: len(y.shape) - remaining], *reduced_shape(a, axes, True))) if keepdims else y


def _median_of_sorted(s: Value) -> Value:
    n = s.shape[0]
    return _or_nan(s, reduction.mean(s[(n - 1) // 2 : n // 2 + 1], 0)) if n else reduction.mean(s, 0)


def _or_nan(s: Value, y: Value) -> Value:
    """Return `y`, or NaN where the last of the sorted elements is NaN, which means that there is a NaN."""
    if not is_differentiable(s.dtype):
        return y
    last = s[-1]
    return elementwise.where(elementwise.isnan(last), last, y)


def _between(alpha: float, beta: float) -> Callable:
    return lambda n, q: n * q + (alpha + q * (1 - alpha - beta)) - 1


def _averaged_step(n: Any, q: Any) -> Any:
    v = n * q - 1
    return numpy.where(v % 1 == 0, v + 0.5, numpy.ceil(v))


def _nearest_even(n: Any, q: Any) -> Any:
    v = numpy.floor(n * q - 1.5)
    return numpy.where((n * q - 1.5 == v) & (v % 2 == 1), v, v + 1)


#: The position of the quantile q among n sorted elements, by each method; a fractional position means interpolation
#: between two elements.
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
#: Methods whose quantile is always one of the elements.
DISCRETE_METHODS = {"inverted_cdf", "closest_observation", "lower", "higher", "nearest"}


def _quantiles(numpy_function: Callable, most: int, skip_nan: bool) -> Callable:
    """Declare all methods' quantiles at q / `most`; differentiable in `a`, and in q if interpolated."""
    name = numpy_function.__name__

    def function(
        a: Value, q: Value, axis: Any = None, *, overwrite_input=False, method: str = "linear", keepdims: bool = False
    ) -> Value:
        q = q if isinstance(q, (int, float)) else as_array(q)
        if not isinstance(q, Tracer) and not numpy.all((q >= 0) & (q <= most)):
            raise ValueError(f"{name}: q must be between 0 and {most}, got {numpy.asarray(q).tolist()}")
        if method not in QUANTILE_METHODS:
            raise ValueError(f"{name}: method must be one of {', '.join(QUANTILE_METHODS)}; got {method!r}")
        if typeof(a).dtype.kind == "c":
            raise TypeError(f"{name}: complex numbers have no order: {typeof(a)}")
        q = q if most == 1 else q / most
        return _apply_to_sorted(lambda s: _quantile_of_sorted(s, q, method, skip_nan), a, axis, keepdims, name)

    return implements(numpy_function)(function)


quantile, percentile = _quantiles(numpy.quantile, 1, False), _quantiles(numpy.percentile, 100, False)
nanquantile, nanpercentile = _quantiles(numpy.nanquantile, 1, True), _quantiles(numpy.nanpercentile, 100, True)


def _quantile_of_sorted(s: Value, q: Value, method: str, skip_nan: bool) -> Value:
    weak = type(q) in WEAK_TYPES  # it does not determine the dtype of the result
    q, n, remaining = as_array(q), s.shape[0], s.shape[1:]
    if skip_nan and is_real_float(s.dtype):
        n = reduction.sum(elementwise.logical_not(elementwise.isnan(s)), 0)
        q = reshape(q, (*q.shape, *[1] * len(remaining)))
        n = elementwise.convert(n, q.dtype) if is_real_float(q.dtype) else n
    place = QUANTILE_METHODS[method](n, q)
    low = numpy.floor(place)
    below, above = (_take(s, i, n, skip_nan) for i in (low, low + 1))
    if method in DISCRETE_METHODS or place.dtype.kind in "iu":
        y = below
    else:
        part = place - low
        part = elementwise.convert(part, s.dtype) if weak and is_real_float(s.dtype) else part
        part = part if skip_nan else reshape(part, (*part.shape, *[1] * len(remaining)))
        y = below + (above - below) * part
    return y if skip_nan else _or_nan(s, y)


def _take(s: Value, place: Value, n: Any, each: bool) -> Value:
    """Return the elements of each line of `s` at the nearest of n places; `each`: each line has its own place."""
    index = elementwise.convert(numpy.maximum(numpy.minimum(place, n - 1), 0), INTP)
    if not each or not is_real_float(s.dtype):
        return indexing.getitem(s, (index,))
    columns = math.prod(s.shape[1:])
    lines, rows = reshape(s, (s.shape[0], columns)), math.prod(index.shape[: len(index.shape) - len(s.shape) + 1])
    return reshape(indexing.getitem(lines, (reshape(index, (rows, columns)), numpy.arange(columns))), index.shape)


# ---------------------------------------------------------------- histogram


@implements(numpy.histogram_bin_edges)
def histogram_bin_edges(a: Value, bins: Any = 10, range: Any = None, weights: Value | None = None) -> Value:
    """`numpy.histogram_bin_edges`; those of a rule ("auto") have no derivative."""
    a = ravel(as_array(a))
    if isinstance(bins, str):
        return numpy.histogram_bin_edges(*make_concrete((a, bins, range, weights), numpy.histogram_bin_edges))
    if numpy.ndim(bins):
        return as_array(bins)
    if range is None:
        range = (numpy.min(a), numpy.max(a)) if typeof(a).size else (0.0, 1.0)
    low, high = range
    dtype = result_type(*[x.dtype if hasattr(x, "dtype") else x for x in (low, high, a)])
    dtype = dtype if is_differentiable(dtype) else numpy.result_type(dtype, float)
    alike = numpy.equal(low, high)
    low, high = numpy.where(alike, low - 0.5, low), numpy.where(alike, high + 0.5, high)
    count = operator.index(bins)
    edges = concatenate([low + numpy.arange(count) * ((high - low) / count), reshape(high, (1,))])
    return elementwise.convert(edges, dtype)


@implements(numpy.histogram)
def histogram(
    a: Value, bins: Any = 10, range: Any = None, density: bool | None = None, weights: Value | None = None
) -> tuple[Value, Value]:
    """`numpy.histogram`: `(counts, edges)`; differentiable in `weights` if given."""
    edges = histogram_bin_edges(a, bins, range, weights)
    a = ravel(as_array(a))
    count = typeof(edges).shape[0] - 1
    # Each bin includes its left edge, and the last one also its right edge. A further bin on each side collects the
    # elements outside.
    place = searchsorted(edges, a, "right") - numpy.equal(a, edges[-1]).astype(INTP)
    ones = numpy.ones(typeof(a).shape, INTP) if weights is None else ravel(as_array(weights))
    sums = indexing.scatter_add_p.bind(ones, place, shape=(count + 2,))[1:-1]
    if density:
        sums = sums / (edges[1:] - edges[:-1]) / sums.sum()
    return sums, edges


# ---------------------------------------------------------------- covariances


def _variables(m: Any, rowvar: bool, dtype: Any) -> Value:
    """Arrange observations as a matrix with a row for each variable."""
    x = as_array(m)
    if x.ndim > 2:
        raise ValueError(f"cov: observations must have at most two dimensions, got {x.ndim}")
    x = reshape(x, (1, x.size)) if x.ndim < 2 else x if rowvar else x.T
    return convert(x, dtype)


@implements(numpy.cov)
@in_float32
def cov(
    m: Value, y=None, rowvar=True, bias=False, ddof=None, fweights=None, aweights=None, *, dtype: Any = None
) -> Value:
    """`numpy.cov`: covariances of the rows of m and y (columns unless `rowvar`)."""
    observations = [as_array(z) for z in (m, y) if z is not None]
    dtype = numpy.result_type(*[z.dtype for z in observations], numpy.float64) if dtype is None else dtype
    rows = [_variables(z, rowvar, dtype) for z in observations]
    x = concatenate(rows, 0) if len(rows) == 2 else rows[0]
    ddof = ddof if ddof is not None else 0 if bias else 1
    given_weights = [as_array(w) for w in (fweights, aweights) if w is not None]
    weights = functools.reduce(operator.mul, given_weights) if given_weights else None
    total = x.shape[1] if weights is None else weights.sum()
    norm = total - (ddof if aweights is None or ddof == 0 else ddof * (weights * aweights).sum() / total)
    # Without degrees of freedom NumPy divides by zero, and never by a negative number.
    norm = max(norm, 0) if isinstance(norm, int) else numpy.maximum(norm, 0)
    weighted = x if weights is None else x * weights
    x = x - weighted.sum(axis=1, keepdims=True) / total
    return squeeze(matmul(x, adjoint(x if weights is None else x * weights)) / norm)


@implements(numpy.corrcoef)
@in_float32
def corrcoef(x: Value, y: Value | None = None, rowvar: bool = True, *, dtype: Any = None) -> Value:
    """`numpy.corrcoef`: correlations of variables, given as for `cov`."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.shape:
        return c / c
    n = numpy.arange(c.shape[0])
    variances = c[n, n]
    deviations = numpy.sqrt(numpy.real(variances) if c.dtype.kind == "c" else variances)
    c = c / deviations[:, None] / deviations[None, :]
    # Rounding must not push a correlation outside [-1, 1].
    return c if c.dtype.kind == "c" else numpy.where(c > 1, 1, numpy.where(c < -1, -1, c))
