"""Pictures of reports, in matplotlib: bars in rows, curves on logarithmic axes, bytes along a program and on ranks.

Each function draws plain data into `ax`, or into new axes if that is None, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # most programs do without it
    from spmd.pipeline.tables import Schedule, Step

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


#: The colors of the passes of a pipeline.
COLORS = {"forward": "#7fb3d9", "backward": "#82c98f", "weight": "#e5c07b"}


def plot_steps(
    ax: Any, schedule: Schedule, steps: Sequence[tuple[int, Step, float, float]], xlabel: str, title: str = ""
) -> Any:
    """Draw the steps of a schedule, (stage, step, start, end)."""
    paler = 0.7 / schedule.chunks
    bars = [
        Bar(stage, start, end - start, COLORS[step.direction], str(step.microbatch), 1 - paler * step.chunk)
        for stage, step, start, end in steps
    ]
    return bars_in_rows(ax, [f"stage {i}" for i in range(schedule.stages)], bars, COLORS, xlabel, title)


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


def bytes_along(ax: Any, kinds: Mapping[str, Sequence[int]], colors: Mapping[str, str], peak: int, label: str) -> Any:
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


def front(ax: Any, points: Pairs, best: Pairs, limit: float, xlabel: str, ylabel: str) -> Any:
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
