"""Matrix equations, decompositions and norms: `numpy.linalg`.

All functions accept stacks of matrices, real and complex. Where NumPy's function does not determine the derivative,
these conventions do:

- `cholesky`, `eigh` and `eigvalsh` read one triangle of a matrix that is assumed to be Hermitian. Their derivative is
  that of the function of the Hermitian part, (a + a^H) / 2. The same holds for `svd` and `pinv` with `hermitian=True`.
- Eigenvectors and singular vectors are determined up to a factor of modulus 1. The factor is assumed not to change, so
  a vector v moves at right angles to itself: v^H dv = 0 (for a pair u, v of singular vectors, u^H du + v^H dv = 0). For
  real matrices this is the derivative of what NumPy computes. For complex ones, differentiate only quantities that do
  not depend on the factors.
- Vectors that share an eigenvalue or singular value, to the last digit, have no derivative within the space that they
  span. It is taken to be zero. So is any term that would divide by a singular value 0.
- `qr` keeps the diagonal of r real, as LAPACK does. If r has k rows, the first k columns must be independent.
- `pinv` and `lstsq` assume that the rank does not change; `matrix_rank` has no derivative.
- Where a function has a value but no derivative, as `slogdet` and `qr` of singular matrices, the derivative is NaN.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.linalg import LinAlgError

from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value, implements
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops import dimensions, reduction
from minidiff.ops.arrays import as_array
from minidiff.ops.base import General, add_all, align, convert, in_float32, unbroadcast
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels
from minidiff.ops.elementwise import real, real_dtype, safe_root, square, where
from minidiff.ops.linalg import adjoint, conj, matmul
from minidiff.ops.shape import concatenate, expand_dims, moveaxis, normalize_axes, ravel, reshape, transpose
from minidiff.ops.ties import basis_p, corner_p, differences_p, quotient_p, rounding_of, split_p


@functools.cache
def _result_type(function: Callable) -> type:
    """Return the named tuple, without a public name, that a `numpy.linalg` function returns."""
    return type(function(numpy.eye(1)))


# ---------------------------------------------------------------- helpers of the rules

#: Parameters with a fixed set of values.
_OPTIONS = {"mode": ("reduced", "complete", "r"), "UPLO": ("L", "U", "l", "u")}


class OfMatrix(Primitive):
    """A function of one matrix, or of a stack of them.

    `rule(x, t, **params)` returns the result at x and its tangent for the tangent t.
    """

    any_shape = False  # True if matrices need not be square

    def __init__(self, name: str, impl: Callable, shape_rule: Callable, rule: Callable, **declared: Any):
        super().__init__(name, impl, shape_rule, sharding=dimensions.batch(2), **declared)
        self.rule = rule

    def fits(self, x, hermitian: bool = False, **params) -> bool:
        square = x.ndim > 1 and x.shape[-1] == x.shape[-2]
        known = all(v in _OPTIONS[k] for k, v in params.items() if k in _OPTIONS)
        return known and x.ndim > 1 and x.dtype.char in "fdFD" and (square or (self.any_shape and not hermitian))

    def jvp(self, primals, tangents, params):
        return self.rule(primals[0], tangents[0], **params)

    def batch(self, args, batched, params):
        return self.bind(args[0], **params)


def check_matrices(name: str, x: Value, square: bool = False) -> Value:
    """Return matrices in a dtype that LAPACK computes with; LinAlgError if their shape does not fit."""
    t = typeof(x)
    if t.ndim < 2:
        raise LinAlgError(f"{name}: a matrix must have at least two dimensions, got {t}")
    if square and t.shape[-1] != t.shape[-2]:
        raise LinAlgError(f"{name}: the matrix must be square, got {t}")
    return as_floating(name, x)


def as_floating(name: str, x: Value) -> Value:
    t = typeof(x)
    if t.dtype.kind in "biu":
        return convert(x, float)
    if t.dtype.char not in "fdFD":
        raise TypeError(f"{name}: numpy.linalg does not compute with {t}; convert it to float32 or float64")
    return x


def right_hand_side(name: str, a: Value, b: Value) -> Value:
    """Return b in a dtype that LAPACK computes with; ValueError if its rows are not those of the equations of a."""
    b = as_floating(name, as_array(b))
    ta, tb = typeof(a), typeof(b)
    if not tb.ndim or tb.shape[max(-2, -tb.ndim)] != ta.shape[-1]:
        raise ValueError(f"{name}: the right-hand side must have as many rows as the matrix, got {ta} and {tb}")
    return b


def declare(numpy_function: Callable, primitive: OfMatrix) -> Callable:
    """Declare a function of a square matrix alone, or of a stack of them."""
    return implements(numpy_function)(lambda a: _apply(numpy_function, primitive, a, square=True))


def _apply(numpy_function: Callable, primitive: OfMatrix, a: Value, square: bool, **params: Any) -> Any:
    """Bind an operation to matrices; several results come as NumPy's named tuple."""
    out = primitive.bind(check_matrices(numpy_function.__name__, a, square), **params)
    return _result_type(numpy_function)(*out) if primitive.multiple_results else out


def _is_complex(x: Value) -> bool:
    return typeof(x).dtype.kind == "c"


def _real(x: Value) -> Value:
    return real(x) if _is_complex(x) else x


def _eye(n: int, like: Value) -> numpy.ndarray:
    return numpy.eye(n, dtype=real_dtype(like.dtype))


def hermitian_part(x: Value) -> Value:
    """Return the Hermitian part of a matrix."""
    return 0.5 * (x + adjoint(x))


def _along(u: Value, t: Value, v: Value) -> Value:
    """Return the diagonal of u^H t v."""
    return reduction.sum(conj(u) * matmul(t, v), -2)


def maximum_or_zero(x: Value, axis: Any, keepdims: bool = False) -> Value:
    """Return the maximum of numbers that are not negative; of none it is 0."""
    return reduction.max(x, axis, keepdims=keepdims, initial=None if x.size else 0.0)


def squared_modulus(x: Value) -> Value:
    """|x|² for each element."""
    return real(x * conj(x)) if _is_complex(x) else square(x)


def _complete_tangent(q: Value, dq: Value, completing: Value) -> Value:
    """Return the tangent of a unitary matrix from that of its first columns q; the rest stay orthogonal to them."""
    return concatenate([dq, -matmul(q, matmul(adjoint(dq), completing))], -1)


# ---------------------------------------------------------------- solve


def _solve_shape(a: ShapedArray, b: ShapedArray, **params: Any):
    batch = numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*batch, *b.shape[-2:]), numpy.result_type(a.dtype, b.dtype)


def _solve_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Batch dimensions, and the columns of the right-hand side, may be split."""
    a, b = types
    batch = outs[0].shape[:-2]
    right = (*broadcast_labels(b.shape[:-2], batch), None, "column")
    return Dimensions(
        ((*broadcast_labels(a.shape[:-2], batch), None, None), right), ((*range(len(batch)), None, "column"),)
    )


def linear_equation(name: str, impl: Callable, product: Callable, transpose: Callable, **rules: Any) -> General:
    """Return the operation that solves `product(a, x, **params) = b` for matrices x; it is linear in b.

    `transpose(a, **params)` returns a's transpose, and the parameters with which that is solved. The columns of b are
    solved each by itself, unless a `batch_rule` is given.
    """

    def by_columns(primitive: General, args: Sequence, batched: Sequence[bool], **params: Any) -> Value:
        args = args if len(args[0].shape) == 2 else align(args, batched)
        return solve_columns(primitive, *args, **params)

    def tangent(out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value:
        ta, tb = tangents
        terms = [t for t in (tb, None if ta is None else -product(ta, out, **params)) if t is not None]
        return primitive.bind(primals[0], add_all(terms), **params)

    def transpose_rule(ct: Value, operands: Sequence, **params: Any) -> list[Value]:
        a, params = transpose(operands[0], **params)
        return [unbroadcast(primitive.bind(a, ct, **params), operands[1])]

    rules = {"batch_rule": by_columns, "sharding": _solve_dimensions, **rules}
    primitive = General(name, impl, _solve_shape, tangent, transpose_rule=transpose_rule, **rules)
    return primitive


def solve_columns(primitive: General, a: Value, b: Value, **params: Any) -> Value:
    """Solve for a vector, or (stacks of) matrices; factorise a single matrix once, for the columns of all."""
    shape = b.shape
    if len(shape) == 1:
        return primitive.bind(a, b[:, None], **params)[..., 0]
    if len(a.shape) > 2 or len(shape) == 2:
        return primitive.bind(a, b, **params)
    columns = reshape(moveaxis(b, -2, 0), (shape[-2], math.prod(shape[:-2]) * shape[-1]))
    solution = primitive.bind(a, columns, **params)
    return moveaxis(reshape(solution, (shape[-2], *shape[:-2], shape[-1])), 0, -2)


solve_p = linear_equation(
    "solve",
    numpy.linalg.solve,
    matmul,
    lambda a: (a.mT, {}),
    fits=lambda a, b: inv_p.fits(a) and b.ndim > 1 and b.shape[-2] == a.shape[-1],
)


@implements(numpy.linalg.solve)
def solve(a: Value, b: Value) -> Value:
    """`numpy.linalg.solve`: x with `a @ x = b`, for a vector or (stacks of) matrices.

    >>> from minidiff import grad
    >>> grad(lambda b: solve(numpy.diag([2.0, 4.0]), b).sum())(numpy.ones(2))
    array([0.5 , 0.25])
    """
    a = check_matrices("solve", a, square=True)
    return solve_columns(solve_p, a, right_hand_side("solve", a, b))


# ---------------------------------------------------------------- inverses


def _inverse(name: str, impl: Callable) -> OfMatrix:
    """Declare an inverse; its derivative uses the same operation."""

    def rule(x, t):
        y = primitive.bind(x)
        return y, -matmul(matmul(y, t), y)

    primitive = OfMatrix(name, impl, lambda x: (x.shape, x.dtype), rule)
    return primitive


def _or_nan(impl: Callable, x: numpy.ndarray) -> numpy.ndarray:
    """Apply `impl` to a stack of matrices, with NaN for those where NumPy raises an error."""
    try:
        return impl(x)
    except LinAlgError:
        if x.ndim == 2:
            return numpy.full(x.shape, numpy.nan, x.dtype)
        return numpy.stack([_or_nan(impl, matrix) for matrix in x])


inv_p = _inverse("inv", numpy.linalg.inv)
#: The inverse for derivatives of functions that also have a value for singular matrices.
inverse_p = _inverse("inverse_or_nan", functools.partial(_or_nan, numpy.linalg.inv))
inv = declare(numpy.linalg.inv, inv_p)


def _pinv_rule(x, t, rcond, hermitian):
    y = pinv_p.bind(x, rcond=rcond, hermitian=hermitian)
    t = hermitian_part(t) if hermitian else t
    m, n = x.shape[-2:]
    yh, th = adjoint(y), adjoint(t)
    left, right = _eye(m, x) - matmul(x, y), _eye(n, x) - matmul(y, x)
    across = matmul(matmul(y, yh), matmul(th, left)) + matmul(matmul(right, th), matmul(yh, y))
    return y, across - matmul(matmul(y, t), y)


pinv_p = OfMatrix(
    "pinv",
    lambda x, rcond, hermitian: numpy.linalg.pinv(x, rcond, hermitian),
    lambda x, rcond, hermitian: ((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype),
    _pinv_rule,
    any_shape=True,
)


@implements(numpy.linalg.pinv)
def pinv(a: Value, rcond: Any = None, hermitian: bool = False, *, rtol: Any = numpy._NoValue) -> Value:
    """`numpy.linalg.pinv`: the pseudo-inverse, differentiable at constant rank."""
    x = check_matrices("pinv", a, square=hermitian)
    if rcond is None:
        rcond = 1e-15 if rtol is numpy._NoValue else rtol
    return pinv_p.bind(x, rcond=default_tolerance(x) if rcond is None else rcond, hermitian=hermitian)


def default_tolerance(x: Value) -> float:
    """Return the ratio to the largest singular value below which others count as zero."""
    return max(x.shape[-2:]) * float(numpy.finfo(x.dtype).eps)


@implements(numpy.linalg.lstsq)
def lstsq(a: Value, b: Value, rcond: float | None = None) -> tuple[Value, Value, Value, Value]:
    """`numpy.linalg.lstsq`: the least-norm x that minimizes |a x - b|, and more.

    The results are x, the residuals, the rank and the singular values (see `matrix_rank` and `svdvals`). There are
    residuals if `a` has more rows than columns. NumPy returns none if the columns are dependent, but on traced values a
    shape cannot depend on the rank.
    """
    a, b = check_matrices("lstsq", a), as_floating("lstsq", b)
    ta, tb = typeof(a), typeof(b)
    if ta.ndim != 2 or tb.ndim not in (1, 2) or tb.shape[0] != ta.shape[0]:
        raise LinAlgError(f"lstsq: expected a matrix and a right-hand side with as many rows, got {ta} and {tb}")
    rcond = default_tolerance(a) if rcond is None else rcond
    x = matmul(pinv(a, rcond), b)
    s = svdvals(a)
    if ta.shape[0] > ta.shape[1]:
        residuals = reshape(reduction.sum(squared_modulus(matmul(a, x) - b), 0), (-1,))
    else:
        residuals = numpy.zeros(0, real_dtype(x.dtype))
    return x, residuals, count_above(s, rcond, maximum_or_zero(s, -1, keepdims=True)), s


@implements(numpy.linalg.tensorinv)
def tensorinv(a: Value, ind: int = 2) -> Value:
    """`numpy.linalg.tensorinv`: the inverse with the first `ind` axes as rows."""
    shape = typeof(a).shape
    if ind <= 0:
        raise ValueError(f"tensorinv: ind must be a positive number of axes, got {ind}")
    rows = math.prod(shape[:ind])
    if rows != math.prod(shape[ind:]):
        raise LinAlgError(f"tensorinv: the first {ind} axes of {typeof(a)} do not have as many elements as the others")
    return reshape(inv(reshape(a, (rows, rows))), shape[ind:] + shape[:ind])


@implements(numpy.linalg.tensorsolve)
def tensorsolve(a: Value, b: Value, axes: Any = None) -> Value:
    """`numpy.linalg.tensorsolve`: x with `tensordot(a, x, x.ndim) = b`.

    The `axes` of a are moved to its end first.
    """
    ta, tb = typeof(a), typeof(b)
    if axes is not None:
        last = normalize_axes(axes, ta.ndim, "tensorsolve")
        a = transpose(a, (*[i for i in range(ta.ndim) if i not in last], *last))
    shape = a.shape[tb.ndim :]
    if math.prod(shape) ** 2 != ta.size or tb.size != math.prod(shape):
        raise LinAlgError(f"tensorsolve: {typeof(a)} does not reshape to a square matrix for a right-hand side of {tb}")
    return reshape(solve(reshape(a, (tb.size, tb.size)), ravel(b)), shape)


@implements(numpy.linalg.matrix_power)
@in_float32
def matrix_power(a: Value, n: int) -> Value:
    """`numpy.linalg.matrix_power` by repeated squaring; n < 0 uses the inverse."""
    t = typeof(a)
    if t.ndim < 2 or t.shape[-1] != t.shape[-2]:
        raise LinAlgError(f"matrix_power: the matrix must be square, got {t}")
    n = operator.index(n)
    if n == 0:
        return numpy.zeros(t.shape, t.dtype) + numpy.eye(t.shape[-1], dtype=t.dtype)
    factor = inv(a) if n < 0 else a
    out = factor
    for bit in f"{abs(n):b}"[1:]:
        out = matmul(out, out)
        out = matmul(out, factor) if bit == "1" else out
    return out


# ---------------------------------------------------------------- cholesky, qr


def _cholesky_rule(x, t, upper):
    out = cholesky_p.bind(x, upper=upper)
    factor = adjoint(out) if upper else out
    inverse = inv_p.bind(factor)
    inner = matmul(matmul(inverse, hermitian_part(t)), adjoint(inverse))
    n = x.shape[-1]
    moved = matmul(factor, inner * (numpy.tri(n, k=-1, dtype=real_dtype(x.dtype)) + 0.5 * _eye(n, x)))
    return out, adjoint(moved) if upper else moved


cholesky_p = OfMatrix(
    "cholesky",
    lambda x, upper: numpy.linalg.cholesky(x, upper=upper),
    lambda x, upper: (x.shape, x.dtype),
    _cholesky_rule,
)


@implements(numpy.linalg.cholesky)
def cholesky(a: Value, /, *, upper: bool = False) -> Value:
    """`numpy.linalg.cholesky`: l such that `a = l @ l^H`; with `upper`, l^H.

    The derivative is that of the function of the Hermitian part of a. Raises LinAlgError if a is not positive
    definite.
    """
    return cholesky_p.bind(check_matrices("cholesky", a, square=True), upper=upper)


def _qr_shape(x: ShapedArray, mode: str):
    *batch, m, n = x.shape
    k = m if mode == "complete" else min(m, n)
    r = ((*batch, k, n), x.dtype)
    return [r] if mode == "r" else [((*batch, m, k), x.dtype), r]


def _qr_impl(x: numpy.ndarray, mode: str) -> list[numpy.ndarray]:
    out = numpy.linalg.qr(x, mode)
    return [out] if mode == "r" else list(out)


def _qr_rule(x, t, mode):
    if mode == "r":
        (_, r), (_, dr) = _qr_rule(x, t, "reduced")
        return [r], [dr]
    *_, m, n = x.shape
    k = min(m, n)
    outs = qr_p.bind(x, mode=mode)
    q, r = outs[0][..., :k], outs[1][..., :k, :]
    square = r[..., :k]
    moved = matmul(t[..., :k], inverse_p.bind(square))
    turned, below = matmul(adjoint(q), moved), numpy.tri(k, k=-1, dtype=real_dtype(x.dtype))
    # q^H dq is skew-Hermitian and dr r^-1 is triangular with a real diagonal, so their sum determines both.
    triangular = turned * below.T + adjoint(turned * below) + _eye(k, x) * _real(turned)
    dq, dr = moved - matmul(q, triangular), matmul(triangular, square)
    if n > k:
        right = matmul(adjoint(q), t[..., k:]) + matmul(matmul(adjoint(dq), q), r[..., k:])
        dr = concatenate([dr, right], -1)
    if mode == "complete" and m > k:
        dq = _complete_tangent(q, dq, outs[0][..., k:])
        dr = concatenate([dr, numpy.zeros((*dr.shape[:-2], m - k, n), x.dtype)], -2)
    return outs, [dq, dr]


qr_p = OfMatrix("qr", _qr_impl, _qr_shape, _qr_rule, multiple_results=True, any_shape=True)


@implements(numpy.linalg.qr)
def qr(a: Value, mode: str = "reduced") -> Any:
    """`numpy.linalg.qr`: orthonormal columns q and a triangular r, `a = q @ r`.

    `mode` is "reduced", "complete" or "r". If r has k rows, differentiable where the first k columns are independent.
    """
    if mode not in ("reduced", "complete", "r"):
        raise ValueError(f"qr: on traced values mode must be 'reduced', 'complete' or 'r', got {mode!r}")
    outs = qr_p.bind(check_matrices("qr", a), mode=mode)
    return outs[0] if mode == "r" else _result_type(numpy.linalg.qr)(*outs)


# ---------------------------------------------------------------- eigenvalues


def _eigh_rule(x, t, UPLO):
    w, v = eigh_p.bind(x, UPLO=UPLO)
    table, divisors = differences_p.bind(w)
    dw, inner = split_p.bind(table, matmul(0.5 * adjoint(v), matmul(t + adjoint(t), v)), of="eigh")
    moved = matmul(v, divisors * inner)
    v, dv = (basis_p.bind(table, y, moved, of="eigh", side=0) for y in (v, moved))
    return [w, v], [dw, dv]


def _eigvalsh_rule(x, t, UPLO):
    w, v = eigh_p.bind(x, UPLO=UPLO)
    return w, _real(_along(v, t, v))


def _eig_rule(x, t):
    w, v = eig_p.bind(x)
    table, divisors = differences_p.bind(w)
    v = basis_p.bind(table, v, t, of="eig", side=0)
    v = v / safe_root(reduction.sum(squared_modulus(v), -2, keepdims=True))
    dw, inner = split_p.bind(table, matmul(inverse_p.bind(v), matmul(t, v)), of="eig")
    moved = matmul(v, divisors * inner)
    return [w, v], [dw, moved - v * reduction.sum(conj(v) * moved, -2, keepdims=True)]


def _eigvals_rule(x, t):
    w, v = eig_p.bind(x)
    return w, reduction.sum(inverse_p.bind(v).mT * matmul(t, v), -2)


def _complex_dtype(x: ShapedArray) -> numpy.dtype:
    return numpy.result_type(x.dtype, numpy.complex64)


eigh_p = OfMatrix(
    "eigh",
    lambda x, UPLO: list(numpy.linalg.eigh(x, UPLO)),
    lambda x, UPLO: [(x.shape[:-1], real_dtype(x.dtype)), (x.shape, x.dtype)],
    _eigh_rule,
    multiple_results=True,
)
eigvalsh_p = OfMatrix(
    "eigvalsh", numpy.linalg.eigvalsh, lambda x, UPLO: (x.shape[:-1], real_dtype(x.dtype)), _eigvalsh_rule
)
#: Eigenvalues, and eigenvectors of norm 1: always complex, since a dtype cannot depend on values.
eig_p = OfMatrix(
    "eig",
    lambda x: [y.astype(_complex_dtype(x), copy=False) for y in numpy.linalg.eig(x)],
    lambda x: [(x.shape[:-1], _complex_dtype(x)), (x.shape, _complex_dtype(x))],
    _eig_rule,
    multiple_results=True,
)
eigvals_p = OfMatrix(
    "eigvals",
    lambda x: numpy.linalg.eigvals(x).astype(_complex_dtype(x), copy=False),
    lambda x: (x.shape[:-1], _complex_dtype(x)),
    _eigvals_rule,
)
eig, eigvals = declare(numpy.linalg.eig, eig_p), declare(numpy.linalg.eigvals, eigvals_p)


def _of_hermitian(numpy_function: Callable, primitive: OfMatrix) -> Callable:
    """Declare a function that reads the lower or the upper triangle of a Hermitian matrix."""
    name = numpy_function.__name__

    def function(a: Value, UPLO: str = "L") -> Any:
        if UPLO.upper() not in ("L", "U"):
            raise ValueError(f"{name}: UPLO must be 'L' or 'U', got {UPLO!r}")
        return _apply(numpy_function, primitive, a, square=True, UPLO=UPLO.upper())

    return implements(numpy_function)(function)


eigh, eigvalsh = _of_hermitian(numpy.linalg.eigh, eigh_p), _of_hermitian(numpy.linalg.eigvalsh, eigvalsh_p)


# ---------------------------------------------------------------- singular values


def _svd_shape(x: ShapedArray, full_matrices: bool, hermitian: bool):
    *batch, m, n = x.shape
    k = min(m, n)
    u, vh = ((m, m), (n, n)) if full_matrices else ((m, k), (k, n))
    return [((*batch, *u), x.dtype), ((*batch, k), real_dtype(x.dtype)), ((*batch, *vh), x.dtype)]


def _svd_rule(x, t, full_matrices, hermitian):
    outs = svd_p.bind(x, full_matrices=full_matrices, hermitian=hermitian)
    s, t = outs[1], hermitian_part(t) if hermitian else t
    k, (table, divisors) = s.shape[-1], differences_p.bind(s)
    of = "svd" if x.shape[-1] == x.shape[-2] and not _is_complex(x) else "svd with other vectors of 0"
    u, v = outs[0][..., :k], adjoint(outs[2])[..., :k]
    half = matmul(0.5 * adjoint(u), matmul(t, v))
    other = adjoint(half)
    # The Hermitian part turns u and v alike, by differences of singular values; the other part by their sums.
    ds, alike = split_p.bind(table, half + other, of=of)
    alike = divisors * alike
    s = where(s <= rounding_of(s) * s[..., :1], 0, s)  # they descend; 0 for those that are 0 up to rounding
    apart = quotient_p.bind(s[..., None, :] + s[..., None], half - other, turns=True, transposed=False)
    left, right = (lambda y, t, i=i: basis_p.bind(table, y, t, of=of, side=i) for i in (0, 1))
    all_u, du = _singular_vectors(outs[0], matmul(u, alike + apart), (s, t, v, half), left)
    all_v, dv = _singular_vectors(adjoint(outs[2]), matmul(v, alike - apart), (s, adjoint(t), u, other), right)
    return [all_u, outs[1], adjoint(all_v)], [du, ds, adjoint(dv)]


def _singular_vectors(all_u, du, moves, basis):
    """Singular vectors in a general basis, with the columns that complete them, and their tangents.

    `moves` are the singular values s, a tangent t of the matrix, the other vectors v, and half of u^H t v.
    """
    k = du.shape[-1]
    u, completing = all_u[..., :k], all_u[..., k:]
    if u.shape[-2] > k:
        s, t, v, half = moves
        out = quotient_p.bind(s[..., None, :], matmul(t, v) - matmul(2 * u, half), turns=False, transposed=False)
        du = du + out - matmul(u, matmul(adjoint(u), out))
    u, du = basis(u, du), basis(du, du)
    return (concatenate([u, completing], -1), _complete_tangent(u, du, completing)) if completing.shape[-1] else (u, du)


def _svdvals_rule(x, t, hermitian):
    u, s, vh = svd_p.bind(x, full_matrices=False, hermitian=hermitian)
    ds = _real(_along(u, hermitian_part(t) if hermitian else t, adjoint(vh)))
    return s, ds + corner_p.bind(s, ds, moved=False, transposed=False)


svd_p = OfMatrix(
    "svd",
    lambda x, full_matrices, hermitian: list(numpy.linalg.svd(x, full_matrices, hermitian=hermitian)),
    _svd_shape,
    _svd_rule,
    multiple_results=True,
    any_shape=True,
)
svdvals_p = OfMatrix(
    "svdvals",
    lambda x, hermitian: numpy.linalg.svd(x, compute_uv=False, hermitian=hermitian),
    lambda x, hermitian: ((*x.shape[:-2], min(x.shape[-2:])), real_dtype(x.dtype)),
    _svdvals_rule,
    any_shape=True,
)


@implements(numpy.linalg.svd)
def svd(a: Value, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """`numpy.linalg.svd`: `a = u @ diag(s) @ vh`; only s if not `compute_uv`.

    The module's docstring has the conventions for factors of vectors and for singular values that are equal or 0.
    """
    if not compute_uv:
        return _apply(numpy.linalg.svd, svdvals_p, a, hermitian, hermitian=hermitian)
    return _apply(numpy.linalg.svd, svd_p, a, hermitian, full_matrices=full_matrices, hermitian=hermitian)


@implements(numpy.linalg.svdvals)
def svdvals(x: Value, /) -> Value:
    """`numpy.linalg.svdvals`: the singular values, in descending order."""
    return svdvals_p.bind(check_matrices("svdvals", x), hermitian=False)


def count_above(s: Value, tol: Any, scale: Any = 1) -> Value:
    """Return the number of singular values above a tolerance times a scale."""
    tol = expand_dims(tol, -1) if numpy.ndim(tol) else tol
    return reduction.sum(s > scale * tol, -1)
