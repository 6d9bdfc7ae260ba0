"""Rows of covariances in `minidiff/ops/statistics.py`."""

import numpy as np

from tests.table.rows import over, positive, product, real, row

WEIGHTS = np.array([1, 3, 2, 1])

ROWS = [
    *(row(np.cov, real(2, 4), **o) for o in ({}, {"rowvar": False}, {"bias": True}, {"ddof": 2})),
    row(np.cov, real(4)),
    row(np.cov, real(2, 4), real(4)),
    *(row(np.cov, real(2, 4), fweights=WEIGHTS, bias=b) for b in (False, True)),
    *product([np.cov], [(real(2, 4), positive(4))], over(ddof=(0, 1)), lambda m, w, **o: np.cov(m, aweights=w, **o)),
    row(np.cov, real(2, 4), positive(4), f=lambda m, w: np.cov(m, fweights=WEIGHTS, aweights=w)),
    row(np.corrcoef, real(3, 5)),
    row(np.corrcoef, real(5, 2), rowvar=False),
    row(np.corrcoef, real(4), real(4)),
    row(np.corrcoef, real(4)),
]
