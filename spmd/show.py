"""Tables and plots, which reports share: tables as `print` and as notebooks show them, and pictures in matplotlib.

The pictures are bars in rows, curves on logarithmic axes, bytes along a program and on ranks. Each function draws plain
data into `ax`, or into new axes if that is None, and returns the axes.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


# ---------------------------------------------------------------- plots


Pairs = Sequence[tuple[float, float]]


class Bar(NamedTuple):
    """A bar in a row, with a text in it."""

    row: int
    start: float
    length: float
    color: str
    text: str = ""
    alpha: float = 1.0


class Curve(NamedTuple):
    """Points of a line: `style` is matplotlib's ("o" for dots, "-" for a line); those without a name are not listed."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str
    color: str


def bars_in_rows(
    ax: Any, rows: Sequence[str], bars: Iterable[Bar], legend: Mapping[str, str], xlabel: str, title: str = ""
) -> Any:
    """Draw rows from the top down, and bars from left to right; `legend` has the meaning of each color.

    An axis of seconds is labeled in the unit that fits.
    """
    ax, bars = axes_or_new(ax), [*bars]
    if xlabel == "seconds":
        longest = max((bar.start + bar.length for bar in bars), default=0.0)
        units = (1.0, xlabel), (1e-3, "milliseconds"), (1e-6, "microseconds"), (1e-9, "nanoseconds")
        size, xlabel = next((unit for unit in units if longest >= unit[0]), units[0])
        ax.xaxis.set_major_formatter(lambda x, _: f"{x / size:,.10g}")
    for row, start, length, color, text, alpha in bars:
        ax.barh(row, length, 0.85, start, color=color, alpha=alpha, edgecolor="white", linewidth=0.5)
        ax.text(start + length / 2, row, text, ha="center", va="center", fontsize="small")
    for name, color in legend.items():
        ax.barh(0, 0, color=color, label=name)
    if legend:  # matplotlib warns of an empty one
        _put_legend_beside(ax)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel=xlabel)
    ax.set_title(title, loc="left", fontsize="medium")
    ax.invert_yaxis()
    return ax


def logarithmic_curves(ax: Any, curves: Iterable[Curve], xlabel: str, ticks: Sequence[int] = ()) -> Any:
    """Draw seconds over numbers of bytes or ranks, on logarithmic axes; a few `ticks` are written out."""
    ax = axes_or_new(ax)
    for name, x, y, style, color in curves:
        ax.loglog(x, y, style, color=color, label=name or "_")
    if 0 < len(ticks) < 10:
        ax.set_xticks(ticks, [str(n) for n in ticks], minor=False)
        ax.set_xticks([], minor=True)
    ax.set(xlabel=xlabel, ylabel="seconds")
    ax.legend(fontsize="small")
    return ax


def plot_bytes(ax: Any, kinds: Mapping[str, Sequence[int]], colors: Mapping[str, str], peak: int, label: str) -> Any:
    """Draw the bytes of each kind of memory during each operation, and `label` at the operation `peak`."""
    ax, total = axes_or_new(ax), sum(nbytes[peak] for nbytes in kinds.values())
    size, unit = _unit(total)
    count = len(next(iter(kinds.values())))
    # The last operation is drawn as wide as all others.
    heights = [[n / size for n in (*nbytes, nbytes[-1])] for nbytes in kinds.values()]
    ax.stackplot(range(count + 1), heights, labels=[*kinds], colors=[colors[kind] for kind in kinds], step="post")
    middle, top = peak + 0.5, total / size
    ax.plot([middle], [top], "kv", markersize=5)
    side = "left" if middle < count / 2 else "right"
    text = f"{top:.3g} {unit}: {label}"
    ax.annotate(text, (middle, top), (0, 6), textcoords="offset points", ha=side, fontsize="small")
    ax.set(xlim=(0, count), ylim=(0, 1.3 * top), xlabel="operation", ylabel=f"{unit} per rank")
    ax.legend(loc="upper left", ncols=4, frameon=False, fontsize="small")
    return ax


def plot_front(ax: Any, points: Pairs, best: Pairs, limit: float, xlabel: str, ylabel: str) -> Any:
    """Draw pairs of numbers, the `best` of them joined, and a line at the largest x that is allowed."""
    ax = axes_or_new(ax)
    ax.loglog(*zip(*points), "o", color="#9aa5b1", markersize=4, label="predicted")
    ax.loglog(*zip(*best), "o-", color="#4878a8", drawstyle="steps-post", label="no other is better in both")
    ax.axvline(limit, color="#e58b88", linestyle="--", label="memory of a device")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(fontsize="small")
    return ax


def axes_or_new(ax: Any) -> Any:
    """Return `ax`, or new matplotlib axes if it is None."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("plots need the package matplotlib: `pip install matplotlib`") from None
    return pyplot.subplots()[1]


def _put_legend_beside(ax: Any, **options: Any) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small", **options)


def _unit(nbytes: int) -> tuple[int, str]:
    """Return a power of 1000 below a number of bytes, and the name of so many bytes."""
    return next(((10**k, name) for k, name in ((9, "GB"), (6, "MB"), (3, "kB")) if nbytes >= 10**k), (1, "bytes"))
