"""The programs of a function, which all `jit(f)` of the same `f` with the same options share.

They are kept as long as the function, which they do not keep: so a loop may call `jit(f)(x)` in each step. A bound
method, which Python makes anew at each access, is known by its object and its function. Another `def` or `lambda` is
another function, also one of equal code.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy

from minidiff.core.tape import Tape

#: By the `id` of a function or of a method's object: a reference, and programs by method and options.
_PROGRAMS: dict[int, tuple[weakref.ref, dict[Hashable, Programs]]] = {}
#: How many programs are kept of a function, for as many types and static arguments.
MOST_PROGRAMS = 256
_EMPTY = types.CellType()
_NUMBERS = (int, float, complex, str, bytes, type(None))


class Programs:
    """Programs of a function by the types of their arguments: `compiled`, and `inlined` in other transformations."""

    def __init__(self) -> None:
        self.compiled: dict[Any, Any] = {}
        self.inlined: dict[Any, Any] = {}
        self.reads: Sequence[tuple[str, str]] = ()  # the kinds and names of variables that the function reads
        self.captured: list | None = None  # the values of these, when the function was traced

    def get(self, f: Callable, programs: dict, key: Hashable, trace: Callable[[], tuple[Any, bool]]) -> Any:
        """Return the program for a key, out of one of the tables, or by `trace`, which says whether to share it."""
        shared = self.captured in (None, self.capture(f))
        if shared and key in programs:
            return programs[key]
        program, may_share = trace()
        if shared and may_share:
            if len(programs) >= MOST_PROGRAMS:
                del programs[next(iter(programs))]
            programs[key] = program
            self.reads = _variables_read(getattr(_function_and_object(f)[0], "__code__", None))
            self.captured = self.capture(f)
        return program

    def capture(self, f: Any) -> list:
        """Identify the values that `f` reads: globals, cells, and attributes of a method's object."""
        function, instance = _function_and_object(f)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = zip(names, getattr(function, "__closure__", None) or ())
        variables = {
            "GLOBAL": getattr(function, "__globals__", {}),
            "DEREF": {name: cell.cell_contents for name, cell in cells if cell != _EMPTY},
            "ATTR": getattr(instance, "__dict__", {}),
        }
        return [_identify(variables[kind][name]) for kind, name in self.reads if name in variables[kind]]


def programs_of(f: Callable, options: Hashable) -> Programs:
    """Return the programs of `f` with these options, new ones if it closes over other values than at the last call.

    A function that cannot be referred to weakly, or options that cannot be hashed, have programs of their own.
    """
    owner, function = (f.__self__, f.__func__) if isinstance(f, types.MethodType) else (f, None)
    number = id(owner)
    try:
        hash(options)
        reference = weakref.ref(owner, lambda _: _PROGRAMS.pop(number, None))
    except TypeError:
        return Programs()
    if number not in _PROGRAMS or _PROGRAMS[number][0]() is not owner:
        _PROGRAMS[number] = reference, {}
    by_options = _PROGRAMS[number][1]
    programs = by_options.get((function, options))
    if programs is None or programs.captured not in (None, programs.capture(f)):
        by_options[function, options] = programs = Programs()
    return programs


def has_closures(x: Any) -> bool:
    """Return whether a tape or a parameter has functions with values, among which may be the one that was traced."""
    if isinstance(x, Tape):
        return any(has_closures(value) for eqn in x.equations for value in eqn.params.values())
    if isinstance(x, (tuple, list)):
        return any(map(has_closures, x))
    if isinstance(x, types.FunctionType):
        return bool(x.__closure__)
    return callable(x) and not isinstance(x, (type, numpy.ufunc))


def _function_and_object(f: Any) -> tuple[Any, Any]:
    """The function of a method or of an object that is called, and the object; a function itself has none."""
    if isinstance(f, types.FunctionType):
        return f, None
    return getattr(f, "__func__", type(f).__call__), getattr(f, "__self__", f)


@functools.lru_cache(1024)
def _variables_read(code: types.CodeType | None) -> tuple[tuple[str, str], ...]:
    """The kinds and names of variables that a function reads, and does not set, as it does with a counter of traces."""
    reads, sets = dict[tuple[str, str], None](), set()
    for instruction in dis.get_instructions(code) if code else ():
        action, _, kind = instruction.opname.replace("METHOD", "ATTR").partition("_")
        if kind in ("GLOBAL", "DEREF", "ATTR"):
            reads[kind, instruction.argval] = None
            sets |= {(kind, instruction.argval)} if action != "LOAD" else set()
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)] if code else []
    return tuple(pair for pair in (*reads, *itertools.chain(*map(_variables_read, inner))) if pair not in sets)


def _identify(x: Any) -> Any:
    """Stand for a value without keeping it: equal if it is the same object, or the same number."""
    if isinstance(x, _NUMBERS):
        return type(x), x
    try:
        return id(x), weakref.ref(x)
    except TypeError:
        return id(x)
