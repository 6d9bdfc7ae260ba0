"""What a program communicates, read from its tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from minidiff import make_tape
from minidiff.control import Cond, Scan, While
from minidiff.tape import Equation, Tape, atom_type, bodies_of

ONE_BRANCH = "which branch is run is not known beforehand: the one that communicates most is counted"
ONE_STEP = "how many steps a while_loop takes is not known beforehand: what it communicates is counted for one"


@dataclass
class Row:
    """One kind of collective over one set of axes: how often, and how many bytes each rank hands to it in all."""

    collective: str
    axes: tuple[str, ...]
    count: int = 0
    bytes: int = 0


@dataclass
class Communication:
    """A report of collectives that communicate. Printing it gives a table.

    `counts` says how often each collective is run, `bytes` how many bytes each rank hands to them in all (the
    size of their operands on one rank; how much of that crosses the network depends on the algorithm). `notes` say
    where these depend on values: they are exact if there are none.
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
        """Count in what another report says, so many times."""
        for r in other.rows if times else ():
            row = next((mine for mine in self.rows if (mine.collective, mine.axes) == (r.collective, r.axes)), None)
            if row is None:
                row = Row(r.collective, r.axes)
                self.rows.append(row)
            row.count += times * r.count
            row.bytes += times * r.bytes
        self.notes += [note for note in other.notes if times and note not in self.notes]

    def __str__(self) -> str:
        if not self.rows:
            return "no communication"
        header = ("collective", "axes", "count", "bytes per rank")
        cells = [(r.collective, ", ".join(r.axes), str(r.count), f"{r.bytes:,}") for r in self.rows]
        total = ("total", "", str(sum(r.count for r in self.rows)), f"{self.bytes:,}")
        widths = [max(map(len, column)) for column in zip(header, *cells, total)]

        def line(row):
            left = "  ".join(c.ljust(w) for c, w in zip(row[:2], widths))
            return left + "  " + "  ".join(c.rjust(w) for c, w in zip(row[2:], widths[2:]))

        rule = "  ".join("-" * w for w in widths)
        notes = [f"({note})" for note in self.notes]
        return "\n".join([line(header), rule, *map(line, cells), rule, line(total), *notes])

    __repr__ = __str__


def communication(f: Callable) -> Callable[..., Communication]:
    """A function that reports what `f` communicates, for arguments of given types: `communication(f)(*args)`.

    Nothing is run: the report is read from the tape of `f`. The body of a `scan` counts as often as the loop has steps.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> print(communication(total)(np.arange(8.0)))
    collective  axes  count  bytes per rank
    ----------  ----  -----  --------------
    psum        i         1              16
    ----------  ----  -----  --------------
    total                 1              16
    """

    return lambda *args: of_tape(make_tape(f)(*args))


def of_tape(tape: Tape) -> Communication:
    found = Communication()
    for eqn in tape.equations:
        found.add(_of_equation(eqn))
    return found


def _of_equation(eqn: Equation) -> Communication:
    primitive, bodies = eqn.primitive, [of_tape(body) for body in bodies_of(eqn)]
    if primitive.communicates:
        return Communication([Row(primitive.name, eqn.params["axes"], 1, atom_type(eqn.inputs[0]).nbytes)])
    if isinstance(primitive, Cond):
        most = max(bodies, key=lambda report: (report.bytes, sum(r.count for r in report.rows)))
        alike = all(sorted(map(str, report.rows)) == sorted(map(str, most.rows)) for report in bodies)
        bodies = [most] if alike else [most, Communication(notes=[ONE_BRANCH])]
    if isinstance(primitive, While) and any(report.rows for report in bodies):
        bodies.append(Communication(notes=[ONE_STEP]))
    found = Communication()
    for report in bodies:
        found.add(report, eqn.params["length"] if isinstance(primitive, Scan) else 1)
    return found
