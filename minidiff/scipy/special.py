"""`scipy.special`, differentiable: one rule for each function, in a table.

SciPy's own ufuncs accept traced values, too: `scipy.special.gammaln(x)` is `md.scipy.special.gammaln(x)`. A ufunc with
one result and without a rule works under `jit`, `vmap` and on ranks, and raises TypeError if it is differentiated. So
does a function with a rule, in an operand for whose derivative SciPy has no function, such as the order of a Bessel
function.

>>> import minidiff as md, numpy as np
>>> md.vmap(md.grad(jv, 1))(np.array([0.0, 1.0]), np.array([1.0, 1.0])).round(6)
array([-0.440051,  0.325147])

Source of the derivatives: NIST Digital Library of Mathematical Functions, https://dlmf.nist.gov.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
import scipy.special as sp

from minidiff import nn
from minidiff.api.derivatives import jvp
from minidiff.core.tracer import Value, implements
from minidiff.core.types import typeof
from minidiff.errors.other_libraries import missing_attribute_error
from minidiff.ops import elementwise
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import (
    ElementwiseFunction,
    cos,
    equal,
    exp,
    floor,
    log,
    log1p,
    nth_derivative,
    remainder,
    rint,
    sin,
    sqrt,
    tanh,
    where,
)
from minidiff.scipy import numerics
from minidiff.scipy.numerics import in_double, increment

_ROOT_PI, _ROOT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


def without_rule(name: str, position: int, nth: str = "") -> Callable:
    """Return a derivative that raises the error for an operand without a rule."""

    def derivative(*_: Any) -> NoReturn:
        raise TypeError(
            f"scipy.special.{name} has no {nth}derivative in its argument {position}, since SciPy has no function for "
            f"it; apply md.stop_gradient to that argument if it is a constant, or declare a rule: md.custom_jvp"
        )

    return derivative


# ---------------------------------------------------------------- gamma functions, where poles cancel


def _is_integer(x: Value) -> Value:
    return equal(x, floor(x))


def _cospi(x: Value) -> Value:
    nearest = rint(x)
    return cos(math.pi * (x - nearest)) * (1 - 2 * remainder(nearest, 2))


@functools.cache
def polygamma_increment(n: int) -> ElementwiseFunction:
    """Return the operation polygamma(n, x + h) - polygamma(n, x) of x and h."""
    in_x, in_h = lambda out, x, h: polygamma_increment(n + 1)(x, h), lambda out, x, h: polygamma(n + 1, x + h)
    return elementwise.function_of(Elementwise(f"polygamma_increment_{n}", partial(increment, n), (in_x, in_h)))


# Where a reciprocal gamma function is 0, its product with a digamma function is finite. By the reflection formula,
# rgamma(x) = gamma(1 - x) sin(pi x) / pi, it is a digamma function of 1 - x, and a cosine times what is not singular.


def _slope_of_rgamma(out: Value, x: Value) -> Value:
    if typeof(x).dtype.kind == "c":
        return -out * sp.digamma(x)
    low = x < 0.5
    z = where(low, 1 - x, x)
    return where(low, _cospi(x) * sp.gamma(where(low, z, 1)), 0) - out * sp.digamma(z)


def _slopes_of_binom(out: Value, n: Value, k: Value) -> tuple[Value, Value]:
    """binom(n, k) = gamma(n + 1) rgamma(k + 1) rgamma(n - k + 1)."""
    low_k, low_rest = (n > -1) & (k <= -1), (n > -1) & (n - k <= -1)
    z = where(low_k, -k, where(low_rest, k - n, 1))
    cosine = _cospi(z) * sp.beta(where(low_k | low_rest, n + 1, 1), z)
    x, y = where(low_k, -k, k + 1), where(low_rest, k - n, n - k + 1)
    difference = polygamma_increment(0)
    in_n = out * difference(y, where(low_rest, n + 1 - z, k)) - where(low_rest, cosine, 0)
    in_k = out * difference(x, where(low_k | low_rest, y - x, n - 2 * k))
    return in_n, in_k + where(low_rest, cosine, 0) - where(low_k, cosine, 0)


def _slope_of_beta(out: Value, a: Value, b: Value) -> Value:
    """beta(a, b) = gamma(a) gamma(b) rgamma(a + b)."""
    s = a + b
    low = (s <= 0) & (abs(a) < 80) & (abs(b) < 80) & ~_is_integer(a) & ~_is_integer(b)
    u, v = where(low, a, 0.5), where(low, b, 0.5)
    regular = sp.gamma(u) * sp.gamma(v) * sp.gamma(1 - where(low, s, 0))
    reflected = out * (sp.digamma(u) - sp.digamma(1 - where(low, s, 0))) + _cospi(s) * regular
    return where(low, reflected, -out * polygamma_increment(0)(where(low, 1, a), where(low, 1, b)))


def _slope_of_poch(out: Value, z: Value, m: Value) -> Value:
    """poch(z, m) = gamma(z + m) rgamma(z)."""
    y = z + m
    low = (z < 0.5) & (z > -80) & (y < 80) & ~(_is_integer(y) & (y <= 0)) & ~(_is_integer(m) & (y <= 0))
    x, y = where(low, 1 - z, 1), where(low, y, 1)
    reflected = out * (sp.digamma(y) - sp.digamma(x)) + _cospi(z) * sp.gamma(y) * sp.gamma(x)
    return where(low, reflected, out * polygamma_increment(0)(where(low, 1, z), where(low, 1, m)))


def _slope_of_poch_in_m(out: Value, z: Value, m: Value) -> Value:
    """Return the derivative in m: 0 where z and z + m are poles, since for another m near it, poch(z, m) is 0."""
    y = z + m
    poles = (z <= 0) & (y <= 0) & _is_integer(z) & _is_integer(y)
    return where(poles, 0, out * sp.digamma(where(poles, 1, y)))


# ---------------------------------------------------------------- densities


def log_powers(p: Value, q: Value, x: Value, y: Value, c: Value) -> Value:
    """log(x**p (1 - y)**q) + c."""
    return sp.xlogy(p, x) + sp.xlog1py(q, -y) + c


#: x**p (1 - y)**q exp(c), with one-sided derivatives where x is 0 or y is 1.
powers = elementwise.function_of(
    Elementwise(
        "powers",
        lambda *operands: numpy.exp(log_powers(*operands)),
        (
            lambda out, p, q, x, y, c: out * log(where(equal(out, 0), 1, x)),
            lambda out, p, q, x, y, c: out * log1p(where(equal(out, 0), 0, -y)),
            lambda out, p, q, x, y, c: p * powers(where(equal(p, 0) & (x <= 0), 0, p - 1), q, x, y, c),
            lambda out, p, q, x, y, c: -q * powers(p, where(equal(q, 0) & (y >= 1), 0, q - 1), x, y, c),
            lambda out, p, q, x, y, c: out,
        ),
    )
)


def beta_powers(a: Value, b: Value, x: Value) -> tuple[Value, ...]:
    """Return the operands of `powers` for the density of the beta distribution."""
    return a - 1, b - 1, x, x, -sp.betaln(a, b)


def gamma_powers(a: Value, x: Value) -> tuple[Value, ...]:
    """Return the operands of `powers` for the density of the gamma distribution."""
    return a - 1, 0 * a, x, 0 * x, -x - sp.gammaln(a)


# ---------------------------------------------------------------- derivatives in shapes

#: Of each distribution: the number of shapes, the logarithm of the density, or operands of `powers` for it, and
#: derivatives of the cdf in the shapes.
_DISTRIBUTIONS: dict[str, tuple[int, Callable, Callable]] = {
    "beta": (2, beta_powers, numerics.beta_in_shapes),
    "gamma": (1, gamma_powers, numerics.gamma_in_shapes),
    "t": (1, lambda df, t: log_t_density(df, t), numerics.t_in_shapes),
}


def log_density(kind: str, *xs: Value) -> Value:
    """Return the logarithm of a density at shapes and a number."""
    log = _DISTRIBUTIONS[kind][1](*xs)
    return log_powers(*log) if isinstance(log, tuple) else log


def _density(kind: str, *xs: Value) -> Value:
    """Return a density at shapes and a number, divided by exp(c), the last operand."""
    *xs, c = xs
    log = _DISTRIBUTIONS[kind][1](*xs)
    return powers(*log[:-1], log[-1] - c) if isinstance(log, tuple) else exp(log - c)


def _slope_in(f: Callable, i: int) -> Callable:
    def slope(*xs: Value) -> Value:
        x = 1.0 * xs[i]
        return jvp(lambda x: f(*xs[:i], x, *xs[i + 1 :]), (x,), (0 * x + 1,))[1]

    return slope


@functools.cache
def _in_shapes(kind: str, *orders: int) -> ElementwiseFunction:
    """Return the derivative of a distribution function of these orders in its shapes, divided by exp(c).

    It is an operation on the shapes, the number, and c, which is not differentiated in the result's shapes.
    """
    count, _, impl = _DISTRIBUTIONS[kind]

    def in_shape(i: int) -> Callable:
        if kind == "t" and orders == (2,):
            return without_rule("stdtr", 0, "third ")
        return lambda out, *xs: _in_shapes(kind, *_raise(orders, i))(*xs)

    in_number = functools.reduce(
        _slope_in, [i for i, n in enumerate(orders) for _ in range(n)], partial(_density, kind)
    )
    rules = [*map(in_shape, range(count)), lambda out, *xs: in_number(*xs), lambda out, *xs: -out]
    name = "_".join([kind, "in_shapes", *map(str, orders)])
    return elementwise.function_of(Elementwise(name, partial(impl, orders), rules))


def _raise(orders: tuple[int, ...], i: int) -> list[int]:
    return [n + (i == j) for j, n in enumerate(orders)]


def shape_rules(kind: str, sign: int, operands: Callable) -> list[Callable]:
    """Return rules for shapes: derivatives of the cdf, times the sign, at `operands(out, *xs)`: shapes, number, c."""
    count = _DISTRIBUTIONS[kind][0]
    firsts = [_raise((0,) * count, i) for i in range(count)]
    return [lambda out, *xs, orders=n: sign * _in_shapes(kind, *orders)(*operands(out, *xs)) for n in firsts]


def _rules_of_cdf(kind: str, sign: int = 1) -> tuple[Callable, ...]:
    """Return the rules of a distribution function, or with sign -1 of that of the other tail."""
    return (
        *shape_rules(kind, sign, lambda out, *xs: (*xs, 0.0)),
        lambda out, *xs: sign * _density(kind, *xs, 0.0),
    )


def _rules_of_inverse(kind: str, sign: int = 1) -> tuple[Callable, ...]:
    """Return the rules of their inverses: if F(a, x) stays, dx/da is -(dF/da) / (dF/dx)."""
    at = lambda out, *xs: (*xs[:-1], out, log_density(kind, *xs[:-1], out))  # noqa: E731
    return *shape_rules(kind, -1, at), lambda out, *xs: sign / _density(kind, *xs[:-1], out, 0.0)


def _normal_density(x: Value) -> Value:
    return exp(-0.5 * x * x) / _ROOT_2PI


#: expit(x) expit(-x). Its derivative has their difference, a hyperbolic tangent.
_slope_of_expit = elementwise.function_of(
    Elementwise("expit_1", lambda x: sp.expit(x) * sp.expit(-x), (lambda out, x: -out * tanh(0.5 * x),))
)


def log1p_square(x: Value) -> Value:
    """log(1 + x * x), where x * x may overflow."""
    large = abs(x) > 1e8
    return where(large, 2 * log(where(large, abs(x), 1)), log1p(where(large, 0, x) ** 2))


def log_t_density(df: Value, t: Value) -> Value:
    """Return the logarithm of the density of Student's distribution, df may be infinite."""
    df = numpy.minimum(df, 1e30)
    return -0.5 * (df + 1) * log1p_square(t / sqrt(df)) + log(sp.poch(0.5 * df, 0.5)) - 0.5 * log(math.pi * df)


def _hazard(x: Value) -> Value:
    """Return the density of the normal distribution, divided by the probability of smaller numbers."""
    right = x > 5
    left = math.sqrt(2 / math.pi) / sp.erfcx(where(right, 0, x) * -math.sqrt(0.5))
    return where(right, _normal_density(x) / sp.ndtr(where(right, x, 0)), left)


# ---------------------------------------------------------------- other removable singularities


def _quotient(x: Value, y: Value) -> Value:
    """x / y, or 0 where both are 0."""
    return x / where(equal(x, 0) & equal(y, 0), 1, y)


def _log_of_quotient(x: Value, y: Value) -> Value:
    """log(x / y), accurate where x is close to y."""
    near = abs(x - y) < 0.5 * y
    logs = log(where(near, 1, x)) - log(where(near, 1, y))
    return where(near, log1p(where(near, x - y, 0) / where(near, y, 1)), logs)


def _slope_of_kl_div(x: Value, y: Value) -> Value:
    """1 - x / y, accurate where x is close to y."""
    near = abs(x - y) < 0.5 * y
    return where(near, (y - x) / where(near, y, 1), 1 - _quotient(where(near, 0, x), where(near, 1, y)))


def _by_series(u: Value, x: Value, series: Callable, f: Callable) -> Value:
    """series(u) where |u| < 1/2, else f(x), which is singular where u is 0; derivatives are those of one of them."""
    near = abs(u) < 0.5
    return where(near, series(where(near, u, 0)), f(where(near, 0.25 if x is not u else -1.0, x)))


def _slope_of_wrightomega(w: Value) -> Value:
    """w / (1 + w), of which no derivative cancels."""
    large = abs(w) > 1
    return where(large, 1 - 1 / (1 + where(large, w, 1)), where(large, 0, w) / (1 + where(large, 0, w)))


def _expn_below(n: Value, x: Value) -> Value:
    """Return expn(n - 1, x), also for n < 1, where SciPy has none: a power of x and an incomplete gamma function."""
    low = n < 1
    a, z = where(low, 2 - n, 1), where(low, x, 1)
    return where(low, sp.gamma(a) * sp.gammaincc(a, z) * z**-a, sp.expn(where(low, 1, n) - 1, x))


def _erfcx_or_dawsn(sign: int, n: int, x: numpy.ndarray) -> numpy.ndarray:
    """Return the n-th derivative of f, where f' = sign * (1 - 2 * x * f): dawsn, or erfcx * sqrt(pi) / 2 if sign is -1.

    For large x the terms of the equation cancel; the asymptotic series is accurate.
    """
    dtype, (x,) = in_double(x)
    f = [sp.dawsn(x) if sign > 0 else _ROOT_PI / 2 * sp.erfcx(x)]
    with numpy.errstate(all="ignore"):
        for k in range(n):
            f.append(sign * (not k) - 2 * sign * (x * f[k] + k * f[k - 1]))
        far = x > 6.5 if sign < 0 else numpy.abs(x) > 6.5
        z = numpy.where(far, x, 10.0)
        factors = [sign**k * math.prod(range(1, 2 * k, 2)) / 2 ** (k + 1) * math.perm(2 * k + n, n) for k in range(20)]
        series = (-1) ** n * sum(c * z ** -(2 * k + 1.0) for k, c in enumerate(factors)) * z**-n
    out = numpy.where(far, series, f[n]) * (1 if sign > 0 else 2 / _ROOT_PI)
    return out.astype(dtype)[()]


def _slope_of(sign: int, out: Value, x: Value) -> Value:
    """Return the derivative of dawsn, or of erfcx if the sign is -1."""
    if typeof(x).dtype.kind == "c":
        return sign * ((1 if sign > 0 else 2 / _ROOT_PI) - 2 * x * out)
    return nth_derivative("dawsn" if sign > 0 else "erfcx", partial(_erfcx_or_dawsn, sign), 1).bind(x)


def _scaled_bessel(kind: str, n: int, v: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Return derivative n > 0 of ive or kve in x: a difference over orders, which cancels, or the asymptotic series.

    Where |x| is not smooth, at 0, it is the mean of both sides.
    """
    dtype, (v, x) = in_double(v, x)
    f, sign = (sp.ive, 1) if kind == "ive" else (sp.kve, -1)
    z = numpy.abs(x) if sign > 0 else x
    with numpy.errstate(all="ignore"):
        out = (sign / 2) ** n * sum((-1) ** j * math.comb(2 * n, j) * f(v + n - j, z) for j in range(2 * n + 1))
        far = z > numpy.maximum(30, v * v / 8)
        y, term, series = numpy.where(far, z, 100.0), (-1.0) ** n * numpy.ones(v.shape), 0.0
        term = term * math.prod(k + 0.5 for k in range(n)) * y ** -(n + 0.5)
        for k in range(1, 45):
            series = series + term
            term = term * (4 * v * v - (2 * k - 1) ** 2) / (-8 * sign * k * y) * (k - 0.5 + n) / (k - 0.5)
        out = numpy.where(far, series * (1 / _ROOT_2PI if sign > 0 else math.sqrt(math.pi / 2)), out)
        if sign > 0:
            mirrored = numpy.where(x > 0, 1, numpy.where(v == numpy.floor(v), (-1.0) ** (v + n), numpy.nan))
            out = out * numpy.where(x == 0, (1 + mirrored) / 2, mirrored)
    return out.astype(dtype)[()]


@functools.cache
def _of_order(kind: str, n: int) -> ElementwiseFunction:
    rules = (None, lambda out, v, x: _of_order(kind, n + 1)(v, x))
    return elementwise.function_of(Elementwise(f"{kind}_{n}", partial(_scaled_bessel, kind, n), rules))


#: The derivative in each operand, of (result, *operands); an operand without one has None.
RULES: dict[str, tuple[Callable | None, ...]] = {
    # gamma and beta functions
    "gamma": (lambda out, x: out * sp.digamma(x),),
    "gammaln": (lambda out, x: sp.digamma(x),),
    "loggamma": (lambda out, x: sp.digamma(x),),
    "rgamma": (_slope_of_rgamma,),
    "gammasgn": (lambda out, x: 0 * x,),
    "psi": (lambda out, x: polygamma(1, x),),
    "polygamma": (None, lambda out, n, x: polygamma(n + 1, x)),
    "zeta": (None, lambda out, x, q: -x * zeta(x + 1, q)),
    "poch": (_slope_of_poch, _slope_of_poch_in_m),
    "binom": (lambda *args: _slopes_of_binom(*args)[0], lambda *args: _slopes_of_binom(*args)[1]),
    "beta": (_slope_of_beta, lambda out, a, b: _slope_of_beta(out, b, a)),
    "betaln": (lambda out, a, b: -polygamma_increment(0)(a, b), lambda out, a, b: -polygamma_increment(0)(b, a)),
    "betainc": _rules_of_cdf("beta"),
    "betaincc": _rules_of_cdf("beta", -1),
    "betaincinv": _rules_of_inverse("beta"),
    "betainccinv": _rules_of_inverse("beta", -1),
    "gammainc": _rules_of_cdf("gamma"),
    "gammaincc": _rules_of_cdf("gamma", -1),
    "gammaincinv": _rules_of_inverse("gamma"),
    "gammainccinv": _rules_of_inverse("gamma", -1),
    # the error function, and distributions
    "erf": (lambda out, x: 2 / _ROOT_PI * exp(-x * x),),
    "erfc": (lambda out, x: -2 / _ROOT_PI * exp(-x * x),),
    "erfcx": (lambda out, x: _slope_of(-1, out, x),),
    "erfi": (lambda out, x: 2 / _ROOT_PI * exp(x * x),),
    "erfinv": (lambda out, x: _ROOT_PI / 2 * exp(out * out),),
    "erfcinv": (lambda out, x: -_ROOT_PI / 2 * exp(out * out),),
    "dawsn": (lambda out, x: _slope_of(1, out, x),),
    "ndtr": (lambda out, x: _normal_density(x),),
    "log_ndtr": (lambda out, x: _hazard(x),),
    "ndtri": (lambda out, y: _ROOT_2PI * exp(0.5 * out * out),),
    "stdtr": _rules_of_cdf("t"),
    "stdtrit": _rules_of_inverse("t"),
    "expit": (lambda out, x: _slope_of_expit(x),),
    "log_expit": (lambda out, x: sp.expit(-x),),
    "logit": (lambda out, x: 1 / (x * (1 - x)),),
    # logarithms, and what is accurate near 0
    "xlogy": (lambda out, x, y: log(y), lambda out, x, y: _quotient(x, y)),
    "xlog1py": (lambda out, x, y: log1p(y), lambda out, x, y: _quotient(x, 1 + y)),
    "entr": (lambda out, x: -log(x) - 1,),
    "rel_entr": (lambda out, x, y: _log_of_quotient(x, y) + 1, lambda out, x, y: -_quotient(x, y)),
    "kl_div": (lambda out, x, y: _log_of_quotient(x, y), lambda out, x, y: _slope_of_kl_div(x, y)),
    "exp10": (lambda out, x: math.log(10) * out,),
    "cosm1": (lambda out, x: -sin(x),),
    # Bessel functions
    "j0": (lambda out, x: -sp.j1(x),),
    "j1": (lambda out, x: 0.5 * (sp.j0(x) - sp.jv(2, x)),),
    "y0": (lambda out, x: -sp.y1(x),),
    "y1": (lambda out, x: 0.5 * (sp.y0(x) - sp.yv(2, x)),),
    "i0": (lambda out, x: sp.i1(x),),
    "i1": (lambda out, x: 0.5 * (sp.i0(x) + sp.iv(2, x)),),
    "i0e": (lambda out, x: _of_order("ive", 1)(0.0, x),),
    "i1e": (lambda out, x: _of_order("ive", 1)(1.0, x),),
    "k0": (lambda out, x: -sp.k1(x),),
    "k1": (lambda out, x: -0.5 * (sp.k0(x) + sp.kv(2, x)),),
    "k0e": (lambda out, x: _of_order("kve", 1)(0.0, x),),
    "k1e": (lambda out, x: _of_order("kve", 1)(1.0, x),),
    "jv": (None, lambda out, v, x: 0.5 * (sp.jv(v - 1, x) - sp.jv(v + 1, x))),
    "yv": (None, lambda out, v, x: 0.5 * (sp.yv(v - 1, x) - sp.yv(v + 1, x))),
    "yn": (None, lambda out, v, x: 0.5 * (sp.yv(v - 1, x) - sp.yv(v + 1, x))),
    "iv": (None, lambda out, v, x: 0.5 * (sp.iv(v - 1, x) + sp.iv(v + 1, x))),
    "kv": (None, lambda out, v, x: -0.5 * (sp.kv(v - 1, x) + sp.kv(v + 1, x))),
    "kn": (None, lambda out, v, x: -0.5 * (sp.kv(v - 1, x) + sp.kv(v + 1, x))),
    "ive": (None, lambda out, v, x: _of_order("ive", 1)(v, x)),
    "kve": (None, lambda out, v, x: _of_order("kve", 1)(v, x)),
    # integrals, and hypergeometric functions
    "exp1": (lambda out, x: -exp(-x) / x,),
    "expi": (lambda out, x: exp(x) / x,),
    "expn": (None, lambda out, n, x: -_expn_below(n, x)),
    "spence": (
        lambda out, x: _by_series(1 - x, x, lambda u: -sp.hyp2f1(1.0, 1.0, 2.0, u), lambda x: log(x) / (1 - x)),
    ),
    "ellipe": (
        lambda out, m: _by_series(
            m,
            m,
            lambda m: -math.pi / 8 * sp.hyp2f1(0.5, 1.5, 2.0, m),
            lambda m: (sp.ellipe(m) - sp.ellipk(m)) / (2 * m),
        ),
    ),
    "ellipk": (
        lambda out, m: _by_series(
            m,
            m,
            lambda m: math.pi / 8 * sp.hyp2f1(0.5, 0.5, 2.0, m) / (1 - m),
            lambda m: (sp.ellipe(m) / (1 - m) - sp.ellipk(m)) / (2 * m),
        ),
    ),
    "hyp0f1": (None, lambda out, v, z: sp.hyp0f1(v + 1, z) / v),
    "hyp1f1": (None, None, lambda out, a, b, x: a / b * sp.hyp1f1(a + 1, b + 1, x)),
    "hyp2f1": (None, None, None, lambda out, a, b, c, z: a * b / c * sp.hyp2f1(a + 1, b + 1, c + 1, z)),
    "wrightomega": (lambda out, z: _slope_of_wrightomega(out),),
}


#: Functions that NumPy has under another name or the same, with rules already.
_SAME = {"cbrt": "cbrt", "exp2": "exp2", "expm1": "expm1", "log1p": "log1p", "round": "rint"}


@functools.cache
def function_of(name: str) -> ElementwiseFunction:
    """Declare a function of SciPy by its name; its ufunc then takes traced values, too."""
    function: Any = getattr(sp, name)
    if name in _SAME:
        return implements(function)(getattr(elementwise, _SAME[name]))
    rules = RULES[name] if name in RULES else (None,) * function.nin
    derivatives = [rule or without_rule(name, i) for i, rule in enumerate(rules)]
    declared = elementwise.function_of(Elementwise(name, function, derivatives))
    declared.__doc__ = f"`scipy.special.{name}`, differentiable."
    return implements(function)(declared) if isinstance(function, numpy.ufunc) else declared


globals().update({name: function_of(name) for name in (*RULES, *_SAME) if name != "round"})
polygamma, zeta = function_of("polygamma"), function_of("zeta")
digamma, jn = function_of("psi"), function_of("jv")
logsumexp = nn.logsumexp


def softmax(x: Value, axis: Any = None) -> Value:
    """`scipy.special.softmax`: `md.nn.softmax`, over the whole array by default.

    Args:
        x: real numbers.
        axis: an axis, a tuple of axes, or None for all.

    Returns:
        An array of the shape of x.

    >>> softmax(numpy.zeros((2, 2)))
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """
    return nn.softmax(x, axis)


def log_softmax(x: Value, axis: Any = None) -> Value:
    """`scipy.special.log_softmax`: `md.nn.log_softmax`, over the whole array by default.

    Args:
        x: real numbers.
        axis: an axis, a tuple of axes, or None for all.

    Returns:
        An array of the shape of x.

    >>> log_softmax(numpy.array([1000.0, 0.0]))
    array([    0., -1000.])
    """
    return nn.log_softmax(x, axis)


def multigammaln(a: Value, d: int) -> Value:
    """`scipy.special.multigammaln`: compute the logarithm of the multivariate gamma function.

    Args:
        a: real numbers above (d - 1) / 2.
        d: the dimension.

    Returns:
        An array of the shape of a.

    >>> round(float(multigammaln(3.0, 2)), 6)
    1.550195
    """
    terms = [sp.gammaln(a - 0.5 * j) for j in range(d)]
    return d * (d - 1) / 4 * math.log(math.pi) + functools.reduce(elementwise.add, terms)


__all__ = [*RULES, "digamma", "jn", "log_softmax", "logsumexp", "multigammaln", "softmax"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:

    def __getattr__(name: str) -> Any:
        ufunc = getattr(sp, name, None)
        if not isinstance(ufunc, numpy.ufunc) or ufunc.nout != 1:
            raise missing_attribute_error(__name__, name, __all__)
        return function_of(name)
