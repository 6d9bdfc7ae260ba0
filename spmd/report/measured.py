"""What each rank did and when: a compiled program runs with a clock, and the ranks' notes are put side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.backends.base import coordinates_of
from minidiff.core.tape import Tape
from minidiff.core.types import Var
from minidiff.diagnostics.location import Location, merge_locations
from minidiff.inputs.arguments import check_function
from spmd.mesh.mesh import Mesh
from spmd.report.profile import Clock, Span
from spmd.report.rewritten import as_jitted, meshes_of

START, WAIT = "_start", "_wait"
CALL = "call"  # what comes before the first line of a function: a shard_map splits its arguments
#: Collectives whose end does not wait for all ranks along their axes.
POINT_TO_POINT = ("ppermute",)


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
        """What the steps of one row of a report have in common."""
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
    own = [step._replace(start=step.start + offset, end=step.end + offset) for step in _steps([*clock.spans()])]
    texts = [json.dumps(own)] if mesh is None else mesh.ranks.texts(json.dumps(own))
    found = [list(map(_read, json.loads(text))) for text in texts]
    first = min((steps[0].start for steps in found if steps), default=0.0)
    found = [[s._replace(start=s.start - first, end=s.end - first) for s in steps] for steps in found]
    return found if mesh is None else _with_arrivals(found, mesh)


def check_runs(name: str, f: Any) -> None:
    """Raise TypeError unless `f` is a function that can be measured."""
    if isinstance(f, Tape):
        raise TypeError(f"{name}: a tape is not measured; write {name}(f, measured=True) for its function f")
    check_function(name, f)


def _read(values: list) -> MeasuredStep:
    """A step that was written as JSON."""
    name, start, end, source, axes, arrived = values
    return MeasuredStep(name, start, end, source and _location(*source), tuple(axes), arrived)


def _location(filename: str, line: int, backward: bool, others: list, recomputed: bool) -> Location:
    return Location(filename, line, backward, tuple(other and _location(*other) for other in others), recomputed)


def _steps(spans: Sequence[Span]) -> list[MeasuredStep]:
    """The steps of this process. A started collective is one step, in the place of its wait."""
    found: list[MeasuredStep] = []
    started: dict[Var, Span] = {}
    for span in spans:
        eqn = span.equation
        if eqn is None:
            found.append(MeasuredStep(CALL, span.start, span.end, None))
            continue
        name, source = str(eqn.primitive), eqn.source
        if name.endswith(START) and eqn.primitive.sends(eqn.params):
            started[eqn.outputs[0]] = span
            found.append(MeasuredStep(name, span.start, span.end, source))
        elif name.endswith(WAIT) and eqn.inputs[0] in started:
            begun = started.pop(eqn.inputs[0])
            axes = _axes(begun.equation)
            found.append(MeasuredStep(name.removesuffix(WAIT), begun.start, span.end, source, axes))
        else:
            axes = _axes(eqn) if eqn.primitive.sends(eqn.params) else ()
            found.append(MeasuredStep(name, span.start, span.end, source, axes))
    return found


def _axes(eqn: Any) -> tuple[str, ...]:
    """The axes of a collective, in a body or lowered."""
    params = eqn.params.get("params", eqn.params)
    return tuple(params["axes"])


def _with_arrivals(found: list[list[MeasuredStep]], mesh: Mesh) -> list[list[MeasuredStep]]:
    """Say of each collective when the last of the ranks that take part in it had begun it.

    The k-th collective over some axes is the same on all ranks that differ along these axes only.
    """
    begun: dict[tuple, list[float]] = {}
    keys = []
    for rank, steps in enumerate(found):
        counts: dict[tuple, int] = {}
        for i, step in enumerate(steps):
            if not step.axes or step.name in POINT_TO_POINT:
                continue
            rest = [(a, c) for a, c in coordinates_of(rank, mesh.shape).items() if a not in step.axes]
            which = (step.name, step.axes, *rest)
            counts[which] = counts.get(which, 0) + 1
            key = (*which, counts[which])
            begun.setdefault(key, []).append(step.start)
            keys.append((rank, i, key))
    for rank, i, key in keys:
        found[rank][i] = found[rank][i]._replace(arrived=max(begun[key]))
    return found
