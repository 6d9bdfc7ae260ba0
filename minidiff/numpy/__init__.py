"""NumPy's namespace, differentiable: `import minidiff.numpy as np`.

The functions *are* NumPy's. On plain arrays nothing comes between; on traced values NumPy hands the
call over to `minidiff` (`__array_ufunc__`, `__array_function__`). So code written for NumPy is
differentiated as it stands. Defined here are only the functions that NumPy cannot hand over.

>>> import minidiff as md, minidiff.numpy as np
>>> float(md.grad(lambda x: np.array([x, 2 * x]).sum())(1.0))
3.0
"""

from __future__ import annotations

from typing import Any

import numpy as _numpy

from minidiff.core import Tracer as _Tracer
from minidiff.core import Value as _Value
from minidiff.ops import elementwise as _elementwise
from minidiff.ops import shape as _shape

_overridden = {"array", "asarray"}

globals().update({name: getattr(_numpy, name) for name in _numpy.__all__ if name not in _overridden})


def array(x: Any, dtype: Any = None, **options: Any) -> _Value:
    """`numpy.array`, of nested lists that may hold traced values."""
    if isinstance(x, (list, tuple)) and _holds_tracer(x):
        x = _shape.stack([array(item) for item in x])
    if isinstance(x, _Tracer):
        return x if dtype is None else _elementwise.convert(x, dtype)
    return _numpy.array(x, dtype, **options)


def asarray(x: Any, dtype: Any = None, **options: Any) -> _Value:
    """`numpy.asarray`, of traced values too."""
    if isinstance(x, (list, tuple, _Tracer)):
        return array(x, dtype, **options)
    return _numpy.asarray(x, dtype, **options)


def _holds_tracer(x: Any) -> bool:
    return isinstance(x, _Tracer) or (isinstance(x, (list, tuple)) and any(map(_holds_tracer, x)))


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations", "Any")]
