"""Timelines: the times at which ranks compute and communicate, by a cost model or measured."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minidiff.core.tape import Tape
from minidiff.errors.location import Location
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from spmd.checks.ranges import RATE, check_ranges
from spmd.prices.compiled_tape import apply_to_tape, has_kernels
from spmd.prices.forecast import CostModel
from spmd.prices.machine import Machine
from spmd.prices.tape_cost import Operation
from spmd.prices.walk import Walk
from spmd.report.communication import MeasuredStep, check_runs, measure
from spmd.report.predict import costs_on
from spmd.show import Bar, Table, bars_in_rows, direction_of, show_line, show_seconds

WIDTH = 72  # columns that are printed
SHORT = 4  # columns in which a name cannot be read
COMPUTE, NETWORK = 0, 1  # the two lanes of a rank
KINDS = ("compute", "network")
PREDICTED = "predicted"
WAITING = "waiting"  # for the last rank to begin a collective


@dataclass(frozen=True, repr=False)
class Lanes:
    """Operations in time, in lanes with these `names`. Printing it draws the lanes, and so does `plot`.

    There are two lanes for each rank: its computation and its communication. `lines` is a table of the seconds of
    each line of the program. `save` writes a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.
    """

    operations: tuple[Operation, ...]
    names: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """When the last operation ends."""
        return max((operation.end for operation in self.operations), default=0.0)

    def busy(self, lane: int) -> float:
        """Return the seconds in which there is an operation in a lane."""
        return sum(x.seconds for x in self._in_turn(lane))

    def _in_turn(self, lane: int) -> Iterator[Operation]:
        """Yield the operations in a lane; each begins when earlier ones have ended, so that no second counts twice."""
        end = 0.0
        for x in sorted((x for x in self.operations if x.lane == lane), key=lambda x: (x.start, x.end)):
            if x.end > end:
                yield x._replace(start=max(x.start, end))
                end = x.end

    def idle(self, lane: int) -> float:
        """Return the seconds in which there is no operation in a lane."""
        return self.seconds - self.busy(lane)

    @property
    def lines(self) -> LineTimes:
        """The seconds of each line of the program, those that take most time first: a table to print.

        While several collectives are in flight on a rank, the first one of them counts.
        """
        by_rank: dict = defaultdict(Counter)
        for x in itertools.chain(*map(self._in_turn, range(len(self.names)))):
            rank, kind = self._rank_and_kind(x.lane)
            if rank != PREDICTED:
                by_rank[x.source, WAITING if x.name == WAITING else kind][rank] += x.seconds
        times: dict = defaultdict(dict)
        for (line, kind), ranks in by_rank.items():
            times[line][kind] = max(ranks.values())
        return LineTimes(dict(sorted(times.items(), key=lambda item: -sum(item[1].values()))))

    def _rank_and_kind(self, lane: int) -> tuple[str, str]:
        rank, _, kind = self.names[lane].rpartition(" ")
        return (rank, kind) if kind in KINDS else (self.names[lane], KINDS[COMPUTE])

    def trace_events(self) -> list[dict]:
        """Return the operations as events of Chrome's trace format: a rank is a process, a lane a thread."""
        events: list[dict] = []
        lanes = [self._rank_and_kind(lane) for lane in range(len(self.names))]
        ranks = [*dict.fromkeys(rank for rank, _ in lanes)]
        ids = [{"pid": ranks.index(rank), "tid": KINDS.index(kind)} for rank, kind in lanes]
        for (rank, kind), id_ in zip(lanes, ids):
            events.append({"name": "process_name", "ph": "M", **id_, "args": {"name": rank or "program"}})
            events.append({"name": "thread_name", "ph": "M", **id_, "args": {"name": kind}})
        for x in self.operations:
            times = {"ts": x.start * 1e6, "dur": x.seconds * 1e6}
            events.append({"name": x.name, "ph": "X", **ids[x.lane], **times, "args": {"line": str(x.source or "")}})
        return events

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace events to a JSON file."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": self.trace_events(), "displayTimeUnit": "ms"}, file)

    def _cells(self, lane: int) -> list[tuple[int, int, str]]:
        """Return the first and last column of each operation, and its name; short neighbors are counted instead."""
        cells: list[tuple[int, int, list[str]]] = []
        for x in (x for x in self.operations if x.lane == lane):
            first, last = (min(int(WIDTH * t / (self.seconds or 1.0)), WIDTH) for t in (x.start, x.end))
            is_short = last - first < SHORT
            if cells and is_short and cells[-1][1] == first and (len(cells[-1][2]) > 1 or first - cells[-1][0] < SHORT):
                first, _, names = cells.pop()
                cells.append((first, last, [*names, x.name]))
            else:
                cells.append((first, last, [x.name]))
        return [(a, b, names[0] if len(names) == 1 else f"{len(names)} ops") for a, b, names in cells]

    def __str__(self) -> str:
        lines, label = [], max(map(len, self.names))
        for lane, name in enumerate(self.names):
            line = [" "] * WIDTH
            for first, last, text in self._cells(lane):
                cell = f"[{text[: max(last - first - 2, 0)]}".ljust(last - first - 1, "-") + "]"
                line[first:last] = cell[: last - first]
            lines.append(f"{name.ljust(label)} |{''.join(line)}|")
        return "\n".join([*lines, f"{show_seconds(self.seconds)} in all"])

    __repr__ = __str__

    def plot(self, ax: Any = None) -> Any:
        """Draw lanes down and seconds across. Returns the axes; needs matplotlib."""
        seconds: dict[str, float] = defaultdict(float)
        for x in self.operations:
            seconds[x.name] += x.seconds
        longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
        colors = {name: f"C{k % 10}" for k, name in enumerate(longest_first)}  # so that those of the legend differ
        colors[WAITING] = "lightgray"
        bars = [Bar(x.lane, x.start, x.seconds, colors[x.name]) for x in self.operations]
        legend = {name: colors[name] for name in longest_first[:8]}
        return bars_in_rows(ax, self.names, bars, legend, "seconds")


@dataclass(frozen=True, repr=False)
class LineTimes(Table):
    """The `seconds` that each line of a program computes, communicates and waits, on the rank that takes longest."""

    seconds: dict[Location | None, dict[str, float]]

    def _table(self) -> tuple[list, list, None]:
        kinds = (*KINDS, WAITING)
        rows = [
            [*(show_seconds(times[k]) if k in times else "" for k in kinds), direction_of(line), show_line(line)]
            for line, times in self.seconds.items()
        ]
        return [*kinds, "direction", "line"], rows, None


def timeline(
    f: Callable | Tape,
    model: CostModel | Machine | None = None,
    flops_per_second: float = 1e9,
    *,
    optimized: bool = True,
    measured: bool = False,
) -> Callable[..., Lanes] | Lanes:
    """Show when ranks compute and when they communicate: `timeline(f, model)(*args) -> Lanes`.

    A rank computes one operation after the other, in the order of the tape. A collective starts when its operands are
    ready and the one before has ended; computation continues until an operation needs its result. A loop is
    one operation. A jitted function is its program. Nothing runs, unless the timeline is measured.

    Args:
        f: a function, or a tape; for a tape, the lanes themselves are returned.
        model: a network, which prices collectives; or a machine of `spmd.machines`, which prices operations, too, as in
            `spmd.predict`.
        flops_per_second: the speed of computation, for a network: a product costs one operation for each term, any
            other operation one for each number that it returns.
        optimized: show the program that `jit` compiles.
        measured: run that program twice on the ranks, and show the second run: the time after each line of the
            program, by clocks that are aligned over ranks. All ranks call it, and all get the same lanes. A collective
            is "waiting" until the last rank has begun it. Simulated ranks run in one process, and so are one rank here.
            If there is a `model`, too, its prediction comes first.

    Raises:
        TypeError: if there is no model and nothing is measured, and for a tape that is to be measured.

    The example shows buckets of gradients (`bucket_bytes` of `jit`, `spmd.rewritten` and `zero`). With small buckets
    the first one is summed while the next gradients are computed; with too many, each adds its latency.

    >>> import minidiff as md
    >>> import minidiff.numpy as np
    >>> import spmd
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> def body(weights, x):
    ...     for w in weights:
    ...         x = np.tanh(x @ w)
    ...     return psum(x.sum(), 'i')
    >>> loss = spmd.shard_map(body, mesh=mesh, in_specs=(spmd.P(), spmd.P('i')), out_specs=spmd.P())
    >>> args = [np.ones((128, 128))] * 3, np.ones((128, 128))
    >>> model = spmd.CostModel(alpha=1e-5, beta=1e-8)
    >>> for bucket_bytes in (10**6, 10**5):
    ...     tape = spmd.rewritten(md.grad(loss), bucket_bytes=bucket_bytes)(*args)
    ...     print(timeline(tape, model))
    compute |[matmu][matmu][matmu][matmul][matmu][matmu][matmul][matmu]              |
    network |                                                          [psum--------]|
    20.8 ms in all
    compute |[matmul][matmul][matmul][[matmul][matmul][matmul-][matmul][matmul]      |
    network |                                         [psu]            [psu]   [psum]|
    18.2 ms in all
    """

    if not measured and model is None:
        raise TypeError("timeline needs a cost model, such as spmd.CostModel(alpha=1e-6, beta=1e-9), or measured=True")
    check_ranges("timeline", {"flops_per_second": RATE}, {"flops_per_second": flops_per_second})
    predict: Any = None
    if model is not None:
        predict = apply_to_tape(lambda tape: _predict(tape, model, flops_per_second, has_kernels(f)), f, optimized)
    if not measured:
        return predict
    check_runs("timeline", f)
    return hide_own_frames_of_lambda(lambda *args: _side_by_side(predict and predict(*args), measure(f, args)))


def _predict(tape: Tape, model: CostModel | Machine, flops_per_second: float, kernels: bool) -> Lanes:
    if isinstance(model, CostModel):
        walk = Walk(model.costs(flops_per_second), fused=False, asynchronous=False, record=True)
    else:
        walk = Walk(costs_on(tape, model)[1], model.overlap, asynchronous=False, record=True, kernels=kernels)
    operations = walk.price(tape).operations
    return Lanes(tuple(x._replace(lane=COMPUTE if x.lane == KINDS[COMPUTE] else NETWORK) for x in operations), KINDS)


def _side_by_side(predicted: Lanes | None, measured: Sequence[Sequence[MeasuredStep]]) -> Lanes:
    """Return the lanes of a prediction, if there is one, and those of each rank."""
    operations: list[Operation] = []
    names: list[str] = []
    if predicted is not None:
        operations += predicted.operations
        names += [f"{PREDICTED} {name}" for name in predicted.names]
    for rank, steps in enumerate(measured):
        for step in steps:
            operations += _operations(step, len(names))
        names += [f"rank {rank} compute", f"rank {rank} network"]
    return Lanes(tuple(operations), tuple(names))


def _operations(step: MeasuredStep, first: int) -> Iterator[Operation]:
    """Yield the operations of a step in the lanes of its rank, the first of which has the number `first`."""
    if not step.axes:
        yield Operation(step.name, first + COMPUTE, step.start, step.end, step.source)
        return
    arrived = min(max(step.start, step.arrived), step.end)
    if arrived > step.start:
        yield Operation(WAITING, first + NETWORK, step.start, arrived, step.source)
    yield Operation(step.name, first + NETWORK, arrived, step.end, step.source)
