"""Write the guide's table of functions from the table of tests: `python -m tests.table.coverage`.

A function that has rows in `tests/table` has passed every check of `tests/minidiff/ops/test_ops.py`: derivatives to
second order against numbers, in forward and in reverse mode, and `vmap` of the values and of the derivatives. Those
listed as discrete have passed all that makes sense for them; those that need values have tests of their own.
"""

from __future__ import annotations

import pathlib

from minidiff import nn
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.errors.other_libraries import suggestions
from minidiff.numpy.functions import FROM_VALUES, public_callables
from minidiff.numpy.replaced import __all__ as REPLACED
from tests.table import CONCRETE, DISCRETE, FAMILIES, TABLE

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "functions.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"

YES, NO = "✓", "–"


def _line(title: str, names: set[str], differentiable: bool, vmap: bool) -> list[str]:
    marks = [YES if differentiable else NO] * 3 + [YES if vmap else NO]
    return [f"| **{title}** `{' '.join(sorted(names))}` | {' | '.join(marks)} |"] if names else []


def coverage_table() -> str:
    """The table as Markdown: a line for each family, and one for its functions that have no derivative.

    A function that NumPy has under several names stands under that which it calls itself by.
    """
    every = public_callables()
    names = {f: n for n, f in every.items()}
    names |= {f: n for n, f in every.items() if n.rpartition(".")[2] == getattr(f, "__name__", None)}
    public = {n: f for n, f in every.items() if names[f] == n}
    tabled = {r.function for r in TABLE}

    def discrete(actual: set[str]) -> set[str]:
        return {n for n in actual if public[n] in DISCRETE}

    lines = ["| function | forward | reverse | second order | vmap |", "|---|:-:|:-:|:-:|:-:|"]
    seen: set[str] = set()
    for family in FAMILIES:
        title = family.__name__.rpartition(".")[2].replace("_", " ")
        functions = {r.function for r in family.ROWS}
        actual = {n for n, f in public.items() if f in functions} - seen
        seen |= actual
        lines += _line(title, actual - discrete(actual), True, True)
        lines += _line(f"{title}, discrete", discrete(actual), False, True)
    forms = {f.lstrip(".").partition("[")[0] for f in tabled if isinstance(f, str)}  # `at` of ".at[].set"
    lines += _line("of `minidiff.nn`", {n for n in nn.__all__ if getattr(nn, n) in tabled}, True, True)
    local = {n for n in REPLACED if every.get(n) not in NUMPY_FUNCTIONS}
    lines += _line("of `minidiff.numpy`", local & forms, True, True)
    concrete = {n for n, f in public.items() if f in CONCRETE}
    lines += _line("need values", concrete - discrete(concrete) | local - forms, True, False)
    lines += _line("need values, discrete", discrete(concrete) | set(FROM_VALUES) & set(public), False, False)
    traced = {n for n, f in public.items() if f in NUMPY_FUNCTIONS and n not in suggestions("numpy")["numpy"]}
    lines += _line("from types alone", {n for n in traced if public[n] not in tabled | CONCRETE}, False, True)
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page's text with the table as it is now between the two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{coverage_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
