"""`scipy.linalg`, differentiable: triangular and banded systems, Sylvester's equation, functions of matrices.

All functions accept stacks of matrices, real and complex. `expm`, `cosm` and `sinm` have Fréchet derivatives of every
order, each by one evaluation at a block matrix: f([[a, e], [0, a]]) has the derivative at a in the direction e in its
upper right block. `sqrtm` is always complex, since a dtype cannot depend on values; its derivative solves Sylvester's
equation. What `numpy.linalg` has too is in `minidiff.numpy.linalg`.

Source: R. Mathias, "A chain rule for matrix functions and applications", 1996.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy
import scipy.linalg

from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops import dimensions
from minidiff.ops.base import General, add_all, bind_aligned, match
from minidiff.ops.decomposition import (
    OfMatrix,
    check_matrices,
    linear_equation,
    right_hand_side,
    solve_columns,
    solve_p,
)
from minidiff.scipy.closures import over_stacks

__all__ = ["block_diag", "cho_factor", "cho_solve", "cosm", "expm", "sinm", "solve_banded", "solve_sylvester"]
__all__ += ["solve_triangular", "sqrtm"]


# ---------------------------------------------------------------- linear equations


def _triangle(x: Value, lower: bool) -> Value:
    return numpy.tril(x) if lower else numpy.triu(x)


_triangular_p = linear_equation(
    "solve_triangular",
    over_stacks(scipy.linalg.solve_triangular, "(n,n),(n,k)->(n,k)"),
    lambda a, x, lower: _triangle(a, lower) @ x,
    lambda a, lower: (a.mT, {"lower": not lower}),
    fits=lambda a, b, lower: solve_p.fits(a, b),
)


def solve_triangular(
    a: Value, b: Value, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> Value:
    """`scipy.linalg.solve_triangular`: x with `a @ x = b`, reading one triangle of a [..., n, n].

    With `trans` 1 or "T", solve with the transpose of a, with 2 or "C" with its conjugate transpose. b is [n] or
    [..., n, k]. Raise LinAlgError if a is not square, ValueError for another `trans`.

    >>> solve_triangular(numpy.array([[2.0, 0.0], [1.0, 4.0]]), numpy.array([2.0, 5.0]), lower=True)
    array([1., 1.])
    """
    a = check_matrices("solve_triangular", a, square=True)
    b = right_hand_side("solve_triangular", a, b)
    if unit_diagonal:
        a = numpy.where(numpy.eye(typeof(a).shape[-1], dtype=bool), 1.0, a)
    if trans in (0, "N"):
        return solve_columns(_triangular_p, a, b, lower=bool(lower))
    if trans not in (1, 2, "T", "C"):
        raise ValueError(f"solve_triangular: trans is 0, 1 or 2 (or 'N', 'T', 'C'), got {trans!r}")
    return solve_columns(_triangular_p, (a if trans in (1, "T") else numpy.conjugate(a)).mT, b, lower=not lower)


def cho_factor(a: Value, lower: bool = False) -> tuple[Value, bool]:
    """`scipy.linalg.cho_factor`: the Cholesky factor of a [..., n, n], and `lower`; its other triangle is 0.

    >>> cho_factor(numpy.array([[4.0, 2.0], [2.0, 5.0]]), lower=True)
    (array([[2., 0.],
           [1., 2.]]), True)
    """
    return numpy.linalg.cholesky(a, upper=not lower), lower


def cho_solve(c_and_lower: tuple[Value, bool], b: Value) -> Value:
    """`scipy.linalg.cho_solve`: x with `a @ x = b`, from the pair that `cho_factor(a)` returned.

    >>> cho_solve(cho_factor(numpy.array([[4.0, 2.0], [2.0, 5.0]])), numpy.array([6.0, 7.0]))
    array([1., 1.])
    """
    c, lower = c_and_lower
    return solve_triangular(c, solve_triangular(c, b, 2 - 2 * lower, lower), 2 * lower, lower)


def _banded_product(ab: Value, x: Value, bands: tuple[int, int]) -> Value:
    """The product of a banded matrix, in SciPy's diagonal ordered form, and matrices x [..., n, k]."""
    (low, up), rows = bands, numpy.arange(x.shape[-2])[:, None]
    terms = [
        numpy.where((rows - d >= 0) & (rows - d < len(rows)), numpy.roll(ab[..., up + d, :, None] * x, d, -2), 0.0)
        for d in range(-up, low + 1)
    ]
    return functools.reduce(numpy.add, terms)


def _banded_transpose(ab: Value, bands: tuple[int, int]) -> tuple[Value, dict]:
    low, up = bands
    rows = [numpy.roll(ab[..., up - d, :], -d, -1) for d in range(-low, up + 1)]
    return numpy.stack(rows, -2), {"bands": (up, low)}


_banded_p = linear_equation(
    "solve_banded",
    over_stacks(lambda ab, b, bands: scipy.linalg.solve_banded(bands, ab, b), "(r,n),(n,k)->(n,k)"),
    _banded_product,
    _banded_transpose,
)


def solve_banded(l_and_u: tuple[int, int], ab: Value, b: Value) -> Value:
    """`scipy.linalg.solve_banded`: x with `a @ x = b`, where row u + i - j of ab has element j at a[i, j].

    ab is [l + u + 1, n] for l diagonals below the main one and u above it, b is [n] or [n, k].

    >>> solve_banded((1, 0), numpy.array([[2.0, 4.0], [1.0, 0.0]]), numpy.array([2.0, 5.0]))
    array([1., 1.])
    """
    ab = check_matrices("solve_banded", ab)
    b = right_hand_side("solve_banded", ab, b)
    return solve_columns(_banded_p, ab, b, bands=(int(l_and_u[0]), int(l_and_u[1])))


def _sylvester_product(ab: Value, x: Value) -> Value:
    n = x.shape[-2]
    return ab[..., :n, :n] @ x + x @ ab[..., n:, n:]


def _sylvester(ab: numpy.ndarray, q: numpy.ndarray) -> numpy.ndarray:
    n = len(q)
    return scipy.linalg.solve_sylvester(ab[:n, :n], ab[n:, n:], q)


# Linear in its second operand: the first has both matrices, as diagonal blocks.
_sylvester_p = linear_equation(
    "solve_sylvester",
    over_stacks(_sylvester, "(s,s),(n,k)->(n,k)"),
    _sylvester_product,
    lambda ab: (ab.mT, {}),
    bind_aligned,
    sharding=dimensions.batch(2),
)


def solve_sylvester(a: Value, b: Value, q: Value) -> Value:
    """`scipy.linalg.solve_sylvester`: x [n, k] with `a @ x + x @ b = q`, for a [n, n] and b [k, k].

    >>> solve_sylvester(numpy.array([[1.0]]), numpy.array([[3.0]]), numpy.array([[8.0]]))
    array([[2.]])
    """
    a, b = (check_matrices("solve_sylvester", x, square=True) for x in (a, b))
    return _sylvester_p.bind(block_diag(a, b), check_matrices("solve_sylvester", q))


def block_diag(*arrs: Value) -> Value:
    """`scipy.linalg.block_diag`: the matrix, or stack of them, with these blocks on its diagonal and 0 elsewhere.

    >>> block_diag(numpy.ones((1, 2)), 3.0)
    array([[1., 1., 0.],
           [0., 0., 3.]])
    """
    blocks = [numpy.atleast_2d(x) for x in arrs]
    widths = [x.shape[-1] for x in blocks]
    rows = [
        numpy.pad(x, [(0, 0)] * (x.ndim - 1) + [(sum(widths[:i]), sum(widths[i + 1 :]))]) for i, x in enumerate(blocks)
    ]
    return numpy.concatenate(rows, -2)


# ---------------------------------------------------------------- functions of matrices


def _block(x: Value, e: Value) -> Value:
    """The matrix [[x, e], [0, x]]."""
    below = numpy.concatenate([numpy.zeros_like(x), x], -1)
    return numpy.concatenate([numpy.concatenate([x, e], -1), below], -2)


def _upper_right(x: Value) -> Value:
    n = x.shape[-1] // 2
    return x[..., :n, n:]


def _of_matrix(f: Callable, what: str, example: str) -> Callable[[Value], Value]:
    """Declare a function of a square matrix, and its derivative as a linear operation."""
    name = f.__name__
    impl = over_stacks(f, "(n,n)->(n,n)")

    def tangent(out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value:
        (x, e), (tx, te) = primals, tangents
        terms = [] if te is None else [frechet.bind(x, te)]
        if tx is not None:
            terms.append(_upper_right(frechet.bind(_block(x, e), _block(tx, numpy.zeros_like(tx)))))
        return add_all(terms)

    primitive = OfMatrix(name, impl, lambda x: (x.shape, x.dtype), lambda x, t: (primitive.bind(x), frechet.bind(x, t)))
    frechet = General(
        f"{name}_frechet",
        lambda x, e: _upper_right(impl(_block(x, e))),
        lambda x, e: (x.shape, numpy.result_type(x.dtype, e.dtype)),
        tangent,
        transpose_rule=lambda ct, operands: [match(frechet.bind(operands[0].mT, ct), operands[1])],
        sharding=dimensions.batch(2),
    )

    def function(a: Value) -> Value:
        return primitive.bind(check_matrices(name, a, square=True))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"`scipy.linalg.{name}`: {what} of a matrix, or of a stack [..., n, n].\n\n>>> {example}\n"
    return function


expm = _of_matrix(scipy.linalg.expm, "the exponential", "round(float(expm(numpy.eye(1))[0, 0]), 6)\n2.718282")
cosm = _of_matrix(scipy.linalg.cosm, "the cosine", "cosm(numpy.zeros((1, 1)))\narray([[1.]])")
sinm = _of_matrix(scipy.linalg.sinm, "the sine", "sinm(numpy.zeros((1, 1)))\narray([[0.]])")


def _sqrtm_rule(x: Value, t: Value) -> tuple[Value, Value]:
    out = _sqrtm_p.bind(x)
    return out, _sylvester_p.bind(block_diag(out, out), t)


def _complex(t: Value | ShapedArray) -> numpy.dtype:
    return numpy.result_type(t.dtype, numpy.complex64)


_sqrtm_p = OfMatrix(
    "sqrtm",
    lambda x: over_stacks(scipy.linalg.sqrtm, "(n,n)->(n,n)")(x.astype(_complex(x))),
    lambda x: (x.shape, _complex(x)),
    _sqrtm_rule,
)


def sqrtm(a: Value) -> Value:
    """`scipy.linalg.sqrtm`: the principal square root of a matrix, or of a stack [..., n, n]; always complex.

    >>> sqrtm(4 * numpy.eye(1))
    array([[2.+0.j]])
    """
    return _sqrtm_p.bind(check_matrices("sqrtm", a, square=True))
