"""`scipy.stats`, differentiable: distributions, written with the operations of `minidiff.scipy.special`.

A distribution has SciPy's methods and arguments: the shapes, then `loc` and `scale`, by position or by name; arrays
broadcast. Outside of the support the density is 0. A shape or a scale that is not positive gives NaN. There are no
frozen distributions; draw from `minidiff.random`.

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
from minidiff.core.types import typeof
from minidiff.ops.arrays import as_array
from minidiff.scipy.linalg import solve_triangular

__all__ = ["bernoulli", "beta", "binom", "cauchy", "chi2", "dirichlet", "expon", "gamma", "geom", "gumbel_r", "laplace"]
__all__ += ["logistic", "lognorm", "multivariate_normal", "nbinom", "norm", "pareto", "poisson", "t", "uniform"]
__all__ += ["weibull_min"]


def _positive(x: Value, dtype: numpy.dtype) -> Value:
    """x, or NaN where it is not positive; a Python number is converted to the dtype."""
    x = numpy.asarray(x, dtype) if isinstance(x, (int, float)) else x
    return numpy.where(numpy.greater(x, 0), x, dtype.type(math.nan))[()]


class _Distribution:
    """A distribution by functions of the standardized number and the shapes, which `log_density` names.

    `support` is an interval, `ppf` the inverse of `cdf`. If the density is `symmetric`, `sf(x)` is `cdf(-x)`.
    """

    defaults = {"loc": 0.0, "scale": 1.0}  # noqa: RUF012 (never written)
    discrete = False

    def __init__(self, support: tuple, log_density: Callable, symmetric: bool = False, **functions: Callable):
        self._support, self._log_density, self._symmetric, self._functions = support, log_density, symmetric, functions
        names = dict.fromkeys([*inspect.signature(log_density).parameters][1:], Parameter.empty) | self.defaults
        kind = Parameter.POSITIONAL_OR_KEYWORD
        self._signature = inspect.Signature([Parameter(name, kind, default=d) for name, d in names.items()])

    def _arguments(self, x: Value, args: tuple, named: dict) -> tuple[Value, Value, Value, list]:
        """The standardized x, loc, scale, and the shapes."""
        bound = self._signature.bind(*args, **named)
        bound.apply_defaults()
        x, given = as_array(x), bound.arguments
        dtype = x.dtype if x.dtype.kind == "f" else numpy.dtype(float)
        loc, scale = given.pop("loc"), _positive(given.pop("scale", 1.0), dtype)
        return numpy.subtract(x, loc) / scale, loc, scale, [_positive(shape, dtype) for shape in given.values()]

    def _logarithm(self, x: Value, args: tuple, named: dict) -> Value:
        (y, _, scale, shapes), (low, high) = self._arguments(x, args, named), self._support
        outside = (y < low) | (y > high) | (y != numpy.floor(y) if self.discrete else False)
        safe = numpy.where(outside, low + 1 if low > -math.inf else 0.0, y)  # the density has a derivative there
        return numpy.where(outside, -math.inf, self._log_density(safe, *shapes) - numpy.log(scale))

    def _probability(self, name: str, x: Value, args: tuple, named: dict) -> Value:
        (y, _, _, shapes), (low, high) = self._arguments(x, args, named), self._support
        y, low = (numpy.floor(y), low - 1) if self.discrete else (y, low)
        y = y if self._support == _REAL else numpy.clip(y, low, high)
        if self._symmetric and name.endswith("sf"):
            y, name = -y, name.replace("sf", "cdf")
        return self._value(name, y, shapes)

    def _value(self, name: str, y: Value, shapes: list) -> Value:
        if name in self._functions:
            return self._functions[name](y, *shapes)
        return numpy.log(self._value(name[3:], y, shapes)) if name != "sf" else 1 - self._functions["cdf"](y, *shapes)

    def cdf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return self._probability("cdf", x, args, kwds)

    def sf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return self._probability("sf", x, args, kwds)

    def logcdf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return self._probability("logcdf", x, args, kwds)

    def logsf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return self._probability("logsf", x, args, kwds)


class _Continuous(_Distribution):
    def logpdf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return self._logarithm(x, args, kwds)

    def pdf(self, x: Value, *args: Any, **kwds: Any) -> Value:
        return numpy.exp(self._logarithm(x, args, kwds))

    def ppf(self, q: Value, *args: Any, **kwds: Any) -> Value:
        _, loc, scale, shapes = self._arguments(q, args, kwds)
        return loc + scale * self._functions["ppf"](q, *shapes)


class _Discrete(_Distribution):
    defaults = {"loc": 0.0}  # noqa: RUF012 (never written)
    discrete = True

    def logpmf(self, k: Value, *args: Any, **kwds: Any) -> Value:
        return self._logarithm(k, args, kwds)

    def pmf(self, k: Value, *args: Any, **kwds: Any) -> Value:
        return numpy.exp(self._logarithm(k, args, kwds))


_REAL, _POSITIVE, _UNIT = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)


norm = _Continuous(
    _REAL,
    lambda x: -0.5 * x * x - 0.5 * math.log(2 * math.pi),
    symmetric=True,
    cdf=sp.ndtr,
    logcdf=sp.log_ndtr,
    ppf=sp.ndtri,
)
cauchy = _Continuous(
    _REAL,
    lambda x: -math.log(math.pi) - numpy.log1p(x * x),
    symmetric=True,
    cdf=lambda x: 0.5 + numpy.arctan(x) / math.pi,
    ppf=lambda q: numpy.tan(math.pi * (q - 0.5)),
)
laplace = _Continuous(
    _REAL,
    lambda x: -numpy.abs(x) - math.log(2),
    symmetric=True,
    cdf=lambda x: numpy.where(x < 0, 0.5 * numpy.exp(numpy.minimum(x, 0)), 1 - 0.5 * numpy.exp(-numpy.maximum(x, 0))),
    ppf=lambda q: -numpy.sign(q - 0.5) * numpy.log1p(-2 * numpy.abs(q - 0.5)),
)
logistic = _Continuous(
    _REAL,
    lambda x: sp.log_expit(x) + sp.log_expit(-x),
    symmetric=True,
    cdf=sp.expit,
    logcdf=sp.log_expit,
    ppf=sp.logit,
)
t = _Continuous(
    _REAL,
    lambda x, df: -0.5 * (df + 1) * numpy.log1p(x * x / df) - 0.5 * numpy.log(df) - sp.betaln(0.5 + 0 * df, 0.5 * df),
    symmetric=True,
    cdf=lambda x, df: sp.stdtr(df, x),
    ppf=lambda q, df: sp.stdtrit(df, q),
)
gumbel_r = _Continuous(
    _REAL,
    lambda x: -x - numpy.exp(-x),
    logcdf=lambda x: -numpy.exp(-x),
    cdf=lambda x: numpy.exp(-numpy.exp(-x)),
    sf=lambda x: -numpy.expm1(-numpy.exp(-x)),
    ppf=lambda q: -numpy.log(-numpy.log(q)),
)
uniform = _Continuous(_UNIT, lambda x: 0.0 * x, cdf=lambda x: x, ppf=lambda q: q)
expon = _Continuous(
    _POSITIVE,
    lambda x: -x,
    cdf=lambda x: -numpy.expm1(-x),
    sf=lambda x: numpy.exp(-x),
    logsf=lambda x: -x,
    ppf=lambda q: -numpy.log1p(-q),
)
gamma = _Continuous(
    _POSITIVE,
    lambda x, a: sp.xlogy(a - 1, x) - x - sp.gammaln(a),
    cdf=lambda x, a: sp.gammainc(a, x),
    sf=lambda x, a: sp.gammaincc(a, x),
    ppf=lambda q, a: sp.gammaincinv(a, q),
)
chi2 = _Continuous(
    _POSITIVE,
    lambda x, df: sp.xlogy(0.5 * df - 1, 0.5 * x) - 0.5 * x - sp.gammaln(0.5 * df) - math.log(2),
    cdf=lambda x, df: sp.gammainc(0.5 * df, 0.5 * x),
    sf=lambda x, df: sp.gammaincc(0.5 * df, 0.5 * x),
    ppf=lambda q, df: 2 * sp.gammaincinv(0.5 * df, q),
)
beta = _Continuous(
    _UNIT,
    lambda x, a, b: sp.xlogy(a - 1, x) + sp.xlog1py(b - 1, -x) - sp.betaln(a, b),
    cdf=lambda x, a, b: sp.betainc(a, b, x),
    sf=lambda x, a, b: sp.betainc(b, a, 1 - x),
    ppf=lambda q, a, b: sp.betaincinv(a, b, q),
)
lognorm = _Continuous(
    (1e-45, math.inf),  # the density is 0 at 0
    lambda x, s: norm.logpdf(numpy.log(x) / s) - numpy.log(s * x),
    cdf=lambda x, s: sp.ndtr(numpy.log(x) / s),
    sf=lambda x, s: sp.ndtr(-numpy.log(x) / s),
    ppf=lambda q, s: numpy.exp(s * sp.ndtri(q)),
)
weibull_min = _Continuous(
    _POSITIVE,
    lambda x, c: numpy.log(c) + sp.xlogy(c - 1, x) - x**c,
    cdf=lambda x, c: -numpy.expm1(-(x**c)),
    sf=lambda x, c: numpy.exp(-(x**c)),
    ppf=lambda q, c: (-numpy.log1p(-q)) ** (1 / c),
)
pareto = _Continuous(
    (1.0, math.inf),
    lambda x, b: numpy.log(b) - (b + 1) * numpy.log(x),
    cdf=lambda x, b: 1 - x**-b,
    sf=lambda x, b: x**-b,
    ppf=lambda q, b: (1 - q) ** (-1 / b),
)

poisson = _Discrete(
    _POSITIVE,
    lambda k, mu: sp.xlogy(k, mu) - sp.gammaln(k + 1) - mu,
    cdf=lambda k, mu: sp.gammaincc(k + 1, mu),
    sf=lambda k, mu: sp.gammainc(k + 1, mu),
)
binom = _Discrete(
    _POSITIVE,
    lambda k, n, p: _log_choose(n, k) + sp.xlogy(k, p) + sp.xlog1py(n - k, -p),
    cdf=lambda k, n, p: sp.betainc(numpy.maximum(n - k, 0), k + 1, 1 - p),
)
bernoulli = _Discrete(
    _UNIT,
    lambda k, p: sp.xlogy(k, p) + sp.xlog1py(1 - k, -p),
    cdf=lambda k, p: numpy.where(k < 0, 0.0, numpy.where(k < 1, 1 - p, 1.0)),
)
geom = _Discrete(
    (1.0, math.inf),
    lambda k, p: sp.xlog1py(k - 1, -p) + numpy.log(p),
    cdf=lambda k, p: -numpy.expm1(sp.xlog1py(k, -p)),
    sf=lambda k, p: numpy.exp(sp.xlog1py(k, -p)),
)
nbinom = _Discrete(
    _POSITIVE,
    lambda k, n, p: _log_choose(k + n - 1, k) + n * numpy.log(p) + sp.xlog1py(k, -p),
    cdf=lambda k, n, p: sp.betainc(n, k + 1, p),
)


def _log_choose(n: Value, k: Value) -> Value:
    return sp.gammaln(n + 1) - sp.gammaln(k + 1) - sp.gammaln(n - k + 1)


class _Dirichlet:
    """x has the numbers that sum to 1 along its first axis, which is not checked; alpha is [k]."""

    def logpdf(self, x: Value, alpha: Value) -> Value:
        terms = numpy.sum(sp.xlogy((numpy.subtract(alpha, 1)), numpy.transpose(x)), -1)
        return terms + sp.gammaln(numpy.sum(alpha)) - numpy.sum(sp.gammaln(alpha))

    def pdf(self, x: Value, alpha: Value) -> Value:
        return numpy.exp(self.logpdf(x, alpha))


class _MultivariateNormal:
    """x is [..., n], mean [n] or [..., n], cov [n, n], of which the lower triangle is read.

    With `allow_singular`, cov may have any rank, which derivatives take to be constant; points off the support of the
    distribution have density 0.
    """

    def logpdf(self, x: Value, mean: Value = 0.0, cov: Value = 1.0, allow_singular: bool = False) -> Value:
        x = numpy.subtract(x, mean)
        cov = cov if typeof(cov).ndim else cov * numpy.eye(typeof(x).shape[-1])
        if not allow_singular:
            factor = numpy.linalg.cholesky(cov)
            white = solve_triangular(factor, x[..., None], lower=True)[..., 0]
            return -0.5 * numpy.sum(white * white, -1) - self._half_log_det(factor)
        w = numpy.linalg.eigvalsh(cov)
        kept = numpy.abs(w) > 1e6 * numpy.finfo(w.dtype).eps * numpy.max(numpy.abs(w))
        inverse = numpy.linalg.pinv(cov, rcond=1e6 * float(numpy.finfo(w.dtype).eps), hermitian=True)
        solution = x @ inverse
        log_det = numpy.sum(numpy.log(numpy.where(kept, 2 * math.pi * w, 1.0)))
        off = numpy.linalg.norm(x - solution @ cov, axis=-1) > 1e-6 * numpy.max(numpy.abs(w)) ** 0.5
        return numpy.where(off, -math.inf, -0.5 * numpy.sum(x * solution, -1) - 0.5 * log_det)

    def pdf(self, x: Value, mean: Value = 0.0, cov: Value = 1.0, allow_singular: bool = False) -> Value:
        return numpy.exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Value, cov: Value) -> Value:
        return self._half_log_det(numpy.linalg.cholesky(cov)) + 0.5 * typeof(cov).shape[-1]

    @staticmethod
    def _half_log_det(factor: Value) -> Value:
        return numpy.sum(numpy.log(math.sqrt(2 * math.pi) * numpy.diagonal(factor, 0, -2, -1)), -1)


dirichlet, multivariate_normal = _Dirichlet(), _MultivariateNormal()
