"""Predict a step on a machine from its tape alone: seconds, floating-point operations and bytes of a rank.

`speed_up` has predictions and measurements for several numbers of ranks side by side.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.core.tape import Tape
from minidiff.errors.location import Location
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import check_function
from minidiff.values.aliasing import types_alone
from spmd.arrays.reshard import gather
from spmd.checks.agreement import make_and_compare
from spmd.checks.ranges import COUNT, FACTOR, FLAG, NAMES, check_ranges, several
from spmd.mesh.mesh import Mesh
from spmd.pipeline.tables import Timed
from spmd.prices.calibrate import maximum, seconds_of
from spmd.prices.compiled_tape import has_kernels, is_jitted, meshes_of, tape_of, without_static
from spmd.prices.forecast import CostModel, Forecast
from spmd.prices.machine import Machine
from spmd.prices.memory_walk import ARGUMENTS, GRADIENTS, KINDS, RESIDUALS, nbytes_of
from spmd.prices.tape_cost import BUBBLE, Amount, OperationCosts, TapeCost
from spmd.prices.walk import Walk
from spmd.report.memory import MemoryUse, block_bytes, memory_in_place
from spmd.report.memory import memory as memory_of
from spmd.show import (
    Bar,
    Table,
    bars_in_rows,
    direction_of,
    show_line,
    show_nbytes,
    show_number,
    show_seconds,
    show_share,
)

ACTIVATIONS, BUFFERS = "activations", "buffers"
COLUMNS = "seconds", "exposed", "of the step", "flops"


@dataclass(frozen=True, repr=False)
class Prediction(Table):
    """The time and memory of a step on a machine, for one rank: a table to print, and to draw by `plot()`.

    `seconds` is the time of the step. `kinds` has an `Amount` for each kind of work (its count, seconds, exposed
    seconds, floating-point operations and bytes), `lines` one for each line of the program, which `by_line` shows.
    `flops` counts all operations of the hardware, `model_flops` leaves out recomputation. `memory` has the bytes of a
    rank at the peak, by kind. `schedules` has the steps of each pipeline in time, which `plot()` draws.
    """

    machine: Machine
    ranks: int
    seconds: float
    cost: TapeCost
    memory: Mapping[str, int]
    dtype: Any
    schedules: Sequence[Timed] = ()
    notes: Sequence[str] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, Amount]:
        return self._sums(lambda key: key.kind)

    @property
    def lines(self) -> dict[Location | None, Amount]:
        return self._sums(lambda key: key.source)

    @property
    def by_line(self) -> Table:
        """The same table for each line of the program, those that take longest first."""
        rows = [[*self._cells(entry), direction_of(line), show_line(line)] for line, entry in self.lines.items()]
        return Table([*COLUMNS, "direction", "line"], rows)

    def _cells(self, entry: Amount) -> list[str]:
        exposed = show_seconds(entry.exposed) if entry.exposed else ""
        share = show_share(entry.seconds / self.seconds) if self.seconds else ""
        return [show_seconds(entry.seconds), exposed, share, f"{entry.flops:.3g}" if entry.flops else ""]

    def _sums(self, of: Callable) -> dict:
        sums: dict = defaultdict(Amount)
        for key, entry in self.cost.entries.items():
            sums[of(key)].add(entry)
        return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products on one rank, with recomputation."""
        return self.cost.total("flops", _is_product)

    @property
    def model_flops(self) -> float:
        """Floating-point operations of matrix products on one rank, each once."""
        return self.cost.total("model_flops", _is_product)

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's operations reach."""
        return self.model_flops / (self.seconds * self.machine.peak(self.dtype)) if self.seconds else 0.0

    @property
    def hfu(self) -> float:
        """The share of the peak that all operations reach, with recomputation."""
        return self.flops / (self.seconds * self.machine.peak(self.dtype)) if self.seconds else 0.0

    @property
    def exposed(self) -> float:
        """Seconds of communication that do not overlap with computation."""
        return self.cost.total("exposed")

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with computation."""
        return self.cost.total("seconds", lambda key: bool(key.axes) and key.kind != BUBBLE) - self.exposed

    def _table(self) -> tuple[list, list, list]:
        rows = [[kind, *self._cells(entry)] for kind, entry in self.kinds.items()]
        total = ["step", show_seconds(self.seconds), show_seconds(self.exposed), "", f"{self.flops:.3g}"]
        return ["kind", *COLUMNS], rows, total

    def _remarks(self) -> list[str]:
        total = sum(self.memory.values())
        kinds = ", ".join(f"{kind} {show_nbytes(n)}" for kind, n in self.memory.items() if n)
        fits = "fits" if total <= self.machine.memory else "does not fit"
        return [
            f"{self.ranks:,} × {self.machine.name}: MFU {show_share(self.mfu)}, HFU {show_share(self.hfu)}",
            f"memory at the peak {show_nbytes(total)} of {show_nbytes(self.machine.memory)}: {fits} ({kinds})",
            *[f"({note})" for note in self.notes],
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the seconds of each kind of work, overlapped communication paler. Returns the axes."""
        bars = []
        for row, entry in enumerate(self.kinds.values()):
            hidden = entry.seconds - entry.exposed if entry.exposed else 0.0
            bars.append(Bar(row, 0.0, entry.seconds - hidden, f"C{row % 10}"))
            bars += [Bar(row, entry.seconds - hidden, hidden, f"C{row % 10}", alpha=0.3)] if hidden > 0 else []
        title = f"{show_seconds(self.seconds)} a step, MFU {show_share(self.mfu)}"
        return bars_in_rows(ax, [*self.kinds], bars, {}, "seconds", title)


def _is_product(key: Any) -> bool:
    return key.operation in ("matmul", "einsum", "add_product", "convolve")


def predict(
    step: Callable | Tape,
    machine: Machine | CostModel,
    *,
    nearest: Sequence[str] | None = None,
    overlap: bool | Collection[str] | None = None,
    optimized: bool = True,
    fused_optimizer: bool | None = None,
    ranks: Iterable[int] | None = None,
    axis: str | None = None,
    scaling: str = "weak",
) -> Any:
    """Predict a step on a machine: `predict(step, machine)(*args) -> Prediction`.

    Nothing runs and no array is made, so a laptop prices a step of any size.

    The time is that of the slowest rank. The time of operations follows from the machine's roofline, that of
    collectives from its links, and that of a pipeline with a schedule (`spmd.pipeline.scheduled`) from the passes of
    its stages. A real machine differs in two ways: here every operation runs at its predicted speed, and collectives
    slow each other down only on the same link.

    Args:
        step: a function, or a tape; for a tape, the prediction is returned. The arguments of the function are arrays or
            types, `md.ShapedArray(shape, dtype)`, in trees.
        machine: a machine of `spmd.machines`. With a `CostModel`, which is a flat network without a processor, the time
            of communication is predicted: a `Forecast`.
        nearest: axes of the mesh, the one whose ranks are next to each other first; by default its last axis.
        overlap: the axes along which collectives overlap with computation: all (True), none (False), or some; by
            default as on the machine.
        optimized: whether the step is compiled, which fuses elementwise operations.
        fused_optimizer: whether those of the optimizer are fused, too; by default as the others. Optimizers of PyTorch
            start a kernel for each operation, unless they are fused by hand.
        ranks, axis, scaling: as those of `CostModel.predict`, for a `CostModel`.

    Raises:
        ValueError: for a machine without a link for an axis, or without a peak for a dtype.
        TypeError: for an operation without a cost, and for an argument that is not for this kind of machine.

    >>> import minidiff as md, minidiff.numpy as np
    >>> import spmd
    >>> from collectives import psum
    >>> from spmd import P
    >>> mesh = spmd.make_mesh((16, 8), ('data', 'feats'), backend='simulated')
    >>> def layer(up, down, x):
    ...     return psum(np.tanh(x @ up) @ down, 'feats')
    >>> specs = P(None, 'feats'), P('feats'), P('data')
    >>> forward = spmd.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P('data'))
    >>> weights = md.ShapedArray((8192, 32768), 'float16'), md.ShapedArray((32768, 8192), 'float16')
    >>> print(spmd.predict(forward, spmd.machines.A100)(*weights, md.ShapedArray((32768, 8192), 'float16')))
    kind              seconds  exposed  of the step     flops
    ----------------  -------  -------  -----------  --------
    matrix products   1.13 ms                 82.5%  2.75e+11
    psum along feats   220 µs   220 µs        16.0%
    elementwise       20.5 µs                  1.5%  8.39e+06
    ----------------  -------  -------  -----------  --------
    step              1.37 ms   220 µs               2.75e+11
    128 × A100 80 GB SXM: MFU 64.2%, HFU 64.2%
    memory at the peak 432 MiB of 80 GiB: fits (up 64 MiB, down 64 MiB, x 32 MiB, buffers 272 MiB)
    """
    if isinstance(machine, CostModel):
        of_machine = {"nearest": nearest, "overlap": overlap, "fused_optimizer": fused_optimizer}
        _refuse(of_machine, "a CostModel", "a machine of spmd.machines")
        return machine.predict(step, ranks=ranks, axis=axis, scaling=scaling, optimized=optimized)
    growth = {"ranks": ranks, "axis": axis, "scaling": None if scaling == "weak" else scaling}
    _refuse(growth, "a machine", "a CostModel")
    jitted = is_jitted(step)
    compiled = optimized or jitted

    def read(tape: Tape, named: Sequence[tuple[str, Any]] = (), use: MemoryUse | None = None) -> Prediction:
        shape, costs = costs_on(tape, machine, nearest)
        axes = _overlapping_axes(machine.overlap if overlap is None else overlap, shape)
        walk = Walk(costs, axes, compiled, fused_optimizer is not False, kernels=has_kernels(step))
        use = memory_in_place(tape) if compiled and machine.fuses else use or memory_of(tape, optimized=compiled)
        cost = walk.price(tape, is_step=True)
        dtype = max(walk.product_flops, key=walk.product_flops.__getitem__, default="float32")
        return Prediction(
            machine, math.prod(shape.values()), cost.seconds, cost, _by_argument(tape, use, named), dtype,
            walk.schedules, [*walk.notes],
        )  # fmt: skip

    if isinstance(step, Tape):
        return read(step)
    check_function("predict", step)
    names = _parameter_names(step)

    def run(*args: Any) -> Prediction:
        with types_alone():
            named = [*zip(without_static(step, names), without_static(step, args))]
            return read(tape_of(step, optimized)(*args), named, memory_of(step)(*args) if jitted else None)

    return hide_own_frames_of_lambda(run)


def _refuse(arguments: Mapping[str, Any], machine: str, other: str) -> None:
    """Raise TypeError for an argument of another kind of machine."""
    if unused := [name for name, value in arguments.items() if value is not None]:
        raise TypeError(f"predict: {unused[0]} is for {other}, not for {machine}: leave it out")


def _overlapping_axes(overlap: Any, shape: Mapping[str, int]) -> Any:
    """Return the option `overlap` of a walk. Raises ValueError for an axis that the mesh does not have."""
    if not FLAG.contains(overlap):
        check_ranges("predict", {"overlap": NAMES}, {"overlap": overlap})
        if unknown := [axis for axis in overlap if axis not in shape]:
            raise ValueError(f"predict: overlap: the mesh has no axis {unknown[0]!r}, only {', '.join(shape)}")
    return overlap


def costs_on(
    tape: Tape, machine: Machine, nearest: Sequence[str] | None = None
) -> tuple[dict[str, int], OperationCosts]:
    """Return the sizes of a program's mesh axes, and the cost model of a machine with such a mesh on it."""
    if not isinstance(machine, Machine):
        raise TypeError(f"got the machine {machine!r}: write one of spmd.machines, such as A100, or a Machine")
    shape: dict[str, int] = {}
    for mesh in meshes_of(tape):
        shape.update(mesh.shape)
    return shape, machine.on(shape, nearest).costs


def _parameter_names(step: Callable) -> Sequence[str]:
    try:
        return [*inspect.signature(step).parameters]
    except (TypeError, ValueError):
        return ()


def _by_argument(tape: Tape, use: MemoryUse, named: Sequence[tuple[str, Any]]) -> dict[str, int]:
    """Return the bytes at the peak: of each argument by its name, of gradients, activations and all other buffers."""
    sizes = [nbytes_of(v.type) if block is None else block for v, block in zip(tape.inputs, block_bytes(tape))]
    memory: Counter = Counter()
    first = 0
    for name, arg in named:
        count = len(tree.leaves(arg))
        memory[name] += sum(sizes[first : first + count])
        first += count
    if first < len(sizes):
        memory[ARGUMENTS] = sum(sizes[first:])
    kinds = {GRADIENTS: GRADIENTS, RESIDUALS: ACTIVATIONS}
    for kind in KINDS:
        if kind != ARGUMENTS:
            memory[kinds.get(kind, BUFFERS)] += use.peak.bytes.get(kind, 0)
    return dict(memory)


# ---------------------------------------------------------------- speed-up


class TimedRun(NamedTuple):
    """The time T_n of a program on n ranks, its speed-up T_1 / T_n, and its parallel efficiency T_1 / (n T_n)."""

    seconds: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True, repr=False)
class SpeedUp(Table):
    """Runs of a program by the number of ranks, `measured` and `predicted`: a table to print."""

    measured: dict[int, TimedRun]
    predicted: dict[int, TimedRun]
    notes: tuple[str, ...] = ()

    def _table(self):
        header = ["ranks", *("time", "predicted"), *("speed-up", "predicted"), *("efficiency", "predicted")]
        shows = show_seconds, "{:.2f}".format, "{:.0%}".format
        lines = []
        for n, predicted in self.predicted.items():
            pairs = zip(self.measured.get(n, (None,) * len(shows)), predicted)
            cells = ["-" if x is None else show(x) for show, pair in zip(shows, pairs) for x in pair]
            lines.append([show_number(n), *cells])
        return header, lines, None


def speed_up(
    f: Callable,
    mesh: Mesh,
    model: CostModel,
    one: Callable | float,
    *,
    ranks: Sequence[int] = (),
    axis: str | None = None,
    repeats: int = 5,
) -> Callable[..., SpeedUp]:
    """Compare times on n ranks, measured and predicted: `speed_up(f, mesh, model, one)(*args) -> SpeedUp`.

    The prediction is T_n = T_1 / n, as if the computation were split evenly, plus the communication that the model
    predicts for the tape of `f`. The measured T_n is longer if ranks repeat work, or wait for each other. The table has
    the speed-up T_1 / T_n, and the parallel efficiency T_1 / (n T_n), which is 100% if n ranks are n times as fast as
    one. On simulated ranks, which share one process, T_n is predicted only. All ranks must call it with the same
    arguments; a mistake on one is an error on all.

    Args:
        f: a program on `mesh`, on whose ranks T_n is measured.
        mesh: a mesh.
        model: the network, which prices communication.
        one: a function that computes the same on one rank, from the same arguments (sharded ones are global there), or
            its time T_1 in seconds. It is measured on the first rank, while the others wait.
        ranks: further numbers of ranks to predict T_n for, with arguments of the same size (strong scaling).
        axis: the axis along which the mesh grows; required if it has several.
        repeats: the number of times that each time is measured; the least counts.

    Raises:
        ValueError: if `f` has no `shard_map` and no sharded array on the mesh, and for `repeats` below 1.

    >>> import numpy as np
    >>> import spmd
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> P, model = spmd.P, spmd.CostModel(alpha=1e-5, beta=1e-9)
    >>> loss = spmd.shard_map(lambda x: psum((x * x).sum(), 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> spmd.speed_up(loss, mesh, model, one=1e-3, ranks=(16, 64))(np.ones(64))
    ranks     time  predicted  speed-up  predicted  efficiency  predicted
    -----  -------  ---------  --------  ---------  ----------  ---------
        1  1.00 ms    1.00 ms      1.00       1.00        100%       100%
        4        -     310 µs         -       3.23           -        81%
       16        -     363 µs         -       2.76           -        17%
       64        -    1.28 ms         -       0.78           -         1%
    strong scaling: whole arrays stay as large as on the tape, which is for 4 ranks
    """

    def plan(args: tuple) -> tuple[Forecast, list[str]]:
        if not COUNT.contains(repeats) or not (callable(one) or FACTOR.contains(one)):
            raise ValueError(
                f"speed_up: `one` must be a function or its seconds, repeats at least 1; got {one!r}, {repeats!r}"
            )
        check_ranges("speed_up", {"ranks": several(COUNT)}, {"ranks": ranks})
        tape = tape_of(f)(*args)
        if not any(mesh.is_like(other) for other in meshes_of(tape)):
            raise ValueError(f"speed_up: the function has no shard_map and no sharded array on {mesh}")
        numbers = sorted({mesh.size, *ranks} - {1})
        forecast = model.predict(tape, ranks=numbers if len(numbers) > 1 else None, axis=axis, scaling="strong")
        time = "a function" if callable(one) else f"{one} s"
        types = [str(v.type) for v in tape.inputs]
        return forecast, [f"{model!r}, one={time}, {repeats} times, on {numbers} ranks", *types]

    def run(*args: Any) -> SpeedUp:
        forecast = make_and_compare(
            "speed_up: all ranks must call it with the same arguments", mesh, lambda: plan(args)
        )
        alone: Any = _time_on_one_rank(one, args, mesh, repeats) if callable(one) else one
        measured, predicted = {1: alone}, {1: alone}
        if mesh.backend == "mpi" and mesh.size > 1:
            times = maximum(mesh, numpy.array(_times(lambda: f(*args), repeats, mesh.ranks.barrier)))
            measured[mesh.size] = float(times.min())
        predicted |= {n: alone / n + seconds for n, seconds in forecast.seconds.items() if n > 1}
        runs, forecasts = (
            {n: TimedRun(t, alone / t, alone / (n * t)) for n, t in times.items()} for times in (measured, predicted)
        )
        return SpeedUp(runs, forecasts, forecast.notes)

    return run


def _time_on_one_rank(f: Callable, args: tuple, mesh: Mesh, repeats: int) -> float:
    """Return the least time of `f` for whole arguments, on the first rank, while the others wait."""
    whole = gather(args)

    def measure() -> tuple[float, list]:
        return 0.0 if mesh.rank else min(_times(lambda: f(*whole), repeats)), []

    seconds = make_and_compare("speed_up: the function of one rank failed", mesh, measure)
    return float(maximum(mesh, numpy.array([seconds]))[0])


def _times(call: Callable[[], Any], repeats: int, start: Callable[[], Any] = lambda: None) -> list[float]:
    """Return the seconds of each call, after `start()`; a first call is not timed, because it may compile."""
    call()
    times = []
    for _ in range(repeats):
        start()
        times.append(seconds_of(call))
    return times
