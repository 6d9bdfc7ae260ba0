"""How long Python holds the values of a program that runs eagerly, observed while it is recorded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any


class Lifetimes:
    """How long each value was held while a program was recorded: as long as when it runs eagerly.

    `ended` maps a variable to the number of equations that its tape had when the last reference to its value went.
    """

    def __init__(self) -> None:
        self.ended: dict[Any, int] = {}
        self._watched: list[weakref.ref] = []  # a reference calls back only if it is held itself

    def watch_results(self, results: Any, equations: Sequence) -> None:
        """Note when the results of the last of these equations are let go."""
        for x in results if isinstance(results, list) else [results]:
            self._watched.append(weakref.ref(x, partial(self._end, x.variable, equations)))

    def _end(self, variable: Any, equations: Sequence, _: weakref.ref) -> None:
        self.ended[variable] = len(equations)


current_lifetimes: ContextVar[Lifetimes | None] = ContextVar("current_lifetimes", default=None)


@contextlib.contextmanager
def watch_lifetimes() -> Iterator[Lifetimes]:
    """Watch the values of programs that are recorded in the block."""
    lifetimes = Lifetimes()
    token = current_lifetimes.set(lifetimes)
    try:
        yield lifetimes
    finally:
        current_lifetimes.reset(token)
