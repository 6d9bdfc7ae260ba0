"""Automatic differentiation on NumPy: a tape, forward and reverse mode, to any order.

A function written with NumPy is run on tracers; what an operation then does is an interpretation of it: push tangents
(`jvp`), linearise and transpose (`grad`, `vjp`), vectorise (`vmap`), record (`make_tape`). A recorded tape can be
printed, drawn, checked, and compiled (`jit`). Control flow that tapes can hold is `cond` … `scan`; `checkpoint`
keeps less for the way back; `custom_jvp` and `custom_vjp` take rules of one's own.

>>> import minidiff as md
>>> import minidiff.numpy as np
>>> float(md.grad(lambda x: np.log(x) * x)(1.0))
1.0
"""

from minidiff import nn, numerical, numpy, testing, tree
from minidiff.batching import vmap
from minidiff.checkpoint import checkpoint, checkpoint_name, checkpoint_policies, remat
from minidiff.control import cond, fori_loop, scan, switch, while_loop
from minidiff.core import (
    LeakedTracerError,
    ShapedArray,
    TracerError,
    UnboundAxisError,
    VarianceError,
    typeof,
)
from minidiff.custom import custom_jvp, custom_vjp, stop_gradient
from minidiff.draw import draw
from minidiff.forward import jvp
from minidiff.jacobian import hessian, hvp, jacfwd, jacrev
from minidiff.jit import jit
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
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "draw",
    "fori_loop",
    "grad",
    "hessian",
    "hvp",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linear_transpose",
    "linearize",
    "make_tape",
    "nn",
    "numerical",
    "numpy",
    "remat",
    "scan",
    "stop_gradient",
    "switch",
    "testing",
    "trace_table",
    "tree",
    "typeof",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
