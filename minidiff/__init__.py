"""Automatic differentiation on NumPy: forward and reverse mode, to any order.

A transformation runs a NumPy function on tracers, and interprets each operation: push tangents (`jvp`), linearize and
transpose (`grad`, `vjp`), vectorize (`vmap`), record (`make_tape`). A recorded tape can be printed, drawn, checked, and
compiled (`jit`). Tapes can hold structured control flow (`cond`, `switch`, `while_loop`, `fori_loop`, `scan`).
`checkpoint` saves memory for the backward pass; `custom_jvp` and `custom_vjp` define custom derivative rules.

>>> import minidiff as md
>>> import minidiff.numpy as np
>>> float(md.grad(lambda x: np.log(x) * x)(1.0))
1.0
"""

import importlib as _importlib
import os as _os
import typing as _typing

import minidiff.numpy.dispatch as _dispatch  # noqa: F401  (NumPy calls it on tracers; `from` would ask `__getattr__`)
from minidiff import numpy, tree
from minidiff.api.derivatives import grad, jvp, linearize, value_and_grad, vjp
from minidiff.api.recording import close_tape as _close_tape
from minidiff.api.recording import closure_convert, eval_shape, make_tape, place
from minidiff.api.vmap import vmap
from minidiff.core.tape import Tape
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import KeyReuseWarning as KeyReuseWarning
from minidiff.errors import LeakedTracerError, TracerError, UnboundAxisError, VarianceError, VarianceWarning
from minidiff.errors.other_libraries import finish_module as _finish_module
from minidiff.errors.other_libraries import imports_at_first_use as _imports_at_first_use
from minidiff.errors.other_libraries import module_getattr as _module_getattr
from minidiff.values import VERSION as _VERSION

__version__ = _VERSION

ShapeDtypeStruct = ShapedArray  # JAX's name

__all__ = ["ShapeDtypeStruct", "ShapedArray", "Tape", "eval_shape", "make_tape", "place", "typeof"]
__all__ += ["grad", "jvp", "linearize", "value_and_grad", "vjp"]
__all__ += ["hessian", "hvp", "jacfwd", "jacobian", "jacrev", "linear_transpose", "transpose"]
__all__ += ["derivatives", "jet", "laplacian"]
__all__ += ["sparse_hessian", "sparse_jacobian", "sparsity"]
__all__ += ["debug", "debug_nans", "disable_jit", "draw", "export", "jit", "trace_table", "vmap"]
__all__ += ["associative_scan", "autograph", "cond", "fori_loop", "map", "scan", "switch", "while_loop"]
__all__ += ["checkpoint", "checkpoint_name", "checkpoint_policies", "pure_callback", "remat"]
__all__ += ["multistage", "online", "revolve"]
__all__ += ["SymbolicZero", "closure_convert", "custom_jvp", "custom_vjp", "custom_vmap", "stop_gradient"]
__all__ += ["dynamic_index_in_dim", "dynamic_slice", "dynamic_slice_in_dim"]
__all__ += ["dynamic_update_index_in_dim", "dynamic_update_slice", "dynamic_update_slice_in_dim"]
__all__ += ["KeyReuseWarning", "keep_memory", "release_memory"]
__all__ += ["nn", "numerical", "numpy", "optim", "precision", "random", "scipy", "testing", "tree"]
__all__ += ["LeakedTracerError", "TracerError", "UnboundAxisError", "VarianceError", "VarianceWarning"]

_LATER, _NAMES = _imports_at_first_use(__name__)

if _typing.TYPE_CHECKING:  # for type checkers and editors; at run time, imported at first use
    import minidiff.checks.numerical as numerical
    import minidiff.checks.testing as testing
    import minidiff.debug as debug
    from minidiff import nn, optim, precision, random, scipy
    from minidiff.api.jacobians import hessian, hvp, jacfwd, jacobian, jacrev
    from minidiff.compiler.export import export
    from minidiff.compiler.jit import jit
    from minidiff.compiler.linear_transpose import linear_transpose, transpose
    from minidiff.control_flow.checkpoint import checkpoint, checkpoint_name, checkpoint_policies, remat
    from minidiff.control_flow.cond import cond, switch
    from minidiff.control_flow.custom_batching import custom_vmap
    from minidiff.control_flow.custom_rules import SymbolicZero, custom_jvp, custom_vjp, stop_gradient
    from minidiff.control_flow.loops import scan
    from minidiff.control_flow.over_axis import associative_scan, map
    from minidiff.control_flow.scheduled_loop import multistage, online, revolve
    from minidiff.control_flow.while_loop import fori_loop, while_loop
    from minidiff.debug import debug_nans, disable_jit
    from minidiff.ops.callback import pure_callback
    from minidiff.ops.slices import (
        dynamic_index_in_dim,
        dynamic_slice,
        dynamic_slice_in_dim,
        dynamic_update_index_in_dim,
        dynamic_update_slice,
        dynamic_update_slice_in_dim,
    )
    from minidiff.show.graph import draw
    from minidiff.show.trace_table import trace_table
    from minidiff.sparse.jacobians import sparse_hessian, sparse_jacobian, sparsity
    from minidiff.syntax.functions import autograph
    from minidiff.taylor import derivatives, jet, laplacian
    from minidiff.values.allocation import keep_memory, release_memory

else:  # type checkers would infer from it that every name exists
    __getattr__ = _module_getattr(__name__, _LATER, _NAMES)


def _from(module: str, name: str) -> _typing.Any:
    """Return a method that is a function of a module above the core, which loads at the first call."""
    return lambda self, *args: getattr(_importlib.import_module(module), name)(self, *args)


def _check(tape: Tape, typed: bool = True) -> None:
    """Infer every type again by the operations' rules; TypeError if one is wrong.

    This also checks bodies, and that parameters fit the operands and the mesh. The error names the operation, the type
    on the tape and the type that the rules give. `typed` says whether operands must also agree in variance. Pass False
    for the body of a `shard_map` with `check_rep=False`, and for a tape recorded in a `vmap` with a named axis, whose
    variances are not tracked.
    """
    _importlib.import_module("minidiff.checks.typecheck").check_tape(tape, typed, None)


Tape.check = _check
Tape.close = _close_tape  # type: ignore[assignment]
Tape.__eq__ = _from("minidiff.compiler.equality", "same")  # type: ignore[method-assign]
Tape.__str__ = Tape.__repr__ = _from("minidiff.printing", "text_of")  # type: ignore[method-assign]
Tape._repr_html_ = _from("minidiff.printing", "tape_as_html")  # type: ignore[attr-defined]
ShapedArray._repr_html_ = _from("minidiff.printing", "type_as_html")  # type: ignore[attr-defined]

if "MINIDIFF_DEBUG_NANS" in _os.environ:
    _importlib.import_module("minidiff.debug").from_environment()
try:
    _importlib.import_module("minidiff.fast").install()
except ModuleNotFoundError as _error:  # without this folder everything works, and takes longer
    if _error.name != "minidiff.fast":
        raise
_finish_module(globals())
