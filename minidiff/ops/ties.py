"""Equal eigenvalues and singular values: where derivatives of their vectors exist, and where they are NaN.

The vectors v_i, v_j of equal values w_i = w_j are any basis of the space that they span. As a matrix moves by t, the
basis turns by (v^H t v)_ij / (w_j - w_i). Derivatives that do not depend on the basis come in two kinds:

- Functions of the space alone, such as a projector: the turn is taken to be 0, and nothing depends on it.
- Functions of a matrix, such as v f(w) v^H: they move by f'(w) (v^H t v)_ij, the limit of a quotient that is 0 / 0. No
  rule that sees the values and vectors can tell f', so the derivative is NaN, with a warning.

In forward mode, a tangent (v^H t v)_ij that is not 0 makes the tangents of the vectors i and j NaN. In reverse mode,
the cotangents tell both kinds apart. Let m be the derivative of the function as one of the matrix, seen in the basis:
the cotangent of w_i is m_ii. The answer is right if m is a multiple of the identity among the equal values. In a
general basis that is the case if the numbers m_ii are equal; in a special one, such as LAPACK's of a diagonal matrix,
they may be equal although m_ij is not 0. So in reverse mode the vectors of equal values are a general basis of their
space, always the same one, and not NumPy's.

The operations get the values and their differences as one matrix, `differences_p`.

Source: M. T. Jones and R. B. Lehoucq, "Derivatives of eigenvectors with repeated eigenvalues", 1999; J. R. Magnus, "On
differentiating eigenvalues and eigenvectors", 1985.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import current_interpreter
from minidiff.core.reverse import Linearize
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.errors.location import warn_here
from minidiff.ops import dimensions
from minidiff.ops.base import General, add_all, convert, unbroadcast
from minidiff.ops.elementwise import real_dtype, where

#: Values are equal, and numbers are 0, up to this many units of rounding of the largest one.
ROUNDING = 64

WAYS_OUT = {
    "eigh": "md.scipy.linalg.expm, sqrtm, logm, and matrix_function for others",
    "eig": "md.scipy.linalg.expm, sqrtm and logm",
    "svd": "md.scipy.linalg.polar for the factor u @ vh, and np.linalg.pinv for the inverse",
}

DEPENDS = "depends on how the values separate, or on the choice of their vectors: it is NaN. Functions that have it:"


def rounding_of(x: Value) -> float:
    """Return the ratio to the largest number up to which others count as 0."""
    return ROUNDING * float(numpy.finfo(x.dtype).eps)


def _values_of(table: numpy.ndarray) -> numpy.ndarray:
    """Return a view of the diagonal of matrices, to be read and written."""
    return numpy.einsum("...ii->...i", table)


_eye = functools.cache(lambda n: numpy.eye(n, dtype=bool))


def _blocks(w: numpy.ndarray) -> numpy.ndarray:
    """For each value, the number of its block of equal ones."""
    size, blocks = numpy.abs(w).max(-1, keepdims=True, initial=0), numpy.zeros(w.shape, int)
    if w.dtype.kind == "f":  # in order
        blocks[..., 1:] = numpy.abs(w[..., 1:] - w[..., :-1]) > rounding_of(w) * size
        return blocks.cumsum(-1)
    near = numpy.abs(w[..., None, :] - w[..., None]) <= 16 * rounding_of(w) * size[..., None]
    blocks += numpy.arange(w.shape[-1])
    for _ in range(w.shape[-1]):
        blocks = numpy.where(near, blocks[..., None, :], w.shape[-1]).min(-1, initial=w.shape[-1])
    return blocks


def _differences_impl(w: numpy.ndarray) -> list[numpy.ndarray]:
    table, blocks = w[..., None, :] - w[..., None], _blocks(w)
    same = blocks[..., None, :] == blocks[..., None]
    table[same] = 0
    divisors = 1 / numpy.where(same, 1, table)
    _values_of(table)[...], _values_of(divisors)[...] = w, 0
    return [table, divisors]


def _differences_tangent(outs: Sequence, primals: Sequence, tangents: Sequence, params: dict) -> list[Value]:
    (table, divisors), (t,) = outs, tangents
    moved = where(table == 0, 0, t[..., None, :] - t[..., None])
    return [where(_eye(t.shape[-1]), t[..., None], moved), -divisors * divisors * moved]


#: The matrix of the differences w_j - w_i, 0 for equal values, with w itself on its diagonal; and the matrix of
#: 1 / (w_j - w_i), 1 for equal values, and 0 on the diagonal.
differences_p = General(
    "differences_of_values",
    _differences_impl,
    lambda w: [((*w.shape, w.shape[-1]), w.dtype)] * 2,
    _differences_tangent,
    multiple_results=True,
    sharding=dimensions.batch(1),
)


# ---------------------------------------------------------------- which pairs have no derivative


def _size(x: numpy.ndarray) -> numpy.ndarray:
    """Return the Frobenius norm of matrices."""
    return numpy.sqrt(numpy.sum(numpy.abs(x) ** 2, (-2, -1), keepdims=True))


def _zero(s: numpy.ndarray) -> numpy.ndarray:
    """Return whether each singular value is 0 up to rounding."""
    return s <= rounding_of(s) * s[..., :1]  # they descend


def _none_tied(table: numpy.ndarray, of: str) -> bool:
    """Return whether there is plainly no pair that is `_tied`."""
    apart = numpy.count_nonzero(table) == table.size
    return apart and (of in ("eigh", "eig", "svd") or not _zero(_values_of(table)).any())


def _tied(table: numpy.ndarray, of: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Pairs of equal values; and of singular values 0, whose vectors on the left and on the right turn apart.

    Among the latter is a value with itself, if there are other vectors that it turns to.
    """
    eye = _eye(table.shape[-1])
    tied = (table == 0) & ~eye
    if not of.startswith("svd"):
        return tied, numpy.zeros_like(tied)
    zero = _zero(_values_of(table))
    return tied, zero[..., None, :] & zero[..., None] & (tied | (eye & (of != "svd")))


def _nan_where(wrong: numpy.ndarray, out: numpy.ndarray, message: str) -> numpy.ndarray:
    if wrong.any():
        out[wrong] = numpy.nan
        warn_here(message, RuntimeWarning)
    return out


def _refuse(out: numpy.ndarray, wrong: numpy.ndarray, table: numpy.ndarray, of: str) -> numpy.ndarray:
    """Write NaN where the derivative is wrong, and warn of the first pair."""
    if not wrong.any():
        return out
    *stack, i, j = numpy.argwhere(wrong)[0].tolist()
    name, kind = of.split()[0], "singular values" if of.startswith("svd") else "eigenvalues"
    pair = f"{kind} {i} and {j} are equal" if i != j else f"singular value {i} is 0"
    message = f"{name}: {pair} ({table[(*stack, i, i)]:.6g}), and this derivative {DEPENDS} {WAYS_OUT[name]}"
    return _nan_where(wrong, out, message)


def _apart(d: numpy.ndarray, zeros: numpy.ndarray) -> numpy.ndarray:
    """By how much numbers differ for each pair; where singular values are 0, how large they are."""
    row, column = d[..., None, :], d[..., None]
    return numpy.where(zeros, numpy.abs(row) + numpy.abs(column), numpy.abs(row - column))


def _split_impl(table: numpy.ndarray, x: numpy.ndarray, of: str, general: bool) -> list[numpy.ndarray]:
    values, out = _values_of(x), x.copy()
    if not _none_tied(table, of):
        tied, zeros = _tied(table, of)
        small = rounding_of(x) * _size(x)
        apart = general & (_apart(values, zeros) > small)
        out[tied] = 0
        out = _refuse(out, (tied & (apart | (numpy.abs(x) > small))) | (zeros & apart), table, of)
    return [values.copy() if of == "eig" else values.real.copy(), out]


def _join_impl(table: numpy.ndarray, x: numpy.ndarray, *values: numpy.ndarray, of: str) -> numpy.ndarray:
    out = x.astype(numpy.result_type(x, *values))
    if not (_none_tied(table, of) and _all_far(table)):
        tied, zeros = _tied(table, of)
        wrong, noise = _depends(table, x, values, (tied, zeros), of)
        out[tied | noise] = 0
        _refuse(out, wrong, table, of)
    diagonal = _values_of(out)
    for d in values:
        diagonal += d
    return out


def _all_far(table: numpy.ndarray) -> bool:
    """Return whether no difference is so small that it may divide nothing but rounding: see `_depends`."""
    gaps = numpy.where(_eye(table.shape[-1]), numpy.inf, numpy.abs(table))
    return bool(gaps.min(initial=numpy.inf) > ROUNDING * _sqrt_of_eps(table))


def _sqrt_of_eps(x: numpy.ndarray) -> float:
    return float(numpy.sqrt(numpy.finfo(x.dtype).eps))


def _depends(table: numpy.ndarray, x: numpy.ndarray, values: Sequence, pairs: tuple, of: str) -> tuple:
    """Return the pairs on whose basis, or on whose parting, the function of these cotangents depends.

    And the pairs of different values for which x, divided by their difference, is nothing but rounding.
    """
    tied, zeros = pairs
    eye, eps = _eye(table.shape[-1]), rounding_of(x)
    turn = x * numpy.where(eye | tied, 1, table)  # the cotangent of what is divided by differences
    largest = numpy.abs(_values_of(table)).max(-1, initial=0)[..., None, None]
    size, moves = _size(turn), sum(numpy.abs(d).max(-1, initial=0)[..., None, None] for d in values)
    basis = turn if of == "eig" else turn - numpy.conjugate(numpy.swapaxes(turn, -1, -2))
    depends = numpy.abs(basis) > eps * (size + moves * largest)
    gaps = numpy.where(eye | tied, numpy.inf, numpy.abs(table))
    most = numpy.abs(turn).max((-2, -1), keepdims=True, initial=0)
    clear = numpy.where(numpy.abs(basis) > eps * most, numpy.abs(basis) / gaps, 0).max(
        (-2, -1), keepdims=True, initial=0
    )
    seen = numpy.maximum(clear, moves)  # the derivative, as far as it is beyond rounding
    noise = (eps * most / gaps > 2 * seen) & (seen > _sqrt_of_eps(x) * most)
    wrong = (tied | noise) & depends
    for d in values:
        # A residual of rounding, squared, has cotangents of the size of the rounding of the values.
        scale = moves + largest + size / numpy.where(largest == 0, numpy.inf, largest)
        wrong = wrong | noise | ((tied | zeros) & (_apart(d, zeros) > eps * scale))
    return wrong, noise


# ---------------------------------------------------------------- operations


def _is_recorded(t: Value) -> bool:
    """Return whether t is a tangent without a value, as reverse mode records it."""
    interpreter = current_interpreter()
    return isinstance(interpreter, Linearize) and interpreter.owns(t)


class Split(General):
    """The diagonal of a matrix, real but for `eig`; and the matrix, 0 where values are equal, or NaN.

    In a `general` basis there is no derivative where the diagonal moves equal values apart, either.
    """

    def bind(self, table: Value, x: Value, of: str, general: bool = False) -> list[Value]:
        return super().bind(table, x, of=of, general=general or _is_recorded(x))


class Scaling(General):
    """An operation that is linear in its second operand, and keeps its type; `transposed` says which way it is used."""

    def __init__(self, name: str, impl: Any, tangent_rule: Any = None, stack: int = 2):
        shape_rule = lambda table, x, *more, **params: (x.shape, x.dtype)  # noqa: E731
        super().__init__(name, impl, shape_rule, tangent_rule or self.apply_to, sharding=dimensions.batch(stack))

    def apply_to(self, out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value | None:
        return None if tangents[1] is None else self.bind(primals[0], tangents[1], *primals[2:], **params)

    def is_linear_in(self, positions, count):
        return positions == {1}

    def transpose(self, ct, operands, params):
        params = {**params, "transposed": not params["transposed"]}
        more = operands[2:]
        return [None, unbroadcast(self.bind(operands[0], ct, *more, **params), operands[1]), *[None for _ in more]]


class Basis(Scaling):
    """Return the vectors v; in the general basis, where reverse mode records the tangent t."""

    def bind(self, table: Value, v: Value, *t: Value, general: bool = False, transposed: bool = False, **params: Any):
        if isinstance(table, numpy.ndarray) and _none_tied(table, params["of"]):
            return v
        if t and _is_recorded(t[0]):
            t, general = (), True
        return super().bind(table, v, *t, general=general, transposed=transposed, **params)


def _split_tangent(out: Sequence, primals: Sequence, tangents: Sequence, params: dict) -> list:
    return [None, None] if tangents[1] is None else split_p.bind(primals[0], tangents[1], **params)


def _split_transpose(cts: Sequence[Value], operands: Sequence, of: str, general: bool) -> list[Value]:
    values, x = cts
    if x is None:
        return [unbroadcast(numpy.eye(values.shape[-1]) * values[..., None], operands[1])]
    return [unbroadcast(join_p.bind(operands[0], x, *[] if values is None else [values], of=of), operands[1])]


def _join_tangent(out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value | None:
    moved = [t for t in tangents[1:] if t is not None]
    if not moved:
        return None
    if tangents[1] is None:
        return convert(numpy.eye(out.shape[-1]) * tangents[2][..., None], out.dtype)
    return join_p.bind(primals[0], *moved, **params)


def _join_transpose(ct: Value, operands: Sequence, of: str) -> list[Value | None]:
    values, x = split_p.bind(operands[0], ct, of=of, general=True)
    return [unbroadcast(y, t) if isinstance(t, ShapedArray) else None for y, t in zip((x, values), operands[1:])]


split_p = Split(
    "split_equal_values",
    _split_impl,
    lambda table, x, of, general: [
        (x.shape[:-1], x.dtype if of == "eig" else real_dtype(x.dtype)),
        (x.shape, x.dtype),
    ],
    _split_tangent,
    transpose_rule=_split_transpose,
    multiple_results=True,
    sharding=dimensions.batch(2),
)
#: The transpose of `split_p`: from cotangents of the matrix, and of the diagonal unless it is not used.
join_p = General(
    "join_equal_values",
    _join_impl,
    lambda table, x, *values, of: (x.shape, numpy.result_type(x.dtype, *[v.dtype for v in values])),
    _join_tangent,
    transpose_rule=_join_transpose,
    sharding=dimensions.batch(2),
)


def _general_basis(n: int, side: int, dtype: numpy.dtype) -> numpy.ndarray:
    """Return a unitary matrix that is in no special position, always the same one."""
    re, im = numpy.random.default_rng([n, side]).normal(size=(2, n, n))
    return numpy.linalg.qr(re + 1j * im if dtype.kind == "c" else re)[0].astype(dtype)


def _basis_impl(
    table: numpy.ndarray, v: numpy.ndarray, *t: Any, of: str, side: int, general: bool, transposed: bool
) -> numpy.ndarray:
    tied, zeros = _tied(table, of)
    turned, out = tied.any(-1) | (zeros.any(-1) & (v.dtype.kind == "c")), numpy.array(v)
    for *stack, i in numpy.argwhere(turned & general).tolist():
        at = tuple(stack)
        block = numpy.union1d(numpy.flatnonzero(tied[(*at, i)]), [i])
        if block[0] == i:  # once for each block
            basis = _general_basis(len(block), side * int(zeros[(*at, i)].any()), v.dtype)
            out[at][:, block] = v[at][:, block] @ (basis.T if transposed else basis)
    return out


basis_p = Basis("basis_of_equal_values", _basis_impl)


# ---------------------------------------------------------------- singular values of 0


def _quotient_impl(d: numpy.ndarray, x: numpy.ndarray, turns: bool, transposed: bool) -> numpy.ndarray:
    zero = d == 0
    if not zero.any():
        return x / d
    zero, out = numpy.broadcast_to(zero, x.shape), x / numpy.where(zero, 1, d)
    out[zero] = 0
    counted = x - numpy.conjugate(numpy.swapaxes(x, -1, -2)) if turns else x
    checked = zero if transposed else zero & ~numpy.eye(x.shape[-2], x.shape[-1], dtype=bool) & turns
    wrong = checked & (numpy.abs(counted) > rounding_of(x) * _size(x))
    return _nan_where(wrong, out, f"svd: a singular value is 0, and this derivative {DEPENDS} {WAYS_OUT['svd']}")


def _quotient_tangent(out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value | None:
    terms = ([] if tangents[0] is None else [-out * tangents[0]]) + ([] if tangents[1] is None else [tangents[1]])
    return quotient_p.bind(primals[0], add_all(terms), **params)


#: x / d; 0 where d is 0. Of x that `turns` vectors of two values 0 against each other, the skew-Hermitian part must be
#: 0 there, else the result is NaN. For the transpose, all of x must be.
quotient_p = Scaling("quotient_or_nan", _quotient_impl, _quotient_tangent)


def _corner_impl(s: numpy.ndarray, t: numpy.ndarray, moved: bool, transposed: bool) -> numpy.ndarray:
    zero = _zero(s)
    wrong = moved & zero & ((t != 0) | zero.all(-1, keepdims=True))
    return _nan_where(
        wrong,
        numpy.zeros_like(t),
        "svd: the first derivative of a singular value at 0 is a convention, like that of abs. This derivative of it "
        "is NaN; np.sum(np.abs(x) ** 2) is smooth",
    )


def _corner_tangent(out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value | None:
    moved = [] if tangents[0] is None else [corner_p.bind(*primals, moved=True, transposed=False) * tangents[0]]
    moved += [] if tangents[1] is None else [corner_p.bind(primals[0], tangents[1], **params)]
    return add_all(moved)


#: 0 where singular values s have the tangents t. Where s has `moved`, it is NaN for values 0 whose tangent is not, and
#: if all are 0: the derivative of a convention.
corner_p = Scaling("corner_of_singular_values", _corner_impl, _corner_tangent, stack=1)
