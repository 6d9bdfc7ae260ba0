"""What a program communicates, read from its tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minidiff import make_tape
from minidiff.tape import Equation, Tape, atom_type


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
    size of their operands on one rank; how much of that crosses the network depends on the algorithm).
    """

    rows: list[Row] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.collective] = counts.get(row.collective, 0) + row.count
        return counts

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def add(self, eqn: Equation) -> None:
        name, axes = eqn.primitive.name, eqn.params["axes"]
        row = next((r for r in self.rows if (r.collective, r.axes) == (name, axes)), None)
        if row is None:
            row = Row(name, axes)
            self.rows.append(row)
        row.count += 1
        row.bytes += atom_type(eqn.inputs[0]).nbytes

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
        return "\n".join([line(header), rule, *map(line, cells), rule, line(total)])

    __repr__ = __str__


def communication(f: Callable) -> Callable[..., Communication]:
    """A function that reports what `f` communicates, for arguments of given types: `communication(f)(*args)`.

    Nothing is run: the report is read from the tape of `f`.

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

    def report(*args: Any) -> Communication:
        found = Communication()
        for eqn in _equations(make_tape(f)(*args)):
            if eqn.primitive.communicates:
                found.add(eqn)
        return found

    return report


def _equations(tape: Tape) -> Iterator[Equation]:
    """All equations of a tape, and of the bodies in it."""
    for eqn in tape.equations:
        yield eqn
        for body in eqn.params.values():
            if isinstance(body, Tape):
                yield from _equations(body)
