"""Tables, as `print` and as notebooks show them."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

Lines = Sequence[Sequence[str]]


def text_table(header: Sequence[str], lines: Lines, total: Sequence[str] | None, right: Sequence[int]) -> str:
    """A table of text.

    Columns in `right` are right-aligned; the total, if there is one, is below a rule.
    """
    foot = [] if total is None else [total]
    widths = [max(map(len, column)) for column in zip(header, *lines, *foot)]

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * w for w in widths)
    beneath = [text for row in foot for text in (rule, line(row))]
    return "\n".join([line(header), rule, *map(line, lines), *beneath])


def html_table(header: Sequence[str], lines: Lines, total: Sequence[str] | None, right: Sequence[int]) -> str:
    """The same table as HTML, for a notebook."""

    def row(cells: Sequence[str], tag: str, style: str = "") -> str:
        aligned = ["right" if i in right else "left" for i in range(len(cells))]
        style = f"padding:0.2em 0.8em{style}"
        parts = [f'<{tag} style="text-align:{a};{style}">{html.escape(c)}</{tag}>' for c, a in zip(cells, aligned)]
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(row(cells, "td") for cells in lines)
    foot = "" if total is None else row(total, "td", ";font-weight:bold;border-top:1px solid")
    head = '<table style="border-collapse:collapse">'
    return f"{head}<thead>{row(header, 'th')}</thead><tbody>{body}{foot}</tbody></table>"


class Tabular:
    """A result shown as a table, by `print` and in notebooks, with remarks below."""

    def _instead(self) -> str:
        """The text to show in place of an empty table; empty if the table is not."""
        return ""

    def _table(self) -> tuple[Sequence[str], Lines, Sequence[str] | None, Sequence[int]]:
        """The arguments of `text_table`."""
        raise NotImplementedError

    def _remarks(self) -> list[str]:
        return []

    def __str__(self) -> str:
        return "\n".join([self._instead() or text_table(*self._table()), *self._remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        instead = self._instead()
        table = paragraph(instead) if instead else html_table(*self._table())
        return table + "".join(map(paragraph, self._remarks()))


def paragraph(text: str) -> str:
    """A line of text as HTML; an empty one gives an empty string."""
    return f"<p>{html.escape(text)}</p>" if text else ""


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
