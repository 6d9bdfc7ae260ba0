"""Rows of `minidiff/numpy/replaced.py`."""

import numpy as np

import minidiff.numpy as mnp
from tests.table.rows import form, real

LINEAR = dict.fromkeys(["array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "full", "r_", "c_"])


def smooth(x: float, y: float) -> float:
    return np.sin(x) * y


CONVERSIONS = [mnp.array, mnp.asarray, mnp.asanyarray, mnp.ascontiguousarray, mnp.asfortranarray]

ROWS = [
    *(form(f.__name__, "as it is", f, real(2, 3)) for f in CONVERSIONS),
    *(form(f.__name__, "a number", f, real()) for f in CONVERSIONS[3:]),
    *(form(f.__name__, "list", lambda x, f=f: f([x[0], [0.0] * 3]), real(2, 3)) for f in (mnp.array, mnp.asarray)),
    *(form(f.__name__, "list", lambda x, f=f: f([x, x]), real()) for f in (mnp.asanyarray, mnp.ascontiguousarray)),
    form("array", "numbers", lambda x, y: mnp.array([[x, 0, y], (x, False, np.float32(0))]), real(), real()),
    form("array", "arrays of one shape", lambda x: mnp.array([[x[0], np.zeros(3)], [[0, 0, 0], x[1]]]), real(2, 3)),
    form("array", "ndmin", lambda x: mnp.array([x], ndmin=3), real(2)),
    form("array", "dtype", lambda x: mnp.array([x, [0, 0]], dtype=complex), real(2)),
    form("array", "empty", lambda x: mnp.array([x, x]), real(0)),
    form("array", "copy", lambda x: mnp.array(x, copy=True, order="C", ndmin=1), real()),
    form("full", "a number", lambda x: mnp.full((2, 3), x), real()),
    form("full", "a row", lambda x: mnp.full((2, 3), [x, 0, x]), real()),
    form("full_like", "of a plain array", lambda x: mnp.full_like(np.zeros((2, 3)), x), real()),
    form("take", "of a traced array", lambda x: mnp.take(x, [0, -1], axis=1), real(2, 3)),
    form("take", "at a traced index", lambda i: mnp.take(np.arange(4.0), i), np.array([0, 3])),
    form("r_", "arrays and numbers", lambda x, y: mnp.r_[x, 0.0, [0, 0], y], real(3), real()),
    form("r_", "along axis 1", lambda x: mnp.r_["1", x, np.zeros((2, 1))], real(2, 3)),
    form("r_", "points", lambda x: mnp.r_[0:x:3j, 0:0:2j], 1.5),
    form("c_", "columns", lambda x: mnp.c_[x, np.zeros(3), x], real(3)),
    form("vectorize", "of numbers", lambda x, y: mnp.vectorize(smooth)(x, y), real(2, 1), real(3)),
    form("vectorize", "of one number", lambda x: mnp.vectorize(smooth, otypes=[float])(x, y=2.0), real()),
]
