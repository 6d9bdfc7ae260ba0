"""NumPy's `fft`, differentiable: see `minidiff.numpy`."""

import functools as _functools

import numpy as _numpy

from minidiff.errors.other_libraries import module_getattr as _module_getattr
from minidiff.numpy.functions import wrap as _wrap

__all__ = list(_numpy.fft.__all__)

__getattr__ = _module_getattr(__name__, names=dict.fromkeys(__all__, "numpy.fft"), wrap=_wrap)
__dir__ = _functools.partial(sorted, __all__)
