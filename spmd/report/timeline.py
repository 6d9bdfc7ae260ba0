"""When a rank computes and when it communicates: a program's operations in time, by a cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.higher_order.scan import run_count
from spmd.report.communication import operations_of, sent_by
from spmd.report.forecast import CostModel, show_seconds
from spmd.report.plots import Bar, bars_in_rows
from spmd.report.rewritten import apply_to_tape

WIDTH = 72  # columns that are printed
COMPUTE, NETWORK = 0, 1  # lanes of a timeline


class Operation(NamedTuple):
    """An operation in a lane, from `start` to `end`, in seconds."""

    name: str
    lane: int
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Lanes:
    """Operations in time, in lanes with these `names`. Printing it draws the lanes, and so does `plot`."""

    operations: tuple[Operation, ...]
    names: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """When the last operation ends."""
        return max((operation.end for operation in self.operations), default=0.0)

    def busy(self, lane: int) -> float:
        """The seconds in which there is an operation in a lane."""
        return sum(x.end - x.start for x in self.operations if x.lane == lane)

    def __str__(self) -> str:
        lines, label = [], max(map(len, self.names))
        for lane, name in enumerate(self.names):
            line = [" "] * WIDTH
            for operation in (x for x in self.operations if x.lane == lane):
                first, last = (min(int(WIDTH * t / (self.seconds or 1.0)), WIDTH) for t in operation[2:])
                cell = f"[{operation.name[: max(last - first - 2, 0)]}".ljust(last - first - 1, "-") + "]"
                line[first:last] = cell[: last - first]
            lines.append(f"{name.ljust(label)} |{''.join(line)}|")
        return "\n".join([*lines, f"{show_seconds(self.seconds)} in all"])

    __repr__ = __str__

    def plot(self, ax: Any = None) -> Any:
        """Draw lanes down and seconds across. Returns the axes; needs matplotlib."""
        seconds: dict[str, float] = defaultdict(float)
        for name, _, start, end in self.operations:
            seconds[name] += end - start
        colors = {name: f"C{k % 10}" for k, name in enumerate(seconds)}
        bars = [Bar(lane, start, end - start, colors[name]) for name, lane, start, end in self.operations]
        legend = {name: colors[name] for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]}
        return bars_in_rows(ax, self.names, bars, legend, "seconds")


def timeline(
    f: Callable | Tape, model: CostModel, flops_per_second: float = 1e9, *, optimized: bool = True
) -> Callable[..., Lanes] | Lanes:
    """Show when a rank computes and when it communicates: `timeline(f, model)(*args) -> Lanes`.

    `f` is a function or a tape; for a tape, it returns the lanes. Nothing runs. A rank computes one operation after the
    other, in the order of the tape (with `optimized`, the one that `jit` compiles), at `flops_per_second`: a product
    costs its terms, any other operation one for each number it returns. A collective takes the time that the `model`
    says. It starts when its operands are ready and the one before has ended; computation goes on meanwhile, until an
    operation needs its result. A loop is one operation, with all that its steps compute and communicate.

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

    def read(tape: Tape) -> Lanes:
        run = _Run(model, flops_per_second)
        run.follow(tape, [0.0] * len(tape.inputs))
        return Lanes(tuple(run.operations), ("compute", "network"))

    return apply_to_tape(read, f, optimized)


class _Run:
    """The operations so far, and when each lane is free."""

    def __init__(self, model: CostModel, rate: float):
        self.model = model
        self.rate = rate
        self.operations: list[Operation] = []
        self.free = [0.0, 0.0]

    def follow(self, tape: Tape, ready: list[float]) -> list[float]:
        """Place the operations of a tape whose inputs are ready at these times; return those of its results."""
        known = dict(zip(tape.inputs, ready))

        def times(atoms: Any) -> list[float]:
            return [known.get(a, 0.0) if isinstance(a, Var) else 0.0 for a in atoms]

        for eqn in tape.equations:
            if eqn.primitive.body_scope(eqn.params) is not None:  # a shard_map is as if its body was here
                done = self.follow(eqn.bodies[0], times(eqn.inputs))
            else:
                done = [self.place(eqn, max(times(eqn.inputs), default=0.0))] * len(eqn.outputs)
            known.update(zip(eqn.outputs, done))
        return times(tape.outputs)

    def place(self, eqn: Equation, ready: float) -> float:
        """Place an operation in its lane, and return when it ends."""
        lane = NETWORK if eqn.primitive.on_ranks else COMPUTE
        seconds = self.seconds(eqn)
        if not seconds:
            return ready
        start = max(ready, self.free[lane])
        self.free[lane] = start + seconds
        self.operations.append(Operation(str(eqn.primitive), lane, start, self.free[lane]))
        return self.free[lane]

    def seconds(self, eqn: Equation) -> float:
        if eqn.primitive.on_ranks:
            return self.model.of_row(sent_by(eqn)) if eqn.primitive.sends(eqn.params) else 0.0
        if eqn.bodies:
            return run_count(eqn) * max(map(self.alone, eqn.bodies))
        return 0.0 if eqn.primitive.is_view else operations_of(eqn) / self.rate

    def alone(self, body: Tape) -> float:
        """The seconds that a body takes by itself."""
        run = _Run(self.model, self.rate)
        run.follow(body, [0.0] * len(body.inputs))
        return max(run.free)
