"""Reports of what a program communicates, with types and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from minidiff import tree
from minidiff.compiler.jit import program_p
from minidiff.core.tape import Equation, Tape
from minidiff.diagnostics.location import Location, lines_of, merge_locations
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda
from minidiff.inputs.arguments import as_value, check_function
from minidiff.values.dtypes import finfo, is_differentiable
from spmd.report.measured import MeasuredStep, check_runs, measure
from spmd.report.rank_tapes import lower_body, lower_parts
from spmd.report.rewritten import apply_to_tape, is_jitted, meshes_of, tape_of, tapes_in, without_static
from spmd.report.table import Table, show_seconds
from spmd.report.tape_cost import ATTENTION, PRODUCTS, OperationCosts
from spmd.report.walk import LONGEST_BRANCH, ONE_STEP, Walk
from spmd.shard_map.operation import shard_map_p
from spmd.shard_map.shard_map import without_types

ONE_BRANCH = "which branch is run is not known beforehand: the one that communicates most is counted"

LONGEST = 60  # columns of a line of the program
SAME_CALL = "  and for"  # another source line that the same call serves

# ---------------------------------------------------------------- one program


@dataclass
class Row:
    """One collective over one set of axes, for one line of the program.

    It runs `count` times on `ranks` ranks, each of which passes it `bytes` bytes in all. `source` is the line that
    asked for it; in the backward direction, the line whose derivative needs it; None if unknown. If one call serves
    several lines, `lines` has all of them. `seconds` is the time of all calls, with waiting, on the slowest rank; None
    if it was not measured.
    """

    collective: str
    axes: tuple[str, ...]
    count: int = 0
    bytes: int = 0
    source: Location | None = None
    ranks: int = 1
    seconds: float | None = None

    @property
    def direction(self) -> str:
        """The direction: "forward", "backward" if only the derivative needs it, or "both"."""
        directions = {direction_of(line) for line in self.lines}
        return directions.pop() if len(directions) == 1 else "both"

    @property
    def lines(self) -> list[Location | None]:
        """The lines that asked for it, without duplicates."""
        return list(dict.fromkeys(lines_of(self.source)))

    @property
    def asked_for_by(self) -> str:
        """The file, number and text of the line that asked for it (the first one)."""
        return show_line(self.source)

    def _cells(self) -> Iterator[list[str]]:
        """Yield the lines of a table: one, and one more for each further line of the program."""
        seconds = [] if self.seconds is None else [show_seconds(self.seconds)]
        first = [self.collective, ", ".join(self.axes), f"{self.count}", f"{self.bytes:,}", *seconds]
        for line in self.lines:
            yield [*first, direction_of(line), show_line(line)]
            first = [SAME_CALL, "", "", "", *[""] * len(seconds)]


def direction_of(line: Location | None) -> str:
    return "backward" if line is not None and line.backward else "forward"


def show_line(line: Location | None) -> str:
    text = str(line or "")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


@dataclass(repr=False)
class Communication(Table):
    """A report of collectives, shown as a table by `print` and notebooks.

    `counts` maps each collective to the number of its calls. `bytes` are those that each rank passes to collectives in
    all: the size of their operands on one rank. (The share that crosses the network depends on the algorithm.) `rows`
    breaks this down by collective, axes, direction and the line of the program that asked for it. `flops` are the
    floating-point operations of matrix products on one rank. `notes` says where the numbers depend on values: without
    notes they are exact.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flops: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for (name,), (count, _) in self.sums(lambda row: (row.collective,)).items()}

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def sums(self, key: Callable[[Row], tuple]) -> dict[tuple, tuple[int, int]]:
        """Return the count and the bytes of all rows with one key."""
        sums: dict[tuple, tuple[int, int]] = {}
        for row in self.rows:
            count, nbytes = sums.get(key(row), (0, 0))
            sums[key(row)] = count + row.count, nbytes + row.bytes
        return sums

    def _table(self) -> tuple[list, list, list] | str:
        measured = [row.seconds for row in self.rows if row.seconds is not None]
        header = ["collective", "axes", "count", "bytes per rank", *["measured"] * bool(measured)]
        header += ["direction", "asked for by"]
        cells = [line for row in self.rows for line in row._cells()]
        total = ["total", "", sum(r.count for r in self.rows), f"{self.bytes:,}"]
        total += [*[show_seconds(sum(measured))] * bool(measured), "", ""]
        return (header, cells, total) if cells else "no communication"

    def _remarks(self) -> list[str]:
        return [f"({note})" for note in self.notes]


def communication(f: Callable | Tape, *args: Any, optimized: bool = False, measured: bool = False) -> Any:
    """Report the collectives of a tape, or of `f`: `communication(f)(*args)`.

    Nothing runs: the report is read from the tape of `f` for arguments of these types. A jitted function, also one that
    `f` calls, is reported as its program, with its options. The table names the line of the program that asked for each
    collective; in the backward direction, the line whose derivative needs it.

    The body of a `scan` counts once for each step, that of a `while_loop` once: `notes` say so. Two things differ from
    a Python loop. Sharded arrays in the carry are resharded before the first step, to the sharding that a step returns.
    In the body of a `shard_map`, the gradient of values that steps compute from invariant ones is summed once, after
    the loop; in a Python loop for each step, unless the program is `optimized`.

    Args:
        f: a function, or a tape; for a tape, the report itself is returned.
        optimized: report on the program that `jit(f)` compiles, with short loops in bodies unrolled.
        measured: run that program, too, twice, on all ranks: the table then has the seconds of each row in the second
            run (`timeline` shows when).

    Raises:
        TypeError: if `f` is neither a function nor a tape.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> report = communication(total)(np.arange(8.0))
    >>> report.counts, report.bytes
    ({'psum': 1}, 16)
    >>> [(row.axes, row.direction) for row in report.rows]
    [(('i',), 'forward')]
    """
    check_function("communication", f, args)
    optimized = optimized or measured or is_jitted(f)
    report = apply_to_tape(lambda tape: price_tape(tape, optimized), f, optimized)
    if not measured:
        return report
    check_runs("communication", f)
    return hide_own_frames_of_lambda(lambda *args: _with_seconds(report(*args), measure(f, args)))


def _with_seconds(report: Communication, ranks: Sequence[Sequence[MeasuredStep]]) -> Communication:
    """Add the seconds of each row on the slowest rank to a report."""
    for row in report.rows:
        key = row.collective, row.axes, row.source
        row.seconds = max(sum(s.seconds for s in steps if s.key == key) for steps in ranks)
    return report


# ---------------------------------------------------------------- a view of the walk


def price_tape(tape: Tape, compiled: bool = False) -> Communication:
    """Report on a tape, which may be that of a compiled program: the messages and products of a rank."""
    walk = _LoweringWalk(_BYTES, fused=False, asynchronous=False)
    walk.compiled = compiled
    cost = walk.price(tape)
    report = Communication(flops=round(cost.total("flops", lambda key: key.kind in (PRODUCTS, ATTENTION))))
    for key, entry in cost.entries.items():
        if key.axes:
            lines = merge_locations([key.source])
            row = Row(key.operation, key.axes, round(entry.count), round(entry.bytes), lines, key.ranks)
            report.rows.append(row)
    notes = {LONGEST_BRANCH: ONE_BRANCH, ONE_STEP: ONE_STEP} if report.rows else {}
    report.notes += [notes[note] for note in walk.notes if note in notes]
    return report


class _LoweringWalk(Walk):
    """A walk along the compiled tape of each body: short loops are unrolled, so that unused sums go, for example."""

    compiled = False  # whether the whole tape is a program; if not, it may call some
    called: frozenset[Equation] = frozenset()  # equations of programs

    def body_of(self, eqn: Equation) -> Tape:
        if eqn.primitive is program_p:
            self.called |= {inner for body in tapes_in(eqn.bodies[0]) for inner in body.equations}
        lowers = eqn.primitive is shard_map_p and (self.compiled or eqn in self.called)
        if not lowers:
            return eqn.bodies[0]
        return lower_body(eqn.params) or lower_parts(eqn.params, eqn.bodies[0])


#: The longest branch is the one that communicates most bytes; of as many bytes, the one with more collectives.
_BYTES = OperationCosts(send=lambda collective, ranks, nbytes, axes: (nbytes + 1e-3, ", ".join(axes)))


# ---------------------------------------------------------------- comparison with the old recipe


@dataclass(repr=False)
class Comparison(Table):
    """The result of `compare`. Printing it gives a table.

    `typed` and `untyped` are reports of communication. `same` says whether both gave the same numbers; it is None if
    they were not run. `note` says why not, or what was wrong. `untyped` is None if the program does not run without
    types.
    """

    typed: Communication
    untyped: Communication | None
    same: bool | None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The old recipe's bytes divided by the typed program's; None if undefined."""
        if self.untyped is None or not self.typed.bytes:
            return None
        return self.untyped.bytes / self.typed.bytes

    def _table(self) -> tuple[list, list, list] | str:
        if self.untyped is not None and not (self.typed.rows or self.untyped.rows):
            return "no communication, with types or without"
        header = ["collective", "axes", "count", "without types", "bytes per rank", "without types", "ratio"]
        reports = self.typed, self.untyped or Communication()
        typed, untyped = (report.sums(lambda row: (row.collective, row.axes)) for report in reports)

        def cells(name: str, axes: str, one: tuple[int, int], two: tuple[int, int]) -> list:
            if self.untyped is None:
                return [name, axes, one[0], "?", f"{one[1]:,}", "?", "?"]
            ratio = f"{two[1] / one[1]:.2f}" if one[1] else "-"
            return [name, axes, one[0], two[0], f"{one[1]:,}", f"{two[1]:,}", ratio]

        none = (0, 0)
        keys = dict.fromkeys([*typed, *untyped])
        lines = [cells(k[0], ", ".join(k[1]), typed.get(k, none), untyped.get(k, none)) for k in keys]
        totals = [report.sums(lambda row: ()).get((), none) for report in reports]
        return header, lines, cells("total", "", *totals)

    def _remarks(self) -> list[str]:
        reports = [r for r in (self.typed, self.untyped) if r is not None]
        same = "both give the same numbers" if self.same else self.note
        return [same, *dict.fromkeys(remark for report in reports for remark in report._remarks())]


def compare(f: Callable, *args: Any) -> Comparison:
    """Compare what `f(*args)` communicates with types and by the old recipe.

    The old recipe is `check_rep=False` throughout. `f` is made of `shard_map`s (`md.grad(loss)`, for example). If all
    its meshes are simulated, it is run both ways, and the results are compared. On MPI ranks nothing runs, and the
    comparison says so. Raises TypeError for a tape, which has its types already.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> loss = shard_map(lambda w, x: psum((w * x).sum(), 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> print(compare(grad(loss), np.ones(2), np.ones((4, 2))))
    collective  axes  count  without types  bytes per rank  without types  ratio
    ----------  ----  -----  -------------  --------------  -------------  -----
    psum        i         2              3              24             32   1.33
    ----------  ----  -----  -------------  --------------  -------------  -----
    total                 2              3              24             32   1.33
    both give the same numbers

    Source: JEP 17111, "Problem: efficient transpose of psum or all_gather depends on whether cotangents are
    invariant across devices".
    """
    if isinstance(f, Tape) or not callable(f):
        raise TypeError(
            f"compare takes a function, to type it both ways; got {type(f).__name__}: write compare(f, *args)"
        )
    typed = tape_of(f)(*args)
    untyped: Any = None
    leaves = tree.leaves(without_static(f, args))
    why = _not_runnable(typed, leaves)
    values = [] if why else list(map(as_value, leaves))
    try:
        with without_types():
            untyped = tape_of(f)(*args)
        other = [] if why else untyped(*values)
    except Exception as error:  # any: the program may not be written to run without types
        why = f"without types it does not run: {type(error).__name__}: {error}"
    with_types, without = price_tape(typed, is_jitted(f)), untyped and price_tape(untyped, is_jitted(f))
    if why:
        return Comparison(with_types, without, None, why)
    same = all(map(_close, typed(*values), other))
    return Comparison(with_types, without, same, "" if same else "the two do not give the same numbers")


def _not_runnable(tape: Tape, leaves: Sequence[Any]) -> str:
    """Return the reason why `compare` cannot run a program; empty if it can."""
    if any(not (hasattr(x, "__array__") or isinstance(x, (int, float, complex))) for x in leaves):
        return "not run: the arguments are types, not values"
    if any(mesh.backend != "simulated" for mesh in meshes_of(tape)):
        return "not run: that is done on simulated ranks only"
    return ""


def _close(x: Any, y: Any) -> bool:
    """Return whether two arrays are equal up to rounding: the order of summation may differ."""
    x, y = numpy.asarray(x), numpy.asarray(y)
    if not is_differentiable(x.dtype):
        return numpy.array_equal(x, y)
    tolerance = numpy.sqrt(finfo(x.dtype).eps)
    scale = numpy.abs(x).max(initial=0.0, where=numpy.isfinite(x))
    return numpy.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
