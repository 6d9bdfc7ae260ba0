"""`scipy.stats`, differentiable: distributions, written with the operations of `minidiff.scipy.special`.

A distribution has SciPy's methods and arguments: the shapes, then `loc` and `scale`, by position or by name; arrays
broadcast. Outside of the support the density is 0; invalid parameters give NaN. At edges derivatives are one-sided.

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
from functools import partial
from inspect import Parameter
from typing import Any

import numpy
import scipy.special as sp

from minidiff.core.tracer import Value
from minidiff.ops.arrays import as_array
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import function_of
from minidiff.scipy import special
from minidiff.scipy.linalg import solve_triangular

__all__ = ["bernoulli", "beta", "binom", "cauchy", "chi2", "dirichlet", "expon", "gamma", "laplace", "logistic"]
__all__ += ["multivariate_normal", "norm", "poisson", "t", "uniform"]

_REAL, _POSITIVE, _UNIT = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)

#: Whether a shape of this name is valid; of other names, whether it is positive.
_VALID: dict[str, Callable] = {
    "mu": lambda mu: numpy.greater_equal(mu, 0),
    "n": lambda n: numpy.greater_equal(n, 0) & numpy.equal(n, numpy.floor(n)),
    "p": lambda p: numpy.greater_equal(p, 0) & numpy.less_equal(p, 1),
}

#: The probabilities below the support; above it, those of the other tail.
_BELOW = {"cdf": 0.0, "sf": 1.0, "logcdf": -math.inf, "logsf": 0.0}
_OTHER_TAIL = {"cdf": "sf", "sf": "cdf", "logcdf": "logsf", "logsf": "logcdf"}


def _holds_everywhere(condition: Value) -> bool:
    """Return whether a condition is known to hold for all elements."""
    return isinstance(condition, (numpy.ndarray, numpy.bool_)) and bool(condition.all())


def _log_of_tail(tail: Value, other: Value) -> Value:
    """Return the logarithm of the probability of a tail, accurate where it is close to 1."""
    small = tail < 0.5
    return numpy.where(small, numpy.log(numpy.where(small, tail, 1.0)), numpy.log1p(-numpy.where(small, 0.0, other)))


def _dtype(x: Value) -> numpy.dtype:
    return x.dtype if x.dtype.kind == "f" else numpy.dtype(float)


def _method(name: str) -> Callable:
    def method(self: _Distribution, x: Value, *args: Any, **kwds: Any) -> Value:
        return self.evaluate(name, x, args, kwds)

    return method


class _Distribution:
    """A distribution by functions of the standardized number and the shapes, which the first of them names.

    `log_density` is the logarithm of the density, or the operands of `log_powers`; `cdf` and `sf` are probabilities, or
    a function of SciPy and its arguments. They see numbers in the interval `support` (which may be a function of the
    shapes) and valid shapes: others are replaced, so that they have no part in derivatives. If no `sf` is given, the
    density is symmetric: it is `cdf(-x)`. The number is in units of `unit` times the scale. `ppf` and `isf` are the
    inverses of `cdf` and `sf`, on (0, 1).
    """

    defaults = {"loc": 0.0, "scale": 1.0}  # noqa: RUF012 (never written)
    discrete = False
    cdf, sf, logcdf, logsf, ppf, isf = map(_method, ("cdf", "sf", "logcdf", "logsf", "ppf", "isf"))

    def __init__(self, support: Any, log_density: Callable, cdf: Callable, sf: Callable | None = None, **others: Any):
        self.unit = others.pop("unit", 1.0)
        symmetric: dict[str, Callable] = {}
        if "isf" not in others:
            symmetric["isf"] = lambda q, *shapes: -others["ppf"](q, *shapes)
        if not sf and "logcdf" in others:
            symmetric["logsf"] = lambda x, *shapes: others["logcdf"](-x, *shapes)
        self.functions = {"cdf": cdf, "sf": sf or (lambda x, *shapes: cdf(-x, *shapes)), **others, **symmetric}
        self.support, self.log_density = support, log_density
        self.shapes = [*inspect.signature(log_density).parameters][1:]
        names = dict.fromkeys(self.shapes, Parameter.empty) | self.defaults
        kind = Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([Parameter(name, kind, default=d) for name, d in names.items()])

    def evaluate(self, name: str, x: Value, args: tuple, kwds: dict) -> Value:
        x, loc, scale, shapes = self._arguments(x, args, kwds)
        if name in ("ppf", "isf"):
            return self._quantile(name, x, loc, scale, shapes)
        x, dtype = numpy.subtract(x, loc), _dtype(x)
        below, above = self._outside(name, x / scale, shapes)
        inside = ~(below | above)
        whole = _holds_everywhere(inside)
        if not whole:
            x, scale = numpy.where(inside, x, 0.0 if self.discrete else 0.5), numpy.where(inside, scale, 1)
            shapes = [numpy.where(inside, v, 0.5) for v in shapes]
        out = self._tail(name, x / scale, shapes) if name in _BELOW else self._density(name, x, scale, shapes)
        if whole:
            return out
        low = dtype.type(_BELOW.get(name, -math.inf if "log" in name else 0.0))
        high = dtype.type(_BELOW[_OTHER_TAIL[name]]) if name in _BELOW else low
        return numpy.where(inside, out, numpy.where(below, low, high))

    def _arguments(self, x: Value, args: tuple, kwds: dict) -> tuple[Value, Value, Value, list]:
        """Return the number, loc, the scale and the shapes; NaN for invalid parameters."""
        bound = self.signature.bind(*args, **kwds)
        bound.apply_defaults()
        x, operands = as_array(x), bound.arguments
        dtype = _dtype(x)
        operands = {k: numpy.asarray(v, dtype) if isinstance(v, (int, float)) else v for k, v in operands.items()}
        loc, scale = operands.pop("loc"), operands.pop("scale", dtype.type(1)) * self.unit
        valid = numpy.greater(scale, 0)
        for shape, v in operands.items():
            valid = valid & _VALID.get(shape, lambda v: numpy.greater(v, 0))(v)
        if not _holds_everywhere(valid):  # NaN, as all that follows from it, and all derivatives
            mark = numpy.where(valid, dtype.type(1), dtype.type(math.nan))
            scale, operands = scale * mark, {k: v * mark for k, v in operands.items()}
        return x, loc, scale, [*operands.values()]

    def _quantile(self, name: str, q: Value, loc: Value, scale: Value, shapes: list) -> Value:
        inside = (q > 0) & (q < 1)
        low, high = self.support(*shapes) if callable(self.support) else self.support
        ends = low - self.discrete, high, math.nan
        low, high, nan = [_dtype(q).type(x) if isinstance(x, float) else x for x in ends]
        first, last = (low, high) if name == "ppf" else (high, low)
        at_ends = numpy.where(numpy.equal(q, 0), first, numpy.where(numpy.equal(q, 1), last, nan))
        return numpy.where(inside, self.functions[name](numpy.where(inside, q, 0.5), *shapes), at_ends) * scale + loc

    def _outside(self, name: str, y: Value, shapes: list) -> tuple[Value, Value]:
        """Return whether the number is below the support, or above it; an infinite one is outside."""
        low, high = self.support(*shapes) if callable(self.support) else self.support
        if not self.discrete:
            return (y < low) | (y == -math.inf), (y > high) | (y == math.inf)
        if name in _BELOW:
            return y < low, y >= high
        return y < low, (y > high) | (y == math.inf) | (y != numpy.floor(y)) & (y == y)

    def _density(self, name: str, x: Value, scale: Value, shapes: list) -> Value:
        log = self.log_density(x / scale, *shapes)
        if not isinstance(log, tuple):
            log = log - numpy.log(scale)
            return log if name.startswith("log") else numpy.exp(log)
        p, q, base, y, c = log
        if not self.discrete:  # not a power of x / scale: where x is 0, that has no derivative in the scale
            base, c = x, c - (p + 1) * numpy.log(scale)
        return (special.log_powers if name.startswith("log") else special.powers)(p, q, base, y, c)

    def _tail(self, name: str, y: Value, shapes: list) -> Value:
        y, tail = numpy.floor(y) if self.discrete else y, name.removeprefix("log")
        if name in self.functions:
            result = self.functions[name](y, *shapes)
            return result[0](*result[1:]) if isinstance(result, tuple) else result
        one, other = [self.functions[k](y, *shapes) for k in (tail, _OTHER_TAIL[tail])]
        return _LOG_TAILS[one[0]](*one[1:]) if isinstance(one, tuple) else _log_of_tail(one, other)


class _Continuous(_Distribution):
    pdf, logpdf = map(_method, ("pdf", "logpdf"))


class _Discrete(_Distribution):
    defaults, discrete = {"loc": 0.0}, True
    pmf, logpmf = map(_method, ("pmf", "logpmf"))

    def __init__(self, *functions: Any):
        super().__init__(*functions, ppf=None, isf=None)
        for name, tail in (("ppf", "cdf"), ("isf", "sf")):
            search = partial(self._search, tail)
            self.functions[name] = function_of(Elementwise(name, search, [None] * (1 + len(self.shapes))))

    def _search(self, tail: str, *operands: Any) -> numpy.ndarray:
        """Return the least integer whose `cdf` is at least q, or whose `sf` is at most q, by bisection."""
        dtype, (q, *shapes) = special.in_double(*operands)

        def reached(k: numpy.ndarray) -> Value:
            p = self.evaluate(tail, k, tuple(shapes), {})
            return p >= q if tail == "cdf" else p <= q

        low, high = q * 0 - 1, q * 0
        for _ in range(52):
            if (more := ~reached(high)).any():
                low, high = numpy.where(more, high, low), numpy.where(more, 2 * high + 1, high)
        while (high - low > 1).any():
            middle = numpy.floor(0.5 * (low + high))
            enough = reached(middle)
            low, high = numpy.where(enough, low, middle), numpy.where(enough, middle, high)
        return numpy.where(high < 2.0**51, high, math.nan).astype(dtype)[()]


# ---------------------------------------------------------------- logarithms of tails that underflow


def _log_tail(name: str, kind: str, log_small: Callable, other: Callable) -> Callable:
    """Return the logarithm of a function of SciPy that is a tail; `log_small` computes it where the tail underflows."""
    tail, sign = getattr(sp, name), -1 if name.endswith("cc") else 1

    def impl(*args: Any) -> numpy.ndarray:
        dtype, args = special.in_double(*args)
        with numpy.errstate(all="ignore"):
            value = numpy.asarray(tail(*args))
            out = numpy.asarray(_log_of_tail(value, other(*args)))
            small = (value < 1e-280) & (args[-1] != 0)
            out[small] = log_small(*[x[small] for x in args])
        return out.astype(dtype)[()]

    def slope(out: Value, *args: Value) -> Value:
        empty = numpy.equal(out, -math.inf)
        return sign * numpy.exp(special.log_density(kind, *args) - numpy.where(empty, -math.inf, out))

    in_shapes = special.shape_rules(kind, sign, lambda out, *args: (*args, out))
    return function_of(Elementwise(f"log_{name}", impl, (*in_shapes, slope)))


def _log_upper_gamma(a: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Return the continued fraction of the incomplete gamma function. Source: https://dlmf.nist.gov/8.9.E2."""
    fraction = x + 1 - a + 400
    for k in range(200, 0, -1):
        fraction = x + 2 * k - 1 - a - k * (k - a) / fraction
    return a * numpy.log(x) - x - sp.gammaln(a) - numpy.log(fraction)


def _log_lower_gamma(a: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    return sp.xlogy(a, x) - x - sp.gammaln(a + 1) + numpy.log(sp.hyp1f1(1.0, a + 1, x))


def _log_lower_beta(a: numpy.ndarray, b: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    return special.log_powers(a, b, x, x, -sp.betaln(a, b)) + numpy.log(sp.hyp2f1(a + b, 1.0, a + 1, x) / a)


def _log_lower_t(df: numpy.ndarray, t: numpy.ndarray) -> numpy.ndarray:
    df = numpy.minimum(df, 1e30)
    return _log_lower_beta(0.5 * df, 0.5 + 0 * df, 1 / (1 + t * t / df)) - math.log(2)


def _log_upper_beta(a: numpy.ndarray, b: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    return _log_lower_beta(b, a, 1 - x)


_LOG_TAILS = {
    sp.gammaincc: _log_tail("gammaincc", "gamma", _log_upper_gamma, sp.gammainc),
    sp.gammainc: _log_tail("gammainc", "gamma", _log_lower_gamma, sp.gammaincc),
    sp.betainc: _log_tail("betainc", "beta", _log_lower_beta, sp.betaincc),
    sp.betaincc: _log_tail("betaincc", "beta", _log_upper_beta, sp.betainc),
    sp.stdtr: _log_tail("stdtr", "t", _log_lower_t, lambda df, t: sp.stdtr(df, -t)),
}


# ---------------------------------------------------------------- the distributions


def _half_exp(x: Value) -> Value:
    return 0.5 * numpy.exp(x)


def _cauchy_quantile(q: Value) -> Value:
    near, tail = q - 0.5, numpy.minimum(q, 1 - q)
    return numpy.where(abs(near) < 0.25, numpy.tan(math.pi * near), numpy.sign(near) / numpy.tan(math.pi * tail))


def _gamma_distribution(log_density: Callable, factor: float) -> _Continuous:
    """Return a gamma distribution by its log density, whose shape is this factor times that of `gamma`."""
    return _Continuous(
        _POSITIVE,
        log_density,
        lambda x, a: (sp.gammainc, factor * a, x),
        lambda x, a: (sp.gammaincc, factor * a, x),
        ppf=lambda q, a: sp.gammaincinv(factor * a, q),
        isf=lambda q, a: sp.gammainccinv(factor * a, q),
        unit=1 / factor,
    )


norm = _Continuous(
    _REAL, lambda x: -0.5 * x * x - 0.5 * math.log(2 * math.pi), sp.ndtr, logcdf=sp.log_ndtr, ppf=sp.ndtri
)
logistic = _Continuous(_REAL, lambda x: sp.log_expit(x) + sp.log_expit(-x), sp.expit, logcdf=sp.log_expit, ppf=sp.logit)
cauchy = _Continuous(
    _REAL,
    lambda x: -math.log(math.pi) - special.log1p_square(x),
    lambda x: numpy.arctan2(1.0, -x) / math.pi,
    ppf=_cauchy_quantile,
)
laplace = _Continuous(
    _REAL,
    lambda x: -numpy.abs(x) - math.log(2),
    lambda x: numpy.where(x < 0, _half_exp(numpy.where(x < 0, x, 0.0)), 1 - _half_exp(numpy.where(x < 0, 0.0, -x))),
    logcdf=lambda x: numpy.where(x < 0, x - math.log(2), numpy.log1p(-_half_exp(numpy.where(x < 0, 0.0, -x)))),
    ppf=lambda q: numpy.log(numpy.minimum(2 * q, 1)) - numpy.log(numpy.minimum(2 - 2 * q, 1)),
)
t = _Continuous(
    _REAL,
    lambda x, df: special.log_t_density(df, x),
    lambda x, df: (sp.stdtr, df, x),
    lambda x, df: (sp.stdtr, df, -x),
    ppf=lambda q, df: sp.stdtrit(df, q),
)
uniform = _Continuous(_UNIT, lambda x: 0.0 * x, lambda x: x, lambda x: 1 - x, ppf=lambda q: q, isf=lambda q: 1 - q)
expon = _Continuous(
    _POSITIVE,
    lambda x: -x,
    lambda x: -numpy.expm1(-x),
    lambda x: numpy.exp(-x),
    logsf=lambda x: -x,
    ppf=lambda q: -numpy.log1p(-q),
    isf=lambda q: -numpy.log(q),
)
gamma = _gamma_distribution(lambda x, a: special.gamma_powers(a, x), 1.0)
chi2 = _gamma_distribution(lambda x, df: special.gamma_powers(0.5 * df, x), 0.5)
beta = _Continuous(
    _UNIT,
    lambda x, a, b: special.beta_powers(a, b, x),
    lambda x, a, b: (sp.betainc, a, b, x),
    lambda x, a, b: (sp.betaincc, a, b, x),
    ppf=lambda q, a, b: sp.betaincinv(a, b, q),
    isf=lambda q, a, b: sp.betainccinv(a, b, q),
)
poisson = _Discrete(
    _POSITIVE,
    lambda k, mu: (k, 0 * k, mu, 0 * mu, -mu - sp.gammaln(k + 1)),
    lambda k, mu: (sp.gammaincc, k + 1, mu),
    lambda k, mu: (sp.gammainc, k + 1, mu),
)
binom = _Discrete(
    lambda n, p: (0.0, n),
    lambda k, n, p: (k, n - k, p, p, -sp.betaln(k + 1, n - k + 1) - numpy.log(n + 1)),
    lambda k, n, p: (sp.betaincc, k + 1, n - k, p),
    lambda k, n, p: (sp.betainc, k + 1, n - k, p),
)
bernoulli = _Discrete(_UNIT, lambda k, p: (k, 1 - k, p, p, 0 * p), lambda k, p: 1 - p, lambda k, p: p)


class _Dirichlet:
    """The Dirichlet distribution: numbers x sum to 1 along the first axis (not checked); alpha is [k]."""

    def logpdf(self, x: Value, alpha: Value) -> Value:
        terms = numpy.sum(sp.xlogy(numpy.subtract(alpha, 1), numpy.transpose(x)), -1)
        return terms + sp.gammaln(numpy.sum(alpha)) - numpy.sum(sp.gammaln(alpha))

    def pdf(self, x: Value, alpha: Value) -> Value:
        return numpy.exp(self.logpdf(x, alpha))


class _MultivariateNormal:
    """The normal distribution of x [..., n]; mean [n] or [..., n]; cov [n, n] (one triangle is read), or variances.

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
        positive, largest = numpy.abs(w) > least * numpy.max(numpy.abs(w)), numpy.max(numpy.abs(w))
        solution = x @ numpy.linalg.pinv(cov, rcond=least, hermitian=True)
        log_det = numpy.sum(numpy.log(numpy.where(positive, 2 * math.pi * w, 1.0)))
        off = numpy.linalg.norm(x - solution @ cov, axis=-1) > math.sqrt(least) * numpy.sqrt(largest)
        return numpy.where(off, -math.inf, -0.5 * numpy.sum(x * solution, -1) - 0.5 * log_det)

    def pdf(self, x: Value, mean: Value | None = None, cov: Value = 1.0, allow_singular: bool = False) -> Value:
        return numpy.exp(self.logpdf(x, mean, cov, allow_singular))

    def entropy(self, mean: Value | None = None, cov: Value = 1.0) -> Value:
        size = self._size(mean, cov) or 1
        return self._half_log_det(numpy.linalg.cholesky(self._matrix(cov, size))) + 0.5 * size

    @staticmethod
    def _size(mean: Value | None, cov: Value) -> int | None:
        """Return the number of dimensions, as mean and cov say; None if there is no mean, and cov is a number."""
        shapes = [as_array(x).shape[-1:] for x in (cov, mean) if x is not None]
        return next((shape[0] for shape in shapes if shape), None if mean is None else 1)

    @staticmethod
    def _matrix(cov: Value, size: int) -> Value:
        return cov if as_array(cov).ndim > 1 else cov * numpy.eye(size)

    @staticmethod
    def _half_log_det(factor: Value) -> Value:
        return numpy.sum(numpy.log(math.sqrt(2 * math.pi) * numpy.diagonal(factor, 0, -2, -1)), -1)


dirichlet, multivariate_normal = _Dirichlet(), _MultivariateNormal()
