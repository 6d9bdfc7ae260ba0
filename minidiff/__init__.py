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

import importlib as _importlib
import typing as _typing

from minidiff import numpy, tree
from minidiff import tracebacks as _tracebacks
from minidiff.compiler.jit import jit
from minidiff.core import (
    LeakedTracerError,
    ShapedArray,
    TracerError,
    UnboundAxisError,
    VarianceError,
    typeof,
)
from minidiff.forward import jvp
from minidiff.reverse import grad, linearize, value_and_grad, vjp
from minidiff.staging import eval_shape, make_tape
from minidiff.tape import Tape
from minidiff.vmap import vmap

__version__ = "0.1.0"

__all__ = [
    "LeakedTracerError",
    "ShapedArray",
    "Tape",
    "TracerError",
    "UnboundAxisError",
    "VarianceError",
    "associative_scan",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policies",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "debug",
    "debug_nans",
    "draw",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "eval_shape",
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
    "map",
    "nn",
    "numerical",
    "numpy",
    "remat",
    "scan",
    "stop_gradient",
    "switch",
    "testing",
    "trace_table",
    "transpose",
    "tree",
    "typeof",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]

#: What most programs do without is imported when it is asked for: name -> module, and whether it is a name in it. (No
#: such module has the name of what is in it: importing it would put the module in that name's place.)
_LATER = {
    **dict.fromkeys(
        ["checkpoint", "checkpoint_name", "checkpoint_policies", "remat"], ("minidiff.higher_order.checkpoint", True)
    ),
    **dict.fromkeys(
        ["associative_scan", "cond", "fori_loop", "map", "scan", "switch", "while_loop"],
        ("minidiff.higher_order", True),
    ),
    **dict.fromkeys(["custom_jvp", "custom_vjp", "stop_gradient"], ("minidiff.higher_order.custom_rules", True)),
    **dict.fromkeys(
        [
            "dynamic_index_in_dim",
            "dynamic_slice",
            "dynamic_slice_in_dim",
            "dynamic_update_index_in_dim",
            "dynamic_update_slice",
            "dynamic_update_slice_in_dim",
        ],
        ("minidiff.slices", True),
    ),
    **dict.fromkeys(["hessian", "hvp", "jacfwd", "jacrev"], ("minidiff.jacobian", True)),
    **dict.fromkeys(["linear_transpose", "transpose"], ("minidiff.transposition", True)),
    "debug": ("minidiff.debug", False),
    "debug_nans": ("minidiff.debug", True),
    "draw": ("minidiff.show.graph", True),
    "nn": ("minidiff.nn", False),
    "numerical": ("minidiff.checks", True),
    "testing": ("minidiff.checks", True),
    "trace_table": ("minidiff.show.trace_table", True),
}


if _typing.TYPE_CHECKING:  # what type checkers and editors know of these
    from minidiff import debug, nn
    from minidiff.checks import numerical, testing
    from minidiff.debug import debug_nans
    from minidiff.higher_order import associative_scan, cond, fori_loop, map, scan, switch, while_loop
    from minidiff.higher_order.checkpoint import checkpoint, checkpoint_name, checkpoint_policies, remat
    from minidiff.higher_order.custom_rules import custom_jvp, custom_vjp, stop_gradient
    from minidiff.jacobian import hessian, hvp, jacfwd, jacrev
    from minidiff.show.graph import draw
    from minidiff.show.trace_table import trace_table
    from minidiff.slices import (
        dynamic_index_in_dim,
        dynamic_slice,
        dynamic_slice_in_dim,
        dynamic_update_index_in_dim,
        dynamic_update_slice,
        dynamic_update_slice_in_dim,
    )
    from minidiff.transposition import linear_transpose, transpose

else:  # to these it would say that there is every name

    def __getattr__(name: str) -> _typing.Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        path, inside = _LATER[name]
        module = _importlib.import_module(path)
        globals()[name] = getattr(module, name) if inside else module
        return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)


_tracebacks.install()
