"""NumPy's namespace, differentiable: `import minidiff.numpy as np`.

The functions call NumPy's, which compute on plain arrays and dispatch traced values to `minidiff` (`__array_ufunc__`,
`__array_function__`), so code written for NumPy can be differentiated unchanged. Lists that hold traced values are
accepted wherever NumPy accepts lists (`functions.py`). Functions that NumPy cannot dispatch are replaced
(`replaced.py`). Only `at` is added, for functional updates `at(x)[index].set(v)`, since traced values cannot be written
into.

>>> import minidiff as md, minidiff.numpy as np
>>> float(md.grad(lambda x: np.array([x, 2 * x]).sum())(1.0))
3.0
>>> float(md.grad(lambda x: np.linalg.norm([3 * x, 4 * x]))(1.0))
5.0
"""

import functools as _functools

import numpy as _numpy

from minidiff.errors.other_libraries import module_getattr as _module_getattr
from minidiff.numpy import replaced as _replaced
from minidiff.numpy.functions import wrap as _wrap
from minidiff.numpy.replaced import *  # noqa: F403

__all__ = [*_numpy.__all__, *(name for name in _replaced.__all__ if name not in _numpy.__all__)]

_later = {*__all__, "__version__", "__array_api_version__", "__array_namespace_info__"}
_modules = {name: f"{__name__}.{name}" for name in ("fft", "linalg")}
__getattr__ = _module_getattr(__name__, _modules, dict.fromkeys(_later, "numpy"), wrap=_wrap)
__dir__ = _functools.partial(sorted, __all__)
