"""Rows of `minidiff/ops/linalg.py`."""

import operator

import numpy as np

from tests.table.rows import distinct, form, real, row

MATMUL = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((3,), (5, 3, 2))]
MATMUL += [((5, 2, 3), (3,)), ((2, 3), (5, 3, 4)), ((4, 1, 2, 3), (5, 3, 1)), ((2, 0), (0, 3))]
DOT = [((), (2, 3)), ((3,), ()), ((3,), (3,)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((3,), (5, 3, 2))]
DOT += [((2, 4, 3), (5, 3, 2)), ((5, 2, 3), (3,)), ((2, 2, 0), (0, 3))]


DISCRETE: set = set()

LINEAR = {f: [(0,), (1,)] for f in (np.matmul, np.dot)}

ROWS = [
    *(row(f, real(*a), real(*b)) for f, shapes in ((np.matmul, MATMUL), (np.dot, DOT)) for a, b in shapes),
    form("operator", "matmul", operator.matmul, real(2, 3), real(3)),
    form("operator", "ndarray @", lambda x: np.ones((4, 2)) @ x, real(2, 3)),
    form("method", "dot", operator.methodcaller("dot", np.ones(3)), distinct(2, 3)),
]
