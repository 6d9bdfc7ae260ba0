"""`scipy.linalg`, differentiable: triangular and banded systems, Sylvester's equation, functions of matrices.

All functions accept stacks of matrices, real and complex. `expm`, `cosm` and `sinm` have Fréchet derivatives of every
order, each from one evaluation of a block matrix: f([[a, e], [0, a]]) has the derivative at a in the direction e in its
upper right block. The same holds for `sqrtm` and `logm`. The derivative of `polar` solves Sylvester's equation.
`matrix_function` is any function of Hermitian matrices, by divided differences. All of these have derivatives where
eigenvalues or singular values are equal. Functions that `numpy.linalg` has, too, are in `minidiff.numpy.linalg`.

`sqrtm` and `logm` of a real matrix are real if a real result exists, as in SciPy. Under `jit` and `vmap` a dtype cannot
depend on values: there the result for a real matrix is real, or NaN, with a warning, if no real result exists.

Source: R. Mathias, "A chain rule for matrix functions and applications", 1996; N. J. Higham, "Functions of matrices",
2008.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy
import scipy.linalg

from minidiff.api.derivatives import jvp
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.errors import TracerError, VarianceError
from minidiff.errors.location import warn_here
from minidiff.ops import decomposition, dimensions
from minidiff.ops.base import Discrete, General, add_all, bind_aligned, convert, unbroadcast
from minidiff.ops.callback import check_closure
from minidiff.ops.decomposition import OfMatrix, check_matrices, linear_equation, right_hand_side, solve_columns
from minidiff.ops.elementwise import real_dtype
from minidiff.ops.linalg import adjoint
from minidiff.ops.norms import Directional, directional_shape
from minidiff.ops.ties import rounding_of
from minidiff.scipy.closures import over_stacks

__all__ = ["block_diag", "cho_factor", "cho_solve", "cosm", "expm", "logm", "matrix_function", "polar", "sinm"]
__all__ += ["solve_banded", "solve_sylvester", "solve_triangular", "sqrtm"]


# ---------------------------------------------------------------- linear equations


def _triangle(x: Value, lower: bool) -> Value:
    return numpy.tril(x) if lower else numpy.triu(x)


_triangular_p = linear_equation(
    "solve_triangular",
    over_stacks(scipy.linalg.solve_triangular, "(n,n),(n,k)->(n,k)"),
    lambda a, x, lower: _triangle(a, lower) @ x,
    lambda a, lower: (a.mT, {"lower": not lower}),
    fits=lambda a, b, lower: decomposition.solve_p.fits(a, b),
)


def solve_triangular(
    a: Value, b: Value, trans: int | str = 0, lower: bool = False, unit_diagonal: bool = False
) -> Value:
    """`scipy.linalg.solve_triangular`: solve `a @ x = b`, reading one triangle of a.

    Args:
        a: matrices [..., n, n].
        b: vectors [n], or matrices [..., n, k].
        trans: 0 or "N" for a itself, 1 or "T" for its transpose, 2 or "C" for its conjugate transpose.
        lower: whether the lower triangle is read.
        unit_diagonal: whether the diagonal is taken to be 1.

    Returns:
        x, an array like b.

    Raises:
        LinAlgError: if a is not square.
        ValueError: for another `trans`, or a right-hand side that does not fit.

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
        raise ValueError(f"solve_triangular: trans must be 0, 1 or 2 (or 'N', 'T', 'C'), got {trans!r}")
    return solve_columns(_triangular_p, (a if trans in (1, "T") else numpy.conjugate(a)).mT, b, lower=not lower)


def cho_factor(a: Value, lower: bool = False) -> tuple[Value, bool]:
    """`scipy.linalg.cho_factor`: compute the Cholesky factor of a; its other triangle is 0.

    Args:
        a: Hermitian, positive definite matrices [..., n, n].
        lower: whether the factor is the lower triangle.

    Returns:
        The pair of the factor and `lower`, for `cho_solve`.

    Raises:
        LinAlgError: if a is not square, or not positive definite.

    >>> cho_factor(numpy.array([[4.0, 2.0], [2.0, 5.0]]), lower=True)
    (array([[2., 0.],
           [1., 2.]]), True)
    """
    return numpy.linalg.cholesky(a, upper=not lower), lower


def cho_solve(c_and_lower: tuple[Value, bool], b: Value) -> Value:
    """`scipy.linalg.cho_solve`: solve `a @ x = b` by the Cholesky factor of a.

    Args:
        c_and_lower: the pair that `cho_factor(a)` returned.
        b: vectors [n], or matrices [..., n, k].

    Returns:
        x, an array like b.

    >>> cho_solve(cho_factor(numpy.array([[4.0, 2.0], [2.0, 5.0]])), numpy.array([6.0, 7.0]))
    array([1., 1.])
    """
    c, lower = c_and_lower
    return solve_triangular(c, solve_triangular(c, b, 2 - 2 * lower, lower), 2 * lower, lower)


def _banded_product(ab: Value, x: Value, bands: tuple[int, int]) -> Value:
    """Return the product of a banded matrix, in SciPy's diagonal ordered form, and matrices x [..., n, k]."""
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
    """`scipy.linalg.solve_banded`: solve `a @ x = b` for a banded matrix a.

    Args:
        l_and_u: the numbers l of diagonals below the main one, and u above it.
        ab: the diagonals [l + u + 1, n]: row u + i - j has element j at a[i, j].
        b: a vector [n], or a matrix [n, k].

    Returns:
        x, an array like b.

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
    batch_rule=bind_aligned,
    sharding=dimensions.batch(2),
)


def solve_sylvester(a: Value, b: Value, q: Value) -> Value:
    """`scipy.linalg.solve_sylvester`: solve `a @ x + x @ b = q`.

    Args:
        a: matrices [..., n, n].
        b: matrices [..., k, k].
        q: matrices [..., n, k].

    Returns:
        x, matrices [..., n, k].

    Raises:
        LinAlgError: if a or b is not square.

    >>> solve_sylvester(numpy.array([[1.0]]), numpy.array([[3.0]]), numpy.array([[8.0]]))
    array([[2.]])
    """
    a, b = (check_matrices("solve_sylvester", x, square=True) for x in (a, b))
    return _sylvester_p.bind(block_diag(a, b), check_matrices("solve_sylvester", q))


def block_diag(*arrs: Value) -> Value:
    """`scipy.linalg.block_diag`: put blocks on the diagonal of a matrix.

    Args:
        arrs: matrices, or stacks of them; vectors are rows, and numbers matrices of one element.

    Returns:
        A matrix, or a stack of them, that is 0 outside of the blocks.

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
    """Return the matrix [[x, e], [0, x]]."""
    below = numpy.concatenate([numpy.zeros_like(x), x], -1)
    return numpy.concatenate([numpy.concatenate([x, e], -1), below], -2)


def _upper_right(x: Value) -> Value:
    n = x.shape[-1] // 2
    return x[..., :n, n:]


def _of_matrix(f: Callable, summary: str, example: str, real: bool = False) -> Callable[[Value], Value]:
    """Declare a function of a square matrix, and its derivative as a linear operation; it may be `real` or NaN."""
    name = f.__name__
    impl = over_stacks(functools.partial(_real_or_nan, function=f) if real else f, "(n,n)->(n,n)")

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
        transpose_rule=lambda ct, operands: [unbroadcast(frechet.bind(operands[0].mT, ct), operands[1])],
        sharding=dimensions.batch(2),
    )

    def function(a: Value) -> Value:
        """`scipy.linalg.{name}`: compute {summary} of a matrix.

        Args:
            a: a square matrix, or a stack of them [..., n, n].

        Returns:
            An array of the shape of a.

        >>> {example}
        """
        return primitive.bind(check_matrices(name, a, square=True))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = str(function.__doc__).format(name=name, summary=summary, example=example)
    return function


expm = _of_matrix(scipy.linalg.expm, "the exponential", "round(float(expm(numpy.eye(1))[0, 0]), 6)\n        2.718282")
cosm = _of_matrix(scipy.linalg.cosm, "the cosine", "cosm(numpy.zeros((1, 1)))\n        array([[1.]])")
sinm = _of_matrix(scipy.linalg.sinm, "the sine", "sinm(numpy.zeros((1, 1)))\n        array([[0.]])")


# ---------------------------------------------------------------- real matrices with complex roots and logarithms


def _real_if_close(x: numpy.ndarray, function: Callable) -> numpy.ndarray:
    """Return a function of a matrix; it is real if the matrix is real, and so is the result up to rounding.

    SciPy computes with complex numbers in between, here in double precision.
    """
    y = numpy.asarray(function(x.astype(numpy.result_type(x, float))))
    is_real = x.dtype.kind != "c" and y.dtype.kind == "c" and numpy.abs(y.imag).max() <= 1e-8 * numpy.abs(y).max()
    return y.real if is_real else y


def _real_or_nan(x: numpy.ndarray, function: Callable) -> numpy.ndarray:
    """Return a function of a matrix, real if the matrix is; NaN, with a warning, if it has no real value."""
    y = _real_if_close(x, function)
    if x.dtype.kind == "c" or y.dtype.kind != "c":
        return y
    name = function.__name__
    warn_here(
        f"{name} of a real matrix has no real value, and under jit and vmap no dtype can depend on values: it is NaN. "
        f"Write {name}(a.astype(complex))",
        RuntimeWarning,
    )
    return numpy.full_like(x, numpy.nan)


def _complex_where_needed(name: str, function: Callable, a: Value) -> Value:
    """Return the matrix, complex if its value is known, is real, and the function of it is not."""
    a = check_matrices(name, a, square=True)
    try:
        known = a.concrete(name) if isinstance(a, Tracer) else a
    except (TracerError, VarianceError):
        return a
    if isinstance(known, numpy.ndarray) and known.dtype.kind == "f" and known.size:
        is_real = all(numpy.isrealobj(_real_if_close(x, function)) for x in known.reshape(-1, *known.shape[-2:]))
        return a if is_real else convert(a, numpy.result_type(a.dtype, numpy.complex64))
    return a


_sqrtm = _of_matrix(scipy.linalg.sqrtm, "the square root", "sqrtm(numpy.eye(1))\n        array([[1.]])", real=True)
_logm = _of_matrix(scipy.linalg.logm, "the logarithm", "logm(numpy.eye(1))\n        array([[0.]])", real=True)


def sqrtm(a: Value) -> Value:
    """`scipy.linalg.sqrtm`: compute the principal square root.

    It is real if a is, and has a real root; see the module's docstring for `jit`.

    Args:
        a: a square matrix, or a stack of them [..., n, n].

    Returns:
        An array of the shape of a.

    >>> sqrtm(4 * numpy.eye(1)), sqrtm(-4 * numpy.eye(1))
    (array([[2.]]), array([[0.+2.j]]))
    """
    return _sqrtm(_complex_where_needed("sqrtm", scipy.linalg.sqrtm, a))


def logm(a: Value) -> Value:
    """`scipy.linalg.logm`: compute the principal logarithm.

    It is real if a is, and has a real logarithm; see the module's docstring for `jit`.

    Args:
        a: a square matrix, or a stack of them [..., n, n].

    Returns:
        An array of the shape of a.

    >>> logm(numpy.eye(2))
    array([[0., 0.],
           [0., 0.]])
    """
    return _logm(_complex_where_needed("logm", scipy.linalg.logm, a))


# ---------------------------------------------------------------- the polar decomposition


def _one_or_nan(a: numpy.ndarray) -> numpy.ndarray:
    """Return 1, or NaN for a matrix that does not have full rank."""
    s = numpy.linalg.svd(a, compute_uv=False)
    deficient = s.min(-1, initial=numpy.inf) <= rounding_of(a) * s.max(-1, initial=0)
    if deficient.any():
        warn_here("polar: a singular value is 0, and the unitary factor has no derivative: it is NaN", RuntimeWarning)
    return numpy.where(deficient, numpy.nan, 1).astype(s.dtype)[..., None, None]


_full_rank_p = Discrete(
    "full_rank", _one_or_nan, lambda a: ((*a.shape[:-2], 1, 1), real_dtype(a.dtype)), sharding=dimensions.batch(2)
)


def _polar_rule(a: Value, t: Value) -> tuple[Value, Value]:
    u = _polar_p.bind(a)
    uh = adjoint(u)
    p, turned = decomposition.hermitian_part(uh @ a), uh @ t
    moved = u @ _sylvester_p.bind(block_diag(p, p), turned - adjoint(turned))
    if a.shape[-2] > a.shape[-1]:
        moved = moved + (t - u @ turned) @ decomposition.inverse_p.bind(p)
    return u, moved * _full_rank_p.bind(a)


#: The unitary factor of a matrix that has no fewer rows than columns.
_polar_p = OfMatrix(
    "polar",
    over_stacks(lambda a: scipy.linalg.polar(a)[0], "(m,n)->(m,n)"),
    lambda a: (a.shape, a.dtype),
    _polar_rule,
    any_shape=True,
)


def polar(a: Value, side: str = "right") -> tuple[Value, Value]:
    """`scipy.linalg.polar`: compute `a = u @ p`, or `a = p @ u` on the left.

    u, the orthogonal matrix nearest to a square one, is differentiable where no singular value is 0; singular
    values may be equal.

    Args:
        a: matrices [..., m, n].
        side: "right" or "left", the side of p.

    Returns:
        The pair of u, with orthonormal columns (or rows), and the Hermitian p, whose eigenvalues are at least 0.

    Raises:
        ValueError: for another `side`.

    >>> u, p = polar(numpy.diag([2.0, 2.0]))
    >>> u
    array([[1., 0.],
           [0., 1.]])

    Source: N. J. Higham, "Functions of matrices", 2008.
    """
    if side not in ("right", "left"):
        raise ValueError(f"polar: side must be 'right' or 'left', got {side!r}")
    a = check_matrices("polar", a)
    u = _polar_p.bind(a) if a.shape[-2] >= a.shape[-1] else adjoint(_polar_p.bind(adjoint(a)))
    uh = adjoint(u)
    return u, decomposition.hermitian_part(uh @ a if side == "right" else a @ uh)


# ---------------------------------------------------------------- functions of Hermitian matrices

# Divided differences of a function, f[x, y] = (f(x) - f(y)) / (x - y) and f[x, y, z], also where points are equal: each
# is computed in two ways, as the quotient, which cancels where points are close, and as a mean of a derivative over the
# points between, which is accurate there. Both have an estimate of their error. The mean is taken where its error is
# smaller, and both agree to the error of the quotient: the mean of a function that jumps between the points is wrong.
# Source: C. de Boor, "Divided differences", 2005 (the formula of Hermite and Genocchi).

#: Nodes and weights of Gauss on [0, 1]: those of a mean, and fewer to estimate its error.
_RULES = [(0.5 + 0.5 * x, 0.5 * w) for x, w in map(numpy.polynomial.legendre.leggauss, (8, 4))]
_EPS = float(numpy.finfo(float).eps)


def _values_of(f: Callable, x: numpy.ndarray) -> numpy.ndarray:
    """Return the values of a user's function; TypeError unless they are plain numbers, one for each of x."""
    y = f(x)
    if isinstance(y, Tracer) or numpy.shape(y) != x.shape:
        kind = "a traced value: it must close over plain ones" if isinstance(y, Tracer) else f"shape {numpy.shape(y)}"
        raise TypeError(f"matrix_function: its functions must return an array like their argument, got {kind}")
    return numpy.asarray(y)


def _means(f: Callable, points: Callable, weights: Callable) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the mean of f at points between 0 and 1, and its error."""

    def mean(u: numpy.ndarray, w: numpy.ndarray) -> numpy.ndarray:
        shares = weights(u, w)
        return numpy.tensordot(shares, _values_of(f, points(u)), shares.ndim)

    many, few = itertools.starmap(mean, _RULES)
    return many, numpy.abs(many - few) + _EPS * numpy.abs(many)


def _better(mean: Sequence[numpy.ndarray], quotient: Sequence[numpy.ndarray]) -> tuple[numpy.ndarray, numpy.ndarray]:
    agree = numpy.abs(mean[0] - quotient[0]) <= 4 * quotient[1]
    chosen = agree & (mean[1] <= quotient[1])
    return numpy.where(chosen, mean[0], quotient[0]), numpy.where(chosen, mean[1], quotient[1])


def _first_difference(functions: Sequence[Callable], x: numpy.ndarray, y: numpy.ndarray) -> tuple:
    """f[x, y] and its error, for arrays of points that broadcast; `functions` are f and its derivatives."""
    gap = x - y
    apart = numpy.where(gap == 0, 1, gap)
    fx, fy = (_values_of(functions[0], p) for p in (x, y))
    cancelled = 4 * _EPS * numpy.maximum(numpy.abs(fx), numpy.abs(fy)) / numpy.abs(apart)
    quotient = (fx - fy) / apart, numpy.where(gap == 0, numpy.inf, cancelled)
    column = (-1, *[1] * gap.ndim)
    return _better(_means(functions[1], lambda u: y + u.reshape(column) * gap, lambda u, w: w), quotient)


def _second_difference(
    functions: Sequence[Callable], x: numpy.ndarray, y: numpy.ndarray, z: numpy.ndarray
) -> numpy.ndarray:
    """f[x, y, z] for arrays of points that broadcast; `functions` are f and its first and second derivative."""
    low, middle, high = numpy.sort(numpy.stack(numpy.broadcast_arrays(x, y, z)), 0)
    (above, e_above), (below, e_below) = (_first_difference(functions, *p) for p in ((high, middle), (middle, low)))
    gap = numpy.where(high == low, 1, high - low)
    quotient = (above - below) / gap, numpy.where(high == low, numpy.inf, (e_above + e_below) / gap)
    ones = [1] * low.ndim

    def points(u: numpy.ndarray) -> numpy.ndarray:  # of a triangle, as those of a square
        u, v = u.reshape(-1, 1, *ones), u.reshape(1, -1, *ones)
        return low + u * (middle - low) + u * v * (high - middle)

    return _better(_means(functions[2], points, lambda u, w: numpy.outer(u * w, w)), quotient)[0]


class Spectral(Directional):
    """The derivatives of a function of a Hermitian matrix.

    In the basis of eigenvectors they are sums of products of the directions and divided differences of the function.
    `functions` are the function, and its first and second derivatives.
    """

    turned = True


def _spectral_impl(a: numpy.ndarray, *directions: numpy.ndarray, functions: tuple[Callable, ...]) -> numpy.ndarray:
    w, v = numpy.linalg.eigh(a)
    vh = numpy.conjugate(numpy.swapaxes(v, -1, -2))
    along = [vh @ e @ v for e in directions]
    w = w.astype(float)
    if not along:
        inner = numpy.eye(w.shape[-1]) * _values_of(functions[0], w)[..., None]
    elif len(along) == 1:
        inner = _first_difference(functions, w[..., None], w[..., None, :])[0] * along[0]
    elif len(along) > 2:
        raise TypeError("matrix_function has first and second derivatives only")
    else:
        d = _second_difference(functions, w[..., None, None], w[..., None, :, None], w[..., None, None, :])
        (e, f) = along
        inner = numpy.einsum("...ikj,...ik,...kj->...ij", d, e, f) + numpy.einsum("...ikj,...ik,...kj->...ij", d, f, e)
    return (v @ inner @ vh).astype(numpy.result_type(a, *directions), copy=False)


_spectral_p = Spectral("matrix_function", _spectral_impl, directional_shape, sharding=dimensions.gather)


def matrix_function(f: Callable, df: Callable, A: Value) -> Value:
    """Compute a function of a symmetric or Hermitian matrix: v f(w) v^H, for the eigenvalues w.

    The function is that of the Hermitian part of A, (A + A^H) / 2. It can be differentiated twice, also where
    eigenvalues are equal. Where the quotients (f(w_i) - f(w_j)) / (w_i - w_j) would cancel, they are computed as means
    of `df` between the two eigenvalues.

    Args:
        f: a function of arrays of numbers, element by element. It gets plain arrays, also under `jit`, and must not
            close over traced values: move those into A.
        df: its derivative, another such function.
        A: a matrix, or a stack of them [..., n, n].

    Returns:
        An array of the shape of A.

    Raises:
        LinAlgError: if A is not square.
        TypeError: for a third derivative, or if `f` closes over a traced value.

    >>> import minidiff as md
    >>> whiten = lambda A: matrix_function(lambda w: w**-0.5, lambda w: -0.5 * w**-1.5, A)
    >>> md.grad(lambda A: whiten(A)[0, 1])(numpy.eye(2))
    array([[ 0.  , -0.25],
           [-0.25,  0.  ]])

    Source: N. J. Higham, "Functions of matrices", 2008, theorem 3.11 (of Daleckii and Krein).
    """
    for function in (f, df):
        check_closure("matrix_function", function, "it gets plain arrays, so move that into the matrix")
    second = lambda x: jvp(df, (x,), (numpy.ones_like(x),))[1]  # noqa: E731
    a = check_matrices("matrix_function", A, square=True)
    return _spectral_p.bind(decomposition.hermitian_part(a), functions=(f, df, second))
