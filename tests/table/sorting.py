"""Rows of `minidiff/ops/sorting.py`, and of histograms. Sets are among its functions of values."""

import operator

import numpy as np

import minidiff as md
from tests.table.rows import Row, complex_, distinct, form, real, row, sequence

AXES: list[dict] = [{}, {"axis": 0}, {"axis": -2}, {"axis": None}]
TIES = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 2.0]])
EDGES = np.array([-1.0, 0.0, 0.5, 2.0])

METHODS: list[tuple[str, tuple]] = [("argsort", ()), ("argsort", (0,)), ("argsort", (None,)), ("argpartition", (1,))]

DISCRETE = {np.argsort, np.argpartition, np.lexsort, np.searchsorted, np.digitize, np.isin, "order"}

LINEAR = {np.bincount: [(0,)]}

#: They need the values of their arguments, and have no place on a tape.
CONCRETE = {np.unique, np.unique_values, np.unique_counts, np.unique_inverse, np.unique_all}
CONCRETE |= {np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d}


def _weighted(function, x, w, **options) -> Row:
    return row(function, w, f=lambda w, **options: function(x, weights=w, **options), **options)


def _histogram(part: int, *args, **options) -> Row:
    """One of the two results."""
    return row(np.histogram, *args, f=lambda *xs, part, **o: np.histogram(*xs, **o)[part], part=part, **options)


ROWS = [
    *(row(np.sort, distinct(2, 3, 4), **o) for o in (*AXES, {"kind": "stable"}, {"stable": True, "axis": 1})),
    *(row(np.sort, distinct(*s)) for s in ((1,), (0, 3), (3, 0), (5,))),
    row(np.sort, complex_(2, 3)),
    *(row(np.argsort, distinct(2, 3, 4), **o) for o in (*AXES, {"kind": "mergesort", "axis": 1})),
    *(row(np.argsort, TIES, axis=a, stable=True) for a in (0, 1)),
    row(np.sort_complex, real(2, 3)),
    row(np.sort_complex, complex_(4)),
    *(row(np.partition, distinct(5), kth=k) for k in (0, 2, -1, (1, 3))),
    *(row(np.partition, distinct(3, 2), kth=1, axis=a) for a in (0, -2, None)),
    *(row(np.argpartition, distinct(3, 4), kth=(0, 1), axis=a) for a in (0, -1, None)),
    sequence(np.lexsort, np.array([2.0, 1.0, 2.0, 0.0]), np.array([1.0, 1.0, 0.0, 1.0])),
    sequence(np.lexsort, TIES, TIES[::-1], axis=0),
    row(np.lexsort, TIES),
    row(np.lexsort, TIES[0]),
    *(row(np.searchsorted, EDGES, *v, side=s) for s in ("left", "right") for v in ([real(2, 3)], [0.5], [EDGES])),
    row(np.searchsorted, EDGES[[2, 0, 3, 1]], real(3), f=lambda a, v: np.searchsorted(a, v, sorter=np.argsort(a))),
    *(row(np.digitize, 2 * real(2, 3), EDGES[::s], right=r) for s in (1, -1) for r in (True, False)),
    *(row(np.isin, TIES, np.array([[0.0], [2.0]]), **o) for o in ({}, {"invert": True}, {"kind": "sort"})),
    row(np.isin, real(), EDGES),
    _weighted(np.bincount, np.array([1, 3, 1, 0]), real(4)),
    _weighted(np.bincount, np.array([1, 3, 1, 0]), real(4), minlength=6),
    *(row(np.histogram_bin_edges, distinct(4), **o) for o in ({}, {"bins": 3}, {"bins": 2, "range": (0.0, 1.5)})),
    *(_histogram(1, distinct(2, 3), **o) for o in ({}, {"bins": 3})),
    *(_histogram(0, distinct(2, 3), bins=b, density=True) for b in ([0.0, 0.5, 1.5], np.array([-1.0, 0.4, 2.0]))),
    _histogram(0, distinct(2, 3), density=True, bins=3, range=(0.0, 1.0)),
    form("weighted histogram", "bins", lambda w: np.histogram(EDGES, 3, weights=w)[0], real(4)),
    form("weighted histogram", "density", lambda w: np.histogram(EDGES, 3, weights=w * w, density=True)[0], real(4)),
    *(form("order", f"histogram {b}", lambda x, b=b: np.histogram(x, b)[0], distinct(7)) for b in (4, [0.0, 0.9, 1.2])),
    *(form("order", f"{m}{a}", operator.methodcaller(m, *a), distinct(2, 3)) for m, a in METHODS),
    form("order", "searchsorted", lambda a, v: a.searchsorted(v), EDGES, real(3)),
    form("order", "searchsorted of many", md.vmap(np.searchsorted), np.stack([EDGES, EDGES + 1]), real(2, 3)),
    form("order", "searchsorted of none", md.vmap(np.searchsorted), np.zeros((0, 4)), np.zeros((0, 2))),
    form("order", "histogram at edges", lambda x, e: np.histogram(x, e)[0], distinct(7), EDGES),
]
