"""NumPy's `linalg`, differentiable: see `minidiff.numpy`."""

import numpy as _numpy

from minidiff.numpy.lists import namespace as _namespace

__all__ = list(_numpy.linalg.__all__)

globals().update(_namespace(_numpy.linalg))
