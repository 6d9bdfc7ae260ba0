"""Rows of `minidiff/ops/indexing.py`."""

from typing import Any

import numpy as np

from tests.table.rows import form, real, row

X = real(4, 3, 5)
I, J = np.array([0, 2, 2]), np.array([[1, 0, 1], [-1, 2, 2]])  # noqa: E741 (an index)
INDICES: list[Any] = [
    *(1, -1, np.int64(2), np.array(1), (), ..., None, (0, 1, -2), (slice(1, 3), 0), (..., 0), (0, ..., None)),
    *(slice(None, None, -1), (slice(3, 0, -2), slice(None, None, -1)), slice(2, 2), (None, slice(1, None), None, 1)),
    *(I, J, [0, 1], [], [[0], [1]], ((0, 1),), np.array([], int), (I, I), (I, J), (slice(None), J), (..., I)),
    *((I, slice(None), I), (0, slice(None), I), (slice(None), I, I), (slice(1, 3), 1, I), (None, I, None, I)),
    *((slice(None), I, ..., I), (I, ..., I), (I, None), (slice(None), None, I, 0), (slice(2, 0, -1), J, slice(0, 0))),
    *(X > 0, X[..., 0] > 0, (slice(None), X[0] > 0), ([True, False, True, True], 1), ([True] * 3 + [False], ..., I)),
]


DISCRETE: set = set()

LINEAR = dict.fromkeys([np.take, "x[...]"])

ROWS = [
    *(row(np.take, X, indices=i, axis=a) for i, a in ((I, 0), (J, 1), (1, -1), ((0, 3), None), ([], 0))),
    form("x[i]", "i traced", lambda x, i: x[i], real(4, 3), np.array([1, -1, 1])),
    form("x[i]", "a traced number", lambda x, i: x[:, i], real(4, 3), np.int64(2)),
    form("x[i]", "several", lambda x, i, j: x[i, None, :, j], X, np.array([3, -1]), np.array([[1], [1]])),
    form("x[i]", "beside a slice", lambda x, i: x[::-1, i, 1], X, np.array([[0, 1], [2, 2]])),
    *(form("x[...]", str(i).replace("\n", ""), lambda x, i=i: x[i], X) for i in INDICES),
]
