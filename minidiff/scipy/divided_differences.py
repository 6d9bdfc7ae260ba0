"""Divided differences of a function, f[x, y] = (f(x) - f(y)) / (x - y) and f[x, y, z], also where points are equal.

Each is computed in two ways: as the quotient, which cancels where points are close, and as a mean of a derivative over
the points between, which is accurate there. Both have an estimate of their error. The mean is taken where its error is
smaller, and both agree to the error of the quotient: the mean of a function that jumps between the points is wrong.

Source: C. de Boor, "Divided differences", 2005 (the formula of Hermite and Genocchi).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from minidiff.core.tracer import Tracer

#: Nodes and weights of Gauss on [0, 1]: those of a mean, and fewer to estimate its error.
_RULES = [(0.5 + 0.5 * x, 0.5 * w) for x, w in map(numpy.polynomial.legendre.leggauss, (8, 4))]
_EPS = float(numpy.finfo(float).eps)


def values_of(f: Callable, x: numpy.ndarray) -> numpy.ndarray:
    """Return the values of a user's function; TypeError unless they are plain numbers, one for each of x."""
    y = f(x)
    if isinstance(y, Tracer) or numpy.shape(y) != x.shape:
        kind = (
            "a traced value: what it closes over must be plain" if isinstance(y, Tracer) else f"shape {numpy.shape(y)}"
        )
        raise TypeError(f"matrix_function: its functions map arrays to arrays of the same shape, got {kind}")
    return numpy.asarray(y)


def _means(f: Callable, points: Callable, weights: Callable) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the mean of f at points between 0 and 1, and its error."""
    many, few = (numpy.tensordot(weights(u, w), values_of(f, points(u)), len(weights(u, w).shape)) for u, w in _RULES)
    return many, numpy.abs(many - few) + _EPS * numpy.abs(many)


def _better(mean: Sequence[numpy.ndarray], quotient: Sequence[numpy.ndarray]) -> tuple[numpy.ndarray, numpy.ndarray]:
    agree = numpy.abs(mean[0] - quotient[0]) <= 4 * quotient[1]
    chosen = agree & (mean[1] <= quotient[1])
    return numpy.where(chosen, mean[0], quotient[0]), numpy.where(chosen, mean[1], quotient[1])


def first_difference(functions: Sequence[Callable], x: numpy.ndarray, y: numpy.ndarray) -> tuple:
    """f[x, y] and its error, for arrays of points that broadcast; `functions` are f and its derivatives."""
    gap = x - y
    apart = numpy.where(gap == 0, 1, gap)
    fx, fy = (values_of(functions[0], p) for p in (x, y))
    cancelled = 4 * _EPS * numpy.maximum(numpy.abs(fx), numpy.abs(fy)) / numpy.abs(apart)
    quotient = (fx - fy) / apart, numpy.where(gap == 0, numpy.inf, cancelled)
    column = (-1, *[1] * gap.ndim)
    return _better(_means(functions[1], lambda u: y + u.reshape(column) * gap, lambda u, w: w), quotient)


def second_difference(
    functions: Sequence[Callable], x: numpy.ndarray, y: numpy.ndarray, z: numpy.ndarray
) -> numpy.ndarray:
    """f[x, y, z] for arrays of points that broadcast; `functions` are f and its first and second derivative."""
    low, middle, high = numpy.sort(numpy.stack(numpy.broadcast_arrays(x, y, z)), 0)
    (above, e_above), (below, e_below) = (first_difference(functions, *p) for p in ((high, middle), (middle, low)))
    gap = numpy.where(high == low, 1, high - low)
    quotient = (above - below) / gap, numpy.where(high == low, numpy.inf, (e_above + e_below) / gap)
    ones = [1] * low.ndim

    def points(u: numpy.ndarray) -> numpy.ndarray:  # of a triangle, as those of a square
        u, v = u.reshape(-1, 1, *ones), u.reshape(1, -1, *ones)
        return low + u * (middle - low) + u * v * (high - middle)

    return _better(_means(functions[2], points, lambda u, w: numpy.outer(u * w, w)), quotient)[0]
