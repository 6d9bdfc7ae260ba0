"""Reports of what a program communicates, with types and without.

To measure, a compiled program runs with a clock, and the ranks exchange their records.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from collectives.backends.base import coordinates_of
from collectives.cost import BY_NAME
from collectives.exact import EXACT
from minidiff import tree
from minidiff.api.recording import make_tape
from minidiff.compiler.codegen import current_profiler
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.errors.location import Location, merge_locations
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import as_value, check_function
from minidiff.values.dtypes import finfo, is_differentiable
from minidiff.values.settings import override
from spmd.mesh.mesh import Mesh
from spmd.prices.compiled_tape import apply_to_tape, as_jitted, is_jitted, meshes_of, tape_of, without_static
from spmd.prices.messages import Communication, price_tape
from spmd.report.minimum import add_minimum
from spmd.shard_map.shard_map import without_types
from spmd.show import Table


def communication(
    f: Callable | Tape, *args: Any, optimized: bool = False, measured: bool = False, against: str | None = None
) -> Any:
    """Report the collectives of a tape, or of `f`: `communication(f)(*args)`.

    Nothing runs: the report is read from the tape of `f` for arguments of these types. A jitted function, also one that
    `f` calls, is reported as its program, with its options. The table names the line of the program that caused each
    collective; in the backward direction, the line whose derivative needs it.

    The body of a `scan` counts once for each step, that of a `while_loop` once: `notes` say so. One thing differs from
    a Python loop: sharded arrays in the carry are resharded before the first step, to the sharding that a step returns.

    Args:
        f: a function, or a tape; for a tape, the report itself is returned.
        optimized: report on the program that `jit(f)` compiles, with short loops in bodies unrolled.
        measured: run that program, too, twice, on all ranks: the table then has the seconds of each row in the second
            run (`timeline` shows when).
        against: with "minimum", the table also has the least bytes that a rank must send for each line, with these
            specs, and the ratio. It must send what results on other ranks depend on: either its numbers, or a partial
            result for each of these, whichever is fewer. A line that is local needs none, a shift the edge, a sum as
            many bytes as the result, another sharding the operand. Empty: the line is too large to tell.

    Raises:
        TypeError: if `f` is neither a function nor a tape.
        ValueError: for another value of `against`.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> report = communication(total)(np.arange(8.0))
    >>> report.counts, report.bytes
    ({'psum': 1}, 16)
    >>> [(row.axes, row.direction) for row in report.rows]
    [(('i',), 'forward')]

    A sum of gathered blocks sends more than a sum, of 8 bytes:

    >>> from collectives import all_gather_invariant
    >>> gathered = shard_map(lambda x: all_gather_invariant(x, 'i').sum(), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> report = communication(gathered, against='minimum')(np.arange(8.0))
    >>> report.bytes, report.minimum, report.rows[0].ratio
    (16, 8, 2.0)
    """
    check_function("communication", f, args)
    if against not in (None, "minimum"):
        raise ValueError(f"communication: against must be 'minimum', got {against!r}")
    optimized = optimized or measured or is_jitted(f)
    report = apply_to_tape(lambda tape: price_tape(tape, optimized), f, optimized)
    if against is not None:
        report = _against_minimum(f, report)
    if not measured:
        return report
    check_runs("communication", f)
    return hide_own_frames_of_lambda(lambda *args: _with_seconds(report(*args), measure(f, args)))


def _against_minimum(f: Callable | Tape, report: Any) -> Any:
    """Add the least bytes of each line to a report, or to the reports that a function returns."""
    if isinstance(f, Tape):
        return add_minimum(report, f)
    return hide_own_frames_of_lambda(lambda *args: add_minimum(report(*args), make_tape(f)(*args)))


def _with_seconds(report: Communication, ranks: Sequence[Sequence[MeasuredStep]]) -> Communication:
    """Add the seconds of each row on the slowest rank to a report."""
    for row in report.rows:
        key = row.collective, row.axes, row.source
        row.seconds = max(sum(s.seconds for s in steps if s.key == key) for steps in ranks)
    return report


# ---------------------------------------------------------------- comparison with the old recipe


@dataclass(repr=False)
class Comparison(Table):
    """The result of `compare`. Printing it gives a table.

    `typed` and `untyped` are reports of communication. `same` says whether both gave the same numbers; it is None if
    they were not run. `note` gives the reason, or the error. `untyped` is None if the program does not run without
    types.
    """

    typed: Communication
    untyped: Communication | None
    same: bool | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The bytes without types divided by those with types; None if undefined."""
        if self.untyped is None or not self.typed.bytes:
            return None
        return self.untyped.bytes / self.typed.bytes

    def _table(self) -> tuple[list, list, list] | str:
        if self.untyped is not None and not (self.typed.rows or self.untyped.rows):
            return "no communication, with types or without"
        header = ["collective", "axes", "count", "without types", "bytes per rank", "without types", "ratio"]
        reports = self.typed, self.untyped or Communication()
        typed, untyped = (report.sums(lambda row: (row.collective, row.axes)) for report in reports)

        def cells(name: str, axes: str, one: tuple[int, int], two: tuple[int, int]) -> list:
            if self.untyped is None:
                return [name, axes, one[0], "?", f"{one[1]:,}", "?", "?"]
            ratio = f"{two[1] / one[1]:.2f}" if one[1] else "-"
            return [name, axes, one[0], two[0], f"{one[1]:,}", f"{two[1]:,}", ratio]

        none = (0, 0)
        keys = dict.fromkeys([*typed, *untyped])
        lines = [cells(k[0], ", ".join(k[1]), typed.get(k, none), untyped.get(k, none)) for k in keys]
        totals = [report.sums(lambda row: ()).get((), none) for report in reports]
        return header, lines, cells("total", "", *totals)

    def _remarks(self) -> list[str]:
        reports = [r for r in (self.typed, self.untyped) if r is not None]
        same = "both give the same numbers" if self.same else self.note
        return [same, *dict.fromkeys(remark for report in reports for remark in report._remarks())]


def compare(f: Callable, *args: Any) -> Comparison:
    """Compare what `f(*args)` communicates with types and without them.

    Without types means `check_rep=False` throughout. If all meshes are simulated, the program is run both ways, and the
    results are compared. On MPI ranks nothing runs, and the comparison says so.

    Args:
        f: a function made of `shard_map`s, such as `md.grad(loss)`.
        args: its arguments; with types in place of arrays, nothing runs.

    Raises:
        TypeError: for a tape, which already has its types.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> print(compare(grad(loss), np.ones(2), np.ones((4, 2))))
    collective  axes  count  without types  bytes per rank  without types  ratio
    ----------  ----  -----  -------------  --------------  -------------  -----
    psum        i         2              3              24             32   1.33
    ----------  ----  -----  -------------  --------------  -------------  -----
    total                 2              3              24             32   1.33
    both give the same numbers

    Source: JEP 17111, "Problem: efficient transpose of psum or all_gather depends on whether cotangents are
    invariant across devices".
    """
    if isinstance(f, Tape) or not callable(f):
        raise TypeError(
            f"compare takes a function, to type it both ways; got {type(f).__name__}: write compare(f, *args)"
        )
    typed = tape_of(f)(*args)
    untyped: Any = None
    leaves = tree.leaves(without_static(f, args))
    why = _not_runnable(typed, leaves)
    values = [] if why else list(map(as_value, leaves))
    try:
        with without_types():
            untyped = tape_of(f)(*args)
        other = [] if why else untyped(*values)
    except Exception as error:  # any: the program may not be written to run without types
        why = f"without types it does not run: {type(error).__name__}: {error}"
    with_types, without = price_tape(typed, is_jitted(f)), untyped and price_tape(untyped, is_jitted(f))
    if why:
        return Comparison(with_types, without, None, why)
    same = all(map(_close, typed(*values), other))
    return Comparison(with_types, without, same, "" if same else "the two do not give the same numbers")


def _not_runnable(tape: Tape, leaves: Sequence[Any]) -> str:
    """Return the reason why `compare` cannot run a program; empty if it can."""
    if any(not (hasattr(x, "__array__") or isinstance(x, (int, float, complex))) for x in leaves):
        return "not run: the arguments are types, not values"
    if any(mesh.backend != "simulated" for mesh in meshes_of(tape)):
        return "not run: that is done on simulated ranks only"
    return ""


def _close(x: Any, y: Any) -> bool:
    """Return whether two arrays are equal up to rounding: the order of summation may differ."""
    x, y = numpy.asarray(x), numpy.asarray(y)
    if not is_differentiable(x.dtype):
        return numpy.array_equal(x, y)
    tolerance = numpy.sqrt(finfo(x.dtype).eps)
    scale = numpy.abs(x).max(initial=0.0, where=numpy.isfinite(x))
    return numpy.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# ---------------------------------------------------------------- measured steps

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
    by_rank = [pickle.loads(bytes.fromhex(x)) for x in ([text] if mesh is None else mesh.ranks.gather_texts(text))]
    first = min((steps[0].start for steps in by_rank if steps), default=0.0)
    by_rank = [[s._replace(start=s.start - first, end=s.end - first) for s in steps] for steps in by_rank]
    return by_rank if mesh is None else _with_arrivals(by_rank, mesh)


def check_runs(name: str, f: Any) -> None:
    """Raise TypeError unless `f` is a function that can be measured."""
    if isinstance(f, Tape):
        raise TypeError(f"{name}: a tape cannot be measured; write {name}(f, measured=True) for its function f")
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
    """Record for each collective when the last of its ranks began it.

    The k-th collective over some axes is the same on all ranks that differ along these axes only.
    """
    begun: dict[tuple, list[float]] = defaultdict(list)
    keys = []
    for rank, steps in enumerate(by_rank):
        counts: Counter = Counter()
        for i, step in enumerate(steps):
            if not step.axes or not BY_NAME[step.name.removeprefix(EXACT)].synchronizes:
                continue
            group = [(a, c) for a, c in coordinates_of(rank, mesh.shape).items() if a not in step.axes]
            call = (step.name, step.axes, *group)
            counts[call] += 1
            keys.append((rank, i, (*call, counts[call])))
            begun[keys[-1][-1]].append(step.start)
    for rank, i, key in keys:
        by_rank[rank][i] = by_rank[rank][i]._replace(arrived=max(begun[key]))
    return by_rank
