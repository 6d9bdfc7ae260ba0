"""Determinants, norms, ranks and condition numbers.

`numpy.linalg.det` has derivatives to every order, also of singular matrices: it is a polynomial. Its derivative in the
directions e_1, ..., e_m, and x, is sum(minors(a, e_1, ..., e_m) * x), where `minors` is one operation for every m: the
cofactors of a for m = 0, and then their derivatives. In the last direction it is symmetric to all others, so that it is
its own transpose.

Source: R. Bhatia, T. Jain, "Higher order derivatives and perturbation bounds for determinants", 2009.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops import decomposition, reduction
from minidiff.ops.base import Batched, add_all, bind_aligned, convert, in_float32, unbroadcast
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels
from minidiff.ops.elementwise import absolute, imag, isnan, real, real_dtype, safe_root, where
from minidiff.ops.shape import expand_dims, moveaxis, normalize_axes, squeeze

# ---------------------------------------------------------------- minors of diagonal matrices


def _all_but_one(s: numpy.ndarray) -> numpy.ndarray:
    """For each number the product of the others, along the last axis."""
    ones = numpy.ones_like(s[..., :1])
    before = numpy.cumprod(numpy.concatenate([ones, s[..., :-1]], -1), -1)
    after = numpy.cumprod(numpy.concatenate([ones, s[..., :0:-1]], -1), -1)[..., ::-1]
    return before * after


def _first_minors(s: numpy.ndarray, e: numpy.ndarray) -> numpy.ndarray:
    """Return the derivative of the cofactors of a diagonal matrix: products of all numbers but two."""
    eye = numpy.eye(s.shape[-1], dtype=bool)
    products = numpy.where(eye, 0, _all_but_one(numpy.where(eye, 1, s[..., None, :])))
    diagonal = numpy.diagonal(e, 0, -2, -1)[..., None]
    return numpy.where(eye, numpy.matmul(products, diagonal), -products * numpy.swapaxes(e, -1, -2))


def _regular_minors(s: numpy.ndarray, directions: Sequence[numpy.ndarray]) -> numpy.ndarray:
    """Derivatives of the cofactors of a regular diagonal matrix, by those of adjugate(a) @ a = det(a)."""
    eye, total = numpy.eye(s.shape[-1]), range(len(directions))
    adjugates: dict[tuple, numpy.ndarray] = {(): eye * (s.prod(-1)[..., None] / s)[..., None]}
    for subset in itertools.chain.from_iterable(itertools.combinations(total, m + 1) for m in total):
        products = [adjugates[tuple(j for j in subset if j != i)] @ directions[i] for i in subset]
        traces = numpy.trace(products[0], axis1=-2, axis2=-1)[..., None, None]
        adjugates[subset] = (traces * eye - sum(products)) / s[..., None, :]
    return numpy.swapaxes(adjugates[tuple(total)], -1, -2)


def _higher_minors(s: numpy.ndarray, directions: Sequence[numpy.ndarray]) -> numpy.ndarray:
    """Return the derivatives of the cofactors of any diagonal matrix: see `_regular_minors`.

    The result is a polynomial in s: the mean of those at s + z over a circle of numbers z. The circle is so small that
    it does not change large numbers much, and passes by all others.
    """
    count = max(s.shape[-1] - len(directions), 1)
    largest = s.max(-1, keepdims=True, initial=0)
    radius = numpy.where(s > 1e-3 * largest, s, numpy.inf).min(-1, keepdims=True, initial=numpy.inf) / s.shape[-1]
    circle = numpy.exp(2j * numpy.pi * (numpy.arange(count) + 0.25) / count)
    ndim = max(e.ndim for e in directions) - 1  # of the batch, and s
    shifts = circle.reshape(-1, *[1] * max(ndim, s.ndim)) * numpy.where(numpy.isfinite(radius), radius, 1)
    return _regular_minors(s + shifts, directions).mean(0)


def _minors_impl(a: numpy.ndarray, *directions: numpy.ndarray) -> numpy.ndarray:
    """Return the minors in the basis of singular vectors, where the matrix is diagonal."""
    bad = ~numpy.isfinite(a).all((-2, -1))[..., None, None]
    u, s, vh = numpy.linalg.svd(numpy.where(bad, 0, a))
    along = [
        numpy.conjugate(numpy.swapaxes(u, -1, -2)) @ e @ numpy.conjugate(numpy.swapaxes(vh, -1, -2)) for e in directions
    ]
    if not directions:
        minors = numpy.eye(s.shape[-1], dtype=s.dtype) * _all_but_one(s)[..., None]
    else:
        minors = _first_minors(s, *along) if len(along) == 1 else _higher_minors(s, along)
    phase = (numpy.linalg.det(u) * numpy.linalg.det(vh))[..., None, None]
    out = phase * (numpy.conjugate(u) @ minors @ numpy.conjugate(vh))
    dtype = numpy.result_type(a, *directions)
    return numpy.where(bad, numpy.nan, out if dtype.kind == "c" else out.real).astype(dtype, copy=False)


# ---------------------------------------------------------------- operations


def _minors_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    batch = outs[0].shape[:-2]
    labels = tuple([(*broadcast_labels(t.shape[:-2], batch), None, None) for t in types])
    return Dimensions(labels, ((*range(len(batch)), None, None),))


class Directional(Batched):
    """Derivatives of a function of a matrix in any number of directions: symmetric, and linear in each.

    The operands are the matrix and the directions. The result is a matrix: its inner product with one more direction is
    the derivative of a number; with the transpose of one, if it is `turned`. So the transpose is the operation itself.
    """

    batch_rule = staticmethod(bind_aligned)
    turned = False

    def is_linear_in(self, positions, count):
        return len(positions) == 1 and 0 not in positions

    def tangent(self, out, primals, tangents, params):
        a, *directions = primals
        terms = [] if tangents[0] is None else [self.bind(a, *directions, tangents[0], **params)]
        for i, t in enumerate(tangents[1:]):
            terms += [] if t is None else [self.bind(a, *directions[:i], t, *directions[i + 1 :], **params)]
        return add_all(terms)

    def transpose(self, ct, operands, params):
        cts: list[Value | None] = [None] * len(operands)
        (i,) = [i for i, x in enumerate(operands) if isinstance(x, ShapedArray)]
        inputs = [x.mT if self.turned and x is not ct else x for x in (*operands[:i], ct, *operands[i + 1 :])]
        cts[i] = unbroadcast(self.bind(*inputs, **params), operands[i])
        return cts


def directional_shape(*types: ShapedArray, **params: Any) -> tuple[Any, Any]:
    return numpy.broadcast_shapes(*[t.shape for t in types]), numpy.result_type(*[t.dtype for t in types])


minors_p = Directional(
    "minors",
    _minors_impl,
    directional_shape,
    fits=lambda *types: all(decomposition.inverse_p.fits(t) for t in types),
    sharding=_minors_dimensions,
)

det_p = decomposition.OfMatrix(
    "det",
    numpy.linalg.det,
    lambda x: (x.shape[:-2], x.dtype),
    lambda x, t: (det_p.bind(x), reduction.sum(minors_p.bind(x) * t, (-2, -1))),
)
det = decomposition.declare(numpy.linalg.det, det_p)


def _slogdet_rule(x, t):
    sign, logabsdet = slogdet_p.bind(x)
    moved = reduction.sum(decomposition.inverse_p.bind(x).mT * t, (-2, -1))
    if x.dtype.kind != "c":
        return [sign, logabsdet], [None, moved]
    return [sign, logabsdet], [sign * (1j * imag(moved)), real(moved)]


slogdet_p = decomposition.OfMatrix(
    "slogdet",
    lambda x: list(numpy.linalg.slogdet(x)),
    lambda x: [(x.shape[:-2], x.dtype), (x.shape[:-2], real_dtype(x.dtype))],
    _slogdet_rule,
    multiple_results=True,
)
slogdet = decomposition.declare(numpy.linalg.slogdet, slogdet_p)


# ---------------------------------------------------------------- norms


@implements(numpy.linalg.norm)
@in_float32
def norm(x: Value, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Value:
    """`numpy.linalg.norm` of vectors (1 axis), matrices (2) or all elements.

    Where a norm is 0, its derivative is 0.

    >>> from minidiff import grad
    >>> grad(norm)(numpy.array([3.0, 4.0])), grad(norm)(numpy.zeros(2))
    (array([0.6, 0.8]), array([0., 0.]))
    """
    x = reduction.as_inexact(x)
    ndim = typeof(x).ndim
    axes = normalize_axes(axis, ndim, "norm")
    if axis is None and ord is None:
        return _euclidean(x, axes, keepdims)
    if len(axes) == 1:
        return _vector_norm(x, ord, axes, keepdims)
    if len(axes) == 2:
        return _matrix_norm(x, ord, axes, keepdims)
    raise ValueError(f"norm: axis must name one axis (vectors) or two (matrices), got {len(axes)} of {typeof(x)}")


@implements(numpy.linalg.vector_norm)
@in_float32
def vector_norm(x: Value, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Value:
    """`numpy.linalg.vector_norm`: the norm of the elements along any number of axes."""
    x = reduction.as_inexact(x)
    return _vector_norm(x, ord, normalize_axes(axis, typeof(x).ndim, "vector_norm"), keepdims)


@implements(numpy.linalg.matrix_norm)
@in_float32
def matrix_norm(x: Value, /, *, keepdims: bool = False, ord: Any = "fro") -> Value:
    """`numpy.linalg.matrix_norm`: the norm of the matrices in the last two axes."""
    x = reduction.as_inexact(x)
    return _matrix_norm(x, ord, normalize_axes((-2, -1), typeof(x).ndim, "matrix_norm"), keepdims)


def _euclidean(x: Value, axes: tuple[int, ...], keepdims: bool) -> Value:
    return safe_root(reduction.sum(decomposition.squared_modulus(x), axes, keepdims=keepdims), 2)


def _vector_norm(x: Value, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Value:
    if isinstance(ord, str):
        raise ValueError(f"norm: the order of a vector norm must be a number, got {ord!r}")
    if ord is None or ord == 2:
        return _euclidean(x, axes, keepdims)
    if ord == 0:
        return reduction.sum(convert(x != 0, real_dtype(x.dtype)), axes, keepdims=keepdims)
    if abs(ord) == math.inf:
        return (decomposition.maximum_or_zero if ord > 0 else reduction.min)(absolute(x), axes, keepdims=keepdims)
    if ord == 1:
        return reduction.sum(absolute(x), axes, keepdims=keepdims)
    total = reduction.sum(absolute(x) ** ord, axes, keepdims=keepdims)
    return safe_root(total, ord) if ord > 0 else total ** (1 / ord)


#: Matrix norms that are computed from singular values.
_SPECTRAL: dict[Any, Callable] = {
    "nuc": functools.partial(reduction.sum, axis=-1),
    2: functools.partial(decomposition.maximum_or_zero, axis=-1),
    -2: functools.partial(reduction.min, axis=-1),
}
#: Matrix norms that are an extreme of sums along rows (0) or columns (1).
_SUMMED: dict[Any, tuple[int, Callable]] = {
    1: (0, decomposition.maximum_or_zero),
    -1: (0, reduction.min),
    math.inf: (1, decomposition.maximum_or_zero),
    -math.inf: (1, reduction.min),
}


def _matrix_norm(x: Value, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Value:
    if ord is None or ord in ("fro", "f"):
        return _euclidean(x, axes, keepdims)
    if ord in _SPECTRAL:
        y = _SPECTRAL[ord](decomposition.svdvals(moveaxis(x, axes, (-2, -1))))
        return expand_dims(y, sorted(axes)) if keepdims else y
    if ord not in _SUMMED:
        raise ValueError(f"norm: the order of a matrix norm must be 'fro', 'nuc', ±1, ±2 or ±inf, got {ord!r}")
    summed, extreme = _SUMMED[ord]
    y = reduction.sum(absolute(x), axes[summed], keepdims=True)
    y = extreme(y, axes[1 - summed], keepdims=True)
    return y if keepdims else squeeze(y, axes)


# ---------------------------------------------------------------- rank and condition number


@implements(numpy.linalg.matrix_rank)
def matrix_rank(A: Value, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Value:
    """`numpy.linalg.matrix_rank`: count singular values above `tol` or `rtol` * max."""
    if typeof(A).ndim < 2:
        return convert(reduction.max(A != 0), int)
    x = decomposition.check_matrices("matrix_rank", A, square=hermitian)
    s = decomposition.svdvals_p.bind(x, hermitian=hermitian)
    if tol is not None:
        return decomposition.count_above(s, tol)
    rtol = decomposition.default_tolerance(x) if rtol is None else rtol
    return decomposition.count_above(s, rtol, decomposition.maximum_or_zero(s, -1, keepdims=True))


@implements(numpy.linalg.cond)
def cond(x: Value, p: Any = None) -> Value:
    """`numpy.linalg.cond`: the condition number in the norm `p` (default 2)."""
    x = decomposition.check_matrices("cond", x, square=p not in (None, 2, -2))
    if p in (None, 2, -2):
        s = decomposition.svdvals_p.bind(x, hermitian=False)
        largest, smallest = s[..., 0], s[..., -1]
        number = smallest / largest if p == -2 else largest / smallest
    else:
        number = norm(x, p, (-2, -1)) * norm(decomposition.inverse_p.bind(x), p, (-2, -1))
    undefined = isnan(number) & ~reduction.any(isnan(x), (-2, -1))
    return where(undefined, numpy.inf, number)  # of a singular matrix
