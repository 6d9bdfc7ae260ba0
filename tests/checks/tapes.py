"""A plugin of pytest: type-check every tape that a test makes.

Ranks make the same tapes, so each checks its share of them.
"""

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

import minidiff
import spmd  # noqa: F401  (loads all modules that import the functions to wrap)
from minidiff.api import recording
from minidiff.api.vmap import named_axes
from minidiff.checks import typecheck
from minidiff.compiler import linear_transpose, program
from minidiff.core import reverse
from minidiff.core.interpreter import current_interpreter, current_scope
from minidiff.core.ranks import Scope

#: The functions that make tapes: where each is, and where in its result the tape is.
MAKERS = [
    (recording, "stage_flat", lambda result: result[0]),
    (reverse.engine, "linearize_flat", lambda result: result[1]),
    (linear_transpose, "transpose", lambda result: result),
    (program, "optimize", lambda result: result),
]
_number_of_tape = itertools.count()
#: Bodies that are checked, by identity and scope: comparing two as programs would take longer than checking one.
_bodies: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_automatic = threading.local()  # `on` while this plugin checks a tape; a test's own checks leave nothing out
_check_tape = typecheck.check_tape


def _checking(make: Callable, tape_of: Callable) -> Callable:
    """`make`, followed by a check of the tape in its result."""

    @functools.wraps(make)
    def checking(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        if next(_number_of_tape) % MPI.COMM_WORLD.size != MPI.COMM_WORLD.rank:
            return result
        scopes = [x for x in [*args, *kwargs.values(), current_scope()] if isinstance(x, Scope)]
        typed = not scopes or scopes[0].typed
        _automatic.on = True
        try:
            tape_of(result).check(typed and not named_axes(current_interpreter()))  # axes of a vmap have no types
        finally:
            _automatic.on = False
        return result

    return checking


def _check_body_once(body: Any, typed: bool, scope: Scope | None) -> None:
    """Check a body, which is a part of many tapes, once in each scope."""
    key = id(body), typed, scope and (*scope.axes.items(), scope.typed, scope.explicit, scope.checks)
    if not getattr(_automatic, "on", False) or _bodies.get(key) is not body:
        _check_tape(body, typed, scope)
        _bodies[key] = body


typecheck.check_tape = _check_body_once
minidiff.grad(lambda x: x)(1.0)  # loads the functions of `minidiff.fast`
for _owner, _name, _tape_of in MAKERS:
    _make = getattr(_owner, _name)
    _modules = [m for name, m in sys.modules.items() if name.split(".")[0] in ("minidiff", "collectives", "spmd")]
    for _module in (_owner, *_modules):
        if vars(_module).get(_name) is _make or _module is _owner:
            setattr(_module, _name, _checking(_make, _tape_of))
