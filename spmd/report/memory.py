"""The memory report: the bytes that each rank holds while a program runs, and the peak.

In the body of a `shard_map` values are blocks. Outside, a sharded array counts as a rank's block of it, and any other
array is whole on every rank. `spmd/prices/memory_walk.py` has the walk along the tape.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from minidiff.api.recording import make_tape
from minidiff.compiler.jit import Jitted
from minidiff.control_flow.cond import Cond
from minidiff.core.tape import Tape
from minidiff.core.types import Var, typeof
from minidiff.errors.location import Location
from minidiff.errors.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import check_function
from minidiff.values.aliasing import distinct_bytes, watch_lifetimes
from spmd.prices.compiled_tape import has_kernels, is_jitted, meshes_of, rewritten, tapes_in
from spmd.prices.memory_layout import filled_p
from spmd.prices.memory_walk import (
    ARGUMENTS,
    CONSTANTS,
    KINDS,
    RESULTS,
    BodyContext,
    MemorySample,
    MemoryWalk,
    nbytes_of,
)
from spmd.prices.walk import LONGEST_BRANCH
from spmd.shard_map.operation import shard_map_p
from spmd.show import Table, direction_of, plot_bytes, show_line

COLORS = dict(zip(KINDS, ("#9aa5b1", "#cbd2d9", "#82c98f", "#7fb3d9", "#b39ddb", "#f2b866", "#e58b88")))

ONE_BRANCH = "which branch is run is not known beforehand: the one that takes most memory is counted"
WHOLE = (
    "arguments that are plain arrays are whole on every rank; where only blocks of them are used, spmd.distribute them "
    "and save {:,} bytes a rank"
)

#: The first, the middle and the last coordinate along an axis of n, for programs whose ranks take different branches.
COORDINATES = (lambda n: 0, lambda n: n // 2, lambda n: n - 1)

# ---------------------------------------------------------------- the report


@dataclass(frozen=True, repr=False)
class MemoryUse(Table):
    """The bytes that a rank holds along a program, shown as a table by `print` and notebooks.

    `moments` has a sample for each operation, in the order in which they run; of a loop, for its first and last step.
    `peak` is the moment with most bytes. `ranks` is the number of ranks. The numbers hold for each rank, since all run
    the same program on blocks of the same shapes. If ranks take different branches, they hold for the first, middle or
    last rank along each axis, whichever holds most. `notes` says where the numbers depend on values, and which bytes
    could be saved. `arguments` has the bytes of each array among the arguments, in order.

    The kinds of memory:

    - arguments: parameters, optimizer state, data. They are held throughout.
    - constants: arrays that the program closes over. They are held throughout.
    - gradients: computed by the backward pass, and returned or used outside of it.
    - residuals: computed by the forward pass, and used by the backward pass.
    - results: other values that the program returns.
    - communication: other results of collectives.
    - temporaries: all other values.
    """

    moments: Sequence[MemorySample]
    ranks: int = 1
    notes: Sequence[str] = field(default_factory=list)
    arguments: Sequence[int] = ()

    @property
    def peak(self) -> MemorySample:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def highest(self) -> dict[str, int]:
        """The most bytes of each kind, at any moment."""
        return {kind: max(moment.bytes.get(kind, 0) for moment in self.moments) for kind in KINDS}

    @property
    def lines(self) -> Table:
        """The most bytes during each line of the program, in the order in which they first run: a table to print."""
        most: dict[Location | None, MemorySample] = {}
        for moment in self.moments:
            most[moment.source] = max(most.get(moment.source, moment), moment, key=lambda m: m.total)
        kinds = [kind for kind in KINDS if any(m.bytes.get(kind) for m in most.values())]
        rows = []
        for line, m in most.items():
            cells = [f"{n:,}" for n in (*(m.bytes.get(kind, 0) for kind in kinds), m.total)]
            rows.append([*cells, direction_of(line), show_line(line) or m.operation])
        return Table([*kinds, "total", "direction", "line"], rows)

    def _table(self) -> tuple[list, list, list]:
        peak, highest = self.peak, self.highest
        rows = [[k, f"{peak.bytes.get(k, 0):,}", f"{highest[k]:,}"] for k in KINDS if highest[k]]
        return ["bytes per rank", "at the peak", "highest"], rows, ["total", f"{peak.total:,}", ""]

    def _remarks(self) -> list[str]:
        peak = self.peak
        where = [peak.operation, direction_of(peak.source), show_line(peak.source)]
        return [f"the peak: {', '.join(filter(None, where))}", *[f"({note})" for note in self.notes]]

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes along the program, by kind. Returns the axes; needs matplotlib."""
        kinds = {kind: [m.bytes.get(kind, 0) for m in self.moments] for kind in KINDS if self.highest[kind]}
        label = show_line(self.peak.source) or self.peak.operation
        return plot_bytes(ax, kinds, COLORS, self.moments.index(self.peak), label)


def memory(f: Callable | Tape, *args: Any, optimized: bool = False, every_rank: bool = False) -> Any:
    """Report the bytes that a rank holds along a tape, or along `f`: `memory(f)(*args)`.

    Nothing runs: the report is read from the tape of `f` for arguments of these types. A sharded argument counts as a
    rank's block; a plain array is whole on every rank. The report counts what NumPy allocates inside an operation
    (`spmd/prices/work.py`), and the messages that a collective packs; it leaves out the memory of MPI, and
    Python's own objects. In the tests, the memory that NumPy allocates is within 5 % of the report for the networks of
    `spmd.parallel`.

    Args:
        f: a function, or a tape; for a tape, the report itself is returned.
        optimized: report on the program that `jit(f)` compiles, which writes results into memory that is no longer
            used, and into donated arguments, as it is for an `f` that `jit` returned. By default `f` runs eagerly:
            an array is freed with the last Python reference to it.
        every_rank: report on a process that simulates all ranks, and holds the blocks of all.

    Raises:
        TypeError: if `f` is neither a function nor a tape.

    >>> import numpy as np
    >>> import minidiff as md
    >>> from spmd import P, distribute, make_mesh, shard_map
    >>> from collectives import psum
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> w, x = np.ones(1000), distribute(np.ones((4, 1000)), mesh, P('i'))
    >>> use = memory(md.grad(loss))(w, x)
    >>> print(use)
    bytes per rank  at the peak  highest
    --------------  -----------  -------
    arguments            16,000   16,000
    gradients             8,000    8,000
    residuals                 8        8
    communication             0        8
    temporaries           8,008    8,008
    --------------  -----------  -------
    total                32,016
    the peak: psum, backward, line 1: loss = shard_map(lambda w, x: psum((w * x).sum(), '…
    >>> use.peak.operation, use.peak.total
    ('psum', 32016)
    """
    check_function("memory", f, args)
    if isinstance(f, Tape):
        return _report(f, compiled=optimized, every_rank=every_rank)

    def report(*args: Any) -> MemoryUse:
        if optimized or is_jitted(f):
            donated = f.donates(*args) if isinstance(f, Jitted) else ()
            kernels = has_kernels(f)
            return _report(rewritten(f)(*args), donated, compiled=True, every_rank=every_rank, kernels=kernels)
        with watch_lifetimes(filled_p) as lifetimes, warnings.catch_warnings():  # the steps of scans run one by one
            warnings.filterwarnings("ignore", "a Python loop is recorded")
            tape = make_tape(f)(*args)
        return _report(tape, lifetimes=lifetimes, every_rank=every_rank)

    return hide_own_frames_of_lambda(report)


def memory_in_place(tape: Tape) -> MemoryUse:
    """Report on a program as XLA compiles it: results are written over arguments, carries over earlier carries."""
    return _report(tape, in_place=True)


def _report(tape: Tape, donated: Sequence[bool] = (), **options: Any) -> MemoryUse:
    """Report on a rank; if ranks take different branches, on the one of `COORDINATES` that holds most."""
    selectors = [eqn.inputs[0] for t in tapes_in(tape) for eqn in t.equations if isinstance(eqn.primitive, Cond)]
    differ = any(typeof(x).variance for x in selectors) and not (options.get("every_rank") or options.get("in_place"))
    walks = [MemoryWalk(**options, coordinate=each) for each in (COORDINATES if differ else (None,))]
    return max((_report_of(tape, walk, donated) for walk in walks), key=lambda use: use.peak.total)


def _report_of(tape: Tape, walk: MemoryWalk, donated: Sequence[bool]) -> MemoryUse:
    arguments = [nbytes_of(t, walk.every_rank) for t in tape.in_types]
    constants = {id(c): c for t in tapes_in(tape) for c in t.constants}
    nbytes = [distinct_bytes(c) if isinstance(c, numpy.ndarray) else nbytes_of(typeof(c)) for c in constants.values()]
    static = {ARGUMENTS: sum(arguments), CONSTANTS: sum(nbytes)}
    walk.contexts[tape] = BodyContext([RESULTS] * len(tape.outputs), donated, op_by_op=walk.eager)
    moments = [MemorySample("the arguments", None, {}), *walk.price(tape).samples]
    moments = [replace(m, bytes={**m.bytes, **static}) for m in moments]
    ranks = max([math.prod(mesh.shape.values()) for mesh in meshes_of(tape)], default=1)
    notes = [ONE_BRANCH] if LONGEST_BRANCH in walk.notes else []
    saved = sum(v.type.nbytes - block for v, block in zip(tape.inputs, block_bytes(tape)) if block is not None)
    return MemoryUse(moments, ranks, [*notes, *([WHOLE.format(saved)] if saved else [])], arguments)


def block_bytes(tape: Tape) -> list[int | None]:
    """Return for each argument the bytes of its largest block, if it is plain and only used by blocks; else None."""
    used: dict[Var, list[Any]] = {v: [] for v in tape.inputs}
    for eqn in tape.equations:
        blocks = eqn.params["body"].inputs if eqn.primitive is shard_map_p else [None] * len(eqn.inputs)
        for a, block in zip(eqn.inputs, blocks):
            if isinstance(a, Var) and a in used:
                used[a].append(block and block.type.nbytes)
    sizes = [used[v] if v.type.sharding is None else [] for v in tape.inputs]
    return [max(n) if n and None not in n else None for n in sizes]
