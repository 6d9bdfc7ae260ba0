"""Classes of public NumPy functions, by their behavior on traced values.

Each function is in one class:

- an *operation*: registered by `implements`. Most are differentiable; those with integer or boolean results have no
  derivative;
- *replaced*: NumPy does not dispatch it, so `minidiff.numpy` defines a function of the same name;
- *from values*: NumPy computes it on concrete values, so it fails on a tape and under `vmap`. The results are integers,
  booleans, text or edges of bins, and carry no derivative;
- *plain*: it takes no argument that could be traced (all others);
- *refused*: it raises an error that says what to use instead (the table "numpy" in `suggestions.json`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy


def _names(text: str) -> list[str]:
    return text.split()


FROM_VALUES = _names(
    """nonzero flatnonzero argwhere array_str array_repr array2string histogram2d histogramdd ravel_multi_index
    unravel_index packbits unpackbits shares_memory may_share_memory in1d"""
)

CREATION = _names(
    """zeros ones empty tri eye identity indices fromfunction fromiter diag_indices tril_indices triu_indices
    mask_indices bartlett blackman hanning hamming kaiser fft.fftfreq fft.rfftfreq"""
)

#: Functions that add or multiply many numbers: of plain 16-bit floats, as of traced ones, they accumulate in float32.
SUMS = _names(
    """sum nansum prod nanprod mean nanmean average var nanvar std nanstd cumsum nancumsum cumprod nancumprod
    cumulative_sum cumulative_prod trace dot vdot inner tensordot einsum matmul vecdot matvec vecmat convolve correlate
    cov corrcoef trapezoid polymul polyval linalg.norm linalg.vector_norm linalg.matrix_norm linalg.trace linalg.matmul
    linalg.tensordot linalg.vecdot linalg.multi_dot linalg.matrix_power"""
)

#: Functions that write into their first argument.
MUTATING = _names("copyto putmask place put put_along_axis fill_diagonal")


def full_name(f: Callable) -> str:
    """Return the name of a NumPy function with its namespace: `np.linalg.svd`."""
    module = getattr(f, "__module__", None) or "numpy"
    name = getattr(f, "__name__", str(f))
    return f"np.{module[6:]}.{name}" if module.startswith("numpy.") else f"np.{name}"


@functools.cache
def mutating_functions() -> frozenset[Callable]:
    """Return the NumPy functions that write into their first argument."""
    return frozenset(getattr(numpy, name) for name in MUTATING)


@functools.cache
def public_callables() -> dict[str, Callable]:
    """Return all public NumPy functions by name (`linalg.svd`), without scalar types."""
    return {
        prefix + name: f
        for prefix, namespace in {"": numpy, "linalg.": numpy.linalg, "fft.": numpy.fft}.items()
        for name in namespace.__all__
        if not name.startswith("_")
        if callable(f := getattr(namespace, name)) and not (isinstance(f, type) and issubclass(f, numpy.generic))
    }
