"""Rows of `minidiff/ops/indexing.py`."""

from typing import Any

import numpy as np

import minidiff.numpy as mnp
from tests.table.rows import complex_, form, product, real, row

X = real(4, 3, 5)
I, J = np.array([0, 2, 2]), np.array([[1, 0, 1], [-1, 2, 2]])  # noqa: E741 (an index)
INDICES: list[Any] = [
    *(1, -1, np.int64(2), np.array(1), (), ..., None, (0, 1, -2), (slice(1, 3), 0), (..., 0), (0, ..., None)),
    *(slice(None, None, -1), (slice(3, 0, -2), slice(None, None, -1)), slice(2, 2), (None, slice(1, None), None, 1)),
    *(I, J, [0, 1], [], [[0], [1]], ((0, 1),), np.array([], int), (I, I), (I, J), (slice(None), J), (..., I)),
    *((I, slice(None), I), (0, slice(None), I), (slice(None), I, I), (slice(1, 3), 1, I), (None, I, None, I)),
    *((slice(None), I, ..., I), (I, ..., I), (I, None), (slice(None), None, I, 0), (slice(2, 0, -1), J, slice(0, 0))),
    *(True, False, (True, 0), (slice(None), np.array(True), slice(1, None)), ([1], False)),
    *((np.bool_(True), I, None, J), (slice(None), range(2)), (slice(np.int64(1), None), np.uint8(2))),
    *((I, np.eye(3, 5) > 0), ([True, False, True, False], ..., [0, 1])),
    *(X > 0, X[..., 0] > 0, (slice(None), X[0] > 0), ([True, False, True, True], 1), ([True] * 3 + [False], ..., I)),
]
CHOICES: list[dict] = [{"i": np.array([0, 1, 2]), "mode": "raise"}, {"i": 7, "mode": "clip"}]
CHOICES += [{"i": np.array([[-1], [4]]), "mode": "wrap"}]
MASKS = [([True, False, True], 1), ([0, 1], -1), ([True, False, True], None)]

LINEAR = dict.fromkeys([np.take, np.take_along_axis, np.compress, np.extract, "x[...]"])

ROWS = [
    *(row(np.take, X, indices=i, axis=a) for i, a in ((I, 0), (J, 1), (1, -1), ((0, 3), None), ([], 0))),
    *(row(np.take, X, indices=i, axis=0, mode=m) for i in ([5, -7, 1], -9) for m in ("wrap", "clip")),
    row(np.take, real(0, 0), indices=[5, -7, 1], axis=0, mode="clip"),
    *(row(np.take, complex_(3), indices=i) for i in (2, [[1, 1]], np.array([True, False]))),
    row(np.take_along_axis, X, np.argsort(X, 1), f=lambda x, i: np.take_along_axis(x, i, 1)),
    row(np.take_along_axis, X, J[0].reshape(3, 1)[None], f=lambda x, i: np.take_along_axis(x, i, axis=-1)),
    row(np.take_along_axis, real(3), I, f=lambda x, i: np.take_along_axis(x, i, 0)),
    row(np.take_along_axis, X, I, f=lambda x, i: np.take_along_axis(x, i, None)),
    *(row(np.compress, X, f=lambda x, c, a: np.compress(c, x, axis=a), c=c, a=a) for c, a in MASKS),
    *product([np.choose], [(real(3), real(2, 3))], CHOICES, lambda x, y, i, mode: np.choose(i, [x, y, 2.0], mode=mode)),
    row(np.choose, real(3), real(3), f=lambda x, y: np.choose(x > 0, [x, y]) * np.take(y, x > 0)),
    form("x[i]", "choose", lambda x, i: np.choose(i, x) + np.choose(i, [x[1], x[0]]), real(2, 3), np.array([1, 0, 1])),
    row(np.extract, X, f=lambda x: np.extract(X > 0, x)),
    row(np.extract, complex_(2), f=lambda x: np.extract([0, 1], x)),
    form("x[i]", "traced, in a list", lambda x, i: x[[i, 0]] * x[(i, 1), [0, i]], real(2, 2), np.int64(1)),
    form(
        "x[i]", "wrapped", lambda x, i: np.take(x, i, mode="wrap") + np.take(x, i, mode="clip"), X, np.array([90, -80])
    ),
    form("x[i]", "wrapped small ones", lambda x, i: np.take(x, i, mode="wrap"), X, np.array([200, 3], np.uint8)),
    form("x[i]", "i traced", lambda x, i: x[i], real(4, 3), np.array([1, -1, 1])),
    form("x[i]", "a traced number", lambda x, i: x[:, i], real(4, 3), np.int64(2)),
    form("x[i]", "several", lambda x, i, j: x[i, None, :, j], X, np.array([3, -1]), np.array([[1], [1]])),
    form("x[i]", "beside a slice", lambda x, i: x[::-1, i, 1], X, np.array([[0, 1], [2, 2]])),
    form("x[i]", "of a plain array", lambda i: mnp.take(X, i, axis=1, mode="wrap"), np.array([0, 4])),
    form("x[i]", "along an axis of a plain array", lambda i: np.take_along_axis(X, i, axis=1), np.argsort(X, 1)),
    *(form("x[...]", str(i).replace("\n", ""), lambda x, i=i: x[i], X) for i in INDICES),
]
