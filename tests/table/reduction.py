"""Rows of `minidiff/ops/reduction.py`."""

import operator

import numpy as np

from tests.table.rows import distinct, form, real, row

AXES: list[dict] = [{}, {"axis": 1}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}, {"axis": (-1, 0, 1)}]
AXES += [{"axis": ()}, {"axis": None, "keepdims": True}]

METHODS: list[tuple[str, tuple]] = [("sum", ()), ("mean", (0,)), ("max", (1,)), ("min", ())]

DISCRETE = {np.argmax, np.argmin, "position"}

LINEAR = dict.fromkeys([np.sum, np.mean])

ROWS = [
    *(row(f, distinct(2, 3, 4), **options) for f in (np.sum, np.mean, np.max, np.min) for options in AXES),
    *(row(f, real()) for f in (np.sum, np.mean, np.max, np.argmin)),
    row(np.sum, real(0, 3), axis=0),
    *(row(f, distinct(2, 3), **options) for f in (np.argmax, np.argmin) for options in ({}, {"axis": 0}, {"axis": -1})),
    *(form("position", m, operator.methodcaller(m, 1), distinct(2, 3)) for m in ("argmax", "argmin")),
    *(form("method", f"{m}{a}", operator.methodcaller(m, *a), distinct(2, 3)) for m, a in METHODS),
]
