"""Schedules of checkpoints: which states of a loop are stored, and which steps run again, for the backward pass.

A schedule is a list of actions on one current state and a few slots. `revolve` is Algorithm 799 of Griewank and
Walther, "Revolve: an implementation of checkpointing for the reverse or adjoint mode of computational differentiation";
`multistage` is due to Stumm and Walther, `online` to Wang, Moin and Iaccarino. `scheduled_loop.py` follows them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from minidiff.core.tape import Tape
from minidiff.core.tracer import Value


class Action(NamedTuple):
    """An action of a schedule: `store` or `restore` a step's state, `advance` it to a later step, `reverse` a step.

    The state of step n is the carry before it. `where` is the slot, or the step to which to advance.
    """

    name: str
    step: int
    where: int = -1


class CheckpointSchedule(NamedTuple):
    """A schedule for any number of steps, which `revolve`, `multistage` and `online` return."""

    kind: str
    slots: int
    disk: int = 0  # so many of the last slots are files

    def actions(self, steps: int) -> list[Action]:
        """Return the actions of a backward pass.

        Args:
            steps: the number of steps of the loop.

        Returns:
            A list of named tuples `(name, step, where)`.

        >>> from minidiff import revolve
        >>> for action in revolve(1).actions(2):
        ...     print(*action)
        store 0 0
        advance 0 1
        reverse 1 -1
        restore 0 0
        reverse 0 -1
        """
        actions = [*(_online if self.kind == "online" else _revolve)(steps, self.slots)] if steps else []
        uses = Counter(a.where for a in actions if a.name in ("store", "restore"))
        by_use = [0, *sorted(range(1, self.slots), key=lambda slot: -uses[slot])] if self.disk else range(self.slots)
        slots = {slot: n for n, slot in enumerate(by_use)}
        return [a._replace(where=slots[a.where]) if a.name in ("store", "restore") else a for a in actions]

    def advances(self, steps: int) -> int:
        """Return the number of steps that the backward pass takes again, before it reverses them.

        Args:
            steps: the number of steps of the loop.

        Returns:
            An int.

        >>> from minidiff import revolve
        >>> revolve(3).advances(10), revolve(10).advances(10)
        (15, 9)
        """
        return sum(a.where - a.step for a in self.actions(steps) if a.name == "advance")

    def bind(self, closed: tuple[Tape, list[Value]], init: list[Value], xs: list[Value], params: dict) -> tuple:
        """Run a recorded step in a scan; return the last carries and the stacked results."""
        raise NotImplementedError

    def bind_while(self, loop: Any, init: list[Value]) -> list[Value]:
        """Run a bounded while loop; return the last carries."""
        raise NotImplementedError


def check_schedule(caller: str, schedule: Any) -> None:
    """Raise TypeError if `schedule` is neither a schedule of checkpoints nor None."""
    if not (schedule is None or isinstance(schedule, CheckpointSchedule)):
        raise TypeError(f"{caller}: schedule must be md.revolve(slots), or multistage or online, got {schedule!r}")


def _next_checkpoint(steps: int, slots: int) -> int:
    """Return after how many of the steps to store the next state, if the first one takes one of the slots.

    `slots` slots reverse `comb(slots + r, r)` steps, each of which then advances at most r times.
    """
    r = next(r for r in range(steps) if math.comb(slots + r, r) >= steps)
    return max(math.comb(slots + r - 2, slots), 1, steps - math.comb(slots - 1 + r, r))


def _reverse(stored: list[tuple], at: int, steps: int, slots: int) -> Iterator[Action]:
    """Reverse steps, the last one first. `stored` has pairs of a step and its slot; the current state is that of `at`.

    The next checkpoint is where the remaining slots then reverse the steps after it with fewest advances.
    """
    free = sorted({*range(slots)} - {slot for _, slot in stored}, reverse=True)
    for last in reversed(range(steps)):
        if at > last:
            at, slot = stored[-1]
            yield Action("restore", at, slot)
        while at < last:
            before, at = at, at + _next_checkpoint(last - at + 1, len(free) + 1) if free else last
            yield Action("advance", before, at)
            if at < last:
                stored.append((at, free.pop()))
                yield Action("store", *stored[-1])
        yield Action("reverse", last)
        at = last + 1
        if stored[-1][0] == last:
            free.append(stored.pop()[1])


def _revolve(steps: int, slots: int) -> Iterator[Action]:
    yield Action("store", 0, 0)
    yield from _reverse([(0, 0)], 0, steps, slots)


def _online(steps: int, slots: int) -> Iterator[Action]:
    """Store every state while slots are free; then in place of one that is before another of a higher level.

    If there is none, the current state gives way to the next one, whose level is higher by one.
    """
    stored, at, level = [(0, 0, math.inf)], 0, 0
    yield Action("store", 0, 0)
    for step in range(1, steps - 1):
        levels = [*[entry[2] for entry in stored], level]
        spare = [k for k in range(1, len(stored)) if levels[k] < max(levels[k + 1 :])]
        if len(stored) == slots and not spare:
            level += 1
            continue
        slot = len(stored) if len(stored) < slots else stored.pop(spare[-1])[1]
        yield Action("advance", at, step)
        yield Action("store", step, slot)
        stored.append((step, slot, level))
        at, level = step, 0
    yield from _reverse([entry[:2] for entry in stored], at, steps, slots)
