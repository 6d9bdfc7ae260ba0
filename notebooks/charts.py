"""Charts for the notebooks, and figures as notebooks show them: whole, sharp on a projector, and small as files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy
from IPython import get_ipython
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from PIL import Image

from spmd import show_schedule

DPI = 90  # of a figure as it is shown
COLORS = 48  # of a figure's file
SHARP = 2  # pixels of a file for each pixel as it is shown, each way


class Picture:
    """A figure as notebooks show it; `print` shows its text."""

    def __init__(self, fig: Figure, text: str):
        self.png, self.size = _draw_sharp(fig)
        self.text = text

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        width, height = self.size
        return self.png, {"width": width, "height": height}

    def __repr__(self) -> str:
        return self.text


def _draw_sharp(fig: Figure) -> tuple[bytes, tuple[int, int]]:
    """Return a PNG of all of a figure, in few colors, and its size as it is shown."""
    drawn, png = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=SHARP * DPI, bbox_inches="tight", pad_inches=0.06)
    image = Image.open(drawn).convert("RGB")
    _in_few_colors(image).save(png, format="png", optimize=True)
    return png.getvalue(), (round(image.width / SHARP), round(image.height / SHARP))


def _in_few_colors(image: Image.Image) -> Image.Image:
    """Return an image in which the most frequent colors are as they were, and others the nearest of these."""
    pixels = numpy.asarray(image, int) @ (1 << 16, 1 << 8, 1)
    colors, which, counts = numpy.unique(pixels, return_inverse=True, return_counts=True)
    channels = colors[:, None] >> numpy.array([16, 8, 0]) & 255
    palette = channels[numpy.argsort(-counts, kind="stable")[:COLORS]]
    nearest = ((channels[:, None] - palette) ** 2).sum(-1).argmin(1)
    result = Image.fromarray(nearest[which].reshape(pixels.shape).astype(numpy.uint8))
    result.putpalette(palette.astype(numpy.uint8).tobytes())
    return result


def _show_figures_sharp() -> None:
    """Let notebooks show figures of `pyplot` as `Picture` does."""
    kernel = get_ipython()
    if hasattr(kernel, "kernel"):
        kernel.run_line_magic("matplotlib", "inline")  # first: it sets a way to show them, too
        formatter = kernel.display_formatter.formatters["image/png"]
        formatter.for_type(Figure, lambda fig: Picture(fig, "")._repr_png_())


_show_figures_sharp()


# ---------------------------------------------------------------- charts


def curves(lines: dict[str, tuple], marks: str | Sequence[str] = "-", size: tuple = (7.5, 3.0), **axes: Any) -> Picture:
    """Curves over one pair of axes: for each label, its x and y. `axes` are matplotlib's settings, such as `xscale`.

    `marks` is matplotlib's style of all curves, or of each. A label that begins with an underscore is not shown.
    """
    fig = Figure(figsize=size, layout="constrained")
    ax = fig.add_subplot()
    styles = [marks] * len(lines) if isinstance(marks, str) else marks
    for (label, (x, y)), style in zip(lines.items(), styles):
        ax.plot(x, y, style, label=label, markersize=4)
    labels = [label for label in lines if not label.startswith("_")]
    axes = {"title": labels[0], **axes} if len(labels) == 1 else axes
    return _chart(fig, ax, list(lines), axes)


def bars(
    panels: dict[str, dict[str, Sequence[float]]], places: Sequence, size: tuple = (6.0, 3.0), **axes: Any
) -> Picture:
    """Bars side by side, a panel for each title: for each label, its bars' heights at `places`."""
    fig = Figure(figsize=size, layout="constrained")
    all_axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    at = numpy.arange(len(places))
    for ax, (title, groups) in zip(all_axes, panels.items()):
        width = 0.8 / len(groups)
        for k, (label, heights) in enumerate(groups.items()):
            ax.bar(at + (k - (len(groups) - 1) / 2) * width, heights, width, label=label)
        axes = {"ylabel": label, **axes} if len(groups) == 1 else axes
        ax.set(title=title, xticks=at, xticklabels=places, **axes)
        ax.label_outer()
        ax.spines[["top", "right"]].set_visible(False)
    return _chart(fig, all_axes[-1], [f"{t}: {', '.join(g)}" for t, g in panels.items()], {})


def _chart(fig: Figure, ax: Axes, shown: Sequence[str], axes: dict[str, Any]) -> Picture:
    ax.set(**axes)
    ax.spines[["top", "right"]].set_visible(False)
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        if axis.get_scale() == "log" and low > 0.5 and high < 20_000 and f"{name}ticks" not in axes:
            axis.set_major_formatter(LogFormatter())  # 200, and not 2 × 10²
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))
    if len(ax.get_legend_handles_labels()[1]) > 1:
        ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(fig, "; ".join(shown))


def draw_matrices(matrices: Sequence[tuple[str, numpy.ndarray, bool, bool]], rows: int, size: tuple) -> Picture:
    """Matrices of collectives, `rows` below each other: (title, matrix, takes a varying value, gives one).

    Red lines separate the ranks' numbers where each rank has its own.
    """
    fig = Figure(figsize=size, layout="constrained")
    columns = [matrices[k : k + rows] for k in range(0, len(matrices), rows)]
    widest = max(m.shape[1] for _, m, *_ in matrices)
    across = [max(0.65 * widest, *[m.shape[1] for _, m, *_ in column]) for column in columns]  # titles need room
    down = [max(column[k][1].shape[0] for column in columns) + 2 * (rows > 1) for k in range(rows)]
    ratios = {"width_ratios": across, "height_ratios": down}
    for axes, column, width in zip(
        fig.subplots(rows, len(columns), squeeze=False, gridspec_kw=ratios).T, columns, across
    ):
        for ax, (title, m, takes, gives), height in zip(axes, column, down):
            ax.pcolormesh(m, cmap="Blues", vmin=0, vmax=1.4, edgecolors="#bbbbbb", linewidth=0.5)
            ax.set(aspect="equal", xlim=(-0.1, width + 0.1), ylim=(height + 0.1, -0.1), xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            ax.set_title(title, fontsize=9, loc="left")
            for r in range(1, 4):
                if takes:
                    ax.vlines(r * m.shape[1] / 4, 0, m.shape[0], color="#d62728", linewidth=1.5)
                if gives:
                    ax.hlines(r * m.shape[0] / 4, 0, m.shape[1], color="#d62728", linewidth=1.5)
    return Picture(fig, "\n".join(title.replace("\n", ": ") for title, *_ in matrices))


def draw_products(matrix: numpy.ndarray, colors: numpy.ndarray) -> Picture:
    """A matrix, the sums of basis vectors of one color, and their products: each element in the color of its column.

    Elements of a product that are sums of several elements are gray.
    """
    fig = Figure(figsize=(0.26 * (matrix.shape[1] + 2 * colors.max() + 6), 0.26 * len(matrix) + 0.5))
    fig.set_layout_engine("constrained")
    count = int(colors.max()) + 1
    seeds = colors[:, None] == numpy.arange(count)
    summands = (matrix != 0) @ seeds.astype(int)
    panels = {
        "matrix": numpy.where(matrix != 0, colors, -1),
        "times": numpy.where(seeds, numpy.arange(count), -1),
        "products": numpy.where(summands == 1, numpy.arange(count), numpy.where(summands, _SUM, -1)),
    }
    palette = numpy.array([*colormaps["Set2"].colors])
    ratios = [panel.shape[1] for panel in panels.values()]
    for ax, (title, panel) in zip(fig.subplots(1, 3, width_ratios=ratios), panels.items()):
        shown = palette[panel % 7]
        shown[panel == -1] = 1.0
        shown[panel == _SUM] = 0.75
        rows, columns = panel.shape
        ax.imshow(shown, extent=(0, columns, rows, 0))
        ax.hlines(range(rows + 1), 0, columns, color="#bbbbbb", linewidth=0.5)
        ax.vlines(range(columns + 1), 0, rows, color="#bbbbbb", linewidth=0.5)
        ax.set(xticks=[], yticks=[], xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05))
        ax.set_title(title, fontsize=9)
        ax.spines[:].set_visible(False)
    return Picture(fig, f"{count} products: colors of columns {colors.tolist()}")


_SUM = -2


def draw_actions(schedules: dict[str, Sequence]) -> Picture:
    """Schedules of checkpoints over time, which is counted in steps: a panel for each title, with its actions.

    Steps that are taken are blue lines, and reversed ones red dots; a state is a gray line while it is stored.
    """
    fig = Figure(figsize=(9.5, 2.8), layout="constrained")
    for ax, (title, actions) in zip(fig.subplots(1, len(schedules), sharey=True, squeeze=False)[0], schedules.items()):
        time, states = 0, []  # of each state: its slot, its step, and since when and until when it is stored
        for action in actions:
            end = time + (action.where - action.step if action.name == "advance" else action.name == "reverse")
            if action.name == "advance":
                ax.plot((time, end), (action.step, action.where), color="C0")
            elif action.name == "reverse":
                ax.plot(time + 0.5, action.step, "o", color="C3", markersize=4)
            elif action.name == "store":
                states.append([action.where, action.step, time, time])
            else:
                next(state for state in reversed(states) if state[0] == action.where)[3] = time
            time = end
        for _, step, since, until in states:
            ax.hlines(step, since, until, color="#bbbbbb", linewidth=2, zorder=0)
        ax.set(title=title, xlabel="time", yticks=range(0, int(max(a.step for a in actions)) + 1, 4))
        ax.spines[["top", "right"]].set_visible(False)
    fig.axes[0].set_ylabel("step")
    return Picture(fig, "; ".join(f"{title}: {len(actions)} actions" for title, actions in schedules.items()))


# ---------------------------------------------------------------- the states of a value

_CORNERS = {"invariant": (0, 1), "varying": (0, -1), "unreduced": (-1, 0), "reduced": (1, 0)}
_MARKS = {"invariant": "", "varying": "\n{i}", "unreduced": "\n{U:i}", "reduced": "\n{R:i}"}
_BEND = 0.18


def draw_states(names: dict[tuple[str, str], str], sends: dict[tuple[str, str], int], pairs: dict) -> Picture:
    """The four states as corners of a square, and operations as arrows from state to state.

    `names` has the operation of each arrow, `sends` the bytes that it sends (none: dashed), and `pairs` what an arrow
    and its transpose have in common: they have one color.
    """
    fig = Figure(figsize=(7.5, 5.6))
    ax = fig.add_axes((0, 0, 1, 1))
    colors = dict(zip(dict.fromkeys(pairs.values()), ("#0072b2", "#d55e00", "#009e73", "#aa4499")))
    plain = {"ha": "center", "va": "center"}
    boxes = {}
    for state, at in _CORNERS.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#f4f4f4", "edgecolor": "#888888"}
        boxes[state] = ax.text(*at, state + _MARKS[state], fontsize=11, bbox=box, **plain).get_bbox_patch()
    for (before, after), name in names.items():
        start, end = numpy.array(_CORNERS[before]), numpy.array(_CORNERS[after])
        style = {
            "arrowstyle": "-|>,head_width=0.35,head_length=0.7",
            "connectionstyle": f"arc3,rad={_BEND}",
            "linestyle": "-" if sends[before, after] else "--",
            "linewidth": 2.4 if sends[before, after] else 1.6,
            "color": colors[pairs[before, after]],
            **{"patchA": boxes[before], "patchB": boxes[after], "shrinkA": 4, "shrinkB": 4},
        }
        ax.annotate("", end, start, arrowprops=style)
        across, up = end - start
        x, y = (start + end) / 2 + _BEND / 2 * numpy.array([up, -across])  # the middle of the arrow
        text = name.replace("all_gather_reduced", "all_gather\nto='reduced'")
        white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        ax.text(x, y, text, color=style["color"], fontsize=10, bbox=white, **plain)
    ax.axvline(0, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    ax.set(xlim=(-1.3, 1.3), ylim=(-1.12, 1.1))
    ax.axis("off")
    return Picture(fig, "\n".join(f"{' -> '.join(arrow)}: {name}" for arrow, name in names.items()))


# ---------------------------------------------------------------- schedules and timelines


def draw_ticks(schedules: dict[str, tuple[numpy.ndarray, int]]) -> Picture:
    """When each layer works on each microbatch, `[microbatches, layers]`, and how many layers a rank has."""
    fig = Figure(figsize=(9, 2.1 * len(schedules)), layout="constrained")
    for ax, (title, (when, per_stage)) in zip(fig.subplots(len(schedules), 1, squeeze=False)[:, 0], schedules.items()):
        layers, ticks = when.shape[1], when.max() + 1
        grid = numpy.full((layers, ticks), numpy.nan)
        for m, layer in numpy.ndindex(when.shape):
            grid[layer, when[m, layer]] = m
            ax.text(when[m, layer], layer, str(m), ha="center", va="center", fontsize=9)
        ax.imshow(grid, cmap=colormaps["Set3"].resampled(12), vmin=0, vmax=12, aspect="auto")
        ax.hlines(numpy.arange(1, layers) - 0.5, -0.5, ticks - 0.5, color="white", linewidth=1)
        ax.hlines(numpy.arange(per_stage, layers, per_stage) - 0.5, -0.5, ticks - 0.5, color="black", linewidth=1.5)
        names = [f"layer {k} (rank {k // per_stage})" for k in range(layers)]
        ax.set(yticks=range(layers), yticklabels=names, title=title)
    ax.set_xlabel("tick")
    return Picture(fig, "\n".join(schedules))


def draw_schedules(schedules: dict[str, Any]) -> Picture:
    """Draw schedules below each other: blue is forward, green is backward; the numbers are microbatches."""
    fig = Figure(figsize=(10, 1.9 * len(schedules)), layout="constrained")
    for ax, (name, schedule) in zip(fig.subplots(len(schedules), squeeze=False)[:, 0], schedules.items()):
        show_schedule(schedule).plot(ax)
        ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left", fontsize="medium")
    return Picture(fig, "; ".join(schedules))


def draw_lanes(timelines: dict[str, tuple[list, float]], lanes: dict[str, str]) -> Picture:
    """Timelines of pieces of work, `(lane, start, length)` in seconds, and when all is done; `lanes` have colors."""
    fig = Figure(figsize=(9, 1.55 * len(timelines)), layout="constrained")
    axes = fig.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, (work, end)) in zip(axes, timelines.items()):
        order = [lane for lane in lanes if any(w[0] == lane for w in work)]
        for lane, start, length in work:
            y = -order.index(lane)
            ax.broken_barh([(start * 1e6, length * 1e6)], (y - 0.4, 0.8), facecolor=lanes[lane], edgecolor="#444444")
        ax.axvline(end * 1e6, color="black", linewidth=1.5)
        ax.set(yticks=[-k for k in range(len(order))], yticklabels=order, title=f"{name}: {end * 1e6:.0f} µs")
    axes[-1].set_xlabel("µs")
    return Picture(fig, "; ".join(f"{name}: {end * 1e6:.0f} µs" for name, (_, end) in timelines.items()))


def draw_jacobian(jacobian: numpy.ndarray, parts: dict[str, Any], inputs: Sequence[str]) -> Picture:
    """A Jacobian for each title, with the entries that are shaded: what one sweep computes."""
    fig = Figure(figsize=(8, 3.2), layout="constrained")
    for ax, (title, where), color in zip(fig.subplots(1, len(parts)), parts.items(), ("Oranges", "Blues")):
        shade = numpy.zeros(jacobian.shape)
        shade[where] = 1
        ax.imshow(shade, cmap=color, vmax=2)
        for (i, j), entry in numpy.ndenumerate(jacobian):
            ax.text(j, i, f"{entry:.2f}", ha="center", va="center")
        ax.set_title(title, fontsize="medium")
        ax.set_xticks(range(len(inputs)), inputs)
        ax.set_yticks(range(len(jacobian)), [f"$y_{i + 1}$" for i in range(len(jacobian))])
    return Picture(fig, "; ".join(parts))
