"""NumPy's namespace, differentiable: `import minidiff.numpy as np`.

The functions call NumPy's, which compute on plain arrays and dispatch traced values to `minidiff` (`__array_ufunc__`,
`__array_function__`), so code written for NumPy can be differentiated unchanged. Lists that hold traced values are
accepted wherever NumPy accepts lists (`lists.py`). Functions that NumPy cannot dispatch are replaced (`replaced.py`).
Only `at` is added, for functional updates `at(x)[index].set(v)`, since traced values cannot be written into.

>>> import minidiff as md, minidiff.numpy as np
>>> float(md.grad(lambda x: np.array([x, 2 * x]).sum())(1.0))
3.0
>>> float(md.grad(lambda x: np.linalg.norm([3 * x, 4 * x]))(1.0))
5.0
"""

from typing import Any as _Any

import numpy as _numpy

from minidiff.numpy import fft, linalg
from minidiff.numpy import replaced as _replaced
from minidiff.numpy.lists import namespace as _namespace

__all__ = [*_numpy.__all__, *(name for name in _replaced.__all__ if name not in _numpy.__all__)]

_own = {"fft": fft, "linalg": linalg, **{name: vars(_replaced)[name] for name in _replaced.__all__}}
globals().update(dict.fromkeys(__all__) | _namespace(_numpy) | _own)
_later = [name for name in __all__ if globals()[name] is None and name not in vars(_numpy)]
for _name in _later:  # submodules that NumPy imports lazily
    del globals()[_name]


def __getattr__(name: str) -> _Any:
    if name in _later or name in ("__version__", "__array_api_version__", "__array_namespace_info__"):
        return getattr(_numpy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
