"""Rows of `minidiff/ops/choosing.py`."""

from typing import Any

import numpy as np

from tests.table.rows import real, row

DISCRETE: set = set()

LINEAR: dict = {}


def choose(a: Any, *choices: Any, **options: Any) -> Any:
    return np.choose(a, choices, **options)


ROWS = [
    row(np.choose, np.array([1, 0, 1]), real(3), real(2, 1), f=choose),
    row(np.choose, np.array([[2], [0]]), real(3), real(), real(2, 3), f=lambda a, *c: np.choose(a, list(c))),
    row(np.choose, np.array([-1, 5, 2]), real(), real(3), f=choose, mode="wrap"),
    row(np.choose, np.array([-1, 5, 2]), real(), real(3), f=choose, mode="clip"),
    row(np.choose, np.array([0, 0]), real(2), f=lambda a, c: np.choose(a, [c])),
    row(np.choose, np.array([1, 0]), real(2, 2), f=np.choose),
]
