"""Factorize a matrix once for all operations that need its factors: solve, inv, slogdet and det.

NumPy's functions each factorize their matrix anew, since NumPy has no function that returns the factors. LAPACK has,
and NumPy has loaded it, so it is called there. Where that is not possible (as on Windows), programs stay unchanged.

The operations here are in compiled programs alone: nothing differentiates or vectorizes them.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy
from numpy.linalg import LinAlgError

from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import Var, typeof
from minidiff.ops.decomposition import inv_p, inverse_p, solve_p
from minidiff.ops.dimensions import gather
from minidiff.ops.norms import det_p, slogdet_p
from minidiff.ops.shape import transpose_p

#: Smaller matrices stay with NumPy, which factorizes them in less time than the calls from Python save.
MIN_ROWS = 128

# ---------------------------------------------------------------- LAPACK

#: How LAPACK's functions are named in NumPy's own wheels, in other builds, and in Apple's library.
NAMES = ("scipy_{}_64_", "scipy_{}_", "{}_64_", "{}_", "{}$NEWLAPACK$ILP64", "{}$NEWLAPACK")

#: The letter with which they begin, for each dtype.
LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}


class Lapack(NamedTuple):
    """The LAPACK that NumPy calls: how its functions are named, and the dtype of their integers."""

    library: ctypes.CDLL
    names: str
    integer: str

    def call(self, name: str, dtype: numpy.dtype, *args: bytes | int | numpy.ndarray) -> None:
        """Call a function for a dtype. Its last argument, the integer `info`, is not returned."""
        arrays = [numpy.array(a, self.integer) if isinstance(a, int) else a for a in (*args, 0)]
        lengths = [ctypes.c_size_t(len(a)) for a in args if isinstance(a, bytes)]  # Fortran has those of strings last
        function = getattr(self.library, self.names.format(LETTERS[dtype.char] + name))
        function(*[a if isinstance(a, bytes) else a.ctypes for a in arrays], *lengths)

    def factorize(self, x: numpy.ndarray) -> list[numpy.ndarray]:
        """Return the triangular factors of a matrix, in one, and which rows change places, counted from 1."""
        lu, n = numpy.array(x, x.dtype.char, order="F"), len(x)
        pivots = numpy.zeros(n, self.integer)
        self.call("getrf", lu.dtype, n, n, lu, n, pivots)
        return [lu, pivots]


@functools.cache
def find_lapack(path: str | None = None) -> Lapack | None:
    """Return the LAPACK that the extension module at `path`, by default NumPy's, is linked with, or None."""
    try:
        library = ctypes.CDLL(path or numpy.linalg._umath_linalg.__file__)
    except (AttributeError, OSError):
        return None
    for names in NAMES:
        if hasattr(library, names.format("dgetrf")):
            lu, pivots = Lapack(library, names, "i8").factorize(numpy.eye(2)[::-1])
            # A function that takes integers of 32 bits reads those of 64 correctly, but writes two in place of one.
            integer = {(2, 2): "i8", ((2 << 32) + 2, 0): "i4"}.get((*pivots,))
            return Lapack(library, names, integer) if integer and (lu == numpy.eye(2)).all() else None
    return None


# ---------------------------------------------------------------- operations


def _lapack() -> Lapack:
    """NumPy's LAPACK, which programs with these operations have found."""
    lapack = find_lapack()
    assert lapack is not None
    return lapack


def _check(lu: numpy.ndarray) -> None:
    if not lu.diagonal().all():
        raise LinAlgError("Singular matrix")


def _solve(lu: numpy.ndarray, pivots: numpy.ndarray, b: numpy.ndarray, transposed: bool) -> numpy.ndarray:
    _check(lu)
    x, n = numpy.array(b, lu.dtype, order="F"), len(lu)
    _lapack().call("getrs", lu.dtype, b"T" if transposed else b"N", n, x.shape[1], lu, n, pivots, x, n)
    return x


def _inverse(lu: numpy.ndarray, pivots: numpy.ndarray, transposed: bool) -> numpy.ndarray:
    """Invert by 4/3 n³ operations; NumPy solves for the n columns of the identity by 2 n³."""
    _check(lu)
    x, n = lu.copy(order="F"), len(lu)
    space = numpy.empty(64 * n, lu.dtype)  # for blocks of 64 columns
    _lapack().call("getri", lu.dtype, n, x, n, pivots, space, space.size)
    return x.T if transposed else x


def _inverse_or_nan(lu: numpy.ndarray, pivots: numpy.ndarray, transposed: bool) -> numpy.ndarray:
    return _inverse(lu, pivots, transposed) if lu.diagonal().all() else numpy.full_like(lu, numpy.nan)


def _slogdet(lu: numpy.ndarray, pivots: numpy.ndarray, transposed: bool) -> list[Any]:
    d = lu.diagonal()
    sizes = numpy.absolute(d)
    if not d.all():
        return [d.dtype.type(0), sizes.dtype.type(-numpy.inf)]
    signs = d / sizes if d.dtype.kind == "c" else numpy.where(d < 0, -1, 1)  # 1 for NaN, as NumPy has it
    exchanges = numpy.count_nonzero(pivots != numpy.arange(1, len(d) + 1))
    return [d.dtype.type((-1) ** exchanges * signs.prod()), numpy.log(sizes).sum()]


def _det(lu: numpy.ndarray, pivots: numpy.ndarray, transposed: bool) -> Any:
    sign, logabsdet = _slogdet(lu, pivots, transposed)
    return sign * numpy.exp(logabsdet)


lu_p = Primitive(
    "lu",
    lambda x: _lapack().factorize(x),
    lambda x: [(x.shape, x.dtype), (x.shape[:1], numpy.dtype(_lapack().integer))],
    multiple_results=True,
    sharding=gather,
)


def _from_lu(p: Primitive, impl: Callable) -> Primitive:
    """Declare an operation of a matrix that is factorized, or of its transpose."""
    shape_rule = lambda lu, pivots, *operands, transposed: p.shape_rule(lu, *operands)  # noqa: E731
    return Primitive(f"lu_{p.name}", impl, shape_rule, multiple_results=p.multiple_results, sharding=gather)


#: Operation of a matrix -> the same of its factors.
FROM_LU: dict[Primitive, Primitive] = {
    solve_p: _from_lu(solve_p, _solve),
    inv_p: _from_lu(inv_p, _inverse),
    inverse_p: _from_lu(inverse_p, _inverse_or_nan),
    slogdet_p: _from_lu(slogdet_p, _slogdet),
    det_p: _from_lu(det_p, _det),
}

# ---------------------------------------------------------------- tapes


def share_factorizations(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Factorize a matrix once for all operations that would factorize it, or its transpose.

    Values in `excluded` may not be plain arrays.
    """
    transposed: dict[Var, Atom] = {e.outputs[0]: e.inputs[0] for e in tape.equations if e.primitive is transpose_p}
    matrices: dict[Equation, Atom] = {}
    for eqn in tape.equations:
        if eqn.primitive in FROM_LU and _fits(eqn, excluded):
            a = eqn.inputs[0]
            matrices[eqn] = transposed.get(a, a) if isinstance(a, Var) else a
    count = Counter(map(id, matrices.values()))
    if max(count.values(), default=0) < 2 or find_lapack() is None:
        return tape
    equations: list[Equation] = []
    factors: dict[int, list[Var]] = {}
    for eqn in tape.equations:
        a = matrices.get(eqn)
        if count[id(a)] > 1:
            if id(a) not in factors:
                factors[id(a)] = [Var(t) for t in lu_p.typecheck([typeof(a)], {})]
                equations.append(Equation(lu_p, [a], {}, factors[id(a)], eqn.source))
            operands, params = [*factors[id(a)], *eqn.inputs[1:]], {"transposed": eqn.inputs[0] is not a}
            eqn = Equation(FROM_LU[eqn.primitive], operands, params, eqn.outputs, eqn.source)
        equations.append(eqn)
    return prune_tape(with_equations(tape, equations))


def _fits(eqn: Equation, excluded: Container[Var]) -> bool:
    """Return True if LAPACK computes an operation unchanged: on one matrix, in the dtype of the matrix."""
    types, out = [*map(typeof, eqn.inputs)], eqn.outputs[0]
    return (
        out not in excluded
        and all(t.ndim == 2 and t.dtype.char in LETTERS for t in types)
        and types[0].dtype == out.type.dtype
        and types[0].shape[0] >= MIN_ROWS
    )
