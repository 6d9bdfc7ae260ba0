"""Where the stages of a scheduled pipeline stash the activations and cotangents that they receive.

A value that a stage sends at one tick arrives at the next. It gets a slot of the receiver's stash, which is free again
after its backward pass. Under GPipe and 1F1B a stage needs as many slots for activations as its schedule stashes
(`Schedule.stashed`), and one for cotangents, which are used when they arrive. The first block of the network receives
no activations: its backward pass begins with the microbatch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from spmd.parallel.schedule import BACKWARD, FORWARD, WEIGHT, Schedule

NOTHING = -1  # the slot of what is not there
KINDS = (None, FORWARD, BACKWARD, WEIGHT)  # None is idle


class Entry(NamedTuple):
    """An entry of a schedule as integers; or as arrays of them, of several stages and ticks.

    The `arriving` slots take the values that were sent one tick before; the others have the operands of the step. In
    the `saved` slot a split backward pass leaves what its weight step needs.
    """

    kind: Any
    microbatch: Any
    chunk: Any
    activation: Any
    cotangent: Any
    arriving_activation: Any
    arriving_cotangent: Any
    saved: Any


def allocate(schedule: Schedule) -> tuple[Entry, list[tuple[int, ...]]]:
    """The entries of a schedule, in arrays [stages, ticks], and each stage's slots for activations and for cotangents.

    If backward passes are split, a third number has the slots for what their second parts need.

    >>> from spmd.parallel import gpipe, one_f_one_b
    >>> [allocate(schedule)[1] for schedule in (gpipe(3, 8), one_f_one_b(3, 8))]
    [[(0, 1), (8, 1), (8, 0)], [(0, 1), (2, 1), (1, 0)]]
    """
    shape = schedule.stages, schedule.ticks
    table = Entry(*(numpy.full(shape, i if i == 0 else NOTHING) for i in (0, 0, 0, 1, 1, 1, 1, 1)))
    stages, ticks, steps = zip(*schedule.steps)
    of_steps = [KINDS.index(step.direction) for step in steps], *zip(*[step[1:] for step in steps])
    for column, values in zip(table, of_steps):
        column[stages, ticks] = values
    activations, cotangents = (table.activation, table.arriving_activation), (table.cotangent, table.arriving_cotangent)
    both = (FORWARD, *activations), (BACKWARD, *cotangents)
    counts = [[_allocate(schedule, stage, *each) for each in both] for stage in range(schedule.stages)]
    if schedule.is_split:
        for stage, found in enumerate(counts):
            found.append(_allocate_saved(schedule, stage, table.saved))
    return table, [*map(tuple, counts)]


def _allocate_saved(schedule: Schedule, stage: int, saved: numpy.ndarray) -> int:
    """Write the slots in which backward steps leave something for weight steps, and return their number."""
    free_at: list[int] = []
    for tick, step in enumerate(schedule.table[stage]):
        if step and step.direction == BACKWARD:
            end = schedule.tick(stage, step._replace(direction=WEIGHT))
            slot = next((i for i, until in enumerate(free_at) if until <= tick), len(free_at))
            free_at[slot : slot + 1] = [end + 1]
            saved[stage, [tick, end]] = slot
    return len(free_at)


def _allocate(schedule: Schedule, stage: int, direction: str, used: numpy.ndarray, arriving: numpy.ndarray) -> int:
    """Write a stage's slots for the values that steps of a direction receive, and return the number of slots."""
    free_at: list[int] = []  # for each slot
    arrivals, uses, slots = [], [], []
    steps = [step for step in schedule.table[stage] if step and step.direction == direction]
    for step in steps:  # in the order in which what they need arrives
        needed = step.needs(stage, schedule.stages, schedule.chunks)
        if needed and needed[1].direction == direction:
            arrivals.append(schedule.tick(*needed) + 1)
            uses.append((schedule.tick(stage, step), schedule.tick(stage, step._replace(direction=BACKWARD))))
            slot = next((i for i, tick in enumerate(free_at) if tick <= arrivals[-1]), len(free_at))
            free_at[slot : slot + 1] = [uses[-1][-1] + 1]
            slots.append(slot)
    arriving[stage, arrivals] = slots
    for ticks in zip(*uses):
        used[stage, ticks] = slots
    return len(free_at)
