"""The table in README of what is differentiable: `python -m tests.table.coverage` writes it from the table of tests.

A function that has rows in `tests/table` has passed every check of `tests/test_ops.py`: derivatives to second order
against numbers, in forward and in reverse mode, and `vmap` of the values and of the derivatives. Those listed as
discrete have passed all that makes sense for them.
"""

from __future__ import annotations

import pathlib

from minidiff.core import NUMPY_FUNCTIONS
from minidiff.numpy.coverage import FROM_VALUES, REFUSED, public_callables
from minidiff.numpy.replaced import __all__ as REPLACED
from tests.table import CONCRETE, DISCRETE, FAMILIES, TABLE

README = pathlib.Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"

YES, NO = "✓", "–"


def _line(title: str, names: list[str], *marks: str) -> str:
    return f"| **{title}** {' '.join(f'`{n}`' for n in names)} | {' | '.join(marks)} |"


def coverage_table() -> str:
    """The table as Markdown: a line for each family, and one for its functions that have no derivative."""
    public = public_callables()
    lines = ["| function | forward | reverse | second order | vmap |", "|---|:-:|:-:|:-:|:-:|"]
    seen: set[str] = set()
    for family in FAMILIES:
        title = family.__name__.rpartition(".")[2].replace("_", " ")
        functions = [r.function for r in family.ROWS if callable(r.function)]
        names = [n for n, f in public.items() if f in functions and n not in seen]
        seen.update(names)
        for label, discrete, mark in ((title, False, YES), (f"{title}, discrete", True, NO)):
            group = sorted(n for n in names if (public[n] in DISCRETE) is discrete)
            if group:
                lines.append(_line(label, group, mark, mark, mark, YES))
    tabled = {r.function for r in TABLE}
    for discrete, mark in ((False, YES), (True, NO)):
        names = [n for n, f in public.items() if f in CONCRETE and (f in DISCRETE) is discrete]
        names += FROM_VALUES if discrete else []
        title = "from values, discrete" if discrete else "chosen by values"
        lines.append(_line(title, sorted(set(names) & set(public)), mark, mark, mark, NO))
    rest = [n for n, f in public.items() if f in NUMPY_FUNCTIONS and f not in tabled | CONCRETE and n not in REFUSED]
    lines.append(_line("from types", sorted(rest), NO, NO, NO, YES))
    own = {n for n in REPLACED if public.get(n) not in NUMPY_FUNCTIONS}
    lines.append(_line("in `minidiff.numpy`", sorted(own & tabled), YES, YES, YES, YES))
    lines.append(_line("in `minidiff.numpy`, need values", sorted(own - tabled), YES, YES, YES, NO))
    return "\n".join(lines)


def with_table(text: str) -> str:
    """README's text with the table as it is now between the two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{coverage_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
