"""Rows of `minidiff/ops/composed.py`."""

import numpy as np

from tests.table.rows import complex_, form, positive, real, row

POINTS: list[dict] = [{"num": 4}, {"num": 3, "endpoint": False}, {"num": 1}, {"num": 0}]

LINEAR = {np.linspace: None}

ROWS = [
    *(row(np.linspace, 0.5, 2.0, **options) for options in POINTS),
    *(row(np.linspace, real(2, 1), real(3), num=4, axis=a) for a in (0, 1, -1)),
    row(np.linspace, complex_(2), real(2), num=3),
    row(np.linspace, 1.5, f=lambda x: np.linspace(0, x, 3, retstep=True)[1]),
    form("linspace in float32", "dtype", lambda x: np.linspace(0, x, 3, dtype=np.float32).sum(), np.float32(2)),
    *(row(np.logspace, 0.5, 1.0, **options) for options in POINTS),
    row(np.logspace, real(2), real(2), num=3, base=2.0, axis=-1),
    row(np.logspace, 0.5, 1.5, positive(2), f=lambda x, y, b: np.logspace(x, y, 3, base=b)),
    *(row(np.geomspace, 0.5, 2.0, **options) for options in POINTS[:3]),
    *(row(np.geomspace, s * positive(2), s * positive(2), num=3, axis=a) for s, a in ((1, 0), (-1, -1))),
    row(np.geomspace, complex_(2), complex_(2), num=3),
]
