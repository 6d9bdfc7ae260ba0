"""Covariances and correlations."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy

from minidiff.core.tracer import Value, implements
from minidiff.ops.arrays import as_array
from minidiff.ops.base import convert, in_float32
from minidiff.ops.linalg import adjoint, matmul
from minidiff.ops.shape import concatenate, reshape, squeeze


def _variables(m: Any, rowvar: bool, dtype: Any) -> Value:
    """Arrange observations as a matrix with a row for each variable."""
    x = as_array(m)
    if x.ndim > 2:
        raise ValueError(f"cov: observations have at most two dimensions, got {x.ndim}")
    x = reshape(x, (1, x.size)) if x.ndim < 2 else x if rowvar else x.T
    return convert(x, dtype)


@implements(numpy.cov)
@in_float32
def cov(
    m: Value,
    y: Value | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Value:
    """`numpy.cov`: covariances of the rows of m and y (columns unless `rowvar`)."""
    given = [as_array(z) for z in (m, y) if z is not None]
    dtype = numpy.result_type(*[z.dtype for z in given], numpy.float64) if dtype is None else dtype
    rows = [_variables(z, rowvar, dtype) for z in given]
    x = concatenate(rows, 0) if len(rows) == 2 else rows[0]
    ddof = ddof if ddof is not None else 0 if bias else 1
    given_weights = [as_array(w) for w in (fweights, aweights) if w is not None]
    weights = functools.reduce(operator.mul, given_weights) if given_weights else None
    total = x.shape[1] if weights is None else weights.sum()
    norm = total - (ddof if aweights is None or ddof == 0 else ddof * (weights * aweights).sum() / total)
    # Without degrees of freedom NumPy divides by zero, and never by a negative number.
    norm = max(norm, 0) if isinstance(norm, int) else numpy.maximum(norm, 0)
    weighted = x if weights is None else x * weights
    x = x - weighted.sum(axis=1, keepdims=True) / total
    return squeeze(matmul(x, adjoint(x if weights is None else x * weights)) / norm)


@implements(numpy.corrcoef)
@in_float32
def corrcoef(x: Value, y: Value | None = None, rowvar: bool = True, *, dtype: Any = None) -> Value:
    """`numpy.corrcoef`: correlations of variables, given as for `cov`."""
    c = cov(x, y, rowvar, dtype=dtype)
    if not c.shape:
        return c / c
    n = numpy.arange(c.shape[0])
    variances = c[n, n]
    deviations = numpy.sqrt(numpy.real(variances) if c.dtype.kind == "c" else variances)
    c = c / deviations[:, None] / deviations[None, :]
    # Rounding must not push a correlation outside [-1, 1].
    return c if c.dtype.kind == "c" else numpy.where(c > 1, 1, numpy.where(c < -1, -1, c))
