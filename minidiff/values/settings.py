"""Settings of programs, which are no arrays: static arguments, what trees have besides leaves, context variables."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from math import copysign
from typing import Any, TypeVar

import numpy

T = TypeVar("T")

_defaults: dict[ContextVar, Any] = {}


def setting(name: str, default: Any) -> ContextVar:
    """Return a new context variable of the library, which `restores_settings` restores after Ctrl-C."""
    variable = ContextVar(name, default=default)
    _defaults[variable] = default
    return variable


_checks = os.environ.get("SPMD_CHECKING")
#: Whether probable mistakes are errors, and ranks compare values: always, never, or (None) at times. See
#: `spmd.checking`.
checks: ContextVar[bool | None] = setting("checking", _checks != "0" if _checks else None)


@contextlib.contextmanager
def override(variable: ContextVar, value: T) -> Iterator[T]:
    """Set a context variable in a `with` block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def restores_settings(function: Callable) -> Callable:
    """Decorate a function to restore all settings, the current interpreter too, even after Ctrl-C.

    Ctrl-C raises KeyboardInterrupt at the start of a Python function or after a call. In a `with` statement that may be
    after `__enter__` has set a variable, or before `__exit__` does. Decorating the outermost function is enough.
    """

    @functools.wraps(function)
    def call_and_restore(*args: Any, **kwargs: Any) -> Any:
        before = copy_context()
        try:
            return function(*args, **kwargs)
        except BaseException:
            for variable, default in _defaults.items():
                variable.set(before.get(variable, default))
            raise

    return call_and_restore


class checking:
    """`with checking(scope, on):` turns an explicit scope's checks on or off.

    They are on for the user's operations, and off for those that implement one (in derivative rules, say). The latter
    get pbroadcasts inserted as in any scope, since the user could not write them.
    """

    __slots__ = ("scope", "on", "before")

    def __init__(self, scope: Any, on: bool):
        self.scope = scope if scope is not None and scope.explicit else None
        self.on = on

    def __enter__(self) -> None:
        if self.scope is not None:
            self.before, self.scope.checks = self.scope.checks, self.on

    def __exit__(self, *exc) -> None:
        if self.scope is not None:
            self.scope.checks = self.before


def types_in(setting: Any) -> Any:
    """The types in a setting, in depth, and the signs of numbers, as a part of cache keys.

    Two settings may be equal and still make two programs: 1, 1.0 and True are equal, and so are 0.0 and -0.0, tuples
    and sets of these, and objects that compare by attributes which have such values.

    >>> from fractions import Fraction
    >>> types_in((1, 1.0)) == types_in((1, 2.0)), types_in((1, 1.0)) == types_in((1, Fraction(1)))
    (True, False)
    """
    kind = type(setting)
    if kind in (str, int, bool) or kind.__eq__ is object.__eq__:  # the latter equals itself alone
        return kind
    if isinstance(setting, tuple):
        return kind, *map(types_in, setting)
    if isinstance(setting, frozenset):
        return kind, frozenset([(x, types_in(x)) for x in setting])
    if isinstance(setting, (float, complex, numpy.inexact)):
        return kind, copysign(1, setting.real), copysign(1, setting.imag)
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    names = [*getattr(setting, "__dict__", ()), *slots]
    return kind, *[(name, types_in(getattr(setting, name, None))) for name in names]
