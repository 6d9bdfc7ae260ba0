"""Draws from distributions: by their quantiles, by rejection, and from other draws."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.base import convert
from minidiff.ops.indexing import take
from minidiff.random.draws import bernoulli, inside_unit, normal, permutation, randint, uniform
from minidiff.random.keys import Shape, check_broadcasts, random_bits, sizes_of, split, with_axis
from minidiff.random.rejection import log_gamma_draw_p, poisson_draw_p
from minidiff.values.dtypes import check_real_float, dtype_name

# ---------------------------------------------------------------- by quantiles


def _by_quantiles(name: str, text: str, quantiles: Callable[[Value], Value], shown: str) -> Callable[..., Value]:
    def draw(key: Value, shape: Shape = (), dtype: Any = float) -> Value:
        real = check_real_float(f"{name}: the dtype is one", dtype)
        return convert(quantiles(inside_unit(name, key, shape)), real)

    draw.__name__ = draw.__qualname__ = name
    draw.__doc__ = f"""Draw from the standard {text}.

    Computes the quantiles at uniform numbers. Raises TypeError for a dtype that is not real and floating-point.

    >>> import minidiff as md
    >>> md.random.{name}(md.random.key(0), 3).round(3)
    array([{shown}])
    """
    return draw


cauchy = _by_quantiles(
    "cauchy", "Cauchy distribution", lambda u: numpy.tan(math.pi * (u - 0.5)), "-0.262, -1.238,  9.143"
)
exponential = _by_quantiles(
    "exponential", "exponential distribution, of mean 1", lambda u: -numpy.log(u), "0.871, 1.531, 0.035"
)
gumbel = _by_quantiles("gumbel", "Gumbel distribution", lambda u: -numpy.log(-numpy.log(u)), " 0.138, -0.426,  3.344")
laplace = _by_quantiles(
    "laplace",
    "Laplace distribution, of scale 1",
    lambda u: -numpy.sign(u - 0.5) * numpy.log(1 - 2 * abs(u - 0.5)),
    "-0.178, -0.838,  2.668",
)
logistic = _by_quantiles(
    "logistic", "logistic distribution", lambda u: numpy.log(u) - numpy.log1p(-u), "-0.329, -1.287,  3.326"
)


def rademacher(key: Value, shape: Shape = (), dtype: Any = int) -> Value:
    """Draw 1 or -1, with equal probabilities.

    >>> import minidiff as md
    >>> rademacher(md.random.key(0), 5)
    array([ 1,  1, -1, -1, -1])
    """
    return convert(2 * convert(bernoulli(key, 0.5, shape), int) - 1, dtype)


# ---------------------------------------------------------------- gamma and its relatives


def _log_gammas(name: str, key: Value, a: Value, shape: Any) -> Value:
    _check_positive(name, a)
    shape = typeof(a).shape if shape is None else shape
    check_broadcasts(name, shape, a=a)
    return log_gamma_draw_p.bind(random_bits(name, key, shape), convert(a, float))


def _check_positive(name: str, x: Value, least: float = math.ulp(0.0)) -> None:
    """Raise ValueError for a parameter below its least value, unless it is traced."""
    if not isinstance(x, Tracer) and not numpy.all(numpy.greater_equal(x, least)):
        raise ValueError(f"{name}: the parameter is {'at least 0' if least == 0 else 'positive'}, got {x}")


def loggamma(key: Value, a: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw the logarithm of a number from the gamma distribution of shape `a`, which may be too small for a dtype.

    `a` broadcasts to the shape of the draw, which by default is its own. Differentiable in `a`, to any order. Raises
    ValueError for an `a` that is not positive (if it is traced, draws NaN), or that does not broadcast.

    >>> import minidiff as md
    >>> loggamma(md.random.key(0), 0.001, 3).round(1)
    array([ -412.6,  -310.1, -1545.5])

    Sources: Marsaglia and Tsang, "A simple method for generating gamma variables"; Figurnov, Mohamed and Mnih,
    "Implicit reparameterization gradients".
    """
    real = check_real_float("loggamma: the dtype is one", dtype)
    return convert(_log_gammas("loggamma", key, a, shape), real)


def gamma(key: Value, a: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the gamma distribution of shape `a` and scale 1; see `loggamma`.

    >>> import minidiff as md
    >>> gamma(md.random.key(0), numpy.array([0.5, 2.0, 100.0])).round(3)
    array([  2.012,   0.433, 103.616])
    """
    real = check_real_float("gamma: the dtype is one", dtype)
    return convert(numpy.exp(_log_gammas("gamma", key, a, shape)), real)


def beta(key: Value, a: Value, b: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the beta distribution: x / (x + y), of gamma numbers x and y of shapes `a` and `b`.

    `a` and `b` broadcast to the shape of the draw, which by default is theirs. Differentiable in both. Raises
    ValueError for parameters that are not positive, or do not broadcast.

    >>> import minidiff as md
    >>> beta(md.random.key(0), 2.0, numpy.array([0.5, 8.0])).round(3)
    array([0.497, 0.164])
    """
    real = check_real_float("beta: the dtype is one", dtype)
    shape = numpy.broadcast_shapes(typeof(a).shape, typeof(b).shape) if shape is None else shape
    keys = split(key)
    x, y = _log_gammas("beta", keys[0], a, shape), _log_gammas("beta", keys[1], b, shape)
    return convert(numpy.exp(x - numpy.logaddexp(x, y)), real)


def dirichlet(key: Value, alpha: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw vectors [..., k] of positive numbers with sum 1 from the Dirichlet distribution of `alpha` [..., k].

    `shape` is that of the vectors: the leading axes of `alpha` broadcast to it, and are the default. Differentiable in
    `alpha`. Raises ValueError for parameters that are not positive, or do not broadcast.

    >>> import minidiff as md
    >>> dirichlet(md.random.key(0), numpy.array([1.0, 2.0, 5.0]), 2).round(3)
    array([[0.38 , 0.045, 0.575],
           [0.151, 0.263, 0.586]])
    """
    real, t = check_real_float("dirichlet: the dtype is one", dtype), typeof(alpha)
    if not t.shape:
        raise ValueError(f"dirichlet: alpha has an axis of parameters, got {t}")
    shape = t.shape[:-1] if shape is None else shape
    x = _log_gammas("dirichlet", key, alpha, with_axis(shape, len(sizes_of("dirichlet", shape)), t.shape[-1]))
    x = numpy.exp(x - numpy.max(x, -1, keepdims=True))
    return convert(x / numpy.sum(x, -1, keepdims=True), real)


def poisson(key: Value, lam: Value, shape: Shape | None = None, dtype: Any = int) -> Value:
    """Draw counts from the Poisson distribution of mean `lam`.

    `lam` broadcasts to the shape of the draw, which by default is its own. Raises ValueError for a mean below 0 (if it
    is traced, draws -1), or that does not broadcast, TypeError for a dtype that is not one of integers.

    >>> import minidiff as md
    >>> poisson(md.random.key(0), numpy.array([0.1, 3.0, 1e6]))
    array([      1,       1, 1000439])

    Source: Hörmann, "The transformed rejection method for generating Poisson random variables".
    """
    if numpy.dtype(dtype).kind not in "iu":
        raise TypeError(f"poisson: the dtype is one of integers, got {dtype_name(numpy.dtype(dtype))}")
    _check_positive("poisson", lam, 0)
    shape = typeof(lam).shape if shape is None else shape
    check_broadcasts("poisson", shape, lam=lam)
    return convert(poisson_draw_p.bind(random_bits("poisson", key, shape), convert(lam, float)), dtype)


# ---------------------------------------------------------------- vectors, matrices, elements


def multivariate_normal(key: Value, mean: Value, cov: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw vectors [..., n] from the normal distribution of a mean [..., n] and a covariance matrix [..., n, n].

    `shape` is that of the vectors: the leading axes of both broadcast to it, and are the default. A vector is the mean
    plus the Cholesky factor times standard normal numbers. Differentiable in both. Raises ValueError if they do not
    fit, LinAlgError if a matrix is not positive definite.

    >>> import minidiff as md
    >>> multivariate_normal(md.random.key(0), numpy.zeros(2), numpy.array([[1.0, 0.9], [0.9, 1.0]]), 2).round(3)
    array([[-0.206, -0.527],
           [ 1.816,  1.716]])
    """
    real, m, c = check_real_float("multivariate_normal: the dtype is one", dtype), typeof(mean), typeof(cov)
    if not m.shape or c.shape[-2:] != (m.shape[-1], m.shape[-1]):
        raise ValueError(f"multivariate_normal: the mean is [..., n] and the matrix [..., n, n], got {m} and {c}")
    shape = numpy.broadcast_shapes(m.shape[:-1], c.shape[:-2]) if shape is None else shape
    each = with_axis(shape, len(sizes_of("multivariate_normal", shape)), m.shape[-1])
    check_broadcasts("multivariate_normal", each, mean=mean)
    z = normal(key, each)
    return convert(mean + numpy.einsum("...ij,...j->...i", numpy.linalg.cholesky(cov), z), real)


def orthogonal(key: Value, n: int, shape: Shape = (), dtype: Any = float, m: int | None = None) -> Value:
    """Draw matrices [..., n, m] from the orthogonal ones, uniformly: by Haar's measure. `m` is n by default.

    The shorter of rows and columns are orthonormal.

    >>> import minidiff as md
    >>> q = orthogonal(md.random.key(0), 3)
    >>> bool(abs(q @ q.T - numpy.eye(3)).max() < 1e-12)
    True

    Source: Mezzadri, "How to generate random matrices from the classical compact groups".
    """
    real, m = check_real_float("orthogonal: the dtype is one", dtype), n if m is None else m
    axes = len(sizes_of("orthogonal", shape))
    z = normal(key, with_axis(with_axis(shape, axes, min(n, m)), axes, max(n, m)))
    q, r = numpy.linalg.qr(z)
    q = q * numpy.where(numpy.diagonal(r, 0, -2, -1) < 0, -1.0, 1.0)[..., None, :]
    return convert(q if n >= m else numpy.swapaxes(q, -2, -1), real)


def choice(key: Value, a: Any, shape: Shape = (), replace: bool = True, p: Value | None = None, axis: int = 0) -> Value:
    """Draw elements of an array along an axis, or integers below `a`, with or without replacement.

    `p` [n] has their probabilities, by default equal; its sum is taken to be 1. Without replacement the draw is a
    sequence, whose shape is one number or a shape of several. The axis is replaced by the shape. Raises ValueError for
    more elements than there are, and for a `p` of another length.

    >>> import minidiff as md
    >>> choice(md.random.key(0), 5, (3,), replace=False), choice(md.random.key(0), numpy.array([7, 8]), 6, p=[0.9, 0.1])
    (array([1, 0, 4]), array([7, 7, 8, 7, 7, 7]))
    """
    x = numpy.arange(operator.index(a)) if isinstance(a, (int, numpy.integer)) else a
    t = typeof(x)
    if not t.shape:
        raise TypeError(f"choice: a is an array with an axis, or a number of integers that is known; got {t}")
    axis, sizes = normalize_axis(axis, t.ndim, "choice"), sizes_of("choice", shape)
    n, count = t.shape[axis], math.prod(sizes)
    if p is not None and typeof(p := numpy.asarray(p) if isinstance(p, list) else p).shape != (n,):
        raise ValueError(f"choice: p has {n} probabilities, got {typeof(p)}")
    if (n == 0 and count) or (not replace and count > n):
        raise ValueError(f"choice: {count} of {n} elements without replacement: write replace=True")
    if replace and p is None:
        which = randint(key, shape, 0, n)
    elif replace:
        ends = numpy.cumsum(p)
        which = numpy.sum(uniform(key, shape)[..., None] * ends[-1] >= ends, -1)
    elif p is None:
        which = permutation(key, n)[:count].reshape(sizes)
    else:  # the largest of Gumbel numbers plus logarithms of probabilities, as in `categorical`
        which = numpy.argsort(-numpy.log(p) - gumbel(key, n))[:count].reshape(sizes)
    return take(x, which, axis)
