"""The time of a pipeline, from the times of its schedule's steps.

A stage runs its steps in the order of its schedule, each as soon as the stage is free and its input has arrived.
Messages between stages travel meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd.prices.tape_cost import BUBBLE, Amount, Category, TapeCost
from spmd.show.plots import plot_steps

if TYPE_CHECKING:
    from spmd.pipeline.tables import Schedule, Step


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

    >>> from spmd.parallel import one_f_one_b
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


def price_schedule(
    schedule: Schedule, axis: str, price_step: Callable[[int, Step], TapeCost], overlap: bool
) -> tuple[Timed, TapeCost]:
    """Time a schedule whose steps cost `price_step(stage, step)`, and return the cost of its busiest stage.

    With `overlap`, messages along `axis` travel while stages compute. Operations and bytes are a stage's on average.
    """
    costs = {(stage, step): price_step(stage, step) for stage, _, step in schedule.steps}
    send = max(cost.sends for cost in costs.values())
    wait = 0.0 if overlap else send
    timed = time_schedule(schedule, lambda *each: costs[each].seconds + wait, send - wait)
    busy = list(map(timed.busy, range(schedule.stages)))
    longest = max(range(schedule.stages), key=busy.__getitem__)
    total = TapeCost(timed.seconds)
    runs = Counter(map(id, costs.values()))
    longest_runs = Counter(id(cost) for (stage, _), cost in costs.items() if stage == longest)
    for cost in {id(cost): cost for cost in costs.values()}.values():
        times, mean = longest_runs[id(cost)], runs[id(cost)] / schedule.stages
        for key, e in cost.entries.items():
            total.entries[key].add(replace(e, flops=0, model_flops=0, bytes=0), times)
            total.entries[key].add(Amount(flops=e.flops, model_flops=e.model_flops, bytes=e.bytes), mean)
    total.entries[Category(BUBBLE, "idle", (axis,), None)].add(Amount(1, timed.seconds - busy[longest]))
    return timed, total
