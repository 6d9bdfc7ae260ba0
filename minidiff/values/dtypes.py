"""Arrays of numbers: their dtypes, 16-bit floats, and advice for values that are not such arrays.

>>> as_plain('two')
Traceback (most recent call last):
TypeError: expected an array or a number, got str: 'two'

Operations on 16-bit floats compute in float32, and round each result. bfloat16 has float32's range, and 8 significant
bits. The package ml_dtypes adds it to NumPy, but NumPy then has no sums in float32, no matrix products and no `einsum`
of it, and a Python float turns it into float32. So an operation on bfloat16 widens its operands, runs as on float32,
and rounds once; those that only rearrange numbers run unchanged. float16 is NumPy's, and operations on it are
NumPy's, but for those that add many numbers, which are widened too: sums, cumulative ones (which NumPy rounds at each
step), those of repeated indices, and products of matrices accumulate in float32, as in hardware. Such an operation
declares `accumulates=True`. A function of several operations that adds on the way is decorated with `in_float32`
(`minidiff/ops/base.py`), and `minidiff.numpy` applies NumPy's functions that are in `SUMS`
(`minidiff/numpy/functions.py`) to plain 16-bit arrays as to traced ones.

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

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

#: The dtype of tangents and cotangents of integers and booleans. It holds no data.
float0 = numpy.dtype([("float0", numpy.void, 0)])

HALF, SINGLE = numpy.dtype(numpy.float16), numpy.dtype(numpy.float32)

#: The numeric dtypes in native byte order.
NATIVE = frozenset(map(numpy.dtype, "?bhilqBHILQefdgFDG"))

#: The 16-bit floats that values have had so far. The package ml_dtypes adds bfloat16.
NARROW: set[numpy.dtype] = set()

#: Types that need no validation: plain arrays and numbers. `as_plain` validates all others.
ARRAYS = frozenset({numpy.ndarray, *(dtype.type for dtype in NATIVE)})
PLAIN = ARRAYS | {bool, int, float, complex}

#: The advice for arrays of these dtype kinds.
_INSTEAD_OF_DTYPES = {
    "O": "convert it to one of numbers (with rows of equal length), as in x.astype(float)",
    "M": "subtract a reference time and divide by a unit, as in (x - x[0]) / numpy.timedelta64(1, 's')",
    "m": "divide it by a unit, as in x / numpy.timedelta64(1, 's')",
    **dict.fromkeys("SUT", "convert it to numbers, as in x.astype(float)"),
}

#: The advice for values that have an attribute of this name. The first match wins.
_INSTEAD_OF_OBJECTS = {
    "wait": "it has not arrived; write x.wait() for its value",
    "filled": "its mask would be lost; write x.filled(value), or compute with x.data and x.mask",
    "to_numpy": "write x.to_numpy()",
    "toarray": "write x.toarray()",
    "compute": "write x.compute()",
    "numpy": "write x.numpy()",
    "__array__": "write numpy.asarray(x)",
    "__float__": "write float(x)",
}


def as_plain(x: Any, containers: Callable[[], Iterable[str]] | None = None) -> Any:
    """Return a plain array or a number unchanged, and a memory map as a plain array.

    Raise TypeError for any other value. NumPy would convert many of them, but lose a mask, an index or a unit, so the
    error says what to write instead. Where a tree may stand it also lists the `containers` that trees are made of.
    """
    if isinstance(x, (numpy.ndarray, numpy.generic)):
        check_dtype(x.dtype)
    if type(x) is numpy.memmap:
        return x.view(numpy.ndarray)
    if isinstance(x, int) and not -(2**63) <= x < 2**64:
        raise TypeError(
            f"expected an array or a number, got an integer of more than 64 bits, which has no dtype: write float({x})"
        )
    if type(x) is numpy.ndarray or isinstance(x, (bool, int, float, complex, numpy.generic)):
        return x
    known = [advice for attribute, advice in _INSTEAD_OF_OBJECTS.items() if hasattr(x, attribute)]
    if x is None:
        known = ["None; a function without `return` gives None: return the value, or test `x is None` first"]
    advice = known[0] if known else f"{x!r:.60}"
    if containers is not None and not known:
        advice += f" (trees are made of {', '.join(containers())})"
    raise TypeError(f"expected an array or a number, got {type(x).__name__}: {advice}")


def convert_array(x: Any, dtype: numpy.dtype) -> Any:
    """Convert an array or a number to a dtype; from complex to real, take the real part."""
    if not hasattr(x, "dtype"):
        x = numpy.asarray(x)[()]
    return (numpy.real(x) if x.dtype.kind == "c" and dtype.kind not in "cb" else x).astype(dtype)


def as_shape(sizes: Iterable[Any]) -> tuple[int, ...]:
    """The sizes of a shape as integers. Raises ValueError for one that is no size."""
    shape = tuple(sizes)
    for n in shape:
        if type(n) is not int or n < 0:  # every type is made here: plain sizes are checked fast
            return tuple(map(_as_size, range(len(shape)), shape))
    return shape


def _as_size(axis: int, n: Any) -> int:
    if isinstance(n, (bool, numpy.bool_)) or not hasattr(n, "__index__") or n < 0:
        raise ValueError(f"shape[{axis}] must be a size, an integer of at least 0; got {n!r}")
    return operator.index(n)


@functools.cache
def check_dtype(dtype: numpy.dtype) -> None:
    """Raise TypeError for a non-numeric dtype, with advice on how to convert it."""
    if dtype == HALF or is_bfloat16(dtype):
        NARROW.add(dtype)
    elif not (dtype in NATIVE or dtype == float0 or (dtype.isbuiltin != 2 and dtype.kind in "biufc")):
        raise TypeError(f"expected an array of numbers, got one of dtype {dtype}: {_advice(dtype)}")


def _advice(dtype: numpy.dtype) -> str:
    if dtype.names is not None:
        return f"take its fields one by one, as in x[{dtype.names[0]!r}]" if dtype.names else "it has no fields"
    return _INSTEAD_OF_DTYPES.get(dtype.kind, "convert it, as in x.astype(numpy.float32)")


_LETTERS = {"f": "f", "i": "i", "u": "u", "c": "c"}


def dtype_name(dtype: numpy.dtype) -> str:
    """The short name of a dtype, as in printed types: `f64`, `i32`, `c128`, `bf16`, `bool`."""
    kind = "bf" if is_bfloat16(dtype) else _LETTERS.get(dtype.kind)
    return f"{kind}{dtype.itemsize * 8}" if kind else str(dtype)


@functools.lru_cache(maxsize=4096)
def array_name(shape: tuple[int, ...], dtype: numpy.dtype) -> str:
    """The type of an array of this shape and dtype, as printed: `f64[3,4]`."""
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"


@functools.lru_cache(maxsize=256)
def is_differentiable(dtype: numpy.dtype) -> bool:
    """Whether values of this dtype carry derivatives: float and complex ones do."""
    dtype = numpy.dtype(dtype)
    return dtype.kind in "fc" or is_bfloat16(dtype)


def is_real_float(dtype: numpy.dtype) -> bool:
    """Whether values of this dtype are real floating-point numbers."""
    return dtype.kind == "f" or is_bfloat16(dtype)


def dtype_of(name: Any) -> numpy.dtype:
    """`numpy.dtype`, which knows `'bfloat16'` too; that raises ImportError without the package ml_dtypes."""
    if isinstance(name, str) and name == "bfloat16":
        optional_dtypes(name)
    return numpy.dtype(name)


def optional_dtypes(name: str) -> Any:
    """The package ml_dtypes, which has this dtype."""
    try:
        return importlib.import_module("ml_dtypes")
    except ImportError:
        raise ImportError(f"{name} needs the package ml_dtypes: pip install ml_dtypes") from None


def check_real_float(subject: str, name: Any) -> numpy.dtype:
    """Return the dtype of this name; raise TypeError, which begins with `subject`, unless it is of real floats."""
    dtype = dtype_of(name)
    if not is_real_float(dtype):
        raise TypeError(f"{subject} of real floating-point numbers, got {dtype_name(dtype)}")
    return dtype


def is_bfloat16(dtype: numpy.dtype) -> bool:
    """Whether this is the dtype `ml_dtypes.bfloat16`."""
    return dtype.kind == "V" and dtype.name == "bfloat16"


def accumulator_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """The dtype in which ranks add numbers: float32 for 16-bit floats."""
    return SINGLE if dtype == HALF or is_bfloat16(dtype) else dtype


def finfo(dtype: Any) -> Any:
    """`numpy.finfo`, of bfloat16 too."""
    dtype = numpy.dtype(dtype)
    return sys.modules[dtype.type.__module__].finfo(dtype) if is_bfloat16(dtype) else numpy.finfo(dtype)


def limits_of(name: Any) -> Any:
    """Return the limits of a dtype of real floats, one of 8 bits among them."""
    if isinstance(name, str) and name.startswith("float8"):
        ml_dtypes = optional_dtypes(name)
        return ml_dtypes.finfo(getattr(ml_dtypes, name))
    return finfo(check_real_float("ranges: the dtype must be one", name))


def result_type(*operands: Any) -> numpy.dtype:
    """`numpy.result_type` of dtypes and Python numbers, of bfloat16 too.

    >>> import ml_dtypes
    >>> result_type(numpy.dtype(ml_dtypes.bfloat16), 2.0)
    dtype(bfloat16)
    """
    if not any(isinstance(t, numpy.dtype) and is_bfloat16(t) for t in operands):
        return numpy.result_type(*operands)
    return rounded_dtype(numpy.result_type(*map(wide_dtype, operands)), operands)


def wide_dtype(dtype: Any) -> Any:
    """The dtype that operations compute in: float32 for bfloat16."""
    return SINGLE if isinstance(dtype, numpy.dtype) and is_bfloat16(dtype) else dtype


def rounded_dtype(dtype: numpy.dtype, dtypes: Iterable[Any]) -> numpy.dtype:
    """Return the dtype of a result: the operands' 16-bit dtype, if float32 is only due to widening them."""
    dtypes = {*dtypes}
    narrow = {t for t in dtypes if isinstance(t, numpy.dtype) and (t == HALF or is_bfloat16(t))}
    if dtype != SINGLE or SINGLE in dtypes or len(narrow) != 1:
        return dtype
    (half,) = narrow
    # Indices are integers of other sizes, which take no part: with them, float32 would have become float64.
    return half if half != HALF or numpy.result_type(*dtypes) != SINGLE else dtype


def is_scalar_constant(x: Any) -> bool:
    """Whether `x` is a Python or NumPy number, which agrees with any variance."""
    return isinstance(x, (bool, int, float, complex, numpy.generic))


# ---------------------------------------------------------------- 16-bit floats


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


def infer_wide(primitive: Any, types: Sequence[Any], params: dict) -> Any:
    """The shape and dtype of each result, by the operation's rule for float32."""
    wide = [t.update(dtype=wide_dtype(t.dtype)) if hasattr(t, "update") else t for t in types]
    results, dtypes = primitive.shape_rule(*wide, **params), dtypes_of(types)
    if "dtype" in params:  # of a conversion
        return results
    return _for_each(primitive, lambda result: (result[0], rounded_dtype(result[1], dtypes)), results)


def evaluate_wide(primitive: Any, /, *args: Any, **params: Any) -> Any:
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
