"""Print which properties the tests show of each program: `make coverage-table`.

A mark says that the property is checked for all the line's programs; a number, for so many of them. What is not checked
has its reason below the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from tests.checks import of_collectives, ranks
from tests.checks.meshes import mesh
from tests.checks.properties import PROPERTIES, shown_by, together
from tests.minidiff.ops.test_ops import ROWS, checks_of
from tests.table import CONCRETE, FAMILIES


class Line(NamedTuple):
    """A line of the table: a name, and for each of its programs the properties that are checked."""

    name: str
    programs: list[frozenset[str]]

    @property
    def title(self) -> str:
        return f"{self.name} ({len(self.programs)})" if len(self.programs) > 1 else self.name

    def cell(self, name: str) -> str:
        count = sum(name in shown for shown in self.programs)
        return "✓" if count == len(self.programs) else str(count) if count else "–"


def operations() -> Iterator[Line]:
    """Operations of NumPy and SciPy, by the files of `tests/table`."""
    for family in FAMILIES:
        functions = dict.fromkeys(row.function for row in family.ROWS)
        shown = [together(check for row in ROWS[f] for check in checks_of(row)) for f in functions]
        yield Line(family.__name__.rpartition(".")[2], shown)


def collectives() -> Iterator[Line]:
    """Collectives, each in all the cases of `tests/checks/of_collectives.py`, on simulated ranks and on MPI ranks."""
    shown: dict[str, set] = {case.name: set() for case in of_collectives.cases(2)}
    call = of_collectives.Case.__call__
    for check, options, *_ in of_collectives.CHECKS.values():

        def noted(case: Any, *args: Any, check: Any = check) -> Any:
            shown[case.name] |= shown_by(check)
            return call(case, *args)

        with mock.patch.object(of_collectives.Case, "__call__", noted):
            check(mesh(2, names="x"), ("x",), **options)
    for name, properties in shown.items():
        yield Line(name, [frozenset(properties)])


def programs_on_ranks() -> Iterator[Line]:
    """Programs of the tables in `tests/checks/ranks.py`, with the numbers of ranks that run them on each backend."""
    for name, table in (ranks.PARALLEL | ranks.TABLES).items():
        if name == "collectives":  # they have a table above
            continue
        checks = [check for n in table.simulated or table.mpi[-1:] for check in table.checks(n, ranks.SIMULATED)]
        backends = ", ".join(
            f"{backend} {' '.join(map(str, numbers))}"
            for backend, numbers in (("simulated", table.simulated), ("MPI", table.mpi))
            if numbers
        )
        yield Line(f"{name} ({backends})", [together(checks)])


TABLES = {
    "operations": (
        operations,
        [
            "derivatives: the others have integers or booleans as results",
            "adjoint: the others are not linear in any argument",
            f"besides, {len(CONCRETE)} functions need values, and have tests of their own in tests/minidiff/ops",
            "counts, errors: one rank has no collectives; errors are rows of tests/messages/operations.md",
        ],
    ),
    "collectives": (
        collectives,
        [
            "adjoint: products, extrema, logical and user-defined reductions are not linear; axis_index takes no array",
            "derivatives: those of linear collectives are the adjoint; logical reductions and axis_index have none",
            "memory: tests/mpi/test_memory_mpi.py, for all; errors: rows of tests/messages/collectives.md",
        ],
    ),
    "programs on ranks": (
        programs_on_ranks,
        [
            "adjoint: derivatives of programs are compared instead; halos and exchanges by splits are collectives",
            "types: programs without types are tested where they differ, in networks and loops",
            "memory: of programs that are there to save it",
            "errors: rows of tests/messages, but where each rank must raise",
        ],
    ),
}


def as_markdown(lines: Iterable[Line]) -> str:
    lines = [line for line in lines if line.programs]
    columns = [name for name in PROPERTIES if any(name in shown for line in lines for shown in line.programs)]
    head = ["programs", *columns]
    rows = [[line.title, *map(line.cell, columns)] for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    for name, meaning in PROPERTIES.items():
        print(f"- {name}: {meaning}")
    for title, (lines, reasons) in TABLES.items():
        print(f"\n## {title}\n\n{lines.__doc__}\n\n{as_markdown(lines())}\n")
        print("\n".join(f"- {reason}" for reason in reasons))


if __name__ == "__main__":
    main()
