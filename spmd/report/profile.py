"""When the steps of a compiled program end: a program that is compiled with a clock notes the time after each line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from minidiff.compiler.codegen import current_profiler
from minidiff.core.tape import Equation
from minidiff.values.settings import override


class Span(NamedTuple):
    """A step of a program as it ran: its number, its equation, and when it began and ended, in seconds."""

    number: int
    equation: Equation | None
    start: float
    end: float


class Clock:
    """The times at which steps end, as `time.perf_counter` says them.

    A step is an equation, or None: what comes before the first line of a function. The program appends the number of a
    step and the time to `marks`, and does nothing else while it runs.
    """

    def __init__(self) -> None:
        self._numbers: dict[Equation | None, int] = {None: 0}  # of steps, in order
        self.marks: list[tuple[int, float]] = []
        self.names = {"mark": self.marks.append, "now": time.perf_counter}

    def in_programs(self) -> AbstractContextManager[Clock]:
        """Programs that are compiled in this context note their steps."""
        return override(current_profiler, self)

    def line(self, eqn: Equation | None) -> str:
        """The line of a program's source that notes the end of a step; it calls the functions in `names`."""
        return f"mark(({self._number(eqn)}, now()))"

    def noting(self, equations: Iterable[Equation]) -> Iterator[Equation]:
        """Yield equations to a caller that applies them one by one, and note when each ends."""
        for eqn in equations:
            yield eqn
            self.marks.append((self._number(eqn), time.perf_counter()))

    def _number(self, eqn: Equation | None) -> int:
        return self._numbers.setdefault(eqn, len(self._numbers))

    def start(self) -> None:
        """Drop what was noted, and begin a measurement."""
        self.marks.clear()
        self.marks.append((0, time.perf_counter()))

    def spans(self) -> Iterator[Span]:
        """Yield the steps since `start`, in order: each begins when the one before ends."""
        steps, begin = [*self._numbers], self.marks[0][1]
        for number, end in self.marks[1:]:
            yield Span(number, steps[number], begin, end)
            begin = end
