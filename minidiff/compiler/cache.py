"""The cache of compiled programs, which all `jit(f)` of the same `f` with the same options share.

Programs live as long as their function, which the cache refers to weakly: a loop may call `jit(f)(x)` in each step.
Python makes a bound method anew at each access, so the cache knows it by its object and its function. Two `def`s or
`lambda`s are two functions, even if their code is equal.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy

from minidiff.core.tape import Tape

#: By the `id` of a function or of a method's object: a reference, and programs by method and options.
_PROGRAMS: dict[int, tuple[weakref.ref, dict[Hashable, Programs]]] = {}
#: The number of programs that are cached for a function, for as many types and static arguments.
MAX_PROGRAMS = 256
_EMPTY = types.CellType()
_NUMBERS = (int, float, complex, str, bytes, type(None))


class Recent(dict[Hashable, Any]):
    """Programs by key: the last one used is the last, and when there are MAX_PROGRAMS, the first quarter is dropped."""

    def find(self, key: Hashable) -> Any:
        """Return the program of a key, or None."""
        program = self.pop(key, None)
        if program is not None:
            self[key] = program
        return program

    def add(self, key: Hashable, program: Any) -> bool:
        """Add a program, and return whether others were dropped."""
        is_full = len(self) >= MAX_PROGRAMS
        for old in [*self][: MAX_PROGRAMS // 4] if is_full else ():
            del self[old]
        self[key] = program
        return is_full


class Programs:
    """Programs of a function, compiled or inlined in other transformations, by the types of their arguments."""

    def __init__(self) -> None:
        self.programs = Recent()
        self.captured: dict[Any, Any] | None = None  # see `capture`: values that no trace changed

    def is_valid(self, values: dict[Any, Any]) -> bool:
        """Return True if the function reads the same values as when it was traced."""
        return all(name in values and values[name] == x for name, x in (self.captured or {}).items())

    def get(self, f: Callable, key: Hashable, trace: Callable[[], tuple[Any, bool]]) -> Any:
        """Return the program for a key: one that is there, or by `trace`, which says whether to share it."""
        before = capture(f)
        is_valid = self.is_valid(before)
        if is_valid and (shared := self.programs.find(key)) is not None:
            return shared
        program, may_share = trace()
        if is_valid and may_share:
            self.programs.add(key, program)
            after = capture(f)
            names = before if self.captured is None else self.captured
            self.captured = {name: before[name] for name in names if after.get(name) == before[name]}
        return program


def capture(f: Any) -> dict[Any, Any]:
    """Identify the values that `f` may read: globals and attributes of a method's object that it names, and cells."""
    function, instance = _function_and_object(f)
    code = getattr(function, "__code__", None)
    names, cells = _names_in(code), getattr(function, "__closure__", None) or ()
    values: dict[Any, Any] = {("cell", k): cell.cell_contents for k, cell in enumerate(cells) if cell != _EMPTY}
    for owner, variables in enumerate((getattr(function, "__globals__", {}), getattr(instance, "__dict__", {}))):
        values |= {(owner, name): variables[name] for name in names if name in variables}
    if instance is not None:
        slots = [name for name in names if isinstance(getattr(type(instance), name, None), types.MemberDescriptorType)]
        values |= {(1, name): getattr(instance, name) for name in slots if hasattr(instance, name)}
    return {name: _identify(x) for name, x in values.items()}


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
    if programs is None or not programs.is_valid(capture(f)):
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
    """Return the function of a method or of a callable object, and the object; a function itself has none."""
    if isinstance(f, types.FunctionType):
        return f, None
    return getattr(f, "__func__", type(f).__call__), getattr(f, "__self__", f)


@functools.lru_cache(1024)
def _names_in(code: types.CodeType | None) -> frozenset[str]:
    """Return the names of globals and attributes in a function, and in functions that it makes."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)] if code else []
    return frozenset(code.co_names if code else ()).union(*map(_names_in, inner))


def _identify(x: Any) -> Any:
    """Stand for a value without keeping it: equal if it is the same object, or the same number."""
    if isinstance(x, _NUMBERS):
        return type(x), x
    try:
        return id(x), weakref.ref(x)
    except TypeError:
        return id(x)
