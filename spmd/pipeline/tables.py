"""Pipeline schedules as data: tables of what each stage does at each tick.

A stage has a row, with an entry for each tick: the forward or backward pass of a microbatch through a chunk of the
stage's layers, or None where the stage is idle. All passes take one tick. A stage has one chunk of consecutive layers,
or several: chunk c of stage i of p is block c*p + i of the network. A schedule may split backward passes: then a
backward step computes the cotangents that the previous stage waits for, and a later weight step the gradients. A
schedule is checked when it is made, so no stage waits forever. `library.py` makes the schedules of the literature.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

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
        """The direction as a number, its place in KINDS: what a program reads of a schedule."""
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
                raise TypeError(f"stage {stage}, tick {tick}: an entry is a Step or None, not {step!r}")
        lengths = [len(row) for row in self.table]
        if not any(map(any, self.table)) or len({*lengths}) > 1:
            raise ValueError(f"a schedule has steps, and as many ticks for each stage as for others; not {lengths}")
        blocks = [(m, c) for m in range(self.microbatches) for c in range(self.chunks)]
        directions = (FORWARD, BACKWARD, WEIGHT) if self.is_split else (FORWARD, BACKWARD)
        everything = {Step(direction, *block): None for block in blocks for direction in directions}
        for stage, tick, step in self.steps:
            if step not in everything:
                raise ValueError(f"stage {stage}, tick {tick}: {step!r} is neither a forward nor a backward pass")
            if (first := self.tick(stage, step)) < tick:
                raise ValueError(f"stage {stage}, tick {tick}: the {step} has been at tick {first} already")
        for stage, row in enumerate(self.table):
            done = {*row}
            if missing := [str(step) for step in everything if step not in done]:
                raise ValueError(f"stage {stage} lacks the {missing[0]}")
        for stage, tick, step in self.steps:
            if (needed := step.needs(stage, self.stages, self.chunks)) and self.tick(*needed) >= tick:
                raise ValueError(
                    f"stage {stage}, tick {tick}: the {step} needs the {needed[1]} on stage {needed[0]}, which is at "
                    f"tick {self.tick(*needed)} and must be earlier"
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
