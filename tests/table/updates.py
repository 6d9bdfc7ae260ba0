"""Rows of `minidiff/ops/updates.py`."""

import operator
from typing import Any

import numpy as np

from minidiff.numpy import at
from tests.table.rows import complex_, distinct, form, positive, real

X = distinct(4, 3, 2)
I, J = np.array([0, 2, 2]), np.array([[1, 0, 1], [-1, 2, 2]])  # noqa: E741 (an index)
INDICES: list[Any] = [
    *(1, -1, (), ..., (0, 1, -1), (slice(1, 3), 0), (..., 0), (slice(None, None, -2), None, slice(1, None))),
    *(slice(2, 2), I, (I, I), (I, J), (slice(None), J), (..., [0, 1]), (0, slice(None), I % 2)),
    *([], X > 2, X[..., 0] > 2, (slice(1, None), X[0] > 1), (None, I, None, 1), True),
]
METHODS = ("set", "add", "subtract", "multiply", "divide", "power", "max", "min")

LINEAR = {".at[].set": [(0, 1)], ".at[].add": [(0, 1)], ".at[].subtract": [(0, 1)], ".at[].multiply": [(0,)]}


def update(method: str, index: Any, x: Any = X, v: Any = None) -> Any:
    def f(x, v):
        return operator.methodcaller(method, v)(at(x)[index])

    v = 0.1 + distinct(*x[index].shape) if v is None else v
    return form(f".at[].{method}", str(index).replace("\n", ""), f, x, v)


def at_traced(method: str, v: Any, i: Any) -> Any:
    f = lambda x, v, i: getattr(at(x)[:, i], method)(v)  # noqa: E731
    return form(f".at[].{method} at traced indices", str(i), f, positive(2, 4), v, i)


ROWS = [
    *(update("set", i) for i in INDICES),
    *(update(m, i) for m in METHODS[1:] for i in ((..., slice(1, None)), I, X > 3)),
    *(update(m, np.array([1, -1, 1, 1, 0]), positive(2, 3), positive(3)) for m in METHODS),
    *(update(m, (), positive(), positive()) for m in METHODS),
    *(update(m, [1, 1, 0], complex_(2), complex_(3)) for m in METHODS[:6]),
    update("set", slice(None), real(2, 3), real(1, 1, 3)),
    *(at_traced(m, positive(3), np.array([1, 0, 1])) for m in METHODS),
    *(at_traced(m, positive(2), np.int64(-1)) for m in METHODS),
    form(".at[i] traced in front", "set", lambda x, v, i: at(x)[i].set(v), real(4, 2), real(3, 2), np.array([1, 3, 1])),
    form(".at[i] traced in front", "add", lambda x, v, i: at(x)[i, 0].add(v), real(4, 2), real(3), np.array([1, 3, 1])),
    *(form(".at[] where a value says", m, lambda x, v, m=m: getattr(at(x)[x > 1], m)(v), X, real()) for m in METHODS),
    form(".at[].apply", "where a value says", lambda x: at(x)[x[:, 0, 0] > 1].apply(np.square), X),
    form(".at[].get", "", lambda x: at(x)[I].get() * at(x)[0].get(), X),
    form(".at[].apply", "", lambda x: at(x)[1:, 0].apply(np.square), X),
    form(".at twice", "", lambda x: at(at(x)[0].set(x[1] * x[2]))[:, 0].multiply(x[1, 1]), X),
    form(".at[] constants", "v", lambda x: at(x)[1].set(2), real(3)),
    form(".at[] constants", "x", lambda v: at(np.zeros((3, 2)))[[0, 2]].set(v), real(2)),
    form(".at[] constants", "x, of repeated indices", lambda v: at(np.ones(3))[[0, 0]].multiply(v), real(2)),
]
