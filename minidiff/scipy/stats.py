"""`scipy.stats`, differentiable: distributions, written with the operations of `minidiff.scipy.special`.

A distribution has SciPy's methods and arguments: the shapes, then `loc` and `scale`, by position or by name; arrays
broadcast. Outside of the support the density is 0. A shape or a scale that is not positive gives NaN.

>>> import minidiff as md
>>> round(float(md.grad(norm.logpdf, argnums=2)(1.0, 0.0, 2.0)), 6)  # in the scale
-0.375
>>> gamma.pdf(numpy.array([-1.0, 1.0]), a=1.0).round(6)
array([0.      , 0.367879])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import numpy
import scipy.special as sp

from minidiff.core.tracer import Value
from minidiff.ops.arrays import as_array
from minidiff.scipy.linalg import solve_triangular

__all__ = ["bernoulli", "beta", "binom", "cauchy", "chi2", "dirichlet", "expon", "gamma", "laplace", "logistic"]
__all__ += ["multivariate_normal", "norm", "poisson", "t", "uniform"]

_REAL, _POSITIVE, _UNIT = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)


def _positive(x: Value, dtype: numpy.dtype) -> Value:
    """x, or NaN where it is not positive; a Python number is converted to the dtype."""
    x = numpy.asarray(x, dtype) if isinstance(x, (int, float)) else x
    return numpy.where(numpy.greater(x, 0), x, dtype.type(math.nan))[()]


def _method(name: str) -> Callable:
    def method(self: _Distribution, x: Value, *args: Any, **kwds: Any) -> Value:
        return self.evaluate(name, x, args, kwds)

    return method


class _Distribution:
    """A distribution by functions of the standardized number and the shapes, which the logarithm of the density names.

    `cdf` is for numbers in the interval `support`. If no `sf` is given, the density is symmetric: it is `cdf(-x)`.
    """

    defaults = {"loc": 0.0, "scale": 1.0}  # noqa: RUF012 (never written)
    discrete = False
    cdf, sf, logcdf, logsf = map(_method, ("cdf", "sf", "logcdf", "logsf"))

    def __init__(
        self, support: tuple, log_density: Callable, cdf: Callable, sf: Callable | None = None, **logs: Callable
    ):
        symmetric = {name.replace("cdf", "sf"): lambda x, *shapes, f=f: f(-x, *shapes) for name, f in logs.items()}
        self.functions = {"cdf": cdf, "sf": sf or (lambda x, *shapes: cdf(-x, *shapes)), **logs, **symmetric}
        self.support, self.log_density = support, log_density
        names = dict.fromkeys([*inspect.signature(log_density).parameters][1:], Parameter.empty) | self.defaults
        kind = Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([Parameter(name, kind, default=d) for name, d in names.items()])

    def evaluate(self, name: str, x: Value, args: tuple, kwds: dict) -> Value:
        bound = self.signature.bind(*args, **kwds)
        bound.apply_defaults()
        x, given, (low, high) = as_array(x), bound.arguments, self.support
        dtype = x.dtype if x.dtype.kind == "f" else numpy.dtype(float)
        y, scale = numpy.subtract(x, given.pop("loc")), _positive(given.pop("scale", 1.0), dtype)
        y, shapes = y / scale, [_positive(shape, dtype) for shape in given.values()]
        if name.endswith("f") and name.removeprefix("log") in ("cdf", "sf"):
            y, low = (numpy.floor(y), low - 1) if self.discrete else (y, low)
            y = y if self.support == _REAL else numpy.clip(y, low, high)
            function = self.functions.get(name)
            return function(y, *shapes) if function else numpy.log(self.functions[name[3:]](y, *shapes))
        outside = (y < low) | (y > high) | (y != numpy.floor(y) if self.discrete else False)
        safe = numpy.where(outside, low + 1 if low > -math.inf else 0.0, y)  # the density has a derivative there
        log = numpy.where(outside, -math.inf, self.log_density(safe, *shapes) - numpy.log(scale))
        return log if name.startswith("log") else numpy.exp(log)


class _Continuous(_Distribution):
    pdf, logpdf = map(_method, ("pdf", "logpdf"))


class _Discrete(_Distribution):
    defaults, discrete = {"loc": 0.0}, True
    pmf, logpmf = map(_method, ("pmf", "logpmf"))


norm = _Continuous(_REAL, lambda x: -0.5 * x * x - 0.5 * math.log(2 * math.pi), sp.ndtr, logcdf=sp.log_ndtr)
logistic = _Continuous(_REAL, lambda x: sp.log_expit(x) + sp.log_expit(-x), sp.expit, logcdf=sp.log_expit)
cauchy = _Continuous(
    _REAL, lambda x: -math.log(math.pi) - numpy.log1p(x * x), lambda x: 0.5 + numpy.arctan(x) / math.pi
)
laplace = _Continuous(
    _REAL,
    lambda x: -numpy.abs(x) - math.log(2),
    lambda x: numpy.where(x < 0, 0.5 * numpy.exp(numpy.minimum(x, 0)), 1 - 0.5 * numpy.exp(-numpy.maximum(x, 0))),
)
t = _Continuous(
    _REAL,
    lambda x, df: -0.5 * ((df + 1) * numpy.log1p(x * x / df) + numpy.log(df)) - sp.betaln(0.5 + 0 * df, 0.5 * df),
    lambda x, df: sp.stdtr(df, x),
)
uniform = _Continuous(_UNIT, lambda x: 0.0 * x, lambda x: x, lambda x: 1 - x)
expon = _Continuous(_POSITIVE, lambda x: -x, lambda x: -numpy.expm1(-x), lambda x: numpy.exp(-x))
gamma = _Continuous(
    _POSITIVE,
    lambda x, a: sp.xlogy(a - 1, x) - x - sp.gammaln(a),
    lambda x, a: sp.gammainc(a, x),
    lambda x, a: sp.gammaincc(a, x),
)
chi2 = _Continuous(
    _POSITIVE,
    lambda x, df: sp.xlogy(0.5 * df - 1, 0.5 * x) - 0.5 * x - sp.gammaln(0.5 * df) - math.log(2),
    lambda x, df: sp.gammainc(0.5 * df, 0.5 * x),
    lambda x, df: sp.gammaincc(0.5 * df, 0.5 * x),
)
beta = _Continuous(
    _UNIT,
    lambda x, a, b: sp.xlogy(a - 1, x) + sp.xlog1py(b - 1, -x) - sp.betaln(a, b),
    lambda x, a, b: sp.betainc(a, b, x),
    lambda x, a, b: sp.betainc(b, a, 1 - x),
)
poisson = _Discrete(
    _POSITIVE,
    lambda k, mu: sp.xlogy(k, mu) - sp.gammaln(k + 1) - mu,
    lambda k, mu: sp.gammaincc(k + 1, mu),
    lambda k, mu: sp.gammainc(k + 1, mu),
)
binom = _Discrete(
    _POSITIVE,
    lambda k, n, p: -sp.betaln(k + 1, n - k + 1) - numpy.log(n + 1) + sp.xlogy(k, p) + sp.xlog1py(n - k, -p),
    lambda k, n, p: sp.betainc(numpy.maximum(n - k, 0), k + 1, 1 - p),
    lambda k, n, p: sp.betainc(k + 1, numpy.maximum(n - k, 0), p),
)
bernoulli = _Discrete(
    _UNIT,
    lambda k, p: sp.xlogy(k, p) + sp.xlog1py(1 - k, -p),
    lambda k, p: sp.betainc(numpy.maximum(1 - k, 0), k + 1, 1 - p),
    lambda k, p: sp.betainc(k + 1, numpy.maximum(1 - k, 0), p),
)


class _Dirichlet:
    """x has the numbers that sum to 1 along its first axis, which is not checked; alpha is [k]."""

    def logpdf(self, x: Value, alpha: Value) -> Value:
        terms = numpy.sum(sp.xlogy(numpy.subtract(alpha, 1), numpy.transpose(x)), -1)
        return terms + sp.gammaln(numpy.sum(alpha)) - numpy.sum(sp.gammaln(alpha))

    def pdf(self, x: Value, alpha: Value) -> Value:
        return numpy.exp(self.logpdf(x, alpha))


class _MultivariateNormal:
    """x is [..., n], mean [n] or [..., n], cov [n, n], of which one triangle is read; or [n] or one number, variances.

    If mean and cov are numbers, n is 1, and x may be a number or a vector of these, as in SciPy. Without a mean, it is
    0 in as many dimensions as x has numbers. With `allow_singular`, cov has a rank that derivatives take to be
    constant; off the support the density is 0.
    """

    def logpdf(self, x: Value, mean: Value | None = None, cov: Value = 1.0, allow_singular: bool = False) -> Value:
        x, size = as_array(x), self._size(mean, cov)
        if not x.ndim or (x.ndim == size == 1 != x.size):
            x = x[..., None]
        cov = self._matrix(cov, size or x.shape[-1])
        x = x if mean is None else numpy.subtract(x, mean)
        if not allow_singular:
            factor = numpy.linalg.cholesky(cov)
            white = solve_triangular(factor, x[..., None], lower=True)[..., 0]
            return -0.5 * numpy.sum(white * white, -1) - self._half_log_det(factor)
        w = numpy.linalg.eigvalsh(cov)
        least = 1e6 * float(numpy.finfo(w.dtype).eps)
        kept, largest = numpy.abs(w) > least * numpy.max(numpy.abs(w)), numpy.max(numpy.abs(w))
        solution = x @ numpy.linalg.pinv(cov, rcond=least, hermitian=True)
        log_det = numpy.sum(numpy.log(numpy.where(kept, 2 * math.pi * w, 1.0)))
        off = numpy.linalg.norm(x - solution @ cov, axis=-1) > math.sqrt(least) * numpy.sqrt(largest)
        return numpy.where(off, -math.inf, -0.5 * numpy.sum(x * solution, -1) - 0.5 * log_det)

    def pdf(self, x: Value, mean: Value | None = None, cov: Value = 1.0, allow_singular: bool = False) -> Value:
        return numpy.exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Value | None = None, cov: Value = 1.0) -> Value:
        size = self._size(mean, cov) or 1
        return self._half_log_det(numpy.linalg.cholesky(self._matrix(cov, size))) + 0.5 * size

    @staticmethod
    def _size(mean: Value | None, cov: Value) -> int | None:
        """The number of dimensions, as mean and cov say; None if there is no mean, and cov is a number."""
        shapes = [as_array(x).shape[-1:] for x in (cov, mean) if x is not None]
        return next((shape[0] for shape in shapes if shape), None if mean is None else 1)

    @staticmethod
    def _matrix(cov: Value, size: int) -> Value:
        return cov if as_array(cov).ndim > 1 else cov * numpy.eye(size)

    @staticmethod
    def _half_log_det(factor: Value) -> Value:
        return numpy.sum(numpy.log(math.sqrt(2 * math.pi) * numpy.diagonal(factor, 0, -2, -1)), -1)


dirichlet, multivariate_normal = _Dirichlet(), _MultivariateNormal()
