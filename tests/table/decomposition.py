"""Rows of `minidiff/ops/decomposition.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.table.rows import Row, complex_, form, real, row


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


def part(function: Callable, i: int, see: Callable = lambda x: x, **options: Any) -> Callable:
    """One of several results, seen by what does not depend on the factors of vectors."""
    return lambda x: see(function(x, **options)[i])


def of_part(function: Callable, x: np.ndarray, note: str, f: Callable) -> Row:
    return row(function, x, f=lambda x, note: f(x), note=note)


def symmetric(x: Any) -> Any:
    return 0.5 * (x + np.conjugate(np.swapaxes(x, -1, -2)))


def of_hermitian(function: Callable) -> Callable:
    """What reads one triangle, as a function of the Hermitian part: differences and the rule speak of the same."""
    return lambda x: function(symmetric(x))


def projectors(v: Any) -> Any:
    """The projector on each column, weighted to tell them apart."""
    return np.einsum("...ik,...jk,k->...ij", v, np.conjugate(v), np.arange(1.0, v.shape[-1] + 1))


def moduli(v: Any) -> Any:
    return np.real(v * np.conjugate(v))


def paired(f: Callable) -> Callable:
    """Left and right vectors together: their factors cancel."""

    def g(x):
        u, s, vh = f(x)
        k = s.shape[-1]
        return np.einsum("...ik,...kj,k->...ij", u[..., :k], vh[..., :k, :], np.arange(1.0, k + 1))

    return g


def complement(u: Any, k: int) -> Any:
    """The projector on the columns after the first k."""
    return u[..., k:] @ np.conjugate(np.swapaxes(u[..., k:], -1, -2))


LA: Any = np.linalg
A, Z = spread(3, 3), spread_complex(3, 3)
H, C = hermitian(real), hermitian(complex_)
SVD_SHAPES = [(3, 3), (4, 2), (2, 3), (2, 3, 2)]
QR_SHAPES = [(3, 3), (4, 2), (2, 3), (2, 3, 2)]
NORM: list[dict] = [{}, {"axis": 0}, {"axis": (0, 1)}, {"keepdims": True}, {"ord": "nuc", "axis": (1, 0)}]
NORM += [
    {"ord": o, "axis": -1, "keepdims": k} for o, k in ((1, True), (2, False), (3, True), (0.5, False), (-2, False))
]
NORM += [{"ord": o, "axis": 1} for o in (np.inf, -np.inf)]
NORM += [{"ord": o} for o in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)]
NORM += [{"ord": o, "keepdims": True, "axis": (-1, 0)} for o in (1, 2, np.inf)]

DISCRETE: set = {LA.matrix_rank}

LINEAR = {LA.solve: [(1,)], LA.tensorsolve: [(1,)]}

ROWS = [
    *(
        row(LA.solve, make(*a), real(*b))
        for make in (spread, spread_complex)
        for a, b in (
            ((3, 3), (3,)),
            ((3, 3), (3, 2)),
            ((2, 3, 3), (3, 2)),
            ((3, 3), (2, 3, 1)),
            ((2, 2, 2), (3, 1, 2, 1)),
        )
    ),
    row(LA.solve, A, complex_(3)),
    row(LA.solve, real(0, 2, 2), real(2, 3)),
    *(row(LA.inv, x) for x in (A, Z, spread(2, 2, 2), spread(1, 1))),
    *(row(LA.det, x) for x in (A, Z, spread(2, 2, 2), spread(1, 1), spread(2, 1, 4, 4))),
    *(of_part(LA.slogdet, x, f"{i}", part(LA.slogdet, i)) for x in (A, -A, Z, spread_complex(2, 2, 2)) for i in (0, 1)),
    *(
        row(LA.cholesky, x, f=lambda x, upper: LA.cholesky(symmetric(x), upper=upper), upper=upper)
        for x in (definite(real), definite(complex_), definite(real, 2, 2), definite(real, 1))
        for upper in (False, True)
    ),
    *(
        of_part(LA.qr, make(*s), f"{mode}[{i}]", part(LA.qr, i, mode=mode))
        for make in (spread, spread_complex)
        for s in QR_SHAPES
        for mode in ("reduced", "complete")
        for i in (0, 1)
        if not (mode == "complete" and i == 0 and s[-2] > s[-1])
    ),
    *(of_part(LA.qr, spread(*s), "r", lambda x: LA.qr(x, mode="r")) for s in QR_SHAPES[:3]),
    *(
        of_part(LA.qr, make(4, 2), "complement", lambda x: complement(LA.qr(x, "complete").Q, 2))
        for make in (spread, spread_complex)
    ),
    *(
        of_part(LA.eigh, x, f"{i}{UPLO}", of_hermitian(part(LA.eigh, i, see, UPLO=UPLO)))
        for x in (H, C, hermitian(real, 2, 3), hermitian(complex_, 2, 2))
        for i, see, UPLO in ((0, np.sin, "L"), (1, projectors, "U"))
    ),
    of_part(LA.eigh, H, "vectors", of_hermitian(part(LA.eigh, 1))),
    *(row(LA.eigvalsh, x, f=of_hermitian(LA.eigvalsh)) for x in (H, C, hermitian(real, 2, 2))),
    row(LA.eigvalsh, H, f=of_hermitian(lambda x: LA.eigvalsh(x, "U"))),
    *(
        of_part(LA.eig, x, f"{i}", part(LA.eig, i, see))
        for x in (Z, spread_complex(2, 2, 2))
        for i, see in ((0, np.sin), (1, moduli), (1, projectors))
    ),
    *(
        of_part(LA.eig, np.array([[0.3, 2.0], [-1.5, 0.5]]), f"{i}", part(LA.eig, i, see))
        for i, see in ((0, np.sin), (1, moduli))
    ),
    *(row(LA.eigvals, x) for x in (Z, np.array([[0.3, 2.0], [-1.5, 0.5]]), spread_complex(2, 2, 2))),
    *(
        of_part(LA.svd, make(*s), f"{name}, full={full}", f)
        for make in (spread, spread_complex)
        for s in SVD_SHAPES
        for full in (True, False)
        for name, f in (
            ("s", part(LA.svd, 1, full_matrices=full)),
            ("u", part(LA.svd, 0, lambda u, s=s: projectors(u[..., : min(s[-2:])]), full_matrices=full)),
            ("uv", paired(lambda x, full=full: LA.svd(x, full_matrices=full))),
        )
    ),
    *(
        of_part(LA.svd, spread(*s), f"vectors {i}", part(LA.svd, i, full_matrices=False))
        for s in ((3, 2), (2, 3))
        for i in (0, 2)
    ),
    *(
        of_part(LA.svd, make(4, 2), "complement", part(LA.svd, 0, lambda u: complement(u, 2)))
        for make in (spread, spread_complex)
    ),
    of_part(LA.svd, real(3, 3), "hermitian", of_hermitian(paired(lambda x: LA.svd(x, hermitian=True)))),
    of_part(LA.svd, spread(2, 3), "no vectors", lambda x: LA.svd(x, compute_uv=False)),
    of_part(
        LA.svd, real(3, 3), "hermitian, no vectors", of_hermitian(lambda x: LA.svd(x, compute_uv=False, hermitian=True))
    ),
    *(row(LA.svdvals, x) for x in (A, Z, spread(2, 2, 3))),
    *(row(LA.pinv, make(*s)) for make in (spread, spread_complex) for s in SVD_SHAPES),
    row(LA.pinv, real(3, 3), f=of_hermitian(lambda x: LA.pinv(x, hermitian=True))),
    row(LA.pinv, spread(2, 3), rtol=1e-6),
    *(
        row(LA.lstsq, make(*a), real(*b), f=lambda x, y, i: LA.lstsq(x, y)[i], i=i)
        for make in (spread, spread_complex)
        for a, b, i in (
            ((4, 2), (4,), 0),
            ((4, 2), (4, 3), 0),
            ((2, 3), (2,), 0),
            ((4, 2), (4,), 1),
            ((4, 2), (4, 3), 1),
        )
    ),
    *(row(LA.cond, x, p=p) for x in (A, Z) for p in (None, 2, -2, "fro", 1, np.inf)),
    row(LA.cond, spread(2, 3, 2)),
    *(
        row(LA.matrix_rank, x, **options)
        for x in (A, real(3))
        for options in ({}, {"tol": 1.5}, {"rtol": 0.6})[: 4 - x.ndim]
    ),
    row(LA.matrix_rank, H, hermitian=True),
    row(LA.matrix_rank, spread(2, 3, 2)),
    *(row(LA.matrix_power, x, n=n) for x in (A, Z) for n in (0, 1, 2, 3, 5, -1, -2)),
    row(LA.matrix_power, spread(2, 2, 2), n=3),
    row(LA.tensorinv, spread(6, 6).reshape(2, 3, 3, 2), ind=2),
    row(LA.tensorinv, spread(6, 6).reshape(6, 3, 2), ind=1),
    row(LA.tensorsolve, spread(6, 6).reshape(2, 3, 3, 2), real(2, 3)),
    row(LA.tensorsolve, spread(6, 6).reshape(2, 6, 3), real(6), axes=(0, 2)),
    *(row(LA.norm, spread(3, 2), **options) for options in NORM),
    *(row(LA.norm, spread_complex(3, 2), **options) for options in (*NORM[:5], *NORM[5:8], *NORM[10:17])),
    *(row(LA.norm, real(3), ord=o) for o in (None, 2, 1, np.inf, 3)),
    *(row(LA.norm, real(*s)) for s in ((), (2, 2, 2))),
    *(row(LA.vector_norm, real(2, 3, 2), **o) for o in ({}, {"axis": (0, 2)}, {"axis": 1, "ord": 3, "keepdims": True})),
    *(row(LA.matrix_norm, spread(2, 3, 2), **o) for o in ({}, {"ord": 2, "keepdims": True}, {"ord": "nuc"})),
    form("integers", "det", lambda x: LA.det(np.outer(np.arange(2), x) + np.eye(2)), real(2)),
    form("integers", "solve", lambda x: LA.solve(np.array([[2, 1], [0, 1]]), x), real(2)),
]
