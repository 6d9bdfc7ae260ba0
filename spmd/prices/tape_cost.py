"""The cost of a tape (`TapeCost`), and the interface of the cost models that price it (`OperationCosts`).

The time of a pipeline follows from the times of its schedule's steps. A stage runs its steps in the order of its
schedule, each as soon as the stage is free and its input has arrived. Messages between stages overlap with them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minidiff.errors.location import Location
from spmd.pipeline.tables import Schedule, Step, Timed, time_schedule
from spmd.prices.work import Work

COMPUTE = "compute"
PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise"
OPTIMIZER, BUBBLE, ISSUE = "optimizer", "pipeline bubble", "waiting for the host"


@dataclass(frozen=True)
class OperationCosts:
    """The cost model of a walk over a tape: functions that return the seconds of operations and of collectives.

    `compute(work, dtype)` prices an operation, or several in one loop. `send(collective, ranks, nbytes, axes)` prices a
    collective, and returns the name of the link that carries it, too.

    `fuses` names operations that run in one loop with elementwise ones; None says that these do not either. `issue` is
    the overhead in which the host launches an operation: it runs ahead of the device, so an operation that waits for
    another rank takes the longer of both times. `steps` maps the name of a function to the factor by which it takes
    longer than its count of operations if it runs alone, `steps_in_loops` if it runs in one loop with others.

    `attend(flops, dtype)` prices the products of attention, where it is one kernel: all else in it takes no time. None
    says that its operations run by themselves.
    """

    compute: Callable[[Work, Any], float] = lambda work, dtype: 0.0
    send: Callable[[str, int, float, tuple[str, ...]], tuple[float, str]] = lambda *call: (0.0, "")
    fuses: Collection[str] | None = ()
    issue: float = 0.0
    steps: Mapping[str, float] = field(default_factory=dict)
    steps_in_loops: Mapping[str, float] = field(default_factory=dict)
    attend: Callable[[float, Any], float] | None = None


class Category(NamedTuple):
    """The key of an `Amount`: a kind of work, an operation, its axes and ranks, and the line of the program."""

    kind: str
    operation: str
    axes: tuple[str, ...]
    source: Location | None
    ranks: int = 1


@dataclass
class Amount:
    """The count, time and work of one rank. `exposed` are the seconds in which it computes nothing."""

    count: float = 0
    seconds: float = 0.0
    exposed: float = 0.0
    flops: float = 0
    model_flops: float = 0
    bytes: float = 0

    def add(self, other: Amount, times: float = 1) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + times * value)


class Operation(NamedTuple):
    """An operation in a lane, by number or name, from `start` to `end`, in seconds; `source` is its line, if known."""

    name: str
    lane: Any
    start: float
    end: float
    source: Location | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class TapeCost:
    """The cost of a tape: the seconds from its first to its last operation, and an `Amount` for each `Category`.

    `operations` are those on the tape itself, if the walk records them. A walk that counts bytes has `samples` instead
    of entries, and the most bytes instead of seconds.
    """

    seconds: float = 0.0
    entries: dict[Category, Amount] = field(default_factory=lambda: defaultdict(Amount))
    sends: float = 0.0  # the longest message along the axis of a schedule, which travels between two of its steps
    launches: float = 0.0  # operations, a fused loop being one
    operations: list[Operation] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)

    def add(self, other: TapeCost, times: float = 1) -> None:
        """Add the counts of another cost, `times` times; the seconds of this one stay."""
        self.launches += times * other.launches
        self.samples += other.samples
        for key, entry in other.entries.items() if times else ():
            self.entries[key].add(entry, times)

    def total(self, name: str, kinds: Callable[[Category], bool] = lambda key: True) -> float:
        return math.fsum(getattr(entry, name) for key, entry in self.entries.items() if kinds(key))


# ---------------------------------------------------------------- the time of a pipeline


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
