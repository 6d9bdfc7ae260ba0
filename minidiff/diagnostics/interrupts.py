"""What Ctrl-C may interrupt: the current interpreter is restored even so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from minidiff.core.interpreter import become, current_interpreter


def restores_interpreter(function: Callable) -> Callable:
    """Decorate a function to restore the current interpreter even after Ctrl-C.

    Ctrl-C raises KeyboardInterrupt at the start of a Python function or after a call. In `running` that may be after
    `__enter__` has called `become`, or before `__exit__` does; it cannot be before the first call of a `finally`
    clause. Decorating the outermost function is enough, so rules need not be decorated.
    """

    @functools.wraps(function)
    def call_and_restore(*args: Any, **kwargs: Any) -> Any:
        previous = current_interpreter()
        try:
            return function(*args, **kwargs)
        finally:
            become(previous)

    return call_and_restore
