"""Rows of `minidiff/ops/decomposition.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.table.rows import NUMPY, Row, complex_, form, over, product, real, row


def spread(*shape: int) -> np.ndarray:
    """Matrices whose singular values are well apart, and far from 0."""
    *batch, m, n = shape
    u, v = (np.linalg.qr(real(*batch, k, k))[0] for k in (m, n))
    s = (np.eye(m, n) * np.arange(1.0, max(m, n) + 1)[:n]) + 0.1 * real(*batch, 1, 1)
    return u @ s @ v


def spread_complex(*shape: int) -> np.ndarray:
    return spread(*shape) + 0.3j * real(*shape)


def hermitian(make: Callable, n: int = 3, *batch: int) -> np.ndarray:
    x = make(*batch, n, n)
    return x + np.conjugate(np.swapaxes(x, -1, -2)) + np.diag(4.0 * np.arange(n))


def definite(make: Callable, n: int = 3, *batch: int) -> np.ndarray:
    x = make(*batch, n, n)
    return x @ np.conjugate(np.swapaxes(x, -1, -2)) + np.eye(n)


def seen(function: Callable, x: np.ndarray, note: str, f: Callable) -> Row:
    """A row whose results are several, seen through `f`."""
    return row(function, x, f=lambda x, note: f(x), note=note)


def flat(*results: Any) -> Any:
    return np.concatenate([np.ravel(y) for y in results])


def symmetric(x: Any) -> Any:
    return 0.5 * (x + np.conjugate(np.swapaxes(x, -1, -2)))


def of_hermitian(function: Callable) -> Callable:
    """Return a function of the Hermitian part for one that reads one triangle, so that differences match the rule."""
    return lambda x: function(symmetric(x))


def projectors(v: Any) -> Any:
    """The projector on each column, weighted to tell them apart."""
    return np.einsum("...ik,...jk,k->...ij", v, np.conjugate(v), np.arange(1.0, v.shape[-1] + 1))


def of_eigenvectors(f: Callable) -> Callable:
    """Return a function of eigenvectors that is independent of their factors; sin separates the eigenvalues."""

    def g(x):
        w, v = f(x)
        return flat(np.sin(w), projectors(v))

    return g


def of_singular_vectors(f: Callable) -> Callable:
    """The left vectors by themselves, and together with the right ones: their factors cancel."""

    def g(x):
        u, s, vh = f(x)
        k = s.shape[-1]
        pairs = np.einsum("...ik,...kj,k->...ij", u[..., :k], vh[..., :k, :], np.arange(1.0, k + 1))
        return flat(s, projectors(u[..., :k]), pairs)

    return g


def complement(u: Any, k: int) -> Any:
    """The projector on the columns after the first k."""
    return u[..., k:] @ np.conjugate(np.swapaxes(u[..., k:], -1, -2))


LA: Any = np.linalg
A, Z = spread(3, 3), spread_complex(3, 3)
ROTATION = np.array([[0.3, 2.0], [-1.5, 0.5]])  # its eigenvalues are complex
H, C = hermitian(real), hermitian(complex_)
DEFINITE = [definite(real), definite(complex_), definite(real, 2, 2), definite(real, 1)]
SHAPES = [(3, 3), (4, 2), (2, 3), (2, 3, 2)]
RECTANGLES = [spread(*z) for z in SHAPES] + [spread_complex(*z) for z in SHAPES[1:3]]
MAKE = (spread, spread_complex)
LEAST = [(make(4, 2), real(*b)) for make in MAKE for b in ((4,), (4, 3))]
NORM: list[dict] = [{}, {"axis": 0}, {"axis": (0, 1)}, {"keepdims": True}, {"ord": "nuc", "axis": (1, 0)}]
NORM += over(ord=(1, 3), axis=(-1,), keepdims=(True,)) + over(ord=(2, 0.5, -2), axis=(-1,))
NORM += [{"ord": o, "axis": 1} for o in (np.inf, -np.inf)]
NORM += [{"ord": o} for o in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)]
NORM += [{"ord": o, "keepdims": True, "axis": (-1, 0)} for o in (1, 2, np.inf)]

DISCRETE: set = {LA.matrix_rank}

LINEAR = {LA.solve: [(1,)], LA.tensorsolve: [(1,)]}

ROWS = [
    *product([LA.solve], [(x, b) for x in (A, Z) for b in (real(3), real(3, 2), real(2, 3, 1), complex_(3))]),
    *product([LA.solve], [(spread(2, 3, 3), real(3, 2)), (spread(2, 2, 2), real(3, 1, 2, 1))]),
    row(LA.solve, real(0, 2, 2), real(2, 3)),
    *(row(LA.inv, x) for x in (A, Z, spread(2, 2, 2), spread(1, 1))),
    *(row(LA.det, x) for x in (A, Z, spread(2, 2, 2), spread(1, 1), spread(2, 1, 4, 4))),
    *(seen(LA.slogdet, x, "both", lambda x: flat(*LA.slogdet(x))) for x in (A, -A, Z, spread_complex(2, 2, 2))),
    *product([LA.cholesky], DEFINITE, over(upper=(False, True)), lambda x, **o: LA.cholesky(symmetric(x), **o)),
    *(seen(LA.qr, x, "reduced", lambda x: flat(*LA.qr(x))) for x in (*RECTANGLES, Z)),
    *(seen(LA.qr, x, "r", lambda x: LA.qr(x, mode="r")) for x in RECTANGLES[:3]),
    *(seen(LA.qr, x, "complete r", lambda x: LA.qr(x, "complete").R) for x in RECTANGLES[1:5]),
    *(seen(LA.qr, RECTANGLES[i], "rest", lambda x: complement(LA.qr(x, "complete").Q, 2)) for i in (1, 4)),
    *(
        seen(LA.eigh, x, UPLO, of_hermitian(of_eigenvectors(lambda x, UPLO=UPLO: LA.eigh(x, UPLO))))
        for x, UPLO in ((H, "L"), (H, "U"), (C, "L"), (C, "U"), (hermitian(complex_, 2, 2), "L"))
    ),
    seen(LA.eigh, H, "vectors", of_hermitian(lambda x: LA.eigh(x)[1])),
    *(row(LA.eigvalsh, x, f=of_hermitian(LA.eigvalsh)) for x in (H, C, hermitian(real, 2, 2))),
    row(LA.eigvalsh, H, f=of_hermitian(lambda x: LA.eigvalsh(x, "U"))),
    *(seen(LA.eig, x, "both", of_eigenvectors(LA.eig)) for x in (Z, spread_complex(2, 2, 2), ROTATION)),
    *(row(LA.eigvals, x) for x in (Z, ROTATION)),
    *(
        seen(LA.svd, x, f"full={full}", of_singular_vectors(lambda x, full=full: LA.svd(x, full)))
        for x, full in (*zip(RECTANGLES, [True] * 6), *zip(RECTANGLES[1:], [False] * 5), (Z, False))
    ),
    *(seen(LA.svd, RECTANGLES[i], "vectors", lambda x: flat(*LA.svd(x, full_matrices=False))) for i in (1, 2)),
    *(seen(LA.svd, RECTANGLES[i], "rest", lambda x: complement(LA.svd(x)[0], 2)) for i in (1, 4)),
    seen(LA.svd, H, "hermitian", of_hermitian(of_singular_vectors(lambda x: LA.svd(x, hermitian=True)))),
    seen(LA.svd, RECTANGLES[2], "no vectors", lambda x: LA.svd(x, compute_uv=False)),
    seen(LA.svd, H, "hermitian, no vectors", of_hermitian(lambda x: LA.svd(x, compute_uv=False, hermitian=True))),
    *(row(LA.svdvals, x) for x in (A, Z, spread(2, 2, 3))),
    *(row(LA.pinv, x) for x in RECTANGLES),
    row(LA.pinv, real(3, 3), f=of_hermitian(lambda x: LA.pinv(x, hermitian=True))),
    row(LA.pinv, spread(2, 3), rtol=1e-6),
    *product([LA.lstsq], LEAST, over(i=(0, 1)), lambda x, y, i: LA.lstsq(x, y)[i]),
    *product([LA.lstsq], [(make(2, 3), real(2)) for make in MAKE], over(i=(0,)), lambda x, y, i: LA.lstsq(x, y)[i]),
    *(row(LA.cond, x, p=p) for x, p in ((A, None), (A, -2), (Z, 2), (A, 1))),
    *[row(LA.cond, Z, p="fro")] * (NUMPY > (2, 2)),  # whose type was that of Z
    row(LA.cond, spread(2, 3, 2)),
    *product([LA.matrix_rank], [A, real(3)], [{}, {"tol": 1.5}]),
    row(LA.matrix_rank, A, rtol=0.6),
    row(LA.matrix_rank, H, hermitian=True),
    row(LA.matrix_rank, spread(2, 3, 2)),
    *(row(LA.matrix_power, A, n=n) for n in (0, 1, 2, 5, -1)),
    row(LA.matrix_power, Z, n=-3),
    row(LA.matrix_power, spread(2, 2, 2), n=3),
    row(LA.tensorinv, spread(6, 6).reshape(2, 3, 3, 2), ind=2),
    row(LA.tensorinv, spread(6, 6).reshape(6, 3, 2), ind=1),
    row(LA.tensorsolve, spread(6, 6).reshape(2, 3, 3, 2), real(2, 3)),
    row(LA.tensorsolve, spread(6, 6).reshape(2, 6, 3), real(6), axes=(0, 2)),
    *(row(LA.norm, spread(3, 2), **options) for options in NORM),
    *(row(LA.norm, spread_complex(3, 2), **options) for options in (*NORM[:5], *NORM[7:8], *NORM[13:15])),
    *(row(LA.norm, real(3), ord=o) for o in (None, 2, 1, np.inf, 3)),
    *(row(LA.norm, real(*s)) for s in ((), (2, 2, 2))),
    *(row(LA.vector_norm, real(2, 3, 2), **o) for o in ({}, {"axis": (0, 2)}, {"axis": 1, "ord": 3, "keepdims": True})),
    *(row(LA.matrix_norm, spread(2, 3, 2), **o) for o in ({}, {"ord": 2, "keepdims": True}, {"ord": "nuc"})),
    form("integers", "det", lambda x: LA.det(np.outer(np.arange(2), x) + np.eye(2)), real(2)),
    form("integers", "solve", lambda x: LA.solve(np.array([[2, 1], [0, 1]]), x), real(2)),
]
