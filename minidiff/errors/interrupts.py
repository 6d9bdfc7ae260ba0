"""Ctrl-C, which may come at any moment: what a function changes for its duration is changed back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


def restores(variable: ContextVar) -> Callable[[Callable], Callable]:
    """Return a decorator of functions that restores the value of `variable` even after Ctrl-C.

    Ctrl-C raises KeyboardInterrupt at the start of a Python function or after a call. In a `with` statement that may be
    after `__enter__` has set the variable, or before `__exit__` does; it cannot be before the first call of a `finally`
    clause. Decorating the outermost function is enough.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call_and_restore(*args: Any, **kwargs: Any) -> Any:
            previous = variable.get()
            try:
                return function(*args, **kwargs)
            finally:
                variable.set(previous)

        return call_and_restore

    return decorate
