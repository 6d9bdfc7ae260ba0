"""Rows of `minidiff/ops/polynomial.py`."""

from typing import Any

import numpy as np

from tests.table.rows import complex_, form, over, product, real, row

LINEAR = {np.polyadd: None, np.polysub: None, np.polymul: [(0,), (1,)], np.polyder: None, np.polyval: [(0,)]}


def quotient(u: Any, v: Any) -> Any:
    return np.polydiv(u, v)[0]


def remainder(u: Any, v: Any) -> Any:
    return np.polydiv(u, v)[1]


def covariance(x: Any, y: Any, **options: Any) -> Any:
    return np.polyfit(x, y, 1, **options)[1]


ROWS = [
    row(np.polyfit, real(6), real(6), f=np.polyfit, deg=2),
    row(np.polyfit, real(5), real(5, 2), f=np.polyfit, deg=1, w=np.arange(1.0, 6.0)),
    *product([np.polyfit], [(real(5), real(5))], over(cov=("unscaled", True)), covariance),
    *(row(np.polyval, make(3), make(*s)) for make in (real, complex_) for s in ((), (2,), (2, 2))),
    *(row(np.polyval, real(3, 2), real(*s)) for s in ((), (2,), (4, 2))),
    form("polynomials of lists", "polyval", lambda a, x: np.polyval([a, 2.0, a], x), real(), real(2)),
    form("polynomials of lists", "polyadd", lambda a: np.polyadd([1, 2], a), real(3)),
    *(row(f, real(n), real(m)) for f in (np.polyadd, np.polysub, np.polymul) for n, m in ((3, 3), (2, 4), (4, 1))),
    row(np.polymul, complex_(2), complex_(3)),
    *(row(np.polydiv, real(n), real(m), f=quotient) for n, m in ((4, 2), (3, 3), (3, 1), (1, 2))),
    *(row(np.polydiv, real(n), real(m), f=remainder) for n, m in ((4, 2), (5, 3), (1, 2))),
    *(row(np.polyder, real(4), m=m) for m in (0, 1, 3)),
    *(row(np.polyint, real(3), m=m) for m in (1, 2)),
    row(np.polyint, real(2), real(2), f=lambda p, k: np.polyint(p, 2, k)),
    *(row(np.poly, x) for x in (real(1), real(3), complex_(2))),
    *(row(np.roots, p) for p in (np.array([1.0, 0.3, 2.0]), np.array([2.0, 1.0, 3.0, 1.5]), complex_(3))),
]
