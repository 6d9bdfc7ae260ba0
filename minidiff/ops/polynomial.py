"""Polynomials as rows of coefficients, highest power first.

NumPy drops leading coefficients that are zero. For traced values they stay, since the shape of a result must not
depend on values.
"""

from __future__ import annotations

from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value, implements
from minidiff.core.types import typeof, zeros_like
from minidiff.ops import dimensions
from minidiff.ops.arrays import as_array
from minidiff.ops.base import General, convert, in_float32
from minidiff.ops.elementwise import copy
from minidiff.ops.linalg import convolve
from minidiff.ops.shape import expand_dims, moveaxis, stack
from minidiff.values.dtypes import is_differentiable


def _row(p: Any) -> Value:
    """Convert coefficients to a 1-d array."""
    p = as_array(p)
    if p.ndim > 1:
        raise ValueError(f"the coefficients of a polynomial must have one dimension, got {typeof(p)}")
    return p.reshape(-1)


def _zeros(n: int, like: Value) -> numpy.ndarray:
    return numpy.zeros(n, like.dtype)


@implements(numpy.polyval)
@in_float32
def polyval(p: Value, x: Value) -> Value:
    """`numpy.polyval`: the polynomial at each element of x, by Horner's scheme.

    Coefficients of more than one dimension, from the highest power on, broadcast to x.
    """
    p = as_array(p)
    return _horner(p if p.ndim else _row(p), as_array(x))


def _horner(coefficients: Value, x: Value) -> Value:
    """Evaluate a polynomial; its coefficients, along the first axis, broadcast to x."""
    y = zeros_like(x)
    for coefficient in coefficients:
        y = y * x + coefficient
    return y


def _of_one_length(*polynomials: Any) -> list[Value]:
    rows = list(map(_row, polynomials))
    length = max(p.size for p in rows)
    return [p if p.size == length else numpy.concatenate([_zeros(length - p.size, p), p]) for p in rows]


implements(numpy.polyadd)(lambda a1, a2: numpy.add(*_of_one_length(a1, a2)))
implements(numpy.polysub)(lambda a1, a2: numpy.subtract(*_of_one_length(a1, a2)))
implements(numpy.polymul)(lambda a1, a2: convolve(_row(a1), _row(a2)))


@implements(numpy.polydiv)
def polydiv(u: Value, v: Value) -> tuple[Value, Value]:
    """`numpy.polydiv`: the quotient and the remainder, with len(v) - 1 coefficients."""
    u, v = _row(u), _row(v)
    steps = u.size - v.size + 1
    if steps < 1:
        return numpy.zeros(1, numpy.result_type(u.dtype, v.dtype)), copy(u)
    quotient = []
    for _ in range(steps):
        quotient.append(u[0] / v[0])
        u = numpy.concatenate([u[1 : v.size] - quotient[-1] * v[1:], u[v.size :]])
    return stack(quotient), u if u.size else _zeros(1, quotient[0])


@implements(numpy.polyder)
def polyder(p: Value, m: int = 1) -> Value:
    """`numpy.polyder`: the coefficients of the m-th derivative."""
    p = _row(p)
    for _ in range(m):
        p = p[:-1] * numpy.arange(p.size - 1, 0, -1)
    return p


@implements(numpy.polyint)
def polyint(p: Value, m: int = 1, k: Any = None) -> Value:
    """`numpy.polyint`: the m-th antiderivative, with constants `k` (default 0)."""
    p = _row(p)
    constants = _row(numpy.zeros(m) if k is None else k)
    if constants.size not in (1, m):
        raise ValueError(f"polyint: pass {m} constants, or one for all, got {constants.size}")
    for i in range(m):
        constant = constants[i : i + 1] if constants.size == m else constants
        p = numpy.concatenate([p / numpy.arange(p.size, 0, -1), constant])
    return p


@implements(numpy.poly)
def poly(seq_of_zeros: Value) -> Value:
    """`numpy.poly`: the polynomial of these roots, or a matrix's characteristic one.

    For complex traced roots the coefficients are complex, even if the roots are conjugate pairs.
    """
    roots = seq_of_zeros
    if not isinstance(roots, (list, tuple)) and typeof(roots).ndim == 2:
        roots = numpy.linalg.eigvals(roots)
    roots = _row(roots)
    p = numpy.ones(1, roots.dtype)
    for root in roots:
        p = numpy.concatenate([p, _zeros(1, p)]) - numpy.concatenate([_zeros(1, p), root * p])
    return p


@implements(numpy.polyfit)
def polyfit(
    x: Value, y: Value, deg: int, rcond: float | None = None, full: bool = False, w: Any = None, cov: Any = False
) -> Any:
    """`numpy.polyfit`: the least-squares fit by a polynomial of degree `deg`."""
    x, y = as_array(x), as_array(y)
    if x.ndim != 1 or y.ndim not in (1, 2) or x.shape[0] != y.shape[0]:
        raise ValueError(f"polyfit: x must have one dimension, y one or two, of equal length; got {x.shape}, {y.shape}")
    work = numpy.promote_types(x.dtype, int)  # as in NumPy: the powers of float32 are float64
    rcond = x.size * numpy.finfo(numpy.result_type(x.dtype, 0.0)).eps if rcond is None else rcond
    powers = (convert(x, work) if isinstance(x, Tracer) else x.astype(work))[:, None] ** numpy.arange(deg, -1, -1)
    if w is not None:
        w = as_array(w)
        powers, y = powers * w[:, None], y * (w[:, None] if y.ndim == 2 else w)
    scale = numpy.sqrt((powers * powers).sum(axis=0))
    powers = powers / scale
    c, residuals, rank, singular = numpy.linalg.lstsq(powers, y, rcond)
    c = (c.T / scale).T
    if full:
        return c, residuals, rank, singular, rcond
    if not cov:
        return c
    covariance = numpy.linalg.inv(powers.T @ powers) / (scale[:, None] * scale)
    factor = 1 if cov == "unscaled" else residuals / (x.size - deg - 1)
    return c, covariance * factor if y.ndim == 1 else covariance[:, :, None] * factor


# ---------------------------------------------------------------- roots


def _roots(p: numpy.ndarray) -> numpy.ndarray:
    """Roots along the last axis: eigenvalues of companion matrices, as in NumPy."""
    n = p.shape[-1] - 1
    companion = numpy.zeros((*p.shape[:-1], n, n), p.dtype)
    companion[..., numpy.arange(1, n), numpy.arange(n - 1)] = 1
    companion[..., 0, :] = -p[..., 1:] / p[..., :1]
    return numpy.linalg.eigvals(companion).astype(numpy.result_type(p.dtype, numpy.complex64))


def _roots_tangent(out, primals, tangents, params):
    """p(r) = 0 gives dr = -dp(r) / p'(r), for a nonzero leading coefficient."""
    (p,), (t,) = primals, tangents
    powers = numpy.arange(p.shape[-1] - 1, 0, -1).astype(typeof(p).dtype)
    change, slope = (expand_dims(moveaxis(c, -1, 0), -1) for c in (t, p[..., :-1] * powers))
    return -_horner(change, out) / _horner(slope, out)


roots_p = General(
    "roots",
    _roots,
    lambda p: ((*p.shape[:-1], p.shape[-1] - 1), numpy.result_type(p.dtype, numpy.complex64)),
    _roots_tangent,
    sharding=dimensions.batch(1),
)


@implements(numpy.roots)
def roots(p: Value) -> Value:
    """`numpy.roots`; complex for traced coefficients, even if all roots are real."""
    p = _row(p)
    if not is_differentiable(p.dtype):
        p = convert(p, float)
    return roots_p.bind(p) if p.size > 1 else numpy.zeros(0)
