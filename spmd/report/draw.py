"""Pictures of sharded arrays: the ranks that hold each block."""

from __future__ import annotations

import colorsys
import html
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import index_along
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray
from minidiff.errors import show_axes
from minidiff.values.dtypes import as_shape
from spmd.arrays.reshard import check_mesh
from spmd.mesh.checks import check_sharding
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, part_count
from spmd.sharding.sharded_array import ShardedArray
from spmd.show import number_ranges, paragraph

MOST_ACROSS = 8  # parts of a one-dimensional array that are drawn next to each other; more run down
MOST_GRIDS = 8  # grids drawn for an array that is split along more than two dimensions; the rest are counted
MOST_STEPS = 16  # parts drawn down, or across; if there are more, those in the middle are left out
MOST_RANKS = 8  # ranks of a block that are listed one by one; more are shown as ranges
LEFT_OUT = "…"
#: Of ranks 0, 1, 2, …: hues that color-blind readers can tell apart, light enough for black text.
RANK_COLORS = ("#8fc9f0", "#f2b84b", "#7fcfa9", "#e59ac6", "#f4e87c", "#a79be0", "#f0946a", "#b9d27a")

Block = tuple[int, ...]  # for each dimension, the number of the part


class ShardingPicture:
    """The result of `visualize_sharding`: `print` and notebooks show the ranks of each block.

    `ranks` maps each block (the number of its part along each dimension) to the ranks that have it.
    """

    def __init__(self, shape: Sequence[int], mesh: Mesh | None, spec: PartitionSpec, dtype: Any = None):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.mesh = mesh
        self.spec = spec
        sizes = mesh.shape if mesh is not None else {}
        self.parts = tuple(part_count(axes, sizes) for axes in spec.dims(len(self.shape)))
        self.ranks: dict[Block, list[int]] = {block: [] for block in itertools.product(*map(range, self.parts))}
        for rank, coordinates in enumerate(itertools.product(*map(range, sizes.values()))):
            at = dict(zip(sizes, coordinates))
            self.ranks[tuple(index_along(axes, at, sizes) for axes in spec.dims(len(self.shape)))].append(rank)

    @property
    def shown(self) -> tuple[int, ...]:
        """The dimensions that run down and across: the first two, the last two, or the first two split ones."""
        ndim = len(self.shape)
        if ndim < 3:
            return tuple(range(ndim))
        split = [d for d, n in enumerate(self.parts) if n > 1]
        pairs = [pair for pair in ((0, 1), (ndim - 2, ndim - 1)) if {*split} <= {*pair}]
        return pairs[0] if pairs else tuple(split[:2])

    @property
    def title(self) -> str:
        """One line: the array, how it is split, and the type of its blocks."""
        if self.mesh is None:
            return f"{self._type(self.shape)}: one block, on no mesh"
        mesh = ", ".join(f"{a}: {n}" for a, n in self.mesh.shape.items())
        block = [n // parts for n, parts in zip(self.shape, self.parts)]
        return f"{self._type(self.shape)} split as {self.spec} over ({mesh}): blocks {self._type(block)}"

    def _type(self, shape: Sequence[int]) -> str:
        if self.dtype is None:
            return f"[{','.join(map(str, shape))}]"
        return str(ShapedArray(shape, self.dtype))

    @property
    def remark(self) -> str:
        """A remark on unreduced blocks and on the dimensions that are shown; empty if there is none."""
        over = self.spec.unreduced
        parts = f"the ranks of a block hold partial sums over {show_axes(over)}" if over else ""
        if len(self.shape) < 3:
            return parts
        down, across = self.shown
        hidden = [d for d in range(len(self.shape)) if d not in self.shown]
        states = [f"dimension {d} is {'split' if self.parts[d] > 1 else 'not split'}" for d in hidden]
        shown = f"down is dimension {down}, across is dimension {across}; {', '.join(states)}"
        return "; ".join(filter(None, (parts, shown)))

    def _directions(self) -> tuple[int | None, int | None]:
        """Return the dimensions that run down and across, or None. A single one with few parts runs across."""
        if len(self.shown) == 2:
            return self.shown
        (d,) = self.shown or (None,)
        return (d, None) if d is not None and self.parts[d] > MOST_ACROSS else (None, d)

    def _slice(self, d: int, part: int) -> str:
        size = self.shape[d] // self.parts[d]
        return f"{part * size}:{(part + 1) * size}"

    def _grids(self) -> Iterator[tuple[str, list[str], list[str], list[list[str]]]]:
        """Yield a grid for each part of the hidden dimensions, up to MOST_GRIDS: headline, labels, and cells.

        The headline is the index of the part, or empty if there is one grid only; labels run down and across.
        """
        down, across = self._directions()
        hidden = [range(1) if d in self.shown else range(n) for d, n in enumerate(self.parts)]

        def steps(d: int | None) -> list[int | None]:
            return [0] if d is None else _few(range(self.parts[d]), MOST_STEPS, None)

        def labels(d: int | None) -> list[str]:
            return [""] if d is None else [LEFT_OUT if p is None else self._slice(d, p) for p in steps(d)]

        def cell(fixed: Block, i: int | None, j: int | None) -> str:
            if i is None or j is None:
                return LEFT_OUT
            at = {down: i, across: j}
            return self._cell(self.ranks[tuple(at.get(d, part) for d, part in enumerate(fixed))])

        for fixed in itertools.islice(itertools.product(*hidden), MOST_GRIDS):
            index = [":" if d in self.shown else self._slice(d, part) for d, part in enumerate(fixed)]
            cells = [[cell(fixed, i, j) for j in steps(across)] for i in steps(down)]
            yield f"[{', '.join(index)}]" if self._count > 1 else "", labels(down), labels(across), cells

    def _cell(self, ranks: list[int]) -> str:
        if self.mesh is None:
            return "here"
        many = len(ranks) > MOST_RANKS  # consecutive ones are then shown as ranges like 0-15
        shown = _few(number_ranges(ranks), MOST_RANKS, LEFT_OUT) if many else map(str, ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {','.join(shown)}"

    @property
    def _count(self) -> int:
        """The number of grids: of parts of the hidden dimensions."""
        return math.prod(n for d, n in enumerate(self.parts) if d not in self.shown)

    @property
    def _more(self) -> str:
        return f"(and {self._count - MOST_GRIDS} more)" if self._count > MOST_GRIDS else ""

    def __str__(self) -> str:
        lines = [self.title, self.remark]
        for headline, down, across, cells in self._grids():
            lines += [headline, *_text_grid(down, across, cells)]
        return "\n".join(line for line in [*lines, self._more] if line)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colors = {LEFT_OUT: "none"} | {
            self._cell(ranks): _stripes(ranks, hatched=bool(self.spec.unreduced)) for ranks in self.ranks.values()
        }
        parts = [paragraph(self.title), paragraph(self.remark)]
        for headline, down, across, cells in self._grids():
            parts += [paragraph(headline), _html_grid(down, across, cells, colors)]
        return "".join([*parts, paragraph(self._more)])


def color_of_rank(rank: int) -> str:
    """Return a rank's color, a hex code, which is the same in every picture. JupyterLab's sanitizer drops `hsl()`."""
    if rank < len(RANK_COLORS):
        return RANK_COLORS[rank]
    rgb = colorsys.hls_to_rgb(137.5 * rank % 360 / 360, 0.82, 0.55)
    return "#" + "".join(f"{round(255 * c):02x}" for c in rgb)


def _stripes(ranks: list[int], hatched: bool) -> str:
    """Return a block's CSS background: stripes of the ranks with copies of it, hatching if they hold partial sums."""
    colors = [color_of_rank(r) for r in ranks[:MOST_RANKS]] or [RANK_COLORS[0]]
    ends = [100 * k // len(colors) for k in range(len(colors) + 1)] if not hatched else range(0, 99, 6)
    unit, shape = ("px", "repeating-linear-gradient(135deg") if hatched else ("%", "linear-gradient(90deg")
    stops = [f"{c} {start}{unit} {end}{unit}" for c, start, end in zip(colors, ends, ends[1:])]
    return f"{colors[0]};background-image:{shape},{','.join(stops)})"


def _few(steps: Sequence[Any], most: int, instead: Any) -> list[Any]:
    """Return all steps; of more than `most`, only the first ones and the last, with `instead` between them."""
    return list(steps) if len(steps) <= most else [*steps[: most - 2], instead, steps[-1]]


def _text_grid(down: list[str], across: list[str], cells: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a grid drawn in characters."""
    widths = [max(map(len, column)) for column in zip(across, *cells)]
    margin = max(map(len, down)) + (1 if any(down) else 0)

    def rule(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * (w + 2) for w in widths) + right

    if any(across):
        labels = "   ".join(label.ljust(w) for label, w in zip(across, widths))
        yield (" " * (margin + 2) + labels).rstrip()
    yield rule("┌", "┬", "┐")
    for i, (label, row) in enumerate(zip(down, cells)):
        if i:
            yield rule("├", "┼", "┤")
        yield f"{label.ljust(margin)}│ {' │ '.join(text.ljust(w) for text, w in zip(row, widths))} │"
    yield rule("└", "┴", "┘")


def _html_grid(down: list[str], across: list[str], cells: list[list[str]], colors: dict[str, str]) -> str:
    def label(text: str) -> str:
        return f'<th style="font-weight:normal;text-align:left">{html.escape(text)}</th>'

    def cell(text: str) -> str:
        style = "border:1px solid #444;color:#000;padding:0.6em 1.2em;text-align:center;max-width:14em"
        shown = html.escape(text).replace(",", ",<wbr/>")
        return f'<td style="{style};background:{colors[text]}">{shown}</td>'

    head = f"<tr>{label('')}{''.join(map(label, across))}</tr>" if any(across) else ""
    rows = "".join(f"<tr>{label(text)}{''.join(map(cell, row))}</tr>" for text, row in zip(down, cells))
    return f'<table style="border-collapse:collapse">{head}{rows}</table>'


# ---------------------------------------------------------------- what users call


def visualize_sharding(x: Any, mesh: Mesh | None = None, spec: PartitionSpec | None = None) -> ShardingPicture:
    """Draw the ranks that hold each block of an array: `visualize_sharding(x)`.

    The picture lists all ranks that hold a block, or, as a remark says, unreduced parts of it. `print` shows the
    picture, and notebooks show it as a table; nothing communicates. If an array has more than two dimensions, two are
    drawn, and words describe the others. Of a large mesh, the beginning and the end are drawn.

    Args:
        x: a ShardedArray; an array or a shape, with a mesh and a spec; or a NumPy array alone, which is one block.
        mesh: the mesh over whose ranks it is split.
        spec: a PartitionSpec to split it by.

    Raises:
        ValueError: for a spec that does not match the shape or the mesh.
        TypeError: if `x` is not an array.

    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh((4, 2), ('x', 'y'), backend='simulated')
    >>> visualize_sharding((8, 4), mesh, P('x', None))
    [8,4] split as P('x', None) over (x: 4, y: 2): blocks [2,4]
          0:4
        ┌───────────┐
    0:2 │ ranks 0,1 │
        ├───────────┤
    2:4 │ ranks 2,3 │
        ├───────────┤
    4:6 │ ranks 4,5 │
        ├───────────┤
    6:8 │ ranks 6,7 │
        └───────────┘

    Source: shard_map tutorial, "So, let's see a shard_map!", and the pictures of its blocks.
    """
    shape, dtype = _shape_of(x)
    if mesh is not None and spec is not None:
        check_mesh("visualize_sharding", mesh)
        check_sharding(spec, shape, mesh.shape, "the array")
        return ShardingPicture(shape, mesh, spec, dtype)
    if mesh is not None or spec is not None:
        missing, present = ("spec", "mesh") if spec is None else ("mesh", "spec")
        raise TypeError(f"visualize_sharding: a {present} needs a {missing}: pass both, or neither")
    if isinstance(x, ShardedArray):
        return ShardingPicture(shape, x.mesh, x.spec, dtype)
    if dtype is None:
        raise TypeError(
            f"visualize_sharding: the shape {shape} alone does not name ranks; pass the mesh and the spec too, "
            f"as in visualize_sharding({shape}, mesh, P('x'))"
        )
    return ShardingPicture(shape, None, PartitionSpec(), dtype)


def _shape_of(x: Any) -> tuple[tuple[int, ...], numpy.dtype | None]:
    """Return the shape of x, an array or a shape; and its dtype, if it has one."""
    if isinstance(x, Tracer) and not isinstance(x, ShardedArray):
        raise TypeError(
            f"visualize_sharding: {x.type} is a traced value, a rank's block or a name on a tape, not an array that is "
            "split over ranks; print it to see the blocks, or show the array outside"
        )
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), numpy.dtype(x.dtype)
    if isinstance(x, (tuple, list)) and all(isinstance(n, (int, numpy.integer)) for n in x):
        return as_shape(x), None
    raise TypeError(
        "visualize_sharding takes a ShardedArray, a NumPy array, or a shape with a mesh and a spec; got "
        f"{type(x).__name__}"
    )
