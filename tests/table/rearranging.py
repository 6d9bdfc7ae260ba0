"""Rows of `minidiff/ops/rearranging.py`."""

from typing import Any

import numpy as np

from minidiff.core.tracer import NUMPY_FUNCTIONS
from tests.table.rows import NUMPY, complex_, distinct, form, over, positive, product, real, row

PADS: list[dict[str, Any]] = [
    *({"mode": m} for m in ("edge", "reflect", "symmetric", "wrap", "linear_ramp", "mean", "maximum", "minimum")),
    *({"mode": m, "reflect_type": "odd"} for m in ("reflect", "symmetric")),
    *({"mode": m, "stat_length": n} for m, n in (("mean", 2), ("maximum", ((1, 2), (2, 9))), ("minimum", (1, 2)))),
    {"mode": "linear_ramp", "end_values": ((1.0, -2.0), (0.5, 3.0))},
    *({"constant_values": c} for c in (0, 1.5, (2.0, 0.0), ((1.0, 2.0), (3.0, 4.0)))),
]
if np.median in NUMPY_FUNCTIONS:
    PADS += [{"mode": "median"}, {"mode": "median", "stat_length": 2}]

windows = np.lib.stride_tricks.sliding_window_view
OF_INDICES = (np.tril_indices_from, np.triu_indices_from, np.diag_indices_from)

DISCRETE = {*OF_INDICES}

#: What its result's shape is depends on values.
CONCRETE = {np.trim_zeros}

LINEAR: dict = dict.fromkeys([np.flip, np.flipud, np.fliplr, np.rot90, np.roll, np.tile, np.repeat, np.resize])
LINEAR |= dict.fromkeys([np.append, np.insert, np.delete, np.diagonal, np.diag, np.diagflat, np.tril, np.triu])
LINEAR |= {windows: None, np.full_like: None, np.kron: [(0,), (1,)]}

ALONG = (np.sum, lambda r: r * r[0], lambda r: np.stack([r, r * r[1]]), lambda r: r[::-1][:2])


def along(x: Any, a: int, g: Any) -> Any:
    return np.apply_along_axis(g, a, x)


#: What is inserted into a matrix, where, and along which axis.
INSERTED: list[tuple] = [
    *((real(), 1, 0), (real(4), 1, 0), (real(3), 1, 1), (real(2, 4), 1, 0), (real(3, 1), 1, 1), (real(4), [2, 0], 0)),
    *((real(2, 4), [2, 0], 0), (real(3, 1), [1], 1), (real(3), [1, 1, 2], -1), (real(2, 4), slice(0, 2), 0)),
    *((real(1), [], 0), (real(), [0], 0), *[(real(3), np.array([True, False, True, True]), 1)] * (NUMPY > (2, 1))),
]

ROWS = [
    *(row(np.flip, real(2, 3), axis=a) for a in (None, 0, -1, (1, 0), ())),
    *(row(f, complex_(2, 3)) for f in (np.flipud, np.fliplr)),
    *(row(np.rot90, real(2, 3), k=k) for k in (0, 1, 2, 3, -1, 6)),
    *(row(np.rot90, real(2, 3, 2), k=k, axes=(2, 0)) for k in (1, 3)),
    *(row(np.roll, real(2, 3), shift=s, axis=a) for s, a in ((1, None), (-2, 0), ((1, 2), (0, -1)), (1, (0, 1, 1)))),
    *(row(np.roll, x, shift=2) for x in (real(), real(0, 3), complex_(3))),
    *(row(np.tile, real(2, 3), reps=r) for r in (2, (2, 1), (2, 1, 3), 0, np.array([1, 2]))),
    *(row(np.tile, x, reps=2) for x in (real(), complex_(3))),
    *(row(np.repeat, real(2, 3), repeats=r, axis=a) for r, a in ((2, None), (3, 1), (0, 0), ([2, 0], 0), ([2], -1))),
    row(np.repeat, real(2, 0), repeats=[], axis=1),
    *(row(windows, real(4, 3), window_shape=w, axis=a) for w, a in ((2, 0), ((2, 2), (0, 0)), ((1, 2), (1, -2)))),
    *(row(windows, x, window_shape=w) for x, w in ((complex_(5), 2), (real(4, 3), (2, 3)))),
    *(row(np.repeat, x, repeats=2) for x in (real(), complex_(2))),
    *(row(np.resize, real(2, 3), new_shape=s) for s in ((2, 2), (3, 5), 4, (0, 2), 6)),
    row(np.append, real(2, 3), real(2)),
    row(np.append, real(2, 3), complex_(1, 3), axis=0),
    form("append constants", "a list", lambda x: np.append(x, [1.0, 2.0]), real(3)),
    row(np.append, real(), real()),
    *(row(np.insert, real(3), real(), f=lambda x, v, obj: np.insert(x, obj, v), obj=i) for i in (0, -1, 3, [0, 2])),
    *(row(np.insert, real(3, 4), v, f=lambda x, v, i, a: np.insert(x, i, v, a), i=i, a=a) for v, i, a in INSERTED),
    row(np.insert, real(2, 2), real(3), f=lambda x, v: np.insert(x, [1, 3, 3], v)),
    row(np.insert, real(2, 3, 2), real(3, 4), f=lambda x, v: np.insert(x, 1, v[0, :3], axis=2)),
    *(row(np.delete, real(3, 4), obj=i, axis=0) for i in (1, [0, 2], slice(0, 3, 2), [], [True, False, True])),
    *(row(np.delete, real(3, 4), obj=i, axis=a) for i, a in ((-1, 1), (7, None))),
    row(np.delete, complex_(3), obj=0),
    *(row(np.diagonal, real(3, 4), offset=k) for k in (0, 1, -2, 5, -3)),
    row(np.diagonal, complex_(2, 3, 4), offset=1, axis1=2, axis2=0),
    *(row(np.diag, real(*s), k=k) for s in ((3,), (3, 2), (0,)) for k in (0, 1, -2)),
    *(row(np.diagflat, x, k=k) for x in (real(2, 2), real()) for k in (0, -1)),
    *(row(f, x, k=k) for f in (np.tril, np.triu) for x in (real(3, 4), complex_(2, 2)) for k in (0, 1, -1)),
    *(row(f, x) for f in (np.tril, np.triu) for x in (real(3), real(2, 3, 3), real(0, 2))),
    row(np.vander, positive(3)),
    row(np.vander, positive(3), N=2, increasing=True),
    *(row(np.vander, x, N=4) for x in (complex_(2), np.array([0.0, -1.5, 2.0]))),
    *(row(np.vander, real(2), N=n) for n in (0, 1)),
    *(row(np.kron, real(*a), real(*b)) for a, b in (((2, 3), (3, 1)), ((2,), (3,)), ((2,), (1, 3, 2)), ((), (2, 2)))),
    row(np.kron, complex_(2), real(2, 2)),
    form("kron constants", "eye", lambda x: np.kron(np.eye(2), x), real(2, 2)),
    *(row(np.pad, distinct(3, 4), f=lambda x, to, **kw: np.pad(x, to, **kw), to=((2, 1), (0, 3)), **kw) for kw in PADS),
    *product([np.pad], [distinct(3), real(1)], [*PADS[1:4], PADS[8]], lambda x, **kw: np.pad(x, (7, 8), **kw)),
    *(row(np.pad, real(2, 3), f=lambda x, to: np.pad(x, to, "edge"), to=w) for w in (1, (1, 2), 0, ((1, 2),))),
    *(row(np.pad, complex_(2, 2), f=lambda x, mode: np.pad(x, 1, mode), mode=m) for m in ("constant", "wrap", "mean")),
    row(
        np.pad,
        real(2, 3),
        real(2, 2),
        f=lambda x, v: np.pad(x, 2, constant_values=[[v[0, 0], v[0, 1]], [v[1, 0], 1.0]]),
    ),
    row(np.pad, real(2, 3), real(), f=lambda x, v: np.pad(x, 2, "linear_ramp", end_values=v)),
    row(np.pad, real(0, 2), f=lambda x: np.pad(x, 1)),
    *[row(np.pad, real(2, 3), f=lambda x: np.pad(x, {-1: (1, 2)}))] * (NUMPY > (2, 1)),
    *(row(f, real(2, 3)) for f in (np.zeros_like, np.ones_like)),
    row(np.zeros_like, real(2, 3), dtype="float32", shape=(4,)),
    row(np.empty_like, real(2), f=lambda x: np.zeros_like(np.empty_like(x)) + x),
    row(np.full_like, real(2, 3), real(), f=lambda x, v: np.full_like(x, v)),
    row(np.full_like, real(2, 3), real(3), f=lambda x, v: np.full_like(x, v, shape=(2, 3))),
    row(np.full_like, real(2, 3), f=lambda x: np.full_like(x, 2) * x),
    *product(
        [np.apply_along_axis], [real(2, 3)], over(a=(0, -1), g=ALONG), lambda x, a, g: np.apply_along_axis(g, a, x)
    ),
    *product([np.apply_over_axes], [real(2, 3, 2)], over(a=([0, 2], 1)), lambda x, a: np.apply_over_axes(np.sum, x, a)),
    *(form("index arrays", f.__name__, lambda x, f=f: x[f(x)] * x[0, 1], real(3, 3)) for f in OF_INDICES),
    *(row(f, real(3, 3), f=lambda x, f=f: np.stack(f(x))) for f in OF_INDICES),
]
