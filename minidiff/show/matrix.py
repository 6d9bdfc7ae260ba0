"""Draw the elements of a sparse matrix, in the colors of the products that compute them."""

from __future__ import annotations

import html

from minidiff.printing import COLORS, INVARIANT_COLOR
from minidiff.sparse.coloring import Coloring

#: The largest number of rows or columns that is drawn.
LARGEST = 64


def coloring_table(coloring: Coloring) -> str:
    """Return a matrix as an HTML-like label of Graphviz: a cell has the color and the number of its product.

    Raises:
        ValueError: if the matrix is too large to be drawn.
    """
    pattern = coloring.pattern
    if max(pattern.size, pattern.count) > LARGEST:
        raise ValueError(
            f"draw: a Jacobian of {pattern.size} rows and {pattern.count} columns is too large to draw: its pattern "
            f"shows for at most {LARGEST}, so pass smaller arguments"
        )
    cells = [[_cell("", INVARIANT_COLOR)] * pattern.count for _ in range(pattern.size)]
    for i, j, n in zip(pattern.rows, pattern.columns, coloring.read_from.tolist()):
        cells[i][j] = _cell(str(n + 1), COLORS[n % len(COLORS)])
    rows = "".join(f"<TR>{''.join(row)}</TR>" for row in cells)
    title = html.escape(_title(coloring))
    return (
        '<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="0" COLOR="#cccccc">'
        f'<TR><TD COLSPAN="{max(pattern.count, 1)}" BORDER="0" HEIGHT="20">{title}</TD></TR>{rows}</TABLE>>'
    )


def _title(coloring: Coloring) -> str:
    products = ((coloring.column_colors, "of columns"), (coloring.row_colors, "of rows"))
    return f"{coloring.count} products: " + ", ".join(f"{n} {which}" for n, which in products if n)


def _cell(number: str, color: str) -> str:
    text = number and f'<FONT POINT-SIZE="8">{number}</FONT>'
    return f'<TD WIDTH="16" HEIGHT="16" FIXEDSIZE="TRUE" BGCOLOR="{color}">{text}</TD>'
