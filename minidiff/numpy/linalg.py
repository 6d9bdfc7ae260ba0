"""NumPy's `linalg`, differentiable: see `minidiff.numpy`."""

import numpy as _numpy

from minidiff.numpy.lists import attributes as _attributes

__all__ = list(_numpy.linalg.__all__)

__getattr__ = _attributes(globals(), _numpy.linalg, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)
