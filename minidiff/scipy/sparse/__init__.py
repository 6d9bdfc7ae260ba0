"""`scipy.sparse`, differentiable: matrices with traced values, and solvers without matrices, in `linalg`.

>>> import minidiff as md
>>> import numpy as np
>>> x, info = md.scipy.sparse.linalg.cg(lambda x: 2 * x, np.ones(2))
>>> x, int(info)
(array([0.5, 0.5]), 0)
"""

from minidiff.errors.other_libraries import finish_module as _finish_module
from minidiff.ops.sparse import coo_array
from minidiff.scipy.sparse import linalg

__all__ = ["coo_array", "linalg"]

_finish_module(globals())
