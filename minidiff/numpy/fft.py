"""NumPy's `fft`, differentiable: see `minidiff.numpy`."""

import numpy as _numpy

from minidiff.numpy.lists import namespace_getattr as _namespace_getattr

__all__ = list(_numpy.fft.__all__)

__getattr__ = _namespace_getattr(globals(), _numpy.fft, __all__)
