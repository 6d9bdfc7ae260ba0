"""NumPy's `fft`, differentiable: see `minidiff.numpy`."""

import numpy as _numpy

from minidiff.numpy.lists import namespace as _namespace

__all__ = list(_numpy.fft.__all__)

globals().update(_namespace(_numpy.fft))
