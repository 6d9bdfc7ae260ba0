"""Rows of the methods and keywords of ufuncs, in `minidiff/numpy/dispatch.py`."""

import numpy as np

from tests.table.rows import Row, distinct, form, positive, real

DISCRETE = {"comparison of all pairs"}

X = distinct(2, 3)
PAIRS = [(positive(3), positive(2)), (positive(2, 1), positive(3)), (positive(), positive(2))]


def method(name: str, ufunc: np.ufunc, x: np.ndarray, *args: object, **options: object) -> Row:
    note = ", ".join(
        [f"{ufunc.__name__}, {list(np.shape(x))}", *map(str, args), *(f"{k}={v}" for k, v in options.items())]
    )
    return form(f"ufunc.{name}", note, lambda x: getattr(ufunc, name)(x, *args, **options), x)


ROWS = [
    *(method("reduce", f, X) for f in (np.add, np.maximum, np.minimum, np.multiply, np.subtract, np.divide)),
    *(method("reduce", f, X, axis=None) for f in (np.add, np.multiply, np.maximum)),
    *(method("reduce", f, X, axis=1, keepdims=True) for f in (np.add, np.multiply, np.subtract)),
    *(method("reduce", f, X, axis=(0, -1), initial=0.4) for f in (np.add, np.multiply, np.minimum)),
    *(method("reduce", f, X, where=np.array([True, False, True])) for f in (np.add, np.multiply)),
    method("reduce", np.maximum, X, axis=1, where=np.array([True, False, True]), initial=-1.0),
    *(method("reduce", f, np.zeros((0, 2))) for f in (np.add, np.multiply)),
    *(method("reduce", np.logaddexp, X, **o) for o in ({}, {"axis": None, "keepdims": True}, {"initial": 0.5})),
    method("accumulate", np.logaddexp, X),
    *(method("accumulate", f, X) for f in (np.add, np.multiply, np.maximum, np.subtract)),
    *(method("accumulate", f, X, axis=-1) for f in (np.add, np.multiply, np.minimum)),
    *(method("reduceat", f, distinct(5, 2), [0, 3, 1, 4]) for f in (np.add, np.multiply)),
    method("reduceat", np.add, distinct(2, 5), [1, 3], axis=1),
    *(form("ufunc.outer", f.__name__, lambda x, y, f=f: f.outer(x, y), *z) for f in (np.add, np.power) for z in PAIRS),
    form("ufunc.outer", "of lists", lambda x: np.subtract.outer([1.0, 2.0], x), real(3)),
    form("comparison of all pairs", "less", lambda x, y: np.less.outer(x, y), real(3), real(2)),
    form("ufunc(dtype=)", "float32", lambda x: np.add(x, 1, dtype=np.float64), real(3)),
    form("ufunc(dtype=)", "order, out", lambda x: np.multiply(x, 2, order="C", out=None, where=True), real(3)),
    form("ufunc of a list", "add", lambda x: np.add(x, [1.0, 2.0, 3.0]), real(3)),
    form("ufunc of a list", "multiply", lambda x: np.multiply([1.0, 2.0, 3.0], x), real(3)),
]
