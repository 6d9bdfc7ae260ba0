"""Where the stages of a scheduled pipeline stash the activations and cotangents that they receive.

A value that a stage sends at one tick arrives at the next. It gets a slot of the receiver's stash, which is free again
after its backward pass. Under GPipe and 1F1B a stage needs as many slots for activations as its schedule stashes
(`Schedule.stashed`), and one for cotangents, which are used when they arrive. The first block of the network receives
no activations: its backward pass begins with the microbatch. What a stage makes in a forward pass, and keeps for the
backward pass, takes slots in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from spmd.pipeline.tables import BACKWARD, WEIGHT, Schedule

NOTHING = -1  # the slot of what is not there


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

    >>> from spmd.parallel import gpipe, one_f_one_b
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
