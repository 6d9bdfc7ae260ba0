"""Rows of `minidiff/ops/linalg.py`."""

import operator
import warnings
from typing import Any

import numpy as np

from tests.table.rows import NUMPY, Row, complex_, distinct, form, over, product, real, row, sequence

MATMUL = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((3,), (5, 3, 2))]
MATMUL += [((5, 2, 3), (3,)), ((2, 3), (5, 3, 4)), ((4, 1, 2, 3), (5, 3, 1)), ((2, 0), (0, 3)), ((2, 4, 3), (3, 2))]
DOT = [((), (2, 3)), ((3,), ()), ((3,), (3,)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((3,), (5, 3, 2))]
DOT += [((2, 4, 3), (5, 3, 2)), ((5, 2, 3), (3,)), ((2, 2, 0), (0, 3))]
INNER = [((), (2,)), ((3,), (3,)), ((2, 3), (4, 3)), ((2, 3), (3,)), ((2, 2, 3), (4, 3))]
MATVEC = [((2, 3), (3,)), ((5, 2, 3), (3,)), ((1, 2, 3), (4, 3))]
AXES: list[Any] = [1, 0, ([1, 0], [0, 1]), (1, 0), ((0,), (-1,)), ([], [])]
#: Subscripts and shapes. Random ones are in `tests/minidiff/ops/test_einsum.py`.
EINSUM: list[tuple] = [("ij,jk->ik", (2, 3), (3, 4)), ("ba,cb", (2, 3), (4, 2)), ("i,i", (3,), (3,)), ("->", ())]
EINSUM += [("ji", (2, 3)), ("ii->i", (3, 3)), ("iji->j", (2, 3, 2)), ("iii->i", (2, 2, 2)), ("i,j->ji", (2,), (3,))]
EINSUM += [("...ij,...jk->...ik", (4, 2, 3), (1, 3, 2)), ("...i,j...->...", (2, 3), (2, 2)), ("i...,...", (2, 1), (3,))]
EINSUM += [("bi,bi->b", (2, 3), (2, 3)), ("ij,ij->ij", (2, 3), (2, 3)), ("ij,ij->j", (1, 3), (2, 3))]
EINSUM += [(",i->i", (), (2,)), ("i,ij,j", (2,), (2, 3), (3,)), ("iij,jk->ki", (2, 2, 3), (3, 2))]
EINSUM += [("ij,ik,il->jkl", (2, 2), (2, 1), (2, 2)), ("ij,kl->", (2, 1), (2, 2)), ("ij,j->i", (2, 0), (0,))]
EINSUM += [("ab, bc ,ca", *[(2, 2)] * 3), ("bhqd,bkhd->bhqk", (2, 2, 3, 2), (2, 3, 2, 2))]
EINSUM += [("Zz,zA->ZA", (2, 3), (3, 2)), ("a,b,c,d->dbca", *[(2,)] * 4)]
PATHS = (False, "optimal", ["einsum_path", (1, 2), (0, 1)])
CONVOLVE = [(m, n, k) for m in ("full", "same", "valid") for n, k in ((5, 3), (2, 4), (4, 4), (5, 4))]


def einsum(*xs: Any, s: str, **options: Any) -> Any:
    return np.einsum(s, *xs, **options)


def cross(*args: Any, **options: Any) -> Any:
    """NumPy warns of vectors of two elements; since 2.5 it has no product of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.cross(*args, **options)


def _cross() -> list[Row]:
    shapes = [((3,), (3,)), *[((2,), (3,)), ((3,), (2,)), ((2,), (2,))] * (NUMPY < (2, 5))]
    return [row(np.cross, real(*a), real(*b), f=cross) for a, b in shapes]


def _pairs(function: Any, shapes: list, make: Any = real) -> list[Row]:
    return [row(function, make(*a), make(*b)) for a, b in shapes]


def _gufuncs() -> list[Row]:
    if not hasattr(np, "matvec"):  # of NumPy 2.2
        return []
    return [r for k in (real, complex_) for r in (*_pairs(np.matvec, MATVEC, k), *_pairs(np.vecmat, VECMAT, k))]


VECMAT = [((2,), (2, 3)), ((5, 2), (2, 3)), ((1, 2), (4, 2, 3))]

DISCRETE: set = {np.einsum_path}

LINEAR = {f: [(0,), (1,)] for f in (np.matmul, np.dot, np.inner, np.outer, np.tensordot, np.vdot, np.cross)}
LINEAR |= {f: [(0,), (1,)] for f in (np.vecdot, np.convolve, np.correlate)}
LINEAR |= dict.fromkeys([np.trace, np.linalg.trace, np.linalg.diagonal, np.linalg.matrix_transpose])

ROWS = [
    *(r for f, shapes in ((np.matmul, MATMUL), (np.dot, DOT), (np.inner, INNER)) for r in _pairs(f, shapes)),
    *(row(np.matmul, complex_(*a), complex_(*b)) for a, b in MATMUL[:5]),
    row(np.matmul, real(2, 3), complex_(3, 2)),
    row(np.linalg.matmul, real(2, 3), real(3, 2)),
    form("operator", "matmul", operator.matmul, real(2, 3), real(3)),
    form("operator", "ndarray @", lambda x: np.ones((4, 2)) @ x, real(2, 3)),
    form("method", "dot", operator.methodcaller("dot", np.ones(3)), distinct(2, 3)),
    form("integers", "dot", lambda x: np.dot(np.arange(6).reshape(2, 3), x), real(3)),
    form("integers", "inner", lambda x: np.inner(np.arange(6).reshape(2, 3), x), real(3)),
    form("integers", "bool", lambda x: x @ np.array([True, False, True]), real(2, 3)),
    row(np.inner, complex_(2, 3), complex_(3)),
    *_pairs(np.outer, [((2,), (3,)), ((2, 2), (3,)), ((), (2,)), ((0,), (2,))]),
    row(np.linalg.outer, complex_(2), complex_(3)),
    *(row(np.vdot, make(*s), make(*s)) for make in (real, complex_) for s in ((3,), (2, 3), ())),
    *(row(np.vdot, *a) for a in ((real(3), complex_(3)), (complex_(3), real(3)))),
    *(row(np.vecdot, make(2, 3), make(3)) for make in (real, complex_)),
    row(np.vecdot, complex_(3, 2), complex_(3, 1), axis=0),
    row(np.linalg.vecdot, complex_(3, 2), complex_(3, 2), axis=-2),
    *_gufuncs(),
    *(row(np.tensordot, real(2, 3), real(3, 2), axes=a) for a in AXES),
    row(np.tensordot, real(2, 3), real(2, 3, 2), axes=2),
    row(np.tensordot, complex_(2, 3, 4), complex_(4, 2), axes=([0, -1], [1, 0])),
    row(np.linalg.tensordot, real(2, 3), real(3, 2), axes=1),
    *(row(np.einsum, *(real(*z) for z in shapes), f=einsum, s=s) for s, *shapes in EINSUM),
    *product([np.einsum], [(complex_(2, 3), complex_(3, 2))], over(s=("ij,jk->ki", "ij,ji", "ij,kl->jk")), einsum),
    row(np.einsum, real(2, 3), complex_(3, 3), f=einsum, s="ij,jj->i"),
    *product([np.einsum], [(real(2, 3), real(3, 4), real(4))], over(s=("ij,jk,k->i",), optimize=PATHS), einsum),
    row(np.einsum, real(2, 3), real(3, 2), f=lambda x, y: np.einsum(x, [0, 1], y, [1, 2], [2, 0])),
    row(np.einsum, real(2, 3, 2), real(3, 4), f=lambda x, y: np.einsum(x, [26, ..., 0], y, [..., 1])),
    row(np.einsum, real(2, 3), f=lambda x: np.einsum("ij,j", x, np.arange(3))),
    row(np.einsum, real(3), f=lambda x: np.einsum("i,i,i->i", x, x, x)),
    *(row(np.trace, real(3, 4), offset=k) for k in (0, 1, -1, -2, 5)),
    row(np.trace, real(2, 3, 4), offset=1, axis1=-1, axis2=0),
    row(np.trace, complex_(3, 3)),
    row(np.linalg.trace, real(2, 3, 3), offset=1),
    row(np.linalg.diagonal, real(2, 4, 3), offset=-1),
    *(row(np.linalg.matrix_transpose, real(*s)) for s in ((2, 3), (2, 3, 4))),
    form("method", "trace", operator.methodcaller("trace", 1), real(3, 3)),
    *_cross(),
    row(np.cross, complex_(4, 3), complex_(3)),
    row(np.cross, real(3, 4), real(4, 3), axisa=0, axisb=1, axisc=0),
    row(np.cross, real(3, 2), real(3, 2), axis=0),
    row(np.linalg.cross, real(2, 3), real(3)),
    sequence(np.linalg.multi_dot, real(2, 3), real(3, 4), real(4, 1), real(1, 3)),
    sequence(np.linalg.multi_dot, real(2), real(2, 3), real(3)),
    sequence(np.linalg.multi_dot, complex_(2, 3), real(3)),
    sequence(np.linalg.multi_dot, real(2, 3, 4), real(3, 4, 2)),
    *(row(np.convolve, real(n), real(k), mode=m) for m, n, k in CONVOLVE),
    *(row(np.correlate, real(n), real(k), mode=m) for m, n, k in CONVOLVE),
    *(row(f, complex_(5), complex_(3), mode=m) for f in (np.convolve, np.correlate) for m in ("same", "valid")),
    row(np.einsum_path, real(2, 3), f=lambda x: len(np.einsum_path("ij,jk", x, x.T)[0]) + 0 * (x > 9).sum()),
]
