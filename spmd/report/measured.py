"""Measured steps of each rank: a compiled program runs with a clock, and the ranks exchange their records."""

from __future__ import annotations

import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from collectives.backends.base import coordinates_of
from collectives.cost import BY_NAME
from minidiff.compiler.codegen import current_profiler
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.errors.location import Location, merge_locations
from minidiff.inputs.arguments import check_function
from minidiff.values.settings import override
from spmd.mesh.mesh import Mesh
from spmd.prices.compiled_tape import as_jitted, meshes_of

START, WAIT = "_start", "_wait"
CALL = "call"  # the time before the first line of a function: a shard_map splits its arguments


class Span(NamedTuple):
    """A step of a program as it ran: its number, its equation, and the seconds at which it began and ended."""

    number: int
    equation: Equation | None
    start: float
    end: float


class Clock:
    """A profiler of compiled programs: the times at which their steps end, by `time.perf_counter`.

    A step is an equation, or None before the first line of a function. The program appends the number of a step and the
    time to `marks`, and does nothing else while it runs.
    """

    def __init__(self) -> None:
        self._numbers: dict[Equation | None, int] = {None: 0}  # of steps, in order
        self.marks: list[tuple[int, float]] = []
        self.names = {"mark": self.marks.append, "now": time.perf_counter}

    def in_programs(self) -> AbstractContextManager[Clock]:
        """Let programs that are compiled in this context record their steps."""
        return override(current_profiler, self)

    def line(self, eqn: Equation | None) -> str:
        """Return the line of source that records the end of a step; it calls the functions in `names`."""
        return f"mark(({self._number(eqn)}, now()))"

    def noting(self, equations: Iterable[Equation]) -> Iterator[Equation]:
        """Yield equations to a caller that applies them one by one, and record when each ends."""
        for eqn in equations:
            yield eqn
            self.marks.append((self._number(eqn), time.perf_counter()))

    def _number(self, eqn: Equation | None) -> int:
        return self._numbers.setdefault(eqn, len(self._numbers))

    def start(self) -> None:
        """Drop all marks, and begin a measurement."""
        self.marks.clear()
        self.marks.append((0, time.perf_counter()))

    def spans(self) -> Iterator[Span]:
        """Yield the steps since `start`, in order: each begins when the one before ends."""
        steps, begin = [*self._numbers], self.marks[0][1]
        for number, end in self.marks[1:]:
            yield Span(number, steps[number], begin, end)
            begin = end


class MeasuredStep(NamedTuple):
    """A step that a rank took, from `start` to `end` in seconds of the clock of rank 0.

    `axes` are those of a collective that communicates; otherwise there are none. A collective that was started and
    waited for ends when the wait does. `arrived` is when the last rank had begun a collective that waits for all.
    """

    name: str
    start: float
    end: float
    source: Location | None
    axes: tuple[str, ...] = ()
    arrived: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def key(self) -> tuple:
        """The row of a report that counts the step."""
        return self.name, self.axes, merge_locations([self.source])


def measure(f: Callable, args: Sequence[Any]) -> list[list[MeasuredStep]]:
    """Run the program that `jit` compiles for `f`, twice; return the steps that each rank took the second time.

    Simulated ranks are one process, and so one list. Times begin with the first step of any rank. All ranks must call
    it.
    """
    clock = Clock()
    program, bound, named = as_jitted(f)
    args = *bound, *args
    with clock.in_programs():
        program(*args, **named)  # compiles
    mesh = max(meshes_of(program.program(*args, **named).tape), key=lambda mesh: mesh.size, default=None)
    offset = 0.0
    if mesh is not None:
        offset = mesh.ranks.clock_offset()
        mesh.ranks.barrier()
    clock.start()
    program(*args, **named)
    local = [step._replace(start=step.start + offset, end=step.end + offset) for step in _steps([*clock.spans()])]
    text = pickle.dumps(local).hex()
    by_rank = [pickle.loads(bytes.fromhex(x)) for x in ([text] if mesh is None else mesh.ranks.texts(text))]
    first = min((steps[0].start for steps in by_rank if steps), default=0.0)
    by_rank = [[s._replace(start=s.start - first, end=s.end - first) for s in steps] for steps in by_rank]
    return by_rank if mesh is None else _with_arrivals(by_rank, mesh)


def check_runs(name: str, f: Any) -> None:
    """Raise TypeError unless `f` is a function that can be measured."""
    if isinstance(f, Tape):
        raise TypeError(f"{name}: a tape is not measured; write {name}(f, measured=True) for its function f")
    check_function(name, f)


def _steps(spans: Sequence[Span]) -> list[MeasuredStep]:
    """Return the steps of this process. A started collective is one step, in the place of its wait."""
    steps: list[MeasuredStep] = []
    started: dict[Var, Span] = {}
    for span in spans:
        eqn = span.equation
        if eqn is None:
            steps.append(MeasuredStep(CALL, span.start, span.end, None))
            continue
        name, source = str(eqn.primitive), eqn.source
        if name.endswith(START) and eqn.primitive.sends(eqn.params):
            started[eqn.outputs[0]] = span
            steps.append(MeasuredStep(name, span.start, span.end, source))
        elif name.endswith(WAIT) and eqn.inputs[0] in started:
            begun = started.pop(eqn.inputs[0])
            axes = _axes(begun.equation)
            steps.append(MeasuredStep(name.removesuffix(WAIT), begun.start, span.end, source, axes))
        else:
            axes = _axes(eqn) if eqn.primitive.sends(eqn.params) else ()
            steps.append(MeasuredStep(name, span.start, span.end, source, axes))
    return steps


def _axes(eqn: Any) -> tuple[str, ...]:
    """Return the axes of a collective, in a body or lowered."""
    params = eqn.params.get("params", eqn.params)
    return tuple(params["axes"])


def _with_arrivals(by_rank: list[list[MeasuredStep]], mesh: Mesh) -> list[list[MeasuredStep]]:
    """Note for each collective when the last of the ranks that take part in it had begun it.

    The k-th collective over some axes is the same on all ranks that differ along these axes only.
    """
    begun: dict[tuple, list[float]] = defaultdict(list)
    keys = []
    for rank, steps in enumerate(by_rank):
        counts: Counter = Counter()
        for i, step in enumerate(steps):
            if not step.axes or not BY_NAME[step.name].synchronizes:
                continue
            group = [(a, c) for a, c in coordinates_of(rank, mesh.shape).items() if a not in step.axes]
            call = (step.name, step.axes, *group)
            counts[call] += 1
            keys.append((rank, i, (*call, counts[call])))
            begun[keys[-1][-1]].append(step.start)
    for rank, i, key in keys:
        by_rank[rank][i] = by_rank[rank][i]._replace(arrived=max(begun[key]))
    return by_rank
