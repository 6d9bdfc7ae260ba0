"""Blocks of matrices on a square grid of ranks: checks of meshes and shapes, and sums of terms."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from collectives import axis_size
from minidiff import typeof
from minidiff.core.tracer import Value

Axes = tuple[str, str]  # of the rows of the grid, and of its columns


def grid_size(what: str, axes: Axes) -> int:
    """The number q of rows of a grid of q×q ranks, which has as many columns.

    Raises ValueError for other grids, and UnboundAxisError if the mesh does not have the axes.
    """
    if not isinstance(axes, (tuple, list)) or len(axes) != 2 or axes[0] == axes[1]:
        raise ValueError(f"{what}: axes={axes!r}; write two axes of the mesh, such as ('rows', 'columns')")
    p, q = map(axis_size, axes)
    if p != q:
        raise ValueError(
            f"{what} takes a square grid of ranks; {axes[0]!r} has size {p} and {axes[1]!r} has size {q}: write "
            f"make_mesh(({min(p, q)}, {min(p, q)}), {tuple(axes)})"
        )
    return q


def check_blocks(what: str, a: Value, b: Value, axes: Axes, contracted: tuple[int, int]) -> int:
    """The size q of the grid; raises ValueError unless a and b are blocks whose `contracted` dimensions agree."""
    q, (left, right), names = grid_size(what, axes), (typeof(a), typeof(b)), ("rows", "columns")
    if left.ndim != 2 or right.ndim != 2:
        raise ValueError(f"{what} multiplies blocks of matrices; got {left} and {right}")
    m, n = contracted
    if left.shape[m] != right.shape[n]:
        raise ValueError(f"{what}: a has as many {names[m]} as b has {names[n]}; got blocks {left} and {right}")
    return q


def total(terms: Iterable[Value]) -> Value:
    """The sum of at least one term."""
    return functools.reduce(operator.add, terms)
