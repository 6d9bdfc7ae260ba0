"""NumPy's namespace, differentiable: `import minidiff.numpy as np`.

The functions *are* NumPy's. On plain arrays nothing comes between; on traced values NumPy hands the
call over to `minidiff` (`__array_ufunc__`, `__array_function__`). So code written for NumPy is
differentiated as it stands. Replaced are only the functions that NumPy cannot hand over; added is only `at`, for
updates: `at(x)[index].set(v)`, since values that are differentiated are not written into.

>>> import minidiff as md, minidiff.numpy as np
>>> float(md.grad(lambda x: np.array([x, 2 * x]).sum())(1.0))
3.0
"""

from typing import Any as _Any

import numpy as _numpy

from minidiff.numpy import replaced as _replaced

__all__ = [*_numpy.__all__, *(name for name in _replaced.__all__ if name not in _numpy.__all__)]

globals().update({name: vars(_replaced if name in _replaced.__all__ else _numpy).get(name) for name in __all__})
_later = [name for name in __all__ if globals()[name] is None and name not in vars(_numpy)]
for _name in _later:  # parts of NumPy that it imports when they are asked for
    del globals()[_name]


def __getattr__(name: str) -> _Any:
    if name in _later:
        return getattr(_numpy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
