"""Colors of the columns and rows of a sparse matrix: those of one color are computed by one product.

Two columns may have the same color if no row has elements in both: then each element of their sum is one of either. If
rows are colored, too, dense ones for example, their elements need no color of a column. In a symmetric matrix, each
element may be read from its row or its column, so fewer colors do (star coloring).

Source: Gebremedhin, Manne and Pothen, "What color is your Jacobian? Graph coloring for computing derivatives" (2005).
"""

from __future__ import annotations

import itertools

import numpy

from minidiff.sparse.pattern import Pattern

#: The color of a column or row that no product computes.
NO_COLOR = -1
#: From how many numbers of elements on rows are tried as dense ones.
_MOST_THRESHOLDS = 4


class Coloring:
    """Colors of the columns and rows of a matrix, and where each of its elements is read from.

    `columns[j]` and `rows[i]` are the colors of column j and row i, or -1; `column_colors` and `row_colors` their
    numbers. Element n of the pattern, which is in `pattern.rows[n]` and `pattern.columns[n]`, is element `read_at[n]`
    of the product with the color `read_from[n]`; colors of rows follow those of columns.
    """

    def __init__(self, pattern: Pattern, columns: numpy.ndarray, rows: numpy.ndarray):
        self.pattern, self.columns, self.rows = pattern, columns, rows
        self.column_colors = int(columns.max(initial=NO_COLOR)) + 1
        self.row_colors = int(rows.max(initial=NO_COLOR)) + 1
        i, j = pattern.rows, pattern.columns
        by_row = rows[i] != NO_COLOR
        self.read_from = numpy.where(by_row, self.column_colors + rows[i], columns[j])
        self.read_at = numpy.where(by_row, j, i)

    @property
    def count(self) -> int:
        """The number of products."""
        return self.column_colors + self.row_colors


def color_columns(pattern: Pattern) -> numpy.ndarray:
    """Return colors of the columns, such that no row has two elements in columns of one color.

    Columns without elements have none. The columns with the most elements come first, each with the first color that no
    row has.
    """
    columns = _rows_of(_transposed(pattern))
    colors = numpy.full(pattern.count, NO_COLOR)
    filled = [j for j, rows in enumerate(columns) if rows]
    if _longest(pattern) == len(filled):  # there is a row with elements in all of them
        colors[filled] = numpy.arange(len(filled))
        return colors
    colors_of_row: list[set[int]] = [set() for _ in range(pattern.size)]
    for j in sorted(filled, key=lambda j: -len(columns[j])):
        rows = [colors_of_row[i] for i in columns[j]]
        colors[j] = first = _first_missing(set().union(*rows))
        for row in rows:
            row.add(first)
    return colors


def color_symmetric(pattern: Pattern) -> Coloring:
    """Color the columns of a symmetric matrix, such that each element can be read from its column or its row.

    In the graph that has the matrix as its adjacency matrix, neighbors have different colors, and each path of four
    vertices has three: no two colors alternate along it.
    """
    neighbors = [[j for j in columns if j != i] for i, columns in enumerate(_rows_of(pattern))]
    colors = [NO_COLOR] * pattern.size
    counts: list[dict[int, int]] = [{} for _ in neighbors]  # how many neighbors have a color
    for v in sorted(range(pattern.size), key=lambda v: -len(neighbors[v])):
        used = {colors[w] for w in neighbors[v]}
        for w in neighbors[v]:
            color_of_w = colors[w]
            for x in neighbors[w]:
                if x != v and (color_of_w == NO_COLOR or counts[x][color_of_w] > 1):
                    used.add(colors[x])
        colors[v] = first = _first_missing(used)
        for w in neighbors[v]:
            counts[w][first] = counts[w].get(first, 0) + 1
    coloring = Coloring(pattern, numpy.array(colors, int), numpy.full(pattern.size, NO_COLOR))
    _read_from_symmetric(coloring)
    return coloring


def _read_from_symmetric(coloring: Coloring) -> None:
    """Read from its transpose's column each element whose row has another element in a column of its color."""
    pattern = coloring.pattern
    i, j = pattern.rows, pattern.columns
    keys = i * max(coloring.column_colors, 1) + coloring.columns[j]
    _, inverse, counts = numpy.unique(keys, return_inverse=True, return_counts=True)
    shared = counts[inverse] > 1
    coloring.read_from = numpy.where(shared, coloring.columns[i], coloring.columns[j])
    coloring.read_at = numpy.where(shared, j, i)


def color(pattern: Pattern) -> Coloring:
    """Color a matrix: columns, rows, or the rows with most elements and the columns of the others, if that is fewer.

    A row needs as many colors as it has elements, so a division that has no better bound than the best one is skipped.
    """
    counts = numpy.diff(pattern.starts)
    distinct = numpy.unique(counts)[::-1].tolist()
    thresholds = [max(distinct, default=0) + 1, *distinct[:_MOST_THRESHOLDS], 0]  # no row, the longest few, all
    divisions = [_divide(pattern, counts >= least) for least in thresholds]
    bounds = [_longest(others) + _longest(_transposed(dense)) for others, dense in divisions]
    best = None
    for n in numpy.argsort(bounds, kind="stable"):
        if best is None or bounds[n] < best.count:
            others, dense = divisions[n]
            coloring = Coloring(pattern, color_columns(others), color_columns(_transposed(dense)))
            best = coloring if best is None or coloring.count < best.count else best
    assert best is not None
    return best


def _divide(pattern: Pattern, is_dense: numpy.ndarray) -> tuple[Pattern, Pattern]:
    """Divide a pattern into that of all rows but the dense ones, and that of these."""
    i, j = pattern.rows, pattern.columns
    others, dense = (Pattern(i[among], j[among], pattern.size, pattern.count) for among in (~is_dense[i], is_dense[i]))
    return others, dense


def _longest(pattern: Pattern) -> int:
    return int(numpy.diff(pattern.starts).max(initial=0))


def _transposed(pattern: Pattern) -> Pattern:
    return Pattern(pattern.columns, pattern.rows, pattern.count, pattern.size)


def _rows_of(pattern: Pattern) -> list[list[int]]:
    starts, columns = pattern.starts.tolist(), pattern.columns.tolist()
    return [columns[i:j] for i, j in itertools.pairwise(starts)]


def _first_missing(used: set[int]) -> int:
    """Return the smallest color that is not among these."""
    return next(color for color in itertools.count() if color not in used)
