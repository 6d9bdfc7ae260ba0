"""Pictures of what ranks hold, for the notebooks: computed by running the program that they are pictures of.

A cell is an entry of a block. Its colors are the ranks whose numbers went into it, found by forward mode: a tangent of
ones on one rank and zeros on the others arrives wherever that rank's numbers did. Gray entries come from a value that
is the same on all ranks; white ones from nowhere (zeros that nobody sent).

A rank has one color in all pictures. Diagonal bands are numbers of several ranks in one: a sum, or partial sums.
Upright bands, in pictures of layouts, are copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from charts import (  # noqa: F401  (for notebooks)
    Picture,
    bars,
    curves,
    draw_actions,
    draw_jacobian,
    draw_lanes,
    draw_matrices,
    draw_products,
    draw_schedules,
    draw_states,
    draw_ticks,
)
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from sources import meaning, source_code  # noqa: F401  (for notebooks)

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, pbroadcast
from minidiff.core.tape import Equation, Tape
from spmd import Mesh, P, shard_map, visualize_sharding
from spmd.report.draw import RANK_COLORS
from spmd.show import Table  # noqa: F401  (for notebooks)

SAME = "#d9d9d9"
NOTHING = "#ffffff"
GROUP_COLORS = colormaps["Pastel1"].colors  # of what is not a rank

CELL = 0.34  # inches
PARTS = 3  # times that the ranks of partial sums are drawn
GAP = 0.45  # cells between the blocks of two ranks
BETWEEN = 2.2  # cells between two columns
DIGIT = 0.64  # the width of a digit, in units of the size of the font


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
    cells = _Cells(numbers, 72 * cell)
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
        _headline(ax, middle, column, types, line)
        cells.add(column[1], middle - width / 2, rows, before if changes else None)
        x, before = x + needed + between, column[1]
    for r in range(len(held[0].blocks)):
        ax.text(-0.5 * line, r * (rows + GAP) + rows / 2, f"rank {r}", ha="right", va="center", fontsize=9)
    cells.draw(ax)
    left, right = -2.9 * line, max(x, end) - between + 0.6 * line
    ax.set(xlim=(left, right), ylim=(height + 0.4, -above))
    fig.set_size_inches((right - left) * cell, (height + above + 0.4) * cell)
    return Picture(fig, _text(columns))


def _headline(ax: Axes, middle: float, column: Column, types: bool, line: float) -> None:
    ax.text(middle, (-0.25 - 0.8 * types) * line, column[0], ha="center", va="bottom", fontsize=10)
    if types:
        ax.text(middle, -0.3 * line, str(column[1].type), ha="center", va="bottom", fontsize=8.5, family="monospace")


def _width(column: Column, types: bool, line: float) -> tuple[int, float]:
    """Return the width of a column's blocks, and of its headline, in cells."""
    width = max(_grid(b).shape[1] for b in column[1].blocks)
    headline = [*column[0].split("\n"), *[str(column[1].type)] * types]
    return width, max(width, 0.26 * line * max(map(len, headline)))


class _Cells:
    """Cells of all columns, drawn together: that is faster than one by one."""

    def __init__(self, numbers: bool, size: float):
        self.numbers = numbers
        self.size = size  # of a cell, in points
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
            self.fills.append((numpy.add(diagonal_band(k, len(colors), 0.7), (x, y)), color))
        self.edges.append((numpy.add(upright_band(0, 1), (x, y)), new))
        if self.numbers:
            self.texts.append((x + 0.5, y + 0.52, _short(value)))

    def draw(self, ax: Axes) -> None:
        corners, colors = zip(*self.fills)
        ax.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="none"))
        for bold, color, width in ((False, "#666666", 0.6), (True, "black", 2.2)):
            corners = [c for c, new in self.edges if new == bold]
            ax.add_collection(PolyCollection(corners, facecolors="none", edgecolors=color, linewidths=width, zorder=2))
        for x, y, text in self.texts:
            fits = 0.9 * self.size / (DIGIT * len(text))
            ax.text(x, y, text, ha="center", va="center", fontsize=min(8.5, fits), zorder=4)


def _short(value: Any) -> str:
    """Three digits of a number, or all digits before the point."""
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.0f}" if 1 <= abs(value) < 1e5 else f"{value:.0e}"


def upright_band(k: int, count: int) -> numpy.ndarray:
    """Return the corners of band k of `count` side by side in a square of side 1, and of those at its right."""
    return numpy.array([(k / count, 0), (1, 0), (1, 1), (k / count, 1)])


def diagonal_band(k: int, count: int, spread: float = 1.0) -> numpy.ndarray:
    """Return the corners of band k of `count` across a square of side 1, and of those below: the next ones cover these.

    With a smaller `spread` the bands at both ends, which are corners, are wider.
    """
    start = 1 + spread * (2 * k / count - 1) if k else 0  # of the sum of both coordinates
    if start > 1:
        return numpy.array([(1, start - 1), (1, 1), (start - 1, 1)])
    return numpy.array([(start, 0), (1, 0), (1, 1), (0, 1), (0, start)])


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


# ---------------------------------------------------------------- layouts


def _draw_blocks(
    ax: Axes, mesh: Mesh, spec: P, place: tuple[float, float, float, float], shape: tuple[int, int], font: float = 8
) -> None:
    """A matrix's blocks at `place` (left, top, height, width), in the colors of the ranks that have them.

    Upright bands are copies; diagonal bands, with a plus sign between the ranks, are partial sums. `font` is the size
    of their numbers; 0: none.
    """
    sharding = visualize_sharding(shape, mesh, spec)
    left, top, *lengths = place
    height, width = (n / parts for n, parts in zip(lengths, sharding.parts))
    gap = (0.02 if font > 7 else 0.04) * max(lengths)
    band, times = (diagonal_band, PARTS) if spec.unreduced else (upright_band, 1)
    size = numpy.array([width - gap, height - gap])
    plain = {"ha": "center", "va": "center", "fontsize": font}
    for (row, column), ranks in sharding.ranks.items():
        corner = numpy.array([left + column * width, top + row * height]) + gap / 2
        middle = corner + size / 2
        for k, rank in enumerate(ranks * times):
            ax.add_patch(Polygon(corner + band(k, len(ranks) * times) * size, color=RANK_COLORS[rank], linewidth=0))
            if font and not spec.unreduced:
                ax.text(corner[0] + (k + 0.5) * size[0] / len(ranks), middle[1], str(rank), **plain)
        if font and spec.unreduced:
            paper = {"boxstyle": "round,pad=0.1", "facecolor": "#ffffffc0", "edgecolor": "none"}
            ax.text(*middle, "+".join(map(str, ranks)), **plain, weight="bold", bbox=paper)
        ax.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#444444", linewidth=0.8))


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
    return Picture(fig, "\n".join(lines))


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
    return Picture(fig, "\n".join(lines))


def draw_specs(mesh: Mesh, specs: Sequence[P], shape: tuple[int, int] = (8, 8)) -> Picture:
    """Draw how each spec splits a matrix over a mesh: its blocks, in the colors of the ranks that have them."""
    fig = Figure(figsize=(9, 4.8), layout="constrained")
    for ax, spec in zip(fig.subplots(2, -(-len(specs) // 2)).flat, specs):
        _draw_blocks(ax, mesh, spec, (0, 0, *shape), shape)
        ax.set(xlim=(0, shape[1]), ylim=(shape[0], 0), aspect="equal", xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        ax.set_title(str(spec), fontsize=9)
    return Picture(fig, "\n".join(map(str, specs)))


# ---------------------------------------------------------------- grids in the colors of ranks


def draw_grids(
    grids: dict[str, numpy.ndarray],
    texts: dict[str, numpy.ndarray] | None = None,
    size: tuple = (9, 3.2),
    colors: Sequence[str] = RANK_COLORS,
    **axes: Any,
) -> Picture:
    """Grids side by side, by title: an entry is the rank whose color a cell has, or -1 for a white one.

    `texts` has what is written into the cells of each grid, and `axes` are matplotlib's settings, such as `xlabel`.
    Entries that are not ranks have `colors` of their own.
    """
    fig = Figure(figsize=size, layout="constrained")
    for ax, (title, grid) in zip(fig.subplots(1, len(grids), squeeze=False)[0], grids.items()):
        for (row, column), rank in numpy.ndenumerate(grid):
            color = NOTHING if rank < 0 else colors[rank % len(colors)]
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
    return Picture(fig, "; ".join(grids))


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
    boxes = []
    for k, (equation, rank) in enumerate(zip(tape.equations, placement)):
        box = {"boxstyle": "round,pad=0.4", "facecolor": RANK_COLORS[rank % len(RANK_COLORS)], "edgecolor": "#444444"}
        text = ax.text(
            *at[k], f"{k}: {equation.primitive}\nrank {rank}", bbox=box, ha="center", va="center", fontsize=8
        )
        boxes.append(text.get_bbox_patch())
    for k, each in enumerate(needs):
        for j in each:
            crosses = placement[j] != placement[k]
            style = {"arrowstyle": "-|>", "color": "#c1272d" if crosses else "#777777", "linewidth": 1 + crosses}
            is_long = depth[k] > depth[j] + 1  # it bends around what is between
            ends = {"patchA": boxes[j], "patchB": boxes[k], "shrinkA": 2, "shrinkB": 2}
            ends["connectionstyle"] = f"arc3,rad={0.15 * is_long}"
            ax.annotate("", at[k], at[j], arrowprops=style | ends)
            if crosses:
                nbytes = sent[j, placement[k]] = sum(v.type.nbytes for v in tape.equations[j].outputs)
                place = [a + (b - a) / (4 if is_long else 2) for a, b in zip(at[j], at[k])]
                look = {"color": "#c1272d", "fontsize": 8, "ha": "center", "textcoords": "offset points"}
                ax.annotate(f"{nbytes:,} B", place, (0, -18 if is_long else 5), **look)
    ax.set(xlim=(-0.6, max(depth) + 0.6), ylim=(max(rows) + 0.6, -0.6))
    ax.axis("off")
    text = ", ".join(f"{k}: {e.primitive} on rank {rank}" for k, (e, rank) in enumerate(zip(tape.equations, placement)))
    return Picture(fig, f"{text}; {len(sent)} values sent, {sum(sent.values()):,} bytes")
