"""The collectives of a tape, by line of the program: a view of the walk that prices it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minidiff.compiler.jit import program_p
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.errors.location import Location, lines_of, merge_locations
from spmd.prices.compiled_tape import lower_body, lower_nested_bodies, tapes_in
from spmd.prices.tape_cost import ATTENTION, PRODUCTS, OperationCosts
from spmd.prices.walk import LONGEST_BRANCH, ONE_STEP, Walk
from spmd.shard_map.operation import shard_map_p
from spmd.sharding.block_operations import INDEXED
from spmd.show import Table, direction_of, show_line, show_seconds

ONE_BRANCH = "which branch is run is not known beforehand: the one that communicates most is counted"
VALUES_OF_INDICES = "op by op, what is sent also depends on the values of whole indices, which are not known beforehand"
SAME_CALL = "  and for"  # another source line that the same call serves


@dataclass
class Row:
    """One collective over one set of axes, for one line of the program.

    It runs `count` times on `ranks` ranks, each of which passes it `bytes` bytes in all. `source` is the line that
    asked for it; in the backward direction, the line whose derivative needs it; None if unknown. If one call serves
    several lines, `lines` has all of them. `seconds` is the time of all calls, with waiting, on the slowest rank; None
    if it was not measured. `minimum` are the least bytes for its lines, in all their rows, and `ratio` is by how much
    these rows exceed it: in the first row of a line, if the report is against the minimum and it is known.
    """

    collective: str
    axes: tuple[str, ...]
    count: int = 0
    bytes: int = 0
    source: Location | None = None
    ranks: int = 1
    seconds: float | None = None
    minimum: int | None = None
    ratio: float | None = None

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

    def _cells(self, shows_minimum: bool) -> Iterator[list[str]]:
        """Yield the lines of a table: one, and one more for each further line of the program."""
        numbers = [f"{self.count}", f"{self.bytes:,}"]
        numbers += show_minimum(self.minimum, self.ratio) if shows_minimum else []
        numbers += [] if self.seconds is None else [show_seconds(self.seconds)]
        first = [self.collective, ", ".join(self.axes), *numbers]
        for line in self.lines:
            yield [*first, direction_of(line), show_line(line)]
            first = [SAME_CALL, *[""] * (1 + len(numbers))]


@dataclass(repr=False)
class Communication(Table):
    """A report of collectives, shown as a table by `print` and notebooks.

    `counts` maps each collective to the number of its calls. `bytes` are those that each rank passes to collectives in
    all: the size of their operands on one rank. (The share that crosses the network depends on the algorithm.) `rows`
    breaks this down by collective, axes, direction and the line of the program that asked for it. `flops` are the
    floating-point operations of matrix products on one rank. `notes` says where the numbers depend on values: without
    notes they are exact. `minimum` are the least bytes, if the report is against them, and all lines' are known.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flops: int = 0
    minimum: int | None = None
    shows_minimum: bool = False

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
        header = ["collective", "axes", "count", "bytes per rank", *["minimum", "ratio"] * self.shows_minimum]
        header += [*["measured"] * bool(measured), "direction", "asked for by"]
        cells = [line for row in self.rows for line in row._cells(self.shows_minimum)]
        total = ["total", "", sum(r.count for r in self.rows), f"{self.bytes:,}"]
        total += show_minimum(self.minimum, self.bytes / self.minimum if self.minimum else None) * self.shows_minimum
        total += [*[show_seconds(sum(measured))] * bool(measured), "", ""]
        return (header, cells, total) if cells else "no communication"

    def _remarks(self) -> list[str]:
        return [f"({note})" for note in self.notes]


def show_minimum(minimum: int | None, ratio: float | None) -> list[str]:
    return ["" if minimum is None else f"{minimum:,}", "" if ratio is None else f"{ratio:.2f}"]


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
    if not compiled and any(map(_looks_up, tape.equations)):
        report.notes.append(VALUES_OF_INDICES)
    return report


def _looks_up(eqn: Equation) -> bool:
    """Return whether an operation on sharded arrays takes whole indices: op by op, they are known."""
    if eqn.primitive is not shard_map_p or eqn.params["call"] is not None:
        return False
    operands = zip(eqn.inputs, eqn.params["in_specs"])
    is_whole = any(isinstance(a, Var) and spec.is_trivial and a.type.dtype.kind in "iu" for a, spec in operands)
    return is_whole and any(e.primitive in INDEXED for e in eqn.params["body"].equations)


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
        return lower_body(eqn.params) or lower_nested_bodies(eqn.params, eqn.bodies[0])


#: The longest branch is the one that communicates most bytes; of as many bytes, the one with more collectives.
_BYTES = OperationCosts(send=lambda collective, ranks, nbytes, axes: (nbytes + 1e-3, ", ".join(axes)))
