"""Reports of what a program communicates, with types and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy

from minidiff import make_tape, tree
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import typeof
from minidiff.diagnostics.location import Location, lines_of, merged
from minidiff.higher_order.cond import Cond
from minidiff.higher_order.scan import rounds
from minidiff.higher_order.while_loop import While
from minidiff.inputs.arguments import as_value, check_function
from minidiff.values.dtypes import finfo, is_differentiable
from spmd.report.rewritten import of_tape
from spmd.report.table import Table
from spmd.shard_map.operation import shard_map_p
from spmd.shard_map.shard_map import without_types

ONE_BRANCH = "which branch is run is not known beforehand: the one that communicates most is counted"
ONE_STEP = "how many steps a while_loop takes is not known beforehand: what it communicates is counted for one"

LONGEST = 60  # columns of a line of the program
SAME_CALL = "  and for"  # another source line that the same call serves

# ---------------------------------------------------------------- one program


@dataclass
class Row:
    """One collective over one set of axes, for one line of the program.

    `count` is how often it runs, `bytes` how many bytes each rank passes to it in all. `source` is the line that asked
    for it; in the backward direction, the line whose derivative needs it; None if unknown. If one call serves several
    lines, `lines` has all of them. `ranks` is the number of ranks that take part.
    """

    collective: str
    axes: tuple[str, ...]
    count: int = 0
    bytes: int = 0
    source: Location | None = None
    ranks: int = 1

    @property
    def direction(self) -> str:
        """The direction: "forward", "backward" if only the derivative needs it, or "both"."""
        found = {_direction(line) for line in self.lines}
        return found.pop() if len(found) == 1 else "both"

    @property
    def lines(self) -> list[Location | None]:
        """The lines that asked for it, without duplicates."""
        return list(dict.fromkeys(lines_of(self.source)))

    @property
    def asked_for_by(self) -> str:
        """The file, number and text of the line that asked for it (the first one)."""
        return _shown(self.source)

    def _key(self) -> tuple:
        return self.collective, self.axes, self.source, self.ranks

    def _cells(self) -> Iterator[list[str]]:
        """The lines of a table: one, and one more for each further line of the program."""
        first = [self.collective, ", ".join(self.axes), f"{self.count}", f"{self.bytes:,}"]
        for line in self.lines:
            yield [*first, _direction(line), _shown(line)]
            first = [SAME_CALL, "", "", ""]


def _direction(line: Location | None) -> str:
    return "backward" if line is not None and line.backward else "forward"


def _shown(line: Location | None) -> str:
    text = str(line or "")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


@dataclass(repr=False)
class Communication(Table):
    """A report of collectives, shown as a table by `print` and notebooks.

    `counts` is how often each collective runs, `bytes` how many bytes each rank passes to them in all (the size of
    their operands on one rank; how much of that crosses the network depends on the algorithm). `rows` breaks this down
    by collective, axes, direction and the line of the program that asked for it. `notes` says where the numbers depend
    on values: without notes they are exact.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.collective] = counts.get(row.collective, 0) + row.count
        return counts

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def add(self, other: Communication, times: int = 1) -> None:
        """Add the counts of another report, `times` times."""
        for r in other.rows if times else ():
            row = next((mine for mine in self.rows if mine._key() == r._key()), None)
            if row is None:
                row = Row(r.collective, r.axes, source=r.source, ranks=r.ranks)
                self.rows.append(row)
            row.count += times * r.count
            row.bytes += times * r.bytes
        self.notes += [note for note in other.notes if times and note not in self.notes]

    def _table(self) -> tuple[list, list, list] | str:
        header = ["collective", "axes", "count", "bytes per rank", "direction", "asked for by"]
        cells = [line for row in self.rows for line in row._cells()]
        total = ["total", "", sum(r.count for r in self.rows), f"{self.bytes:,}", "", ""]
        return (header, cells, total) if cells else "no communication"

    def _remarks(self) -> list[str]:
        return [f"({note})" for note in self.notes]


def communication(f: Callable | Tape, *args: Any, optimized: bool = False) -> Any:
    """Report what a tape, or `f`, communicates: `communication(f)(*args)`.

    For a function, it returns a function that reports on `f` for its arguments. Nothing runs: the report is read from
    the tape of `f` for arguments of these types; with `optimized`, from the tape that `jit(f)` compiles (`rewritten`).
    The body of a `scan` counts once for each step. (Its carried sharded arrays have the sharding that its steps return
    from the first step on; in a loop that is not compiled, from the second. What its steps compute
    from constants has its gradient summed once, after the loop; a loop that is not compiled sums it in each step.) The
    table names the line of the program that asked for each collective; in the backward direction, the line whose
    derivative needs it.

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
    return of_tape(_report, f, optimized)


def _report(tape: Tape) -> Communication:
    found = Communication()
    for eqn in tape.equations:
        found.add(_of_equation(eqn))
    return found


def _of_equation(eqn: Equation) -> Communication:
    primitive, bodies = eqn.primitive, [_report(body) for body in eqn.bodies]
    if primitive.sends(eqn.params):
        nbytes = sum(typeof(a).nbytes for a in eqn.inputs)
        source = merged([eqn.source])
        return Communication([Row(primitive.name, eqn.params["axes"], 1, nbytes, source, eqn.params["size"])])
    if isinstance(primitive, Cond):
        most = max(bodies, key=lambda report: (report.bytes, sum(r.count for r in report.rows)))
        alike = all(_summary(report) == _summary(most) for report in bodies)
        bodies = [most] if alike else [most, Communication(notes=[ONE_BRANCH])]
    if isinstance(primitive, While) and any(report.rows for report in bodies):
        bodies.append(Communication(notes=[ONE_STEP]))
    found = Communication()
    for report in bodies:
        found.add(report, rounds(eqn))
    return found


Key = tuple[str, tuple[str, ...]]  # a collective, and its axes


def _summary(report: Communication) -> dict[Key, tuple[int, int]]:
    """The count and bytes of each collective over each set of axes."""
    found: dict[Key, tuple[int, int]] = {}
    for row in report.rows:
        count, nbytes = found.get((row.collective, row.axes), (0, 0))
        found[row.collective, row.axes] = count + row.count, nbytes + row.bytes
    return found


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
        typed, untyped = _summary(self.typed), _summary(self.untyped or Communication())
        keys = dict.fromkeys([*typed, *untyped])

        def cells(name: str, axes: str, one: tuple[int, int], two: tuple[int, int]) -> list:
            if self.untyped is None:
                return [name, axes, one[0], "?", f"{one[1]:,}", "?", "?"]
            ratio = f"{two[1] / one[1]:.2f}" if one[1] else "-"
            return [name, axes, one[0], two[0], f"{one[1]:,}", f"{two[1]:,}", ratio]

        none = (0, 0)
        lines = [cells(k[0], ", ".join(k[1]), typed.get(k, none), untyped.get(k, none)) for k in keys]
        sums = [(sum(c for c, _ in s.values()), sum(b for _, b in s.values())) for s in (typed, untyped)]
        return header, lines, cells("total", "", *sums)

    def _remarks(self) -> list[str]:
        reports = [r for r in (self.typed, self.untyped) if r is not None]
        same = "both give the same numbers" if self.same else self.note
        return [same, *dict.fromkeys(remark for report in reports for remark in report._remarks())]


def compare(f: Callable, *args: Any) -> Comparison:
    """Compare what `f(*args)` communicates with types and by the old recipe.

    The old recipe is `check_rep=False` throughout. `f` is made of `shard_map`s (`md.grad(loss)`, for example). If all
    its meshes are simulated, it is run both ways, and the results are compared. On MPI ranks nothing runs and nothing
    communicates; the comparison says so.

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
    typed = make_tape(f)(*args)
    untyped: Any = None
    why = _not_runnable(typed, args)
    values = [] if why else list(map(as_value, tree.leaves(args)))
    try:
        with without_types():
            untyped = make_tape(f)(*args)
        other = [] if why else untyped(*values)
    except Exception as error:  # any: the program may not be written to run without types
        why = f"without types it does not run: {type(error).__name__}: {error}"
    with_types, without = _report(typed), untyped and _report(untyped)
    if why:
        return Comparison(with_types, without, None, why)
    same = all(map(_close, typed(*values), other))
    return Comparison(with_types, without, same, "" if same else "the two do not give the same numbers")


def _not_runnable(tape: Tape, args: tuple) -> str:
    """Why `compare` cannot run a program; empty if it can."""
    if any(not (hasattr(x, "__array__") or isinstance(x, (int, float, complex))) for x in tree.leaves(args)):
        return "not run: the arguments are types, not values"
    if any(mesh.backend != "simulated" for mesh in meshes_of(tape)):
        return "not run: that is done on simulated ranks only"
    return ""


def meshes_of(tape: Tape) -> Iterator[Any]:
    """Yield the mesh of each shard_map on a tape."""
    for eqn in tape.equations:
        if eqn.primitive is shard_map_p:
            yield eqn.params["mesh"]
        for body in eqn.bodies:
            yield from meshes_of(body)


def _close(x: Any, y: Any) -> bool:
    """Whether two arrays are equal up to rounding: the order of summation may differ."""
    x, y = numpy.asarray(x), numpy.asarray(y)
    if not is_differentiable(x.dtype):
        return numpy.array_equal(x, y)
    tolerance = numpy.sqrt(finfo(x.dtype).eps)
    scale = numpy.abs(x).max(initial=0.0, where=numpy.isfinite(x))
    return numpy.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
