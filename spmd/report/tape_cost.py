"""What a walk over a tape finds, and the prices that it asks for: seconds, work and messages, by kind and by line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidiff.diagnostics.location import Location
from minidiff.ops.costs import Work

COMPUTE = "compute"
PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise"
OPTIMIZER, BUBBLE, ISSUE = "optimizer", "pipeline bubble", "waiting for the host"


class Prices:
    """What seconds the walk asks for.

    `fuses` names operations that run in one loop with elementwise ones; None says that these do not either. `issue` is
    the time in which the host issues an operation: it runs ahead of the device, so what waits for another rank takes
    the longer of both times. `steps` has how many times as long as it counts operations a function takes by itself, by
    its name, and `steps_in_loops` in one loop with others.
    """

    fuses: Collection[str] | None = ()
    issue: float = 0.0
    steps: Mapping[str, float] = {}
    steps_in_loops: Mapping[str, float] = {}

    def compute(self, work: Work, dtype: Any) -> float:
        """The seconds of an operation, or of several in one loop."""
        raise NotImplementedError

    def send(self, collective: str, ranks: int, nbytes: float, axes: tuple[str, ...]) -> tuple[float, str]:
        """The seconds of a collective, and the lane in which it is."""
        raise NotImplementedError


class Category(NamedTuple):
    """What is counted together: a kind of work, the line that asked for it, and whether it is done again."""

    kind: str
    operation: str
    axes: tuple[str, ...]
    source: Location | None
    ranks: int = 1


@dataclass
class Amount:
    """How often, how long and how much: of a rank. `exposed` are the seconds in which nothing is computed."""

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
    """What a tape takes: seconds from its first to its last operation, and an `Amount` for each `Category`.

    `operations` are those on the tape itself, if the walk keeps them. A walk that counts bytes has `moments` instead of
    entries, and the most bytes instead of seconds.
    """

    seconds: float = 0.0
    entries: dict[Category, Amount] = field(default_factory=lambda: defaultdict(Amount))
    sends: float = 0.0  # the longest message along the axis of a schedule, which travels between two of its steps
    issued: float = 0.0  # operations, a fused loop being one
    operations: list[Operation] = field(default_factory=list)
    moments: list[Any] = field(default_factory=list)

    def add(self, other: TapeCost, times: float = 1) -> None:
        """Add what another span has counted, `times` times; the seconds of this one stay."""
        self.issued += times * other.issued
        self.moments += other.moments
        for key, entry in other.entries.items() if times else ():
            self.entries[key].add(entry, times)

    def total(self, name: str, kinds: Callable[[Category], bool] = lambda key: True) -> float:
        return math.fsum(getattr(entry, name) for key, entry in self.entries.items() if kinds(key))
