"""The cost of a tape (`TapeCost`), and the interface of the cost models that price it (`OperationCosts`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidiff.errors.location import Location
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
    """

    compute: Callable[[Work, Any], float] = lambda work, dtype: 0.0
    send: Callable[[str, int, float, tuple[str, ...]], tuple[float, str]] = lambda *call: (0.0, "")
    fuses: Collection[str] | None = ()
    issue: float = 0.0
    steps: Mapping[str, float] = field(default_factory=dict)
    steps_in_loops: Mapping[str, float] = field(default_factory=dict)


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
