"""Rows of `minidiff/ops/reduction.py`, `statistics.py` and `differences.py`."""

import operator
from typing import Any

import numpy as np

from tests.table.rows import NUMPY, Row, complex_, distinct, form, positive, real, row

AXES: list[dict] = [{}, {"axis": 1}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}, {"axis": (-1, 0, 1)}]
AXES += [{"axis": ()}, {"axis": None, "keepdims": True}, {"axis": (2, 0), "keepdims": True}]
FEW: list[dict] = [{}, {"axis": 0}, {"axis": (2, 0), "keepdims": True}]
MASK = np.array([[True, False, True], [False, True, True]])

NAN = np.array([[0.4, np.nan, 1.1], [np.nan, 0.9, 2.1], [0.1, 1.4, np.nan]])
WITHOUT_NANS = (np.nansum, np.nanprod, np.nanmean, np.nanvar, np.nanstd, np.nanmax, np.nanmin, np.nanmedian)
QUANTILES = "inverted_cdf averaged_inverted_cdf interpolated_inverted_cdf hazen weibull linear "
QUANTILES += "median_unbiased normal_unbiased lower higher midpoint nearest" + " closest_observation" * (NUMPY > (2, 0))

CUMULATIVE = [getattr(np, name) for name in ("cumulative_sum", "cumulative_prod") if hasattr(np, name)]  # NumPy 2.1

METHODS: list[tuple[str, tuple, dict]] = [
    *(("sum", (), {}), ("mean", (0,), {}), ("max", (1,), {}), ("min", (), {}), ("sum", (0, float), {"keepdims": True})),
    *(("prod", (), {}), ("prod", (0,), {"keepdims": True}), ("cumsum", (), {}), ("cumprod", (-1,), {})),
    *(("var", (), {"ddof": 1}), ("std", (1,), {"keepdims": True}), ("max", (), {"initial": 0.2, "where": MASK})),
]
TRUTHS: list[tuple[str, tuple]] = [("argmax", (1,)), ("argmin", (1,)), ("all", ()), ("any", (0,)), ("argmax", ())]

DISCRETE = {np.argmax, np.argmin, np.nanargmax, np.nanargmin, np.all, np.any, np.count_nonzero, "position"}

LINEAR = dict.fromkeys([np.sum, np.mean, np.cumsum, np.diff, np.ediff1d]) | {np.trapezoid: [(0,)]}


def _nan_row(function: Any, **options: Any) -> Row:
    """NaNs stay where they are: the derivative is taken in the numbers among them."""

    def f(x: Any, **options: Any) -> Any:
        return function(np.where(np.isnan(NAN), np.nan, x), **options)

    return row(function, np.nan_to_num(NAN), f=f, **options)


ROWS = [
    *(row(f, distinct(2, 3, 4), **o) for f in (np.sum, np.max) for o in AXES),
    *(row(f, distinct(2, 3, 4), **o) for f in (np.mean, np.min) for o in FEW),
    *(row(f, positive(2, 3, 2), **o) for f in (np.prod, np.var) for o in AXES[1:6]),
    *(row(np.std, positive(2, 3, 2), **o) for o in FEW),
    *(row(f, real()) for f in (np.sum, np.mean, np.max, np.argmin, np.prod, np.var)),
    *(row(f, real(0, 3), axis=0) for f in (np.sum, np.prod, np.cumsum, np.cumprod, np.all, np.any)),
    *(row(f, distinct(2, 3, 2), **o) for f in (np.ptp, np.median) for o in FEW),
    *(row(f, distinct(2, 3), axis=-1) for f in (np.amax, np.amin)),
    *(row(f, complex_(2, 3), **o) for f in (np.sum, np.prod, np.mean, np.var, np.std) for o in ({}, {"axis": 1})),
    *(row(f, complex_(2, 3)) for f in (np.max, np.median, np.ptp)),
    *(row(f, complex_(2, 3), axis=1) for f in (np.cumsum, np.cumprod, np.diff, np.gradient, np.trapezoid)),
    # dtype, initial, where
    *(row(f, real(2, 3), axis=0, dtype=complex) for f in (np.sum, np.prod, np.mean, np.cumsum, np.cumprod)),
    *(form("initial", f"sum {n}", lambda x: np.sum(x, 0, initial=2), real(n, 3)) for n in (0, 2)),
    *(row(np.prod, real(n, 3), axis=0, initial=2) for n in (0, 2)),
    *(row(f, distinct(2, 3), axis=0, initial=0.7) for f in (np.max, np.min)),
    *(row(f, real(0, 3), axis=0, initial=1.5) for f in (np.max, np.min)),
    *(row(f, distinct(2, 3), where=MASK, **o) for f in (np.sum, np.prod, np.mean, np.var, np.std) for o in FEW[:1]),
    *(row(f, distinct(2, 3), where=MASK, axis=1, keepdims=True, ddof=1) for f in (np.var, np.std)),
    *(row(f, distinct(2, 3), where=MASK, axis=1) for f in (np.sum, np.prod, np.mean)),
    *(row(f, distinct(2, 3), where=MASK[0], initial=i, axis=1) for f, i in ((np.max, -np.inf), (np.min, 9))),
    *(row(f, distinct(2, 3), where=MASK, axis=1) for f in (np.all, np.any)),
    row(np.mean, complex_(2, 3), where=MASK),
    row(np.var, complex_(2, 3), where=MASK, ddof=1),
    # var, std
    *(row(f, real(2, 3), axis=1, **o) for f in (np.var, np.std) for o in ({"ddof": 1}, {"correction": 0.5})),
    row(np.var, real(2, 3), real(2, 1), f=lambda x, m: np.var(x, axis=1, mean=m)),
    row(np.std, real(2, 3), f=lambda x: np.std(x, axis=1, mean=np.mean(x, axis=1, keepdims=True), ddof=1)),
    # average
    row(np.average, real(2, 3), axis=1),
    row(np.average, real(2, 3), positive(3), axis=-1, f=lambda x, w, axis: np.average(x, axis, w)),
    row(np.average, complex_(2, 3), positive(2), axis=0, f=lambda x, w, axis: np.average(x, axis, w)),
    row(np.average, real(2, 3, 4), positive(4, 2), f=lambda x, w: np.average(x, (2, 0), w, keepdims=True)),
    row(np.average, real(2, 3), positive(2, 3), f=lambda x, w: np.average(x, None, w, True)[1]),
    row(np.average, real(2, 3), f=lambda x: np.average(x, returned=True)[0]),
    # those without NaNs
    *(_nan_row(f, **o) for f in WITHOUT_NANS for o in ({}, {"axis": 0}, {"axis": -1, "keepdims": True})),
    *(_nan_row(f, axis=a) for f in (np.nancumsum, np.nancumprod) for a in (None, 0, -1)),
    *(_nan_row(f, axis=a) for f in (np.nanargmax, np.nanargmin) for a in (None, 0, 1)),
    *(_nan_row(f, axis=0, initial=0.5) for f in (np.nansum, np.nanprod, np.nanmax, np.nanmin)),
    *(_nan_row(f, axis=0, ddof=1) for f in (np.nanvar, np.nanstd)),
    # quantiles
    *(row(np.quantile, distinct(7), q=np.array([0.0, 0.3, 0.5, 1]), method=m) for m in QUANTILES.split()),
    *(row(np.quantile, distinct(2, 3, 4), q=0.4, **o) for o in AXES[:4]),
    row(np.quantile, distinct(2, 3, 4), q=[[0.1, 0.2], [0.6, 0.9]], axis=(0, 2), keepdims=True),
    row(np.quantile, distinct(5), np.array([0.15, 0.9])),
    row(np.quantile, distinct(5, 2), 0.33, axis=0, method="hazen"),
    row(np.percentile, distinct(4, 3), q=30, axis=0),
    row(np.percentile, distinct(4, 3), np.array([10.0, 77.0]), axis=1),
    *(_nan_row(np.nanquantile, q=q, axis=a) for q in (0.3, [0.2, 0.6]) for a in (None, 0, 1)),
    row(np.nanquantile, distinct(4, 3), np.array([0.15, 0.9]), axis=0),
    _nan_row(np.nanpercentile, q=40, axis=1, keepdims=True, method="weibull"),
    # truth and places
    *(row(f, distinct(2, 3), **o) for f in (np.argmax, np.argmin) for o in ({}, {"axis": 0}, {"axis": -1})),
    *(row(np.argmax, distinct(2, 3), keepdims=True, **o) for o in ({}, {"axis": 0})),
    *(row(f, np.eye(2, 3), **o) for f in (np.all, np.any, np.count_nonzero) for o in ({}, *AXES[1:3])),
    row(np.all, np.array([True, False]), keepdims=True),
    # accumulations
    *(row(f, positive(2, 3), axis=a) for f in (np.cumsum, np.cumprod) for a in (None, 0, -1)),
    *(row(f, positive(3)) for f in CUMULATIVE),
    *(row(f, positive(2, 3), axis=1, include_initial=True) for f in CUMULATIVE),
    # differences
    *(row(np.diff, real(3, 4), **o) for o in ({}, {"n": 2}, {"n": 0}, {"axis": 0}, {"n": 3, "axis": 0})),
    form("diff", "constant ends", lambda x: np.diff(x, prepend=0.5, append=np.ones((2, 2))), real(2, 3)),
    form("diff", "ends", lambda x, y: np.diff(x, prepend=y), real(3), real(2)),
    row(np.ediff1d, real(2, 3)),
    row(np.ediff1d, real(4), real(), np.ones(2), f=lambda x, y, z: np.ediff1d(x, to_end=y, to_begin=z)),
    row(np.trapezoid, real(3, 4)),
    *(row(np.trapezoid, real(3, 4), axis=a, dx=0.3) for a in (0, 1)),
    row(np.trapezoid, real(3, 4), real(3), axis=0),
    *(row(np.trapezoid, real(3, 4), real(3, 4), axis=a) for a in (0, -1)),
    *(row(np.gradient, real(4), edge_order=e) for e in (1, 2)),
    row(np.gradient, real(2)),
    *(row(np.gradient, real(4), np.array([0.0, 0.3, 1.0, 1.2]), edge_order=e) for e in (1, 2)),
    row(np.gradient, real(3, 4), positive(), axis=1),
    form("gradient", "2 axes", lambda x: np.stack(np.gradient(x, 0.5, np.array([0.0, 1.0, 3.0]))), real(3, 3)),
    # methods
    *(form("position", f"{m}{a}", operator.methodcaller(m, *a), distinct(2, 3)) for m, a in TRUTHS),
    *(form("method", f"{m}{a}{o}", operator.methodcaller(m, *a, **o), distinct(2, 3)) for m, a, o in METHODS),
]
