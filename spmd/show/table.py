"""Tables, as `print` and as notebooks show them."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from minidiff.errors.location import Location

NUMBER = re.compile(r"[-+\d][\d,.e+-]*(%| \S{1,4})?|\??")  # with a unit, perhaps; an unknown one, or nothing

LONGEST = 60  # columns of a line of the program

Cells = Sequence[Sequence[Any]]


class Table:
    """Lines under a header, a total below a rule, and remarks, as `print` and notebooks show them.

    Columns of numbers are right-aligned. A result that is shown as a table is a subclass with its own `_table`.

    >>> Table(["collective", "bytes"], [["psum", "1,024"], ["pmax", 8]], ["total", "1,032"])
    collective  bytes
    ----------  -----
    psum        1,024
    pmax            8
    ----------  -----
    total       1,032
    """

    notes: Sequence[str] = ()

    def __init__(self, header: Sequence[str], lines: Cells, total: Sequence[Any] | None = None):
        self._content = header, lines, total

    def _table(self) -> tuple[Sequence[str], Cells, Sequence[Any] | None] | str:
        """Return the header, the lines, and the total or None; or the text to show in place of an empty table."""
        return self._content

    def _remarks(self) -> Sequence[str]:
        return self.notes

    def _rows(self, table: tuple) -> tuple[list[list[str]], list[bool]]:
        """Return the cells of all rows, the header first and the total last; and whether each column is of numbers."""
        header, lines, total = table
        rows = [[*map(str, row)] for row in (header, *lines, *([] if total is None else [total]))]
        return rows, [all(map(NUMBER.fullmatch, column)) for column in zip(*rows[1:])] or [False] * len(header)

    def __str__(self) -> str:
        table = self._table()
        if isinstance(table, str):
            return "\n".join([table, *self._remarks()])
        rows, right = self._rows(table)
        widths = [max(map(len, column)) for column in zip(*rows)]
        shown = [[c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)] for row in rows]
        rule = ["-" * w for w in widths]
        shown[1:1] = [rule]
        if table[2] is not None:
            shown[-1:-1] = [rule]
        return "\n".join([*["  ".join(row).rstrip() for row in shown], *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table as HTML, for a notebook."""
        remarks, table = "".join(map(paragraph, self._remarks())), self._table()
        if isinstance(table, str):
            return paragraph(table) + remarks
        rows, right = self._rows(table)

        def row(cells: Sequence[str], tag: str, style: str = "") -> str:
            style = f"padding:0.2em 0.8em{style}"
            sides = ["right" if r else "left" for r in right]
            parts = [f'<{tag} style="text-align:{a};{style}">{html.escape(c)}</{tag}>' for c, a in zip(cells, sides)]
            return f"<tr>{''.join(parts)}</tr>"

        foot = "" if table[2] is None else row(rows.pop(), "td", ";font-weight:bold;border-top:1px solid")
        head, *body = row(rows[0], "th"), *[row(cells, "td") for cells in rows[1:]]
        style = '<table style="border-collapse:collapse">'
        return f"{style}<thead>{head}</thead><tbody>{''.join(body)}{foot}</tbody></table>{remarks}"


def paragraph(text: str) -> str:
    """Return a line of text as HTML; an empty string for an empty line."""
    return f"<p>{html.escape(text)}</p>" if text else ""


def show_seconds(seconds: float) -> str:
    """Format a time with three digits, in the unit that fits: "1.23 µs"."""
    seconds = float(f"{seconds:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            digits = max(0, 2 - math.floor(math.log10(seconds / size) + 1e-9))
            return f"{seconds / size:,.{digits}f} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def show_number(x: float) -> str:
    """Format a number, rounded, with commas."""
    return f"{round(x):,}"


def show_nbytes(nbytes: float) -> str:
    """Format a number of bytes with three digits, in the unit that fits: "1.23 MiB"."""
    units = ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)
    unit, size = next(((unit, size) for unit, size in units if nbytes >= 0.9995 * size), ("bytes", 1))
    return f"{nbytes / size:.4g} {unit}" if 999.5 <= nbytes / size < 1024 else f"{nbytes / size:.3g} {unit}"


def show_share(x: float) -> str:
    """Format a share as a percentage with one decimal, a small one with one digit: "0.003%"."""
    return f"{100 * x:.1g}%" if 0 < x < 0.0005 else f"{x:.1%}"


def direction_of(line: Location | None) -> str:
    return "backward" if line is not None and line.backward else "forward"


def show_line(line: Location | None) -> str:
    text = str(line or "")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def labeled_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells: a column of labels, then columns of one width."""
    label = max(len(first) for first, *_ in rows)
    width = max(len(cell) for _, *cells in rows for cell in cells)
    return [" ".join([first.ljust(label), *(c.ljust(width) for c in cells)]).rstrip() for first, *cells in rows]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draw numbers as a line of bars, at most `width` of them, from the smallest to the largest number.

    >>> sparkline([1, 2, 3, 4, 8])
    '▁▂▃▄█'
    """
    bars, step = "▁▂▃▄▅▆▇█", max(1, -(-len(values) // width))
    shown = [max(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    return "".join(bars[round((x - low) / (high - low or 1) * (len(bars) - 1))] for x in shown)


def number_ranges(numbers: Sequence[int]) -> list[str]:
    """Format ascending numbers, consecutive ones as ranges.

    >>> number_ranges([0, 1, 2, 5, 7, 8])
    ['0-2', '5', '7-8']
    """
    starts = [i for i, n in enumerate(numbers) if not i or n != numbers[i - 1] + 1]
    runs = [(numbers[i], numbers[j - 1]) for i, j in itertools.pairwise([*starts, len(numbers)])]
    return [f"{first}-{last}" if last > first else str(first) for first, last in runs]
