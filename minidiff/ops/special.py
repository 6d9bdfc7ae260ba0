"""Functions that NumPy lacks: the error function, quantiles of the normal distribution, and a quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy

from minidiff.core.tracer import Value
from minidiff.ops.base import Elementwise
from minidiff.ops.elementwise import exp
from minidiff.values.dtypes import is_differentiable


def of_numbers(f: Callable[[float], float]) -> Callable:
    """Apply a function of `math`, which is accurate to the last digit, to arrays."""

    def impl(x: numpy.ndarray) -> numpy.ndarray:
        x = numpy.asarray(x)
        x = x if is_differentiable(x.dtype) else x.astype(float)
        return numpy.fromiter(map(f, x.ravel().tolist()), x.dtype, x.size).reshape(x.shape)[()]

    return impl


_SLOPE = 2 / math.sqrt(math.pi)
erfc_of = of_numbers(math.erfc)

erf_p = Elementwise("erf", of_numbers(math.erf), (lambda out, x: _SLOPE * exp(-x * x),))
erfc_p = Elementwise("erfc", erfc_of, (lambda out, x: -_SLOPE * exp(-x * x),))

# ---------------------------------------------------------------- quantiles of the normal distribution

CHUNK = 1 << 15  # elements: so many are computed at a time, in many passes, that they stay in the cache

# Numerator and denominator of rational functions, highest power first. Source: Wichura, "Algorithm AS 241: The
# percentage points of the normal distribution", PPND16.
_CENTRAL = (
    (
        *(2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457),
        *(13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    ),
    (
        *(5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867),
        *(5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
    ),
)
_TAIL = (
    (
        *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258),
        *(3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    ),
    (
        *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459),
        *(0.6897673349851000045, 1.6763848301838038494, 2.05319162663775882187, 1.0),
    ),
)
_FAR_TAIL = (
    (
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.0265321895265761230930),
        *(0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    ),
    (
        *(2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4),
        *(0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
    ),
)


def _ratio(coefficients: tuple[Sequence[float], Sequence[float]], r: numpy.ndarray) -> numpy.ndarray:
    """Return a rational function of r, by Horner's rule without temporaries."""
    parts = []
    for first, second, *lower in coefficients:
        total = first * r
        total += second
        for c in lower:
            total *= r
            total += c
        parts.append(total)
    above, below = parts
    return numpy.divide(above, below, out=above)


def quantiles(p: numpy.ndarray) -> numpy.ndarray:
    """Return the quantiles of probabilities [n] in double precision."""
    q = p - 0.5
    out = q * _ratio(_CENTRAL, 0.180625 - q * q)
    tail = numpy.flatnonzero(numpy.abs(q) > 0.425)
    p, q = p[tail], q[tail]
    with numpy.errstate(
        divide="ignore", invalid="ignore"
    ):  # probabilities of 0 and 1, and numbers that are no probability
        r = numpy.sqrt(-numpy.log(numpy.minimum(p, 1 - p)))
    size = _ratio(_TAIL, numpy.minimum(r, 5) - 1.6)
    far = numpy.flatnonzero(r > 5)
    size[far] = _ratio(_FAR_TAIL, numpy.minimum(r[far], 40) - 5)  # 40: beyond all numbers but 0
    size[r == numpy.inf] = numpy.inf
    out[tail] = numpy.copysign(size, q)
    return out


def _ndtri(p: numpy.ndarray) -> numpy.ndarray:
    p = numpy.asarray(p)
    dtype = p.dtype if is_differentiable(p.dtype) else numpy.dtype(float)
    flat, out = p.reshape(-1), numpy.empty(p.shape, dtype)
    flat_out = out.reshape(-1)
    for i in range(0, flat.size, CHUNK):
        flat_out[i : i + CHUNK] = quantiles(flat[i : i + CHUNK].astype(float))
    return out[()]


#: The quantiles of the standard normal distribution: the inverse of its cumulative distribution function.
ndtri_p = Elementwise("ndtri", _ndtri, (lambda out, p: math.sqrt(2 * math.pi) * exp(0.5 * out * out),))

# ---------------------------------------------------------------- integrals


def integrate(f: Callable[[Value], Value], rate: Value, ratio: Value = 1.0) -> Value:
    """Return integrals of functions over (0, infinity), by the double exponential rule.

    `f` is analytic, and decays exponentially. Lengths, on which it changes or decays by a factor, are between 1 / rate
    and ratio / rate. `f` takes abscissas along a last axis, along which `rate` and `ratio` have size 1.
    """
    count = 60 + 4 * math.ceil(numpy.nanmax(numpy.log(ratio), initial=0.0))
    step = (numpy.log(ratio) + 9) / count
    t = step * numpy.arange(count + 1) - 4
    v = numpy.exp(t - numpy.exp(-t)) / rate
    return numpy.sum(f(v) * v * (1 + numpy.exp(-t)) * step, -1, keepdims=True)
