"""Pictures of pipeline schedules: text, or bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd.pipeline.tables import Schedule, Step, plot_steps
from spmd.show import labeled_rows

IDLE = "."


@dataclass(frozen=True, repr=False)
class SchedulePicture:
    """The result of `show_schedule`: text if it is printed, and a picture by `plot`."""

    schedule: Schedule

    def __str__(self) -> str:
        chunked = self.schedule.chunks > 1
        rows = [["tick", *map(str, range(self.schedule.ticks))]]
        for stage, row in enumerate(self.schedule.table):
            rows.append([f"stage {stage}", *(IDLE if step is None else _cell(step, chunked) for step in row)])
        return "\n".join([*labeled_rows(rows), self._remark()])

    __repr__ = __str__

    def _remark(self) -> str:
        stashed = ", ".join(map(str, self.schedule.stashed))
        return f"{self.schedule.ticks} ticks, bubble {self.schedule.bubble:.0%}, activations stashed {stashed}"

    def plot(self, ax: Any = None) -> Any:
        """Draw stages down and ticks across. Returns the axes; needs matplotlib.

        A bar has the number of its microbatch; the bubble is white. Later chunks of a stage are paler.
        """
        steps = [(stage, step, tick, tick + 1) for stage, tick, step in self.schedule.steps]
        ax = plot_steps(ax, self.schedule, steps, "tick", self._remark())
        ax.set(xlim=(0, self.schedule.ticks))
        ax.xaxis.get_major_locator().set_params(integer=True)
        return ax


def _cell(step: Step, chunked: bool) -> str:
    chunk = (chr(ord("a") + step.chunk) if step.chunk < 26 else f":{step.chunk}") if chunked else ""
    return f"{step.direction[0].upper()}{step.microbatch}{chunk}"


def show_schedule(schedule: Schedule) -> SchedulePicture:
    """Show what each stage of a pipeline does at each tick: F, B, W and the microbatch's number, dots where idle.

    With several chunks a stage, a letter says which one. `.plot()` draws the picture with matplotlib.

    Args:
        schedule: a schedule.

    >>> from spmd.pipeline import one_f_one_b
    >>> show_schedule(one_f_one_b(2, 3))
    tick    0  1  2  3  4  5  6  7
    stage 0 F0 .  F1 B0 F2 B1 .  B2
    stage 1 .  F0 B0 F1 B1 F2 B2 .
    8 ticks, bubble 25%, activations stashed 2, 1
    """
    return SchedulePicture(schedule)
