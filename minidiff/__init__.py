"""Automatic differentiation on NumPy: a tape, forward and reverse mode, to any order.

>>> import minidiff as md
>>> import minidiff.numpy as np
>>> float(md.grad(lambda x: np.log(x) * x)(1.0))
1.0
"""

from minidiff import numerical, numpy, testing, tree
from minidiff.batching import vmap
from minidiff.core import (
    LeakedTracerError,
    ShapedArray,
    TracerError,
    UnboundAxisError,
    VarianceError,
    typeof,
)
from minidiff.draw import draw
from minidiff.forward import jvp
from minidiff.reverse import grad, linear_transpose, linearize, value_and_grad, vjp
from minidiff.staging import make_tape
from minidiff.tape import Tape
from minidiff.trace import trace_table

__version__ = "0.1.0"

__all__ = [
    "LeakedTracerError",
    "ShapedArray",
    "Tape",
    "TracerError",
    "UnboundAxisError",
    "VarianceError",
    "draw",
    "grad",
    "jvp",
    "linear_transpose",
    "linearize",
    "make_tape",
    "numerical",
    "numpy",
    "testing",
    "trace_table",
    "tree",
    "typeof",
    "value_and_grad",
    "vjp",
    "vmap",
]
