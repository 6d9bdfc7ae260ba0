"""Rows of `minidiff/ops/shape.py`."""

import operator
from typing import Any

import numpy as np

from tests.table.rows import complex_, distinct, form, over, product, real, row, sequence


def reshape(x: Any, to: Any) -> Any:
    return np.reshape(x, to)  # NumPy 2.0 has another name for the argument than later versions


METHODS: list[tuple[str, tuple]] = [("ravel", ()), ("flatten", ()), ("squeeze", ()), ("swapaxes", (0, 1)), ("copy", ())]
METHODS += [("reshape", (3, 2)), ("reshape", ((3, -1),)), ("reshape", (-1,)), ("transpose", ()), ("transpose", (1, 0))]
METHODS += [("astype", (float,)), ("reshape", (np.int64(6),))]

MESHES = over(indexing=("xy", "ij"), sparse=(False, True))
BLOCKS = [
    lambda a, b, c: [[a, b], [c, np.ones((1, 1))]],
    lambda a, b, c: [a[0], b[0, 0], 2.0],
    lambda a, b, c: [[a[None]], [c]],
    lambda a, b, c: a,
]


def parts(function: Any) -> Any:
    """A function of several results, as one whose single result tells them apart."""

    def joined(*args: Any, **options: Any) -> Any:
        return np.concatenate([np.ravel(x) * (k + 1) for k, x in enumerate(function(*args, **options))])

    return joined


def split_row(function: Any, x: Any, at: Any, **options: Any) -> Any:
    return row(function, x, f=parts(lambda x, at, **kw: function(x, at, **kw)), at=at, **options)


LINEAR = dict.fromkeys([np.reshape, np.ravel, np.expand_dims, np.squeeze, np.transpose, np.moveaxis, np.swapaxes])
LINEAR |= dict.fromkeys([np.broadcast_to, np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack])
LINEAR |= dict.fromkeys([np.atleast_1d, np.atleast_2d, np.atleast_3d, np.matrix_transpose, np.rollaxis, np.meshgrid])
LINEAR |= dict.fromkeys([np.broadcast_arrays, np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit, np.ix_])

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
    *(row(np.reshape, real(2, 3, 4), f=lambda x, order: np.reshape(x, (4, -1), order=order), order=o) for o in "CFA"),
    row(np.reshape, complex_(2, 6), f=reshape, to=(3, 4)),
    *(row(np.ravel, real(2, 3, 2), order=o) for o in "CFAK"),
    *(row(np.rollaxis, real(2, 3, 4), axis=a, start=s) for a, s in ((2, 0), (0, 3), (1, -1), (0, 2))),
    *(row(np.matrix_transpose, x) for x in (real(2, 3), real(2, 3, 4), complex_(1, 2))),
    *(row(f, real(*s)) for f in (np.atleast_1d, np.atleast_2d, np.atleast_3d) for s in ((), (3,), (2, 3), (1, 2, 3))),
    row(np.atleast_2d, real(), real(2), f=parts(np.atleast_2d)),
    row(np.broadcast_arrays, real(3), real(2, 1), f=parts(np.broadcast_arrays)),
    form("broadcast constants", "", parts(lambda x: np.broadcast_arrays(x, np.ones((2, 1)), 1)), complex_(3)),
    *product([np.meshgrid], [(real(3), real(2), real(1))], MESHES, parts(np.meshgrid)),
    row(np.meshgrid, real(3), f=parts(np.meshgrid)),
    row(np.meshgrid, real(), real(2), f=parts(np.meshgrid)),
    row(np.ix_, real(3), real(2), f=lambda x, y: np.ix_(x, y)[0] + np.ix_(x, y)[1]),
    form("index arrays", "ix_", lambda x: x[np.ix_([True, False, True])] * np.ix_(x, [1, 2])[0], real(3)),
    *(sequence(f, real(2, 3), real(2, 3)) for f in (np.vstack, np.hstack, np.dstack, np.column_stack)),
    *(sequence(f, real(3), complex_(3)) for f in (np.vstack, np.hstack, np.dstack, np.column_stack)),
    *(sequence(f, real(), real()) for f in (np.vstack, np.hstack, np.dstack, np.column_stack)),
    sequence(np.vstack, real(3), real(2, 3), dtype="complex128"),
    sequence(np.hstack, real(2, 1, 2), real(2, 3, 2)),
    sequence(np.column_stack, real(2), real(2, 3)),
    sequence(np.concatenate, real(2), complex_(3), dtype="complex128"),
    sequence(np.concatenate, complex_(2), real(3), axis=None),
    form("concatenate constants", "lists", lambda x: np.hstack([x, [1.0, 2.0], 3.0]), real(3)),
    form("concatenate constants", "lists of traced values", lambda x: np.vstack([x, [x[0], 1.0]]), real(2)),
    *product([np.block], [(real(2, 3), real(2, 1), real(1, 3))], over(of=BLOCKS), lambda *x, of: np.block(of(*x))),
    *(split_row(np.split, real(6, 2), at) for at in (3, 1, [1, 4], [4, 1], [2, 9], [-2], [])),
    split_row(np.split, complex_(2, 4), 2, axis=-1),
    *(split_row(np.array_split, real(5), at) for at in (3, 7, np.array([1, 2]), (0, 5))),
    split_row(np.hsplit, real(4), 2),
    split_row(np.hsplit, real(2, 4), [1, 3]),
    split_row(np.vsplit, real(4, 2), 2),
    split_row(np.dsplit, real(1, 2, 4), [1]),
    row(np.split, real(4, 2), f=lambda x: np.split(x, 4)[2]),
    form("method", "mT", lambda x: x.mT, real(2, 3, 4)),
    form("method", "flat", lambda x: x.flat[1:3] * np.stack([*x.flat][:2]), real(2, 3)),
    form("method", "iteration, partly", lambda x: [*x][1], real(2, 3)),
    form("method", "unpacking numbers", lambda x: (lambda a, b, c: a * b + c)(*x), complex_(3)),
    *(form("method", f"ravel {o}", lambda x, o=o: x.ravel(order=o) * x.flatten(o), real(2, 3)) for o in "CF"),
    form("method", "reshape F", lambda x: x.reshape(3, 2, order="F") * x.reshape((3, -1), order="F"), real(2, 3)),
    *(form("method", f"transpose{a}", lambda x, a=a: x.transpose(*a), real(2, 3, 4)) for a in ((2, 0, 1), (None,))),
    *(form("method", f"repeat{a}", operator.methodcaller("repeat", *a), real(2, 3)) for a in ((2,), (2, 1))),
    form("method", "diagonal", lambda x: x.diagonal(1), real(2, 3)),
    form("method", "take", lambda x: x.take([1, 0], axis=1) + x.take(3, mode="wrap"), real(2, 3)),
    form("method", "compress", lambda x: x.compress([True, False, True], axis=1), real(2, 3)),
]

if hasattr(np, "unstack"):
    LINEAR[np.unstack] = None
    ROWS += [row(np.unstack, real(2, 3), f=parts(np.unstack), **options) for options in ({}, {"axis": -1})]
    ROWS += [row(np.unstack, real(3), f=parts(np.unstack))]
