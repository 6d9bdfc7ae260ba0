"""Functions that SciPy lacks, on NumPy arrays: computed in double precision, and returned in the operands' dtype.

Derivatives of a distribution function in its shapes are integrals, because it is the integral of a density. For the
gamma distribution, the density of the logarithm s is f(s) = exp(a s - exp(s)) / gamma(a), and its derivative in a is
(s - digamma(a)) f(s). Beyond log(x), on the side away from the mode of f, the first factor keeps its sign. So the
integral over that side does not cancel: it has all digits, however small it is. It is computed relative to f(log(x)).
The beta distribution (with s = log(t / (1 - t))) and Student's are treated in the same way.

The last operand c of these functions divides the derivative by exp(c), for a derivative that underflows:

>>> a, x = numpy.array([2.0, 2.0]), numpy.array([1.0, 2000.0])
>>> gamma_in_shapes((1,), a, x, numpy.array([0.0, -1990.0])).round(6)
array([-0.276196, -0.652143])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy
import scipy.special as sp

from minidiff.ops.special import integrate

Array = numpy.ndarray


def in_double(*operands: Any) -> tuple[numpy.dtype, list]:
    """Return the dtype of a result, and the operands in double precision, broadcast; TypeError for complex ones."""
    arrays = [numpy.asarray(x).astype(float, casting="same_kind") for x in operands]
    return numpy.result_type(*operands, numpy.float32), list(numpy.broadcast_arrays(*arrays))


# ---------------------------------------------------------------- increments of polygamma functions

#: B_2k, the Bernoulli numbers, from k = 1.
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)


def _increment_at_positive(n: int, x: numpy.ndarray, h: numpy.ndarray) -> numpy.ndarray:
    """polygamma(n, x + h) - polygamma(n, x), without cancellation: the asymptotic series at x + 10."""

    def power(p: int, shift: int) -> numpy.ndarray:
        """(x + h + shift)**-p - (x + shift)**-p."""
        z = x + shift
        small = numpy.abs(h) < 0.5 * z
        rise = numpy.expm1(-p * numpy.log1p(numpy.where(small, h / z, 0)))
        return numpy.where(small, z**-p * rise, (x + h + shift) ** -p - z**-p)

    total = math.factorial(n - 1) * power(n, 10) if n else -numpy.log1p(h / (x + 10))
    total = total + math.factorial(n) / 2 * power(n + 1, 10)
    for k, b in enumerate(BERNOULLI, 1):
        total = total + b * math.factorial(2 * k + n - 1) / math.factorial(2 * k) * power(2 * k + n, 10)
    total = total + math.factorial(n) * sum(power(n + 1, k) for k in range(10))
    return (-1) ** (n + 1) * total


def increment(n: int, x: numpy.ndarray, h: numpy.ndarray) -> numpy.ndarray:
    """Return polygamma(n, x + h) - polygamma(n, x)."""
    dtype, (x, h) = in_double(x, h)
    with numpy.errstate(all="ignore"):
        y = x + h
        low = (x <= 0) & (y <= 0) & (h == numpy.floor(h))  # the sines of the reflection formula cancel
        near = low | ((x > 0) & (y > 0))
        sign, z, step = numpy.where(low, (-1) ** n, 1), numpy.where(low, 1 - x, x), numpy.where(low, -h, h)
        out = numpy.asarray(sp.polygamma(n, y) - sp.polygamma(n, x))
        out[near] = sign[near] * _increment_at_positive(n, z[near], step[near])
    return out.astype(dtype)[()]


# ---------------------------------------------------------------- densities


def _log1p_rest(h: Any, log: Any) -> Any:
    """Return log(1 + h) - h, where `log` is log(1 + h)."""
    near = numpy.abs(h) < 0.5
    s = numpy.where(near, h / (2 + h), 0)  # log(1 + h) = 2 artanh(s)
    square = s * s
    series: Any = functools.reduce(lambda total, k: total * square + 1 / k, range(35, 1, -2), numpy.zeros(()))
    return numpy.where(near, s * (2 * square * series - h), log - h)


def _log_gamma_rest(a: Array) -> Array:
    """Return log(gamma(a)) without the terms of Stirling's formula, (a - 1/2) log(a) - a + log(2 pi) / 2."""
    far = a > 10
    z = numpy.where(far, a, 10)
    series = sum(b / (2 * k * (2 * k - 1)) * z ** (1 - 2 * k) for k, b in enumerate(BERNOULLI, 1))
    return numpy.where(far, series, sp.gammaln(a) - (a - 0.5) * numpy.log(a) + a - 0.5 * math.log(2 * math.pi))


def _log_gamma_density(a: Array, x: Array) -> Array:
    """Return a log(x) - x - log(gamma(a)), of which large terms cancel. Source: Loader, "Fast and accurate computation
    of binomial probabilities"."""
    return a * _log1p_rest((x - a) / a, numpy.log(x / a)) - _log_gamma_rest(a) + 0.5 * numpy.log(a / (2 * math.pi))


def _log_beta_density(a: Array, b: Array, x: Array, y: Array) -> Array:
    """Return a log(x) + b log(y) - log(B(a, b)), where y is 1 - x."""
    n, excess = a + b, b * x - a * y
    powers = a * _log1p_rest(excess / a, numpy.log(n * x / a)) + b * _log1p_rest(-excess / b, numpy.log(n * y / b))
    rest = _log_gamma_rest(n) - _log_gamma_rest(a) - _log_gamma_rest(b)
    return powers + rest + 0.5 * numpy.log(a / n * b / (2 * math.pi))


# ---------------------------------------------------------------- derivatives of distribution functions in the shapes


def _elementwise(f: Callable) -> Callable:
    """Return `f(orders, *columns)`, of columns of at most 512 numbers, as a function of arrays."""

    def impl(orders: tuple[int, ...], *operands: Any) -> Array:
        dtype, arrays = in_double(*operands)
        columns = [x.reshape(-1, 1) for x in arrays]
        out = numpy.empty_like(columns[0])
        with numpy.errstate(all="ignore"):
            for i in range(0, len(out), 512):
                total, log_density = f(orders, *[x[i : i + 512] for x in columns[:-1]])
                density = numpy.exp(log_density - columns[-1][i : i + 512])
                out[i : i + 512] = numpy.where(density == 0, 0, density * total)
        return out.reshape(arrays[0].shape).astype(dtype)[()]

    return impl


def _bell(k: Callable, m: int, n: int = 0) -> Any:
    """Return derivative (m, n) of exp(g) divided by exp(g), where k(i, j) is derivative (i, j) of g."""
    if m == 0:
        return _bell(lambda i, j: k(j, i), n) if n else 1.0
    pairs = [(i, j) for i in range(m) for j in range(n + 1)]
    return sum(math.comb(m - 1, i) * math.comb(n, j) * k(i + 1, j) * _bell(k, m - 1 - i, n - j) for i, j in pairs)


# For a shape a < 1, the integral over numbers below x cancels. Partial integration raises a to a + 1: it leaves the
# derivative of the density divided by a, which has the sign of the integral.


@_elementwise
def gamma_in_shapes(orders: tuple[int, ...], a: Array, x: Array) -> tuple[Array, Array]:
    """Return derivative n of gammainc(a, x) in a, divided by exp(c)."""
    (n,) = orders
    below = (x < a) | (x < 1)
    raised = below & (a < 1)
    to, log_x, psi = a + raised, numpy.log(x), [sp.polygamma(i, a + 1) for i in range(n)]

    def factor(log_t: Array, n: int) -> Array:
        return _bell(lambda i, _: log_t - psi[0] if i == 1 else -psi[i - 1], n)

    def integrand(v: Array) -> Array:
        y = numpy.where(below, -v, numpy.log1p(v))
        power = numpy.where(below, -to * v - x * numpy.expm1(-v), (to - 1) * y - x * v)
        rest = numpy.where(raised, 0, n / a) * factor(log_x + y, n - 1)  # of 1 / gamma(a) = a / gamma(a + 1)
        return (factor(log_x + y, n) + rest) * numpy.exp(power)

    rate = numpy.abs(x - to) + numpy.sqrt(x)
    total = integrate(integrand, rate, numpy.maximum(rate / numpy.where(below, to, x), 1))
    total = numpy.where(raised, (factor(log_x, n) + x * total) / a, numpy.where(below, total, -total))
    return total, _log_gamma_density(a, x)


def _log_of_rest(x: Array, y: Array) -> Array:
    return numpy.where(x < 0.5, numpy.log1p(-x), numpy.log(y))


def _below(factor: Callable, a: Array, b: Array, x: Array, y: Array) -> Array:
    """Return the integral of the density of log(t / (1 - t)) times `factor(log(t), log(1 - t))` over t < x.

    It is relative to the density at x, which is 1 - y.
    """
    log_x, log_y = numpy.log(x), _log_of_rest(x, y)

    def rise(v: Array) -> Array:
        return numpy.log1p(-x / y * numpy.expm1(-v))

    def integrand(v: Array) -> Array:  # at t = x exp(-v)
        g = rise(v)
        return factor(log_x - v, log_y + g) * numpy.exp((b - 1) * g - a * v) / y

    rate = (numpy.abs(a * y - b * x) + x + numpy.sqrt(b * x)) / y
    length = (
        1 - b * log_y
    ) / a  # within it, the density falls by more than e; now reduced, since its logarithm is convex
    for _ in range(2):
        length = length / numpy.sqrt(numpy.maximum(a * length - b * rise(length), 1))
    return integrate(integrand, rate, numpy.maximum(rate * length, 1))


@_elementwise
def beta_in_shapes(orders: tuple[int, ...], a: Array, b: Array, x: Array) -> tuple[Array, Array]:
    """Return derivative (m, n) of betainc(a, b, x) in a and b, divided by exp(c)."""
    below = b * x <= a * (1 - x)
    a, b, x, y = numpy.where(below, (a, b, x, 1 - x), (b, a, 1 - x, x))
    raised = a < 1
    to = a + raised

    def factor(log_t: Array, log_rest: Array, to: Array, n_minus_b: Array, m: int, n: int) -> Array:
        """Differentiate t**a (1 - t)**b gamma(n) / gamma(to) gamma(b), and divide by it."""
        up = int(n > 1)  # then for small b terms of 1 / gamma(b) = b / gamma(b + 1) would cancel

        def k(i: int, j: int) -> Array:
            if i and j:
                return sp.polygamma(i + j - 1, n_minus_b + b)
            if i:
                n = n_minus_b + b
                far = sp.polygamma(i - 1, n) - sp.polygamma(i - 1, to)
                near = increment(i - 1, to, b + (n_minus_b - to))
                return numpy.where(n < 0.5, far, near) + (log_t if i == 1 else 0)
            return increment(j - 1, b + up, n_minus_b - up) + (log_rest if j == 1 else 0)

        return _bell(k, m, n) + (n / b * _bell(k, m, n - 1) if up else 0)

    def either(*args: Array) -> Array:
        if orders[0] == orders[1]:
            return numpy.where(below, 1, -1) * factor(*args, *orders)
        return numpy.where(below, factor(*args, *orders), -factor(*args, *orders[::-1]))

    total = _below(lambda log_t, log_rest: either(log_t, log_rest, to, to), to, b, x, y)
    first = either(numpy.log(x), _log_of_rest(x, y), a + 1, a)
    return numpy.where(raised, (first + x * (a + b) * total) / a, total), _log_beta_density(a, b, x, y)


def _digamma_difference(n: int, v: Array) -> Array:
    """Return derivative n, 0 or 1, of digamma((v + 1) / 2) - digamma(v / 2) - 1 / v."""
    far = v > 30
    z = numpy.where(far, v, 30)
    series = sum(
        c * (-p) ** n * z ** -(p + n)
        for p, c in zip(range(2, 13, 2), (1 / 2, -1 / 4, 1 / 2, -17 / 8, 31 / 2, -691 / 4))
    )
    near = increment(n, v / 2, numpy.full_like(v, 0.5)) / 2**n - (-1) ** n * v ** -(n + 1.0)
    return numpy.where(far, series, near)


@_elementwise
def t_in_shapes(orders: tuple[int, ...], df: Array, t: Array) -> tuple[Array, Array]:
    """Return derivative n, 1 or 2, of stdtr(df, t) in df, divided by exp(c).

    The integral of the derivative of the density over (0, infinity) is 0. It is positive near 0.
    """
    z = numpy.minimum(abs(t / numpy.sqrt(df)), 1e150) ** 2
    x, y = 1 / (1 + z), 1 / (1 + 1 / z)

    def factor(r: Array, log_rest: Array, n: int) -> Array:
        """Differentiate the density, and divide by it; r is t**2 / (df + t**2)."""
        first = _digamma_difference(0, df) + _log1p_rest(-r, log_rest) + r / df
        second: Any = _digamma_difference(1, df) + r * r / df - r * (2 - r) / df**2 if n > 1 else None
        return _bell(lambda i, _: 0.5 * (first if i == 1 else second), n)

    far = factor(y, numpy.log(x), 1) < 0
    a, b, x, y = numpy.where(far, (df / 2, 0.5 + 0 * df, x, y), (0.5 + 0 * df, df / 2, y, x))

    def either(log_t: Array, log_rest: Array) -> Array:
        return factor(numpy.exp(numpy.where(far, log_rest, log_t)), numpy.where(far, log_t, log_rest), *orders)

    sign = numpy.where(far, -0.5, 0.5) * numpy.sign(t)
    return sign * _below(either, a, b, x, y), _log_beta_density(a, b, x, y)
