"""16-bit floats: operations compute in float32, and round each result.

bfloat16 has float32's range, and 8 significant bits. The package ml_dtypes adds it to NumPy, but NumPy then has no
sums in float32, no matrix products and no `einsum` of it, and a Python float turns it into float32. So an operation on
bfloat16 widens its operands, runs as on float32, and rounds once; those that only rearrange numbers run as they are.
float16 is NumPy's, and operations on it are NumPy's, but for those that add many numbers, which are widened too: sums,
cumulative ones (which NumPy rounds at each step), those of repeated indices, and products of matrices accumulate in
float32, as in hardware. Such an operation declares `accumulates=True`. A function of several operations that adds on
the way is decorated with `in_float32` (`minidiff/ops/base.py`), and `minidiff.numpy` applies NumPy's functions that are
in `SUMS` (`minidiff/numpy/coverage.py`) to plain 16-bit arrays as to traced ones.

>>> import ml_dtypes
>>> import minidiff as md
>>> x = numpy.ones(1000, ml_dtypes.bfloat16)
>>> md.make_tape(lambda x: (2.0 * x).sum())(x)
lambda a:bf16[1000]:
  b:bf16[1000] = multiply(2.0, a)
  c:bf16[] = sum(b, axes=(0,))
  return c
>>> md.grad(lambda x: (x * x).sum())(x)[:3]
array([2, 2, 2], dtype=bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.values.dtypes import NARROW, SINGLE, is_bfloat16, rounded_dtype, wide_dtype


def dtypes_of(values: Sequence[Any]) -> list[numpy.dtype]:
    """The dtypes of values or types; Python numbers have none."""
    return [x.dtype for x in values if hasattr(x, "dtype")]


def has_narrow(values: Sequence[Any]) -> bool:
    """Whether one of these values or types is a 16-bit float."""
    for x in values:
        dtype = getattr(x, "dtype", None)
        if dtype is not None and dtype.itemsize == 2 and dtype in NARROW:
            return True
    return False


def runs_wide(primitive: Any, values: Sequence[Any]) -> bool:
    """Whether an operation on these values or types computes in float32."""
    if primitive.is_view or primitive.shape_rule is None or not has_narrow(values):
        return False  # without a rule, it only moves numbers
    return primitive.accumulates or any(map(is_bfloat16, dtypes_of(values)))


def infer(primitive: Any, types: Sequence[Any], params: dict) -> Any:
    """The shape and dtype of each result, by the operation's rule for float32."""
    wide = [t.update(dtype=wide_dtype(t.dtype)) if hasattr(t, "update") else t for t in types]
    results, dtypes = primitive.shape_rule(*wide, **params), dtypes_of(types)
    if "dtype" in params:  # of a conversion
        return results
    return _for_each(primitive, lambda result: (result[0], rounded_dtype(result[1], dtypes)), results)


def evaluate(primitive: Any, /, *args: Any, **params: Any) -> Any:
    """Run an operation on arrays in float32, and round its results."""
    dtypes = dtypes_of(args)
    wide = [x.astype(SINGLE) if hasattr(x, "dtype") and x.dtype in NARROW else x for x in args]
    results = primitive.impl(*wide, **params)
    if "dtype" in params:
        return results
    return _for_each(primitive, lambda x: _round_to_narrow(x, dtypes), results)


def _for_each(primitive: Any, f: Callable, results: Any) -> Any:
    return list(map(f, results)) if primitive.multiple_results else f(results)


def _round_to_narrow(x: Any, dtypes: Sequence[numpy.dtype]) -> Any:
    x = x if hasattr(x, "dtype") else numpy.asarray(x)[()]
    return x.astype(rounded_dtype(x.dtype, dtypes), copy=False)
