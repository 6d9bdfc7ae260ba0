"""Draws by rejection: the gamma and the Poisson distribution.

An operation takes the seed of each number, 64 random bits, and the parameter of each. A seed begins a stream of uniform
numbers, from which proposals are made until one is accepted. So a number depends on its own seed alone, and the
operations are elementwise: batches, blocks and shards draw the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Value
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import stop_gradient
from minidiff.ops.special import of_numbers, quantiles
from minidiff.random.keys import threefry2x32


class _Streams:
    """Uniform numbers in (0, 1) for each of some seeds u64[n], as many as it needs."""

    def __init__(self, seeds: numpy.ndarray):
        word = numpy.uint64(32)
        self.words = (seeds >> word).astype(numpy.uint32), seeds.astype(numpy.uint32)

    def __call__(self, which: Any, attempt: int, number: int) -> numpy.ndarray:
        k0, k1 = (w[which] for w in self.words)
        high, low = threefry2x32(k0, k1, numpy.full_like(k0, attempt), numpy.full_like(k0, number))
        bits = (high.astype(numpy.uint64) << numpy.uint64(32)) | low
        return ((bits >> numpy.uint64(12)).astype(float) + 0.5) * 2.0**-52


def _until_accepted(attempt: Callable, streams: _Streams, *parameters: numpy.ndarray) -> numpy.ndarray:
    """The first number that `attempt(u, v, *parameters)` accepts, for each seed; NaN is accepted."""
    out, todo, times = numpy.empty(len(parameters[0])), numpy.arange(len(parameters[0])), 0
    with numpy.errstate(all="ignore"):
        while todo.size:
            u, v = (streams(todo, times, number) for number in (0, 1))
            x, accepted = attempt(u, v, *[p[todo] for p in parameters])
            accepted |= numpy.isnan(x)
            out[todo[accepted]] = x[accepted]
            todo, times = todo[~accepted], times + 1
    return out


def _each_seed(f: Callable) -> Callable:
    """An operation on arrays of seeds u64 and of a parameter, from a function of streams and parameters [n]."""

    def impl(seeds: Any, parameter: Any) -> numpy.ndarray:
        seeds, parameter = numpy.broadcast_arrays(seeds, numpy.asarray(parameter, float))
        found = f(_Streams(numpy.asarray(seeds, numpy.uint64).ravel()), parameter.ravel())
        return found.reshape(parameter.shape)[()]

    return impl


def _marsaglia_tsang(u: numpy.ndarray, v: numpy.ndarray, d: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The logarithm of a number from the gamma distribution of shape d + 1/3, at least 1."""
    z = quantiles(u)
    log_cube = 3 * numpy.log1p(z / numpy.sqrt(9 * d))  # NaN where 1 + z / sqrt(9 d) is negative
    accepted = numpy.log(v) < 0.5 * z * z + d * (1 - numpy.exp(log_cube) + log_cube)
    return numpy.where(numpy.isnan(log_cube) & ~numpy.isnan(d), -numpy.inf, numpy.log(d) + log_cube), accepted


def _log_gammas(streams: _Streams, a: numpy.ndarray) -> numpy.ndarray:
    """Marsaglia and Tsang's method for a + 1 where a < 1, and then the power 1 / a of a uniform number as a factor."""
    a = numpy.where((a > 0) & (a < numpy.inf), a, numpy.nan)
    small = a < 1
    out = _until_accepted(_marsaglia_tsang, streams, a + small - 1 / 3)
    out[small] += numpy.log(streams(small, 0, 2)) / a[small]
    return out


#: The nodes of a quadrature over (0, infinity), double exponential: of integrands that decay exponentially.
_T = numpy.arange(-4, 7, 0.15)
_NODES, _WEIGHTS = numpy.exp(_T - numpy.exp(-_T)), 0.15 * numpy.exp(_T - numpy.exp(-_T)) * (1 + numpy.exp(-_T))


def _slope_of_log_gammas(out: Value, seeds: Value, a: Value) -> Value:
    """The derivative of the logarithm x of a draw in `a`, at a constant probability of smaller ones.

    That is -(dP/da) / (dP/dx) of the distribution function P, an integral over the logarithms of the numbers below the
    draw; where the draw is above a, over the numbers above it. On that side the integrand decays. Source: Figurnov,
    Mohamed and Mnih, "Implicit reparameterization gradients".
    """
    x, a = numpy.exp(out)[..., None], numpy.expand_dims(a, -1)
    above = x >= a
    step = stop_gradient(1 / (abs(x - a) + numpy.sqrt(x)))
    z = step * _NODES
    y = numpy.where(above, numpy.log1p(z), z)  # the distance from the logarithm of the draw
    powers = numpy.where(above, (a - 1) * y - x * z, -a * y - x * numpy.expm1(-y))
    side = numpy.where(above, 1.0, -1.0)
    terms = (out[..., None] + side * y - _digamma(a)) * numpy.exp(powers) * side * step
    return numpy.sum(terms * _WEIGHTS, -1)


def _digamma(x: Value) -> Value:
    """The derivative of log(gamma(x)) for positive x: the asymptotic series at x + 6."""
    shifted, total = x + 6.0, -sum(1 / (x + float(k)) for k in range(6))
    z = 1 / (shifted * shifted)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * 691 / 32760)))))
    return total + numpy.log(shifted) - 0.5 / shifted - series


def _poissons(streams: _Streams, rates: numpy.ndarray) -> numpy.ndarray:
    """By the quantile for rates below 10, by transformed rejection for others; -1 for a rate that is not one."""
    out, low, high = numpy.full(rates.shape, -1.0), (rates >= 0) & (rates < 10), (rates >= 10) & (rates < 2.0**62)
    out[low] = _poisson_quantiles(streams(low, 0, 0), rates[low])
    of_high = _Streams(numpy.zeros(0, numpy.uint64))
    of_high.words = tuple(w[high] for w in streams.words)
    out[high] = _until_accepted(_hormann, of_high, rates[high])
    return out


def _poisson_quantiles(u: numpy.ndarray, rates: numpy.ndarray) -> numpy.ndarray:
    k, p = numpy.zeros(rates.shape), numpy.exp(-rates)
    up_to = p.copy()
    while ((more := (u > up_to) & (p > 0)) & (k < 1000)).any():
        k = k + more
        p = numpy.where(more, p * rates / numpy.maximum(k, 1), p)
        up_to += more * p
    return k


def _hormann(u: numpy.ndarray, v: numpy.ndarray, rate: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Source: Hörmann, "The transformed rejection method for generating Poisson random variables", PTRS."""
    b = 0.931 + 2.53 * numpy.sqrt(rate)
    a = -0.059 + 0.02483 * b
    u = u - 0.5
    side = 0.5 - abs(u)
    k = numpy.floor((2 * a / side + b) * u + rate + 0.43)
    accepted = (side >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
    test = numpy.flatnonzero(~accepted & (k >= 0) & ((side >= 0.013) | (v <= side)))
    a, b, side, v, n, rate = (z[test] for z in (a, b, side, v, k, rate))
    height = numpy.log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (side * side) + b))
    accepted[test] = height <= n * numpy.log(rate) - rate - log_gamma(n + 1)
    return k, accepted


log_gamma = of_numbers(math.lgamma)

#: The logarithm of a number from the gamma distribution of shape a, and a number from the Poisson distribution.
log_gamma_draw_p = Elementwise("log_gamma_draw", _each_seed(_log_gammas), (None, _slope_of_log_gammas))
poisson_draw_p = Elementwise("poisson_draw", _each_seed(_poissons), (None, None))
