"""Pipeline schedules as data: tables of what each stage does at each tick.

A stage has a row, with an entry for each tick: the forward or backward pass of a microbatch through a chunk of the
stage's layers, or None where the stage is idle. All passes take one tick. A stage has one chunk of consecutive layers,
or several: chunk c of stage i of p is block c*p + i of the network. A schedule may split backward passes: then a
backward step computes the cotangents that the previous stage waits for, and a later weight step the gradients. A
schedule is checked when it is made, so no stage waits forever. `library.py` makes the schedules of the literature.

A value that a stage sends at one tick arrives at the next. `allocate` gives it a slot of the receiver's stash, which is
free again after its backward pass. Under GPipe and 1F1B a stage needs as many slots for activations as its schedule
stashes (`Schedule.stashed`), and one for cotangents, which are used when they arrive. The first block of the network
receives no activations: its backward pass begins with the microbatch. Residuals, which a forward pass keeps for the
backward pass, take slots in the same way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from spmd.show import Bar, bars_in_rows

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
KINDS = (None, FORWARD, BACKWARD, WEIGHT)  # None is idle


class Step(NamedTuple):
    """An entry of a schedule: the pass of a microbatch through a chunk of a stage's layers.

    >>> step = Step(FORWARD, microbatch=2)
    >>> print(step, "needs stage %d to do the %s" % step.needs(stage=1, stages=4, chunks=1))
    forward of microbatch 2 needs stage 0 to do the forward of microbatch 2
    """

    direction: str  # FORWARD, BACKWARD or WEIGHT
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.direction} of microbatch {self.microbatch}" + (f", chunk {self.chunk}" if self.chunk else "")

    @property
    def kind(self) -> int:
        """The direction as a number, its index in KINDS, which programs read."""
        return KINDS.index(self.direction)

    def needs(self, stage: int, stages: int, chunks: int) -> tuple[int, Step] | None:
        """Return the stage and the step that must come before this one; None if there is none."""
        if self.direction == WEIGHT:
            return stage, Step(BACKWARD, self.microbatch, self.chunk)
        ahead = -1 if self.direction == FORWARD else 1
        block = self.chunk * stages + stage + ahead  # blocks of layers are numbered in their order in the network
        if block < 0:
            return None
        if block == stages * chunks:
            return stage, Step(FORWARD, self.microbatch, self.chunk)
        return block % stages, Step(self.direction, self.microbatch, block // stages)


@dataclass(frozen=True, repr=False)
class Schedule:
    """A table of steps, [stages][ticks], with None where a stage is idle.

    Raises ValueError, which names stage, tick and microbatch, for a step that is missing or repeated, or that is not
    later than the one it needs: a forward pass needs that of the previous stage, a backward pass that of the next
    stage, and on the last stage its own forward pass.

    >>> f, b = Step(FORWARD, 0), Step(BACKWARD, 0)
    >>> Schedule(((f, None, None, b), (None, f, b, None))).bubble
    0.5
    """

    table: tuple[tuple[Step | None, ...], ...]

    def __repr__(self) -> str:
        shape = f"{self.stages} stages, {self.microbatches} microbatches"
        return f"<Schedule of {shape}, {self.chunks} chunks: {self.ticks} ticks>"

    def __post_init__(self):
        for stage, tick, step in self.steps:
            if not isinstance(step, Step):
                raise TypeError(f"stage {stage}, tick {tick}: an entry must be a Step or None, not {step!r}")
        lengths = [len(row) for row in self.table]
        if not any(map(any, self.table)) or len({*lengths}) > 1:
            raise ValueError(f"a schedule needs steps, and the same number of ticks for each stage; not {lengths}")
        blocks = [(m, c) for m in range(self.microbatches) for c in range(self.chunks)]
        directions = (FORWARD, BACKWARD, WEIGHT) if self.is_split else (FORWARD, BACKWARD)
        everything = {Step(direction, *block): None for block in blocks for direction in directions}
        for stage, tick, step in self.steps:
            if step not in everything:
                raise ValueError(f"stage {stage}, tick {tick}: {step!r} is neither a forward nor a backward pass")
            if (first := self.tick(stage, step)) < tick:
                raise ValueError(f"stage {stage}, tick {tick}: the {step} is already at tick {first}")
        for stage, row in enumerate(self.table):
            done = {*row}
            if missing := [str(step) for step in everything if step not in done]:
                raise ValueError(f"stage {stage} lacks the {missing[0]}")
        for stage, tick, step in self.steps:
            if (needed := step.needs(stage, self.stages, self.chunks)) and self.tick(*needed) >= tick:
                raise ValueError(
                    f"stage {stage}, tick {tick}: the {step} needs the {needed[1]} on stage {needed[0]}, which is at "
                    f"tick {self.tick(*needed)}, but must be earlier"
                )

    @functools.cached_property
    def steps(self) -> list[tuple[int, int, Step]]:
        """All steps: (stage, tick, step)."""
        return [(i, tick, step) for i, row in enumerate(self.table) for tick, step in enumerate(row) if step]

    @property
    def stages(self) -> int:
        return len(self.table)

    @property
    def ticks(self) -> int:
        return len(self.table[0])

    @functools.cached_property
    def microbatches(self) -> int:
        return 1 + max(step.microbatch for _, _, step in self.steps)

    @functools.cached_property
    def chunks(self) -> int:
        return 1 + max(step.chunk for _, _, step in self.steps)

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether backward passes are split in two: some steps are for the gradients of weights alone."""
        return any(step.direction == WEIGHT for _, _, step in self.steps)

    def tick(self, stage: int, step: Step) -> int:
        """Return the tick at which a stage does a step (the first, if it is repeated)."""
        return self._ticks[stage, step]

    @functools.cached_property
    def _ticks(self) -> dict[tuple[int, Step], int]:
        return {(stage, step): tick for stage, tick, step in reversed(self.steps)}

    @property
    def bubble(self) -> float:
        """The fraction of ticks in which a stage is idle."""
        return sum(row.count(None) for row in self.table) / (self.stages * self.ticks)

    @property
    def stashed(self) -> list[int]:
        """For each stage, the most activations that wait for their backward pass."""
        change = {FORWARD: 1, BACKWARD: 0, WEIGHT: -1} if self.is_split else {FORWARD: 1, BACKWARD: -1}
        return [max(itertools.accumulate(change[step.direction] for step in row if step)) for row in self.table]


# ---------------------------------------------------------------- slots

NOTHING = -1  # the slot of a value that does not exist


class Entry(NamedTuple):
    """An entry of a schedule as integers; or as arrays of them, of several stages and ticks.

    The `arriving` slots take the values that were sent one tick before; the others have the operands of the step. The
    slots of `residuals`, and of the `loss`'s cotangent, are written by a forward pass and read by the backward pass.
    """

    kind: Any
    microbatch: Any
    chunk: Any
    activation: Any
    cotangent: Any
    arriving_activation: Any
    arriving_cotangent: Any
    residuals: Any
    loss: Any


class Slots(NamedTuple):
    """The numbers of slots that a stage needs."""

    activations: int
    cotangents: int
    residuals: int
    losses: int


def allocate(schedule: Schedule, recompute: bool = True) -> tuple[Entry, list[Slots]]:
    """Return the entries of a schedule, in arrays [stages, ticks], and the slots of each stage.

    If backward passes do not recompute, residuals take the slots from each forward pass to its backward pass, and
    activations are not needed after the forward pass. If backward passes are split, residuals take the slots from the
    first part to the second.

    >>> from spmd.pipeline import gpipe, one_f_one_b
    >>> for schedule in (gpipe(3, 8), one_f_one_b(3, 8)):
    ...     print([tuple(slots) for slots in allocate(schedule)[1]])
    [(0, 1, 0, 0), (8, 1, 0, 0), (8, 0, 0, 0)]
    [(0, 1, 0, 0), (2, 1, 0, 0), (1, 0, 0, 0)]
    >>> [tuple(slots) for slots in allocate(one_f_one_b(3, 8), recompute=False)[1]]
    [(0, 1, 3, 0), (1, 1, 2, 0), (1, 0, 1, 1)]
    """
    shape = schedule.stages, schedule.ticks
    table = Entry(*(numpy.full(shape, i if i == 0 else NOTHING) for i in (0, 0, 0, 1, 1, 1, 1, 1, 1)))
    stages, ticks, steps = zip(*schedule.steps)
    of_steps = [step.kind for step in steps], *zip(*[step[1:] for step in steps])
    for column, values in zip(table, of_steps):
        column[stages, ticks] = values
    return table, [_allocate(schedule, stage, table, recompute) for stage in range(schedule.stages)]


def _allocate(schedule: Schedule, stage: int, table: Entry, recompute: bool) -> Slots:
    """Write a stage's slots, and return how many there are."""
    lives: dict[str, list] = {name: [] for name in Slots._fields}  # ticks, and the columns that name the slot there
    for now, step in enumerate(schedule.table[stage]):
        if step is None or step.direction == WEIGHT:
            continue
        then = schedule.tick(stage, step._replace(direction=BACKWARD))
        needed = step.needs(stage, schedule.stages, schedule.chunks)
        arrival = schedule.tick(*needed) + 1 if needed and needed[1].direction == step.direction else None
        if step.direction == BACKWARD:
            if schedule.is_split:
                later = schedule.tick(stage, step._replace(direction=WEIGHT))
                lives["residuals"].append([(now, table.residuals), (later, table.residuals)])
            if arrival is not None:
                lives["cotangents"].append([(arrival, table.arriving_cotangent), (now, table.cotangent)])
            continue
        if arrival is not None:
            uses = [(now, table.activation), *[(then, table.activation)] * recompute]
            lives["activations"].append([(arrival, table.arriving_activation), *uses])
        if not recompute:
            lives["residuals"].append([(now, table.residuals), (then, table.residuals)])
            if schedule.stages * step.chunk + stage == schedule.stages * schedule.chunks - 1:
                lives["losses"].append([(now, table.loss), (then, table.loss)])
    return Slots(**{name: _first_free(stage, each) for name, each in lives.items()})


def _first_free(stage: int, lives: list[list[tuple[int, numpy.ndarray]]]) -> int:
    """Give each value, in the order in which they begin, the first slot that is free; return the number of slots."""
    free_at: list[int] = []  # for each slot
    for life in lives:
        slot = next((i for i, tick in enumerate(free_at) if tick <= life[0][0]), len(free_at))
        free_at[slot : slot + 1] = [life[-1][0] + 1]
        for tick, column in life:
            column[stage, tick] = slot
    return len(free_at)


# ---------------------------------------------------------------- times


class Timed(NamedTuple):
    """The start and end of each step of a schedule, (stage, step, start, end), and the seconds of all."""

    schedule: Schedule
    steps: list[tuple[int, Step, float, float]]
    seconds: float

    def busy(self, stage: int) -> float:
        """Return the seconds in which a stage works."""
        return sum(end - start for i, _, start, end in self.steps if i == stage)

    def plot(self, ax: Any = None) -> Any:
        """Draw stages down and seconds across. Returns the axes; needs matplotlib."""
        return plot_steps(ax, self.schedule, self.steps, "seconds")


def time_schedule(schedule: Schedule, seconds: Callable[[int, Step], float], send: float = 0.0) -> Timed:
    """Time a schedule whose steps take `seconds(stage, step)`, and whose messages travel `send` seconds.

    >>> from spmd.pipeline import one_f_one_b
    >>> time_schedule(one_f_one_b(4, 8), lambda stage, step: 1.0 if step.direction == "forward" else 2.0).seconds
    33.0
    """
    free = [0.0] * schedule.stages
    ends: dict[tuple[int, Step], float] = {}
    steps = []
    for stage, _, step in sorted(schedule.steps, key=lambda each: each[1]):
        start = free[stage]
        if needed := step.needs(stage, schedule.stages, schedule.chunks):
            start = max(start, ends[needed] + (send if needed[0] != stage else 0.0))
        free[stage] = ends[stage, step] = start + seconds(stage, step)
        steps.append((stage, step, start, free[stage]))
    return Timed(schedule, steps, max(free))


# ---------------------------------------------------------------- pictures

#: The colors of the passes of a pipeline.
COLORS = {"forward": "#7fb3d9", "backward": "#82c98f", "weight": "#e5c07b"}


def plot_steps(
    ax: Any, schedule: Schedule, steps: Sequence[tuple[int, Step, float, float]], xlabel: str, title: str = ""
) -> Any:
    """Draw the steps of a schedule, (stage, step, start, end)."""
    paler = 0.7 / schedule.chunks
    bars = [
        Bar(stage, start, end - start, COLORS[step.direction], str(step.microbatch), 1 - paler * step.chunk)
        for stage, step, start, end in steps
    ]
    legend = {pass_: color for pass_, color in COLORS.items() if pass_ != "weight" or schedule.is_split}
    return bars_in_rows(ax, [f"stage {i}" for i in range(schedule.stages)], bars, legend, xlabel, title)
