"""Lifetimes of the values of a program that runs eagerly, observed while it is recorded."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

from minidiff.values.settings import override


class Lifetimes:
    """The lifetime of each value while a program was recorded: as long as when it runs eagerly.

    `ended` maps a variable to the number of equations that its tape had when the last reference to its value went. The
    arrays of one number that the library makes meanwhile, such as zeros, are results of the operation `uniform`.
    """

    def __init__(self, uniform: Any) -> None:
        self.ended: dict[Any, int] = {}
        self._watched: list[weakref.ref] = []  # a reference calls back only if it is held itself
        self._uniform = uniform
        #: By id of an array that was made: a reference to it, and its variables, each with the equations of its tape.
        self.made: dict[int, tuple[weakref.ref, list[tuple[Any, Sequence]]]] = {}

    def watch_results(self, results: Any, equations: Sequence) -> None:
        """Note when the results of the last of these equations are let go."""
        for x in results if isinstance(results, list) else [results]:
            self._watched.append(weakref.ref(x, partial(self._end, x.variable, equations)))

    def watch_array(self, x: Any) -> None:
        """Note when an array of one number is let go, and give it a variable on tapes that use it."""
        self.made[id(x)] = weakref.ref(x, partial(self._end_array, id(x))), []

    def variable_of(self, x: Any, tape: Any) -> Any:
        """The variable, on the tape of this recorder, of an array that was made."""
        _, uses = self.made[id(x)]
        use = next((variable for variable, equations in uses if equations is tape.equations), None)
        if use is None:
            use = tape.record(self._uniform, [], {"shape": x.shape, "dtype": x.dtype}).variable
            uses.append((use, tape.equations))
        return use

    def _end_array(self, i: int, _: weakref.ref) -> None:
        self.ended.update((variable, len(equations)) for variable, equations in self.made.pop(i)[1])

    def _end(self, variable: Any, equations: Sequence, _: weakref.ref) -> None:
        self.ended[variable] = len(equations)


current_lifetimes: ContextVar[Lifetimes | None] = ContextVar("current_lifetimes", default=None)


def watch_lifetimes(uniform: Any) -> AbstractContextManager[Lifetimes]:
    """Watch the values of programs that are recorded in the block; `uniform` is the operation that makes zeros."""
    return override(current_lifetimes, Lifetimes(uniform))
