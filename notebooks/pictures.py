"""Pictures of what ranks hold, for the notebooks: computed by running the program that they are pictures of.

A cell is an entry of a block. Its colors are the ranks whose numbers went into it, found by forward mode: a tangent of
ones on one rank and zeros on the others arrives wherever that rank's numbers did. Gray entries come from a value that
is the same on all ranks; white ones from nowhere (zeros that nobody sent).
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from sources import meaning, source_code  # noqa: F401  (for notebooks)

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, pbroadcast
from minidiff.core.tape import Equation, Tape
from spmd import Mesh, P, shard_map, show_schedule, visualize_sharding
from spmd.report.draw import RANK_COLORS
from spmd.show import Table  # noqa: F401  (for notebooks)

SAME = "#d9d9d9"
NOTHING = "#ffffff"

CELL = 0.34  # inches
GAP = 0.45  # cells between the blocks of two ranks
BETWEEN = 2.2  # cells between two columns
DPI = 90


# ---------------------------------------------------------------- what ranks hold


@dataclass
class Held:
    """One value of a program on all ranks: its type, each rank's block, and where the entries came from.

    `origins[r]` has the shape of rank r's block and one more dimension: whether numbers of rank s went into an entry,
    for each s; and, last, whether numbers did that are the same on all ranks.
    """

    type: md.ShapedArray
    blocks: list[numpy.ndarray]
    origins: list[numpy.ndarray]


def on_ranks(f: Callable, *args: Any, mesh: Mesh, in_specs: Any, follow: Sequence[int] | None = None) -> list[Held]:
    """Return each rank's block of each result of `f`, a function of blocks that may use collectives.

    `f` returns an array, or a list of arrays of any types; `in_specs` are those of `shard_map`, one for all arguments
    or a tuple. `follow` are the arguments whose numbers are followed to where they go (their positions; all of them
    if it is None).

    >>> import spmd
    >>> from collectives import psum
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> (total,) = on_ranks(lambda x: psum(x, 'i'), numpy.array([1., 2., 3., 4.]), mesh=mesh, in_specs=P('i'))
    >>> print(total.type, total.blocks, total.origins[0].tolist())
    f64[2] [array([4., 6.]), array([4., 6.])] [[True, True, False], [True, True, False]]
    """
    types: list[md.ShapedArray] = []
    specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(args)
    followed = range(len(args)) if follow is None else follow

    def tangent(k: int, block: Any, source: tuple[int, ...] | None) -> Any:
        """Ones where the numbers are those to follow: rank `source`'s, or if it is None those that all ranks have."""
        along = [a for a in mesh.axis_names if a in md.typeof(block).variance]
        if k not in followed or bool(along) != (source is not None):
            return np.zeros_like(block)
        marks = np.ones_like(block)
        for a in along:
            marks = marks * (axis_index(a) == source[mesh.axis_names.index(a)])
        return marks

    def everywhere(y: Any) -> Any:
        missing = tuple(a for a in mesh.axis_names if a not in md.typeof(y).variance)
        return (pbroadcast(y, missing) if missing else y)[None]

    def run(source: tuple[int, ...] | None) -> list:
        def body(*blocks: Any) -> list:
            tangents = tuple(tangent(k, b, source) for k, b in enumerate(blocks))
            results, moved = md.jvp(lambda *b: _as_list(f(*b)), blocks, tangents)
            types[:] = map(md.typeof, results)
            return [(everywhere(y), everywhere(t)) for y, t in zip(results, moved)]

        return shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names))(*args)

    runs = [run(source) for source in [*itertools.product(*map(range, mesh.shape.values())), None]]
    values = []
    for k, type_ in enumerate(types):
        moved = [[t[0].astype(bool) for t in results[k][1].local] for results in runs]
        blocks = [b[0] for b in runs[0][k][0].local]
        values.append(Held(type_, blocks, [numpy.stack(arrived, -1) for arrived in zip(*moved)]))
    return values


def _as_list(results: Any) -> list:
    return list(results) if isinstance(results, (list, tuple)) else [results]


# ---------------------------------------------------------------- pictures


class Picture:
    """The result of `draw`: notebooks show the picture; `print` shows the numbers."""

    def __init__(self, png: bytes, text: str):
        self.png = png
        self.text = text

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return self.text


Column = tuple[str, Held]  # with a headline


def draw(
    *columns: Column | str,
    changes: bool = False,
    numbers: bool = True,
    arrows: bool = True,
    types: bool = True,
    scale: float = 1.0,
) -> Picture:
    """Draw the ranks' blocks, a row for each rank: columns are values with headlines, from left to right.

    A string among them is the title of the group of columns that it starts. With `changes`, entries that are new in a
    column have a bold border. Without `numbers`, there are colors alone; without `arrows`, less between
    columns; without `types`, headlines alone. `scale` is the size of cells.
    """
    cell, line = CELL * scale, 1 / scale  # inches; and the height of text, in cells
    held = [c[1] for c in columns if not isinstance(c, str)]
    rows = max(_grid(b).shape[0] for h in held for b in h.blocks)
    height = len(held[0].blocks) * (rows + GAP) - GAP
    titled = 0.9 * any(isinstance(c, str) for c in columns)
    above = line * (titled + 1.0 + 0.9 * types + 0.9 * max(c[0].count("\n") for c in columns if not isinstance(c, str)))
    between = line * (BETWEEN if arrows else BETWEEN / 2)
    fig = Figure()
    ax = fig.add_axes((0, 0, 1, 1))
    ax.axis("off")
    cells = _Cells(numbers)
    x, end, before = 0.0, 0.0, None  # end: of a group's title
    for column in columns:
        if isinstance(column, str):
            x = max(x, end) + between / 2 if x else x
            ax.text(x, 0.2 * line - above, column, ha="left", va="top", fontsize=11, weight="bold")
            end, before = x + 0.27 * line * len(column) + between, None
            continue
        if before is not None and arrows:
            ax.text(x - between / 2, height / 2, "→", ha="center", va="center", fontsize=15, color="#555555")
        width, needed = _width(column, types, line)
        middle = x + needed / 2
        ax.text(middle, (-0.25 - 0.8 * types) * line, column[0], ha="center", va="bottom", fontsize=10)
        if types:
            shown = str(column[1].type)
            ax.text(middle, -0.3 * line, shown, ha="center", va="bottom", fontsize=8.5, family="monospace")
        cells.add(column[1], middle - width / 2, rows, before if changes else None)
        x, before = x + needed + between, column[1]
    for r in range(len(held[0].blocks)):
        ax.text(-0.5 * line, r * (rows + GAP) + rows / 2, f"rank {r}", ha="right", va="center", fontsize=9)
    cells.draw(ax)
    left, right = -2.9 * line, max(x, end) - between + 0.6 * line
    ax.set(xlim=(left, right), ylim=(height + 0.4, -above))
    fig.set_size_inches((right - left) * cell, (height + above + 0.4) * cell)
    return Picture(_png(fig), _text(columns))


def _png(fig: Figure) -> bytes:
    """With few colors: it is all that these pictures have, and a quarter as large."""
    drawn, png = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(64).save(png, format="png", optimize=True)
    return png.getvalue()


def _width(column: Column, types: bool, line: float) -> tuple[int, float]:
    """Return the width of a column's blocks, and of its headline, in cells."""
    width = max(_grid(b).shape[1] for b in column[1].blocks)
    headline = [*column[0].split("\n"), *[str(column[1].type)] * types]
    return width, max(width, 0.26 * line * max(map(len, headline)))


class _Cells:
    """Cells of all columns, drawn together: that is faster than one by one."""

    def __init__(self, numbers: bool):
        self.numbers = numbers
        self.fills: list[tuple] = []  # corners, color
        self.edges: list[tuple] = []  # corners, whether bold
        self.texts: list[tuple] = []

    def add(self, held: Held, x: float, rows: int, before: Held | None) -> None:
        for r, block in enumerate(held.blocks):
            grid = _grid(block)
            top = r * (rows + GAP) + (rows - len(grid)) / 2
            origins = held.origins[r].reshape(*grid.shape, -1)
            old = None if before is None else _grid(before.blocks[r])
            for i, j in numpy.ndindex(grid.shape):
                new = old is not None and (old.shape != grid.shape or old[i, j] != grid[i, j])
                self._add_cell(x + j, top + i, grid[i, j], origins[i, j], new)

    def _add_cell(self, x: float, y: float, value: Any, origins: numpy.ndarray, new: bool) -> None:
        colors = [RANK_COLORS[s % len(RANK_COLORS)] for s in numpy.flatnonzero(origins[:-1])]
        colors = colors or [SAME if origins[-1] else NOTHING]
        for k, color in enumerate(colors):
            self.fills.append((_corners(x + k / len(colors), y, 1 / len(colors)), color))
        self.edges.append((_corners(x, y, 1), new))
        if self.numbers:
            self.texts.append((x + 0.5, y + 0.52, f"{value:.3g}"))

    def draw(self, ax: Axes) -> None:
        corners, colors = zip(*self.fills)
        ax.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="none"))
        for bold, color, width in ((False, "#666666", 0.6), (True, "black", 2.2)):
            corners = [c for c, new in self.edges if new == bold]
            ax.add_collection(PolyCollection(corners, facecolors="none", edgecolors=color, linewidths=width, zorder=2))
        for x, y, text in self.texts:
            ax.text(x, y, text, ha="center", va="center", fontsize=8.5 if len(text) < 4 else 6.5, zorder=4)


def _corners(x: float, y: float, width: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + 1), (x, y + 1)]


def _text(columns: Sequence[Column | str]) -> str:
    """The same in words: for each column its headline, its type and each rank's block."""
    lines = []
    for column in columns:
        if isinstance(column, str):
            lines.append(f"{column}:")
            continue
        headline, held = column
        blocks = [numpy.array2string(b, separator=",").replace("\n", "").replace(" ", "") for b in held.blocks]
        lines.append(f"{headline.replace(chr(10), ' ')} {held.type}: {' | '.join(blocks)}".strip())
    return "\n".join(lines)


def _grid(block: numpy.ndarray) -> numpy.ndarray:
    """A block as rows and columns."""
    return block.reshape(-1, block.shape[-1]) if block.ndim else block.reshape(1, 1)


# ---------------------------------------------------------------- a collective, and its transpose


def collective_names(tape: Tape) -> list[str]:
    """The operations on ranks of a tape, in order."""
    return [eqn.primitive.name for eqn in equations_on_ranks(tape)]


def equations_on_ranks(tape: Tape) -> Iterator[Equation]:
    """The equations of a tape, and of bodies in it, whose operations are on ranks."""
    for eqn in tape.equations:
        if eqn.primitive.on_ranks:
            yield eqn
        for body in eqn.bodies:
            yield from equations_on_ranks(body)


def only_equation(tape: Tape) -> Equation:
    """The only equation in the body of a tape's only shard_map."""
    (outer,) = tape.equations
    (equation,) = outer.params["body"].equations
    return equation


def follow_collective(
    f: Callable, x: Any, mesh: Mesh, in_specs: Any = P("i")
) -> tuple[str, list[Held], str, list[Held]]:
    """The name of one collective, what ranks hold before and after it, and the same of its transpose."""
    before, after = on_ranks(lambda x: [x, f(x)], x, mesh=mesh, in_specs=in_specs)
    spec = P(*[a for a in mesh.axis_names if a in after.type.variance])
    ct = numpy.arange(1.0, 1 + numpy.prod(after.type.shape) * numpy.prod([mesh.shape[a] for a in spec.axes], dtype=int))
    ct = ct.reshape(-1, *after.type.shape[1:])

    def transpose(x: Any, ct: Any) -> Any:
        return md.linear_transpose(f, md.typeof(x))(ct)[0]

    specs = (in_specs, spec)
    tape = md.make_tape(shard_map(transpose, mesh=mesh, in_specs=specs, out_specs=in_specs))(x, ct)
    back = on_ranks(lambda x, ct: [ct, transpose(x, ct)], x, ct, mesh=mesh, in_specs=specs, follow=[1])
    forward = md.make_tape(shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=spec))(x)
    names = " and ".join(collective_names(forward)), ", then ".join(collective_names(tape))
    return names[0], [before, after], names[1], back


def draw_collective(f: Callable, x: Any, mesh: Mesh, in_specs: Any = P("i"), linear: bool = True) -> Picture:
    """Draw the ranks' blocks before and after `f`, one collective; and, if it is `linear`, of its transpose."""
    if not linear:
        before, after = on_ranks(lambda x: [x, f(x)], x, mesh=mesh, in_specs=in_specs)
        return draw(("before", before), ("after", after))
    title, (before, after), name, (ct, back) = follow_collective(f, x, mesh, in_specs)
    return draw(title, ("before", before), ("after", after), f"its transpose: {name}", ("before", ct), ("after", back))


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
        ax.set(title=title, xticks=at, xticklabels=places, **axes)
        ax.label_outer()
        ax.spines[["top", "right"]].set_visible(False)
    return _chart(fig, all_axes[-1], [f"{t}: {', '.join(g)}" for t, g in panels.items()], {})


def _chart(fig: Figure, ax: Axes, shown: Sequence[str], axes: dict[str, Any]) -> Picture:
    ax.set(**axes)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return Picture(_png(fig), "; ".join(shown))


def draw_specs(mesh: Mesh, specs: Sequence[P], shape: tuple[int, int] = (8, 8)) -> Picture:
    """Draw how each spec splits a matrix over a mesh: its blocks, in the colors of the ranks that have them."""
    fig = Figure(figsize=(9, 4.8), layout="constrained")
    for ax, spec in zip(fig.subplots(2, -(-len(specs) // 2)).flat, specs):
        _draw_blocks(ax, mesh, spec, (0, 0, *shape), shape)
        ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_title(str(spec), fontsize=9)
    return Picture(_png(fig), "\n".join(map(str, specs)))


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
    return Picture(_png(fig), "\n".join(title.replace("\n", ": ") for title, *_ in matrices))


# ---------------------------------------------------------------- the states of a value

_CORNERS = {"invariant": (0, 1), "varying": (0, -1), "unreduced": (-1, 0), "reduced": (1, 0)}
_MARKS = {"invariant": "", "varying": "\n{i}", "unreduced": "\n{U:i}", "reduced": "\n{R:i}"}
_BEND = 0.18


def draw_states(names: dict[tuple[str, str], str], sends: dict[tuple[str, str], int], pairs: dict) -> Picture:
    """The four states as corners of a square, and operations as arrows from state to state.

    `names` has the operation of each arrow, `sends` the bytes that it sends (none: dashed), and `pairs` what an arrow
    and its transpose have in common: they have one color.
    """
    fig = Figure(figsize=(7.5, 6.5))
    ax = fig.add_subplot()
    colors = dict(zip(dict.fromkeys(pairs.values()), ("#0072b2", "#d55e00", "#009e73", "#aa4499")))
    plain = {"ha": "center", "va": "center"}
    for (before, after), name in names.items():
        start, end = numpy.array(_CORNERS[before]), numpy.array(_CORNERS[after])
        style = {
            "arrowstyle": "-|>,head_width=0.35,head_length=0.7",
            "connectionstyle": f"arc3,rad={_BEND}",
            "linestyle": "-" if sends[before, after] else "--",
            "linewidth": 2.4 if sends[before, after] else 1.6,
            "color": colors[pairs[before, after]],
            "shrinkA": 34,
            "shrinkB": 34,
        }
        ax.annotate("", end, start, arrowprops=style)
        across, up = end - start
        x, y = (start + end) / 2 + _BEND / 2 * numpy.array([up, -across])  # the middle of the arrow
        text = name.replace("all_gather_reduced", "all_gather\nto='reduced'")
        white = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        ax.text(x, y, text, color=style["color"], fontsize=9, bbox=white, **plain)
    for state, (x, y) in _CORNERS.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#f4f4f4", "edgecolor": "#888888"}
        ax.text(x, y, state + _MARKS[state], fontsize=10, bbox=box, **plain)
    ax.axvline(0, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
    ax.set(xlim=(-1.3, 1.3), ylim=(-1.15, 1.15), aspect="equal")
    ax.axis("off")
    return Picture(_png(fig), "\n".join(f"{' -> '.join(arrow)}: {name}" for arrow, name in names.items()))


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
    return Picture(_png(fig), "\n".join(schedules))


def draw_schedules(schedules: dict[str, Any]) -> Picture:
    """Draw schedules below each other: blue is forward, green is backward; the numbers are microbatches."""
    fig = Figure(figsize=(10, 1.9 * len(schedules)), layout="constrained")
    for ax, (name, schedule) in zip(fig.subplots(len(schedules), squeeze=False)[:, 0], schedules.items()):
        show_schedule(schedule).plot(ax)
        ax.set_title(f"{name}: {ax.get_title(loc='left')}", loc="left", fontsize="medium")
    return picture(fig, "; ".join(schedules))


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
    return Picture(_png(fig), "; ".join(f"{name}: {end * 1e6:.0f} µs" for name, (_, end) in timelines.items()))


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
    return Picture(_png(fig), "; ".join(parts))


# ---------------------------------------------------------------- layouts


def _draw_blocks(
    ax: Axes, mesh: Mesh, spec: P, place: tuple[float, float, float, float], shape: tuple[int, int], font: float = 8
) -> None:
    """A matrix's blocks at `place` (left, top, height, width), in stripes of the colors of the ranks that have them.

    Ranks with parts of a sum have a plus sign between them. `font` is the size of their numbers; 0: none.
    """
    sharding = visualize_sharding(shape, mesh, spec)
    left, top, *lengths = place
    height, width = (n / parts for n, parts in zip(lengths, sharding.parts))
    for (row, column), ranks in sharding.ranks.items():
        x, y, stripe = left + column * width, top + row * height, width / len(ranks)
        for k, rank in enumerate(ranks):
            ax.add_patch(Rectangle((x + k * stripe, y), stripe, height, color=RANK_COLORS[rank], linewidth=0))
            if font:
                ax.text(x + (k + 0.5) * stripe, y + height / 2, str(rank), ha="center", va="center", fontsize=font)
            if spec.unreduced and k:
                ax.text(x + k * stripe, y + height / 2, "+", ha="center", va="center", fontsize=font + 3, weight="bold")
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="white", linewidth=3 if font > 7 else 2))


def draw_grid(
    mesh: Mesh,
    rows: dict[str, P],
    columns: dict[str, P],
    cells: dict[tuple[str, str], tuple[str, float]],
    corner: str = "",
    cell: tuple[float, float] = (1.5, 0.8),
) -> Picture:
    """A table with a layout of a matrix at the head of each row and column: its name, and its blocks.

    `cells` are texts and numbers: the larger the number, the darker the cell. `cell` is the size of one, in inches.
    """
    wide, high = cell
    fig = Figure(figsize=(wide * (len(columns) + 1), high * len(rows) + 1.1), layout="constrained")
    ax = fig.add_subplot()
    largest = max((number for _, number in cells.values()), default=0) or 1
    plain = {"ha": "center", "va": "center"}
    icon, above, font = 0.62, 1.0, 7 if mesh.size <= 4 else 0  # inches; of ranks' numbers, where there is room
    for across, heads in ((True, columns), (False, rows)):
        for k, (name, spec) in enumerate(heads.items()):
            size = wide if across else high
            x, y = k * size + (size - icon) / 2, -icon - 0.08
            x, y = (x, y) if across else (y, x)
            _draw_blocks(ax, mesh, spec, (x, y, icon, icon), (8, 8), font)
            at = (x + icon / 2, y - 0.12) if across else (x - 0.08, y + icon / 2)
            ax.text(*at, name, fontsize=8.5, **(plain if across else {"ha": "right", "va": "center"}))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            text, number = cells.get((row, column), ("", 0))
            color = colormaps["Blues"](0.75 * number / largest) if text else "#f4f4f4"
            ax.add_patch(Rectangle((j * wide, i * high), wide, high, facecolor=color, edgecolor="white", linewidth=2))
            ink = "white" if number > 0.8 * largest else "black"
            ax.text((j + 0.5) * wide, (i + 0.5) * high, text, fontsize=8, color=ink, **plain)
    ax.text(-wide / 2, -above / 2, corner, fontsize=8.5, **plain)
    ax.set(xlim=(-wide, wide * len(columns)), ylim=(high * len(rows), -above), aspect="equal")
    ax.axis("off")
    lines = [f"{row} | {column}: {' '.join(text.split())}" for (row, column), (text, _) in cells.items()]
    return Picture(_png(fig), "\n".join(lines))


def draw_layouts(rows: dict[str, tuple[Mesh, dict[str, P]]], size: tuple) -> Picture:
    """Draw how matrices are split, in rows: for each title the mesh, and specs by name, in the colors of the ranks."""
    fig = Figure(figsize=size, layout="constrained")
    widest = max(len(arrays) for _, arrays in rows.values())
    lines = []
    for axes, (title, (mesh, arrays)) in zip(fig.subplots(len(rows), widest, squeeze=False), rows.items()):
        for ax, (name, spec) in zip(axes, arrays.items()):
            _draw_blocks(ax, mesh, spec, (0, 0, 1, 1), (mesh.size, mesh.size), font=0)
            ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
            ax.set_title(name, fontsize=9)
            ax.spines[:].set(color="#666666", linewidth=0.6)
        for ax in axes[len(arrays) :]:
            ax.axis("off")
        axes[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
        lines.append(f"{title}: {', '.join(f'{name} {spec}' for name, spec in arrays.items())}")
    return Picture(_png(fig), "\n".join(lines))


# ---------------------------------------------------------------- grids in the colors of ranks


def draw_grids(
    grids: dict[str, numpy.ndarray],
    texts: dict[str, numpy.ndarray] | None = None,
    size: tuple = (9, 3.2),
    **axes: Any,
) -> Picture:
    """Grids side by side, by title: an entry is the rank whose color a cell has, or -1 for a white one.

    `texts` has what is written into the cells of each grid, and `axes` are matplotlib's settings, such as `xlabel`.
    """
    fig = Figure(figsize=size, layout="constrained")
    for ax, (title, grid) in zip(fig.subplots(1, len(grids), squeeze=False)[0], grids.items()):
        for (row, column), rank in numpy.ndenumerate(grid):
            color = NOTHING if rank < 0 else RANK_COLORS[rank % len(RANK_COLORS)]
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="#666666", linewidth=0.5))
            if texts is not None:
                ax.text(column + 0.5, row + 0.55, texts[title][row, column], ha="center", va="center", fontsize=8)
        rows, columns = grid.shape
        every = -(-max(grid.shape) // 16)
        ax.set_xticks(numpy.arange(0, columns, every) + 0.5, range(0, columns, every), fontsize=8)
        ax.set_yticks(numpy.arange(0, rows, every) + 0.5, range(0, rows, every), fontsize=8)
        ax.tick_params(length=0)
        ax.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal", **axes)
        ax.set_title(title, fontsize=10)
        ax.spines[:].set_visible(False)
    return Picture(_png(fig), "; ".join(grids))


# ---------------------------------------------------------------- a graph that is cut over ranks


def draw_placement(tape: Tape, placement: Sequence[int]) -> Picture:
    """The operations of a tape in the colors of their ranks; edges between ranks are red, with the bytes sent."""
    result = {v: k for k, equation in enumerate(tape.equations) for v in equation.outputs}
    needs = [dict.fromkeys(result[a] for a in e.inputs if a in result) for e in tape.equations]
    depth: list[int] = []
    for each in needs:
        depth.append(1 + max((depth[j] for j in each), default=-1))
    rows: list[int] = []  # a chain stays in the row of its first operation
    for k, each in enumerate(needs):
        taken = {row for row, d in zip(rows, depth) if d == depth[k]}
        rows.append(next(r for r in itertools.chain((rows[j] for j in each), itertools.count()) if r not in taken))
    at = list(zip(depth, rows))
    fig = Figure(figsize=(1.45 * (max(depth) + 1), 0.6 + 0.8 * (max(rows) + 1)))
    ax = fig.add_axes((0, 0, 1, 1))
    sent: dict[tuple[int, int], int] = {}
    for k, each in enumerate(needs):
        for j in each:
            crosses = placement[j] != placement[k]
            style = {"arrowstyle": "-|>", "color": "#c1272d" if crosses else "#777777", "linewidth": 1 + crosses}
            ax.annotate("", at[k], at[j], arrowprops={**style, "shrinkA": 20, "shrinkB": 20})
            if crosses:
                nbytes = sent[j, placement[k]] = sum(v.type.nbytes for v in tape.equations[j].outputs)
                middle = [(a + b) / 2 for a, b in zip(at[j], at[k])]
                ax.text(*middle, f"{nbytes:,}", color="#c1272d", fontsize=8, ha="center", va="bottom")
    for k, (equation, rank) in enumerate(zip(tape.equations, placement)):
        box = {"boxstyle": "round,pad=0.4", "facecolor": RANK_COLORS[rank % len(RANK_COLORS)], "edgecolor": "#444444"}
        ax.text(*at[k], f"{k}: {equation.primitive}\nrank {rank}", bbox=box, ha="center", va="center", fontsize=8)
    ax.set(xlim=(-0.6, max(depth) + 0.6), ylim=(max(rows) + 0.6, -0.6))
    ax.axis("off")
    text = ", ".join(f"{k}: {e.primitive} on rank {rank}" for k, (e, rank) in enumerate(zip(tape.equations, placement)))
    return Picture(_png(fig), f"{text}; {len(sent)} values sent, {sum(sent.values()):,} bytes")


def picture(fig: Figure, text: str) -> Picture:
    """A figure, drawn by whatever means, as the picture that notebooks show, and as what `print` shows of it."""
    return Picture(_png(fig), text)
