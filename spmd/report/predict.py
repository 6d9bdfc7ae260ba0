"""Predict a step on a machine from its tape alone: seconds, floating-point operations and bytes of a rank."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minidiff import tree
from minidiff.core.tape import Tape
from minidiff.diagnostics.location import Location
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import check_function
from minidiff.ops.costs import Work
from minidiff.values.aliasing import types_alone
from spmd.checks.ranges import FLAG, NAMES, check_ranges
from spmd.report.communication import direction_of, show_line
from spmd.report.memory import MemoryUse, memory_in_place, nbytes_of_blocks
from spmd.report.memory import memory as memory_of
from spmd.report.memory_walk import ARGUMENTS, GRADIENTS, KINDS, RESIDUALS, nbytes_of
from spmd.report.plots import Bar, bars_in_rows
from spmd.report.rewritten import has_kernels, is_jitted, meshes_of, tape_of, without_static
from spmd.report.table import Table, show_nbytes, show_seconds, show_share
from spmd.report.tape_cost import BUBBLE, Amount, Prices, TapeCost
from spmd.report.walk import Walk

if TYPE_CHECKING:
    from spmd.machines import Machine, Placement
    from spmd.report.pipelined import Timed


ACTIVATIONS, BUFFERS = "activations", "buffers"
COLUMNS = "seconds", "exposed", "of the step", "flops"


@dataclass(frozen=True, repr=False)
class Prediction(Table):
    """What a step takes on a machine, of a rank: a table to print, and to draw by `plot()`.

    `seconds` is the time of the step. `kinds` has an `Amount` for each kind of work (its count, seconds, exposed
    seconds, floating-point operations and bytes), `lines` one for each line of the program, which `by_line` shows.
    `flops` are those of the hardware, `model_flops` those without what is computed again. `memory` has the bytes of a
    rank at the peak, by kind. `schedules` has the steps of each pipeline in time, which `plot()` draws.
    """

    machine: Machine
    ranks: int
    seconds: float
    span: TapeCost
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
        found: dict = defaultdict(Amount)
        for key, entry in self.span.entries.items():
            found[of(key)].add(entry)
        return dict(sorted(found.items(), key=lambda item: -item[1].seconds))

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products on one rank, those computed again included."""
        return self.span.total("flops", _is_product)

    @property
    def model_flops(self) -> float:
        """Floating-point operations of matrix products on one rank, each once."""
        return self.span.total("model_flops", _is_product)

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's operations reach."""
        return self.model_flops / (self.seconds * self.machine.peak(self.dtype)) if self.seconds else 0.0

    @property
    def hfu(self) -> float:
        """The share of the peak that all operations reach, those computed again included."""
        return self.flops / (self.seconds * self.machine.peak(self.dtype)) if self.seconds else 0.0

    @property
    def exposed(self) -> float:
        """Seconds of communication in which a rank computes nothing."""
        return self.span.total("exposed")

    @property
    def hidden(self) -> float:
        """Seconds of communication beside computation."""
        return self.span.total("seconds", lambda key: bool(key.axes) and key.kind != BUBBLE) - self.exposed

    def _table(self) -> tuple[list, list, list]:
        rows = [[kind, *self._cells(entry)] for kind, entry in self.kinds.items()]
        total = ["step", show_seconds(self.seconds), show_seconds(self.exposed), "", f"{self.flops:.3g}"]
        return ["kind", *COLUMNS], rows, total

    def _remarks(self) -> list[str]:
        total = sum(self.memory.values())
        held = ", ".join(f"{kind} {show_nbytes(n)}" for kind, n in self.memory.items() if n)
        fits = "fits" if total <= self.machine.memory else "does not fit"
        return [
            f"{self.ranks:,} × {self.machine.name}: MFU {show_share(self.mfu)}, HFU {show_share(self.hfu)}",
            f"memory at the peak {show_nbytes(total)} of {show_nbytes(self.machine.memory)}: {fits} ({held})",
            *[f"({note})" for note in self.notes],
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the seconds of each kind of work, what is hidden of communication paler. Returns the axes."""
        bars = []
        for row, entry in enumerate(self.kinds.values()):
            hidden = entry.seconds - entry.exposed if entry.exposed else 0.0
            bars.append(Bar(row, 0.0, entry.seconds - hidden, f"C{row % 10}"))
            bars += [Bar(row, entry.seconds - hidden, hidden, f"C{row % 10}", alpha=0.3)] if hidden > 0 else []
        title = f"{show_seconds(self.seconds)} a step, MFU {show_share(self.mfu)}"
        return bars_in_rows(ax, [*self.kinds], bars, {}, "seconds", title)


def _is_product(key: Any) -> bool:
    return key.operation in ("matmul", "einsum", "add_product", "convolve")


class OnMachine(Prices):
    """The prices of a machine, with a mesh on it."""

    def __init__(self, machine: Machine, placed: Placement | None):
        self.machine, self.placed = machine, placed
        self.dtypes: dict[Any, float] = defaultdict(float)
        self.fuses, self.issue = machine.fuses, machine.issue
        self.steps, self.steps_in_loops = machine.steps, machine.steps_in_loops

    def compute(self, work: Work, dtype: Any) -> float:
        if work.product is not None:
            self.dtypes[dtype] += work.flops
        return self.machine.seconds(work, dtype)

    def send(self, collective: str, ranks: int, nbytes: float, axes: tuple[str, ...]) -> tuple[float, str]:
        assert self.placed is not None
        return self.placed.seconds(collective, ranks, nbytes, axes), self.placed.slowest(axes).name


def predict(
    step: Callable | Tape,
    machine: Machine,
    *,
    nearest: Sequence[str] | None = None,
    overlap: bool | Collection[str] | None = None,
    optimized: bool = True,
) -> Any:
    """Predict a step on a machine: `predict(step, machine)(*args) -> Prediction`.

    Arguments are arrays or types, `md.ShapedArray(shape, dtype)`, in trees: no array is made and nothing runs, so a
    laptop prices a step of any size. `nearest` are the axes of the mesh, those whose ranks are next to each other
    first; by default the last axis of the mesh is. `overlap` says along which axes collectives run beside computation:
    all (True), none (False), or those given; by default as the machine has it. A step that is compiled (`optimized`)
    fuses elementwise operations.

    The time is that of the slowest rank. Operations take what the roofline of the machine says, collectives what its
    links say, and a pipeline that follows a schedule (`spmd.parallel.scheduled`) what its stages' passes take. Two more
    things differ from a machine: every operation runs at its predicted speed, and no collective slows another one down
    except on the same link.

    Raises ValueError for a machine without a link for an axis, or without a peak for a dtype; TypeError for an
    operation without a cost.

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
    jitted = is_jitted(step)
    compiled = optimized or jitted

    def read(tape: Tape, named: Sequence[tuple[str, Any]] | None = None, use: MemoryUse | None = None) -> Prediction:
        shape, prices = prices_of(tape, machine, nearest)
        beside: Any = machine.overlap if overlap is None else overlap
        if not FLAG.contains(beside):
            check_ranges("predict", {"overlap": NAMES}, {"overlap": beside})
            if unknown := [axis for axis in beside if axis not in shape]:
                raise ValueError(f"predict: overlap: the mesh has no axis {unknown[0]!r}, only {', '.join(shape)}")
        walk = Walk(prices, beside, fused=compiled, kernels=has_kernels(step))
        if compiled and machine.fuses:
            use = memory_in_place(tape)
        return _predict(tape, walk, math.prod(shape.values()), use or memory_of(tape, optimized=compiled), named)

    if isinstance(step, Tape):
        return read(step)
    check_function("predict", step)
    names = _parameter_names(step)

    def run(*args: Any) -> Prediction:
        with types_alone():
            named = [*zip(without_static(step, names), without_static(step, args))]
            return read(tape_of(step, optimized)(*args), named, memory_of(step)(*args) if jitted else None)

    return hide_own_frames_of_lambda(run)


def prices_of(tape: Tape, machine: Machine, nearest: Sequence[str] | None = None) -> tuple[dict[str, int], OnMachine]:
    """The sizes of a program's mesh axes, and the prices of a machine with such a mesh on it."""
    if not hasattr(machine, "peak"):
        raise TypeError(f"a machine is one of spmd.machines; got {machine!r}: write spmd.machines.A100, or a Machine")
    shape: dict[str, int] = {}
    for mesh in meshes_of(tape):
        shape.update(mesh.shape)
    return shape, OnMachine(machine, machine.on(shape, nearest) if shape or nearest else None)


def _parameter_names(step: Callable) -> Sequence[str]:
    try:
        return [*inspect.signature(step).parameters]
    except (TypeError, ValueError):
        return ()


def _predict(tape: Tape, walk: Walk, ranks: int, use: MemoryUse, named: Sequence[tuple[str, Any]] | None) -> Prediction:
    prices: Any = walk.prices
    span = walk.price(tape, whole=True)
    dtype = max(prices.dtypes, key=prices.dtypes.__getitem__, default="float32")
    memory = _by_argument(tape, use, named)
    return Prediction(prices.machine, ranks, span.seconds, span, memory, dtype, walk.schedules, [*walk.notes])


def _by_argument(tape: Tape, use: MemoryUse, named: Sequence[tuple[str, Any]] | None) -> dict[str, int]:
    """The bytes at the peak: of each argument by its name, of gradients, of activations, and of all other buffers."""
    blocks = [nbytes_of_blocks(tape, v) for v in tape.inputs]
    sizes = [nbytes_of(v.type) if block is None else block for v, block in zip(tape.inputs, blocks)]
    found: dict[str, int] = {}
    first = 0
    for name, arg in named or ():
        count = len(tree.leaves(arg))
        found[name] = found.get(name, 0) + sum(sizes[first : first + count])
        first += count
    if first < len(sizes):
        found[ARGUMENTS] = sum(sizes[first:])
    kinds = {GRADIENTS: GRADIENTS, RESIDUALS: ACTIVATIONS}
    for kind in KINDS:
        if kind != ARGUMENTS:
            name = kinds.get(kind, BUFFERS)
            found[name] = found.get(name, 0) + use.peak.bytes.get(kind, 0)
    return found
