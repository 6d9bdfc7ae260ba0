"""How each public NumPy function behaves on traced values.

Each function is in one class:

- an *operation*: registered by `implements`. Most are differentiable; those with integer or boolean results have no
  derivative;
- *replaced*: NumPy does not dispatch it, so `minidiff.numpy` defines a function of the same name;
- *from values*: NumPy computes it on concrete values, so it fails on a tape and under `vmap`. The results are integers,
  booleans, text or edges of bins, and carry no derivative;
- *plain*: it takes no argument that could be traced (all others);
- *refused*: it raises an error that says what to use instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy


def _names(text: str) -> list[str]:
    return text.split()


FROM_VALUES = _names(
    """array_str array_repr array2string histogram2d histogramdd ravel_multi_index unravel_index packbits unpackbits
    shares_memory may_share_memory in1d"""
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

_WRITES = "it writes into its argument, which the computation may have used already. Build the new value instead: "
_AT = "x = np.at(x)[index].set(values), where np is minidiff.numpy"
_SAVES = "save concrete values: return the traced value from the function first"

#: Refused functions, and what to use instead.
REFUSED = {
    "copyto": _WRITES + "x = np.where(mask, values, x), or " + _AT,
    "putmask": _WRITES + "x = np.where(mask, values, x), or " + _AT,
    "place": _WRITES + "x = np.where(mask, values, x), or " + _AT,
    "put": _WRITES + "for a flat x, " + _AT,
    "put_along_axis": _WRITES + _AT,
    "fill_diagonal": _WRITES + "with i = np.arange(n), x = np.at(x)[i, i].set(values) of minidiff.numpy",
    "save": _SAVES,
    "savez": _SAVES,
    "savez_compressed": _SAVES,
    "savetxt": _SAVES,
    "frompyfunc": "it makes arrays of objects; use np.vectorize of minidiff.numpy, or md.vmap",
    "from_dlpack": "it shares memory with another library; pass the traced value itself",
    "require": "traced values have no memory layout; use np.asarray of minidiff.numpy",
    "isfortran": "traced values have no memory layout",
    "asmatrix": "np.matrix is not supported; use arrays and the operator @",
    "bmat": "np.matrix is not supported; use np.block",
    "matrix": "np.matrix is not supported; use arrays and the operator @",
    "poly1d": "use np.polyval, np.polyadd, np.polymul on arrays of coefficients",
    "broadcast": "use np.broadcast_arrays",
    "nditer": "iterate over x itself, or over np.ndindex(x.shape)",
    "nested_iters": "iterate over x itself, or over np.ndindex(x.shape)",
    "ndenumerate": "iterate over np.ndindex(x.shape), and index with what it yields",
    "flatiter": "iterate over x.ravel()",
    "isnat": "traced values are numbers; test dates outside, and pass the mask",
    "recarray": "structured arrays carry no derivatives; use dictionaries or named tuples of arrays",
}


def full_name(f: Callable) -> str:
    """The name of a NumPy function with its namespace: `np.linalg.svd`."""
    module = getattr(f, "__module__", None) or "numpy"
    name = getattr(f, "__name__", str(f))
    return f"np.{module[6:]}.{name}" if module.startswith("numpy.") else f"np.{name}"


@functools.cache
def mutating_functions() -> frozenset[Callable]:
    """The NumPy functions that write into their first argument."""
    return frozenset(public_callables()[name] for name, why in REFUSED.items() if why.startswith(_WRITES))


@functools.cache
def public_callables() -> dict[str, Callable]:
    """All public NumPy functions by name (`linalg.svd`), without scalar types."""
    return {
        prefix + name: f
        for prefix, namespace in {"": numpy, "linalg.": numpy.linalg, "fft.": numpy.fft}.items()
        for name in namespace.__all__
        if not name.startswith("_")
        if callable(f := getattr(namespace, name)) and not (isinstance(f, type) and issubclass(f, numpy.generic))
    }
