"""Rows of `minidiff/ops/shape.py`."""

import operator
from typing import Any

import numpy as np

from tests.table.rows import distinct, form, real, row, sequence


def reshape(x: Any, to: Any) -> Any:
    return np.reshape(x, to)  # NumPy 2.0 has another name for the argument than later versions


METHODS: list[tuple[str, tuple]] = [("ravel", ()), ("flatten", ()), ("squeeze", ()), ("swapaxes", (0, 1)), ("copy", ())]
METHODS += [("reshape", (3, 2)), ("reshape", ((3, -1),)), ("reshape", (-1,)), ("transpose", ()), ("transpose", (1, 0))]
METHODS += [("astype", (float,))]

DISCRETE: set = set()

LINEAR = dict.fromkeys([np.reshape, np.ravel, np.expand_dims, np.squeeze, np.transpose, np.moveaxis, np.swapaxes])
LINEAR |= dict.fromkeys([np.broadcast_to, np.concatenate, np.stack])

ROWS = [
    *(row(np.reshape, real(2, 6), f=reshape, to=s) for s in ((3, 4), -1, (4, -1), [12, 1, 1], (2, 6))),
    row(np.reshape, real(0, 3), f=reshape, to=(-1, 3)),
    *(row(np.ravel, real(*s)) for s in ((2, 3), (), (0, 2))),
    *(row(np.expand_dims, real(2, 3), axis=a) for a in (0, -1, (0, 2), (-1, 1))),
    *(row(np.squeeze, real(1, 3, 1), axis=a) for a in (None, 0, -1, (0, 2))),
    *(row(np.transpose, real(2, 3, 4), axes=a) for a in (None, (1, 2, 0), (-1, 0, 1), (0, 1, 2))),
    *(row(np.moveaxis, real(2, 3, 4), source=s, destination=d) for s, d in ((0, -1), (2, 0), ((0, 1), (-1, 0)))),
    *(row(np.swapaxes, real(2, 3, 4), axis1=a, axis2=b) for a, b in ((0, 2), (-1, 1), (1, 1))),
    *(row(np.broadcast_to, real(*s), shape=t) for s, t in (((3,), (2, 3)), ((2, 1), (4, 2, 3)), ((), 3), ((2,), (2,)))),
    row(np.broadcast_to, real(1, 3), shape=(0, 3)),
    sequence(np.concatenate, real(2, 3), real(1, 3)),
    sequence(np.concatenate, real(2, 3), real(2, 0), real(2, 1), axis=-1),
    sequence(np.concatenate, real(2, 3), real(4), axis=None),
    form("concatenate constants", "f64", lambda x: np.concatenate([np.ones((1, 3)), x, x]), real(2, 3)),
    form("concatenate constants", "i64", lambda x: np.concatenate([x, np.arange(2)]), real(3)),
    form("concatenate constants", "stack", lambda x: np.stack([x, np.zeros(3)], axis=1), real(3)),
    *(sequence(np.stack, real(2, 3), real(2, 3), axis=a) for a in (0, 1, -1, -2)),
    sequence(np.stack, real(), real(), real()),
    form("method", "T", lambda x: x.T, real(2, 3)),
    form("method", "iteration", lambda x: sum(r * r[0] for r in x), real(2, 3)),
    *(form("method", f"{m}{a}", operator.methodcaller(m, *a), distinct(2, 3)) for m, a in METHODS),
]
