"""Rows of `minidiff/ops/elementwise.py`."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.table.rows import Row, complex_, form, positive, real, row


def right_of(operator: Callable, y: Any, x: Any) -> Any:
    return operator(y, x)


def left_of(operator: Callable, y: Any, x: Any) -> Any:
    return operator(x, y)


def _broadcasting(function: Callable, make: Callable) -> list[Row]:
    shapes = [((3,), (3,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((2, 3), ()), ((1, 3), (2, 1)), ((0, 3), (1, 3))]
    rows = [row(function, make(*a), make(*b)) for a, b in shapes]
    for c in (2.0, 2, np.float32(1.5)):
        rows.append(form("a scalar", f"{function.__name__}, {c!r}", lambda x, c=c: function(x, c), make(2)))
        rows.append(form("a scalar", f"{c!r}, {function.__name__}", lambda x, c=c: function(c, x), make(2)))
    return rows


ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]

DISCRETE = {
    *(np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.isfinite, np.isnan),
    *(np.logical_and, np.logical_or, np.logical_not, "comparison"),
}

LINEAR = dict.fromkeys([np.add, np.subtract, np.negative, np.conjugate, np.real, np.imag])
LINEAR |= {np.where: [(1, 2)], np.divide: [(0,)], np.multiply: [(0,), (1,)]}

ROWS = [
    *(r for f in (np.add, np.subtract, np.multiply, np.divide) for r in _broadcasting(f, positive)),
    *(r for f in (np.maximum, np.minimum) for r in _broadcasting(f, lambda *shape: 7 * positive(*shape))),
    *_broadcasting(np.power, positive),
    *(row(np.power, real(3), f=lambda x, n=n: np.power(x, n), n=n) for n in (0, 1, 3, -2, 2.0)),
    *(row(f, real(3), f=lambda x, f=f: f(x, 0.3)) for f in (np.remainder, np.floor_divide)),
    *(row(f, 3 * positive(2, 3), np.array([0.7, 1.3, 9.0])) for f in (np.remainder, np.floor_divide)),
    *(row(f, real(2, 3)) for f in (np.negative, np.exp, np.sin, np.cos, np.tanh, np.square, np.absolute, np.sign)),
    *(row(f, z) for f in (np.conjugate, np.real, np.imag) for z in (complex_(2, 3), real(3))),
    *(row(f, positive(2, 3)) for f in (np.log, np.sqrt, np.floor, np.ceil)),
    *(row(f, 0.7) for f in (np.negative, np.exp, np.sin, np.absolute, np.square)),
    *(row(f, real(2, 3), np.array([[0.0], [np.inf]])) for f in (np.equal, np.not_equal, np.less, np.less_equal)),
    *(row(f, real(2, 3), 0.1) for f in (np.greater, np.greater_equal, np.logical_and, np.logical_or)),
    *(row(f, np.array([0.0, np.nan, np.inf])) for f in (np.isfinite, np.isnan, np.logical_not)),
    row(np.where, real(2, 3) > 0, real(2, 3), real(3)),
    row(np.where, np.array([True, False]), real(3, 1), real()),
    row(np.where, np.array(True), real(2), real(2)),
    row("where a scalar", real(3), f=lambda x: np.where(x > 0, x, 0.5)),
    row("where a scalar", real(3), f=lambda x: np.where(x > 0, 2, np.where(x > -1, x, x[0]))),
    *(
        form("operator", f"{f.__name__}, {side.__name__} {y!r}", functools.partial(side, f, y), 1.5)
        for f in ARITHMETIC
        for y in (2, 1.7, np.float64(1.7), np.array(0.4), positive(2))
        for side in (right_of, left_of)
    ),
    *(form("operator", f.__name__, f, real(2, 3)) for f in (operator.neg, operator.pos, abs)),
    *(form("operator", f"** {n}", lambda x, n=n: x**n, real(3)) for n in (2, 3, -1, 0)),
    *(form("comparison", f.__name__, f, real(3), np.array([0.0, 1.0, -1.0])) for f in COMPARISONS),
]
