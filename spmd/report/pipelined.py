"""The time of a pipeline: a schedule's steps with the durations that their tapes say.

A stage does its steps in the order of its schedule, each as soon as the stage is free and what it needs has arrived.
What stages send travels meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from minidiff.core.tape import Tape
from minidiff.core.types import Var
from spmd.report.schedule import plot_steps
from spmd.report.tape_cost import BUBBLE, ISSUE, Amount, Category, TapeCost

if TYPE_CHECKING:
    from spmd.parallel.schedule import Schedule, Step
    from spmd.report.walk import Walk


class Timed(NamedTuple):
    """When each step of a schedule starts and ends, (stage, step, start, end), and the seconds of all."""

    schedule: Schedule
    steps: list[tuple[int, Step, float, float]]
    seconds: float

    def busy(self, stage: int) -> float:
        """The seconds in which a stage works."""
        return sum(end - start for i, _, start, end in self.steps if i == stage)

    def plot(self, ax: Any = None) -> Any:
        """Draw stages down and seconds across. Returns the axes; needs matplotlib."""
        return plot_steps(ax, self.schedule, self.steps, "seconds")


def time_schedule(schedule: Schedule, seconds: Callable[[int, Step], float], send: float = 0.0) -> Timed:
    """Time a schedule whose steps take `seconds(stage, step)`, and whose messages travel `send` seconds.

    >>> from spmd.parallel import one_f_one_b
    >>> time_schedule(one_f_one_b(4, 8), lambda stage, step: 1.0 if step.direction == "forward" else 2.0).seconds
    33.0
    """
    free = [0.0] * schedule.stages
    ends: dict[tuple[int, Step], float] = {}
    found = []
    for stage, _, step in sorted(schedule.steps, key=lambda each: each[1]):
        start = free[stage]
        if needed := step.needs(stage, schedule.stages, schedule.chunks):
            start = max(start, ends[needed] + (send if needed[0] != stage else 0.0))
        free[stage] = ends[stage, step] = start + seconds(stage, step)
        found.append((stage, step, start, free[stage]))
    return Timed(schedule, found, max(free))


def price_schedule(walk: Walk, body: Tape, labels: Mapping[Var, dict], known: Mapping[Var, Any]) -> TapeCost:
    """The span of the loop over a schedule's ticks: that of the stage that works longest, and its bubble."""
    label = next(label for label in labels.values() if "schedule" in label)
    schedule, axis = label["schedule"], label["along"]
    places = {v: label.get("field", "stage") for v, label in labels.items() if label.get("axes", (axis,)) == (axis,)}

    cache: dict[tuple, TapeCost] = {}
    blocks = schedule.stages * schedule.chunks

    def span_of(stage: int, step: Step) -> TapeCost:
        block = step.chunk * schedule.stages + stage
        alike = 0 if block == 0 else 2 if block == blocks - 1 else 1
        key = alike, step.direction
        if key not in cache:
            entry = {"kind": step.kind, "chunk": step.chunk, "stage": stage}
            walk.coordinates = {**walk.coordinates, axis: stage}
            try:
                values = {v: numpy.int64(entry[name]) for v, name in places.items()}
                span = _once(walk.price(body, {**known, **values}), step.direction)
                if (idle := span.issued * walk.prices.issue - span.seconds) > 0:
                    span.seconds += idle
                    span.entries[Category(ISSUE, "idle", (), None)].add(Amount(1, idle))
                cache[key] = span
            finally:
                walk.coordinates = {a: i for a, i in walk.coordinates.items() if a != axis}
        return cache[key]

    sends = max(span_of(stage, step).sends for stage, _, step in schedule.steps)
    beside = walk.runs_beside((axis,))
    wait = 0.0 if beside else sends

    timed = time_schedule(schedule, lambda stage, step: span_of(stage, step).seconds + wait, sends if beside else 0.0)
    busy = [0.0] * schedule.stages
    for stage, _, start, end in timed.steps:
        busy[stage] += end - start
    longest = max(range(schedule.stages), key=busy.__getitem__)
    found = TapeCost(timed.seconds)
    counts = Counter(id(span_of(stage, step)) for stage, _, step in schedule.steps if stage == longest)
    everywhere = Counter(id(span_of(stage, step)) for stage, _, step in schedule.steps)
    for span in cache.values():
        here, mean = counts[id(span)], everywhere[id(span)] / schedule.stages  # what it works, on average over stages
        for key, e in span.entries.items():
            found.entries[key].add(replace(e, flops=0, model_flops=0, bytes=0), here)
            found.entries[key].add(Amount(flops=e.flops, model_flops=e.model_flops, bytes=e.bytes), mean)
    found.entries[Category(BUBBLE, "idle", (axis,), None)].add(Amount(1, timed.seconds - busy[longest]))
    walk.schedules.append(timed)
    return found


def _once(span: TapeCost, direction: str) -> TapeCost:
    """Of a backward step, the forward pass is computed again: it is not the model's."""
    for key, entry in span.entries.items():
        if direction != "forward" and not (key.source and key.source.backward):
            entry.model_flops = 0
    return span
