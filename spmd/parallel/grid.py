"""Blocks of matrices on a square grid of ranks: checks of meshes and shapes, and sums of terms."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from collectives import axis_size
from minidiff.core.tracer import Value
from spmd.parallel.matmul import matrices

Axes = tuple[str, str]  # of the rows of the grid, and of its columns


def check_blocks(what: str, a: Value, b: Value, axes: Axes, contracted: tuple[int, int]) -> int:
    """The size q of a q×q grid of ranks.

    Raises ValueError for other grids, and unless a and b are blocks whose `contracted` dimensions agree.
    """
    if not isinstance(axes, (tuple, list)) or len(axes) != 2 or axes[0] == axes[1]:
        raise ValueError(f"{what}: axes={axes!r}; write two axes of the mesh, such as ('rows', 'columns')")
    p, q = map(axis_size, axes)
    if p != q:
        raise ValueError(
            f"{what} takes a square grid of ranks; {axes[0]!r} has size {p} and {axes[1]!r} has size {q}: write "
            f"make_mesh(({min(p, q)}, {min(p, q)}), {tuple(axes)})"
        )
    (left, right), (m, n), names = matrices(what, a, b), contracted, ("rows", "columns")
    if left.shape[m] != right.shape[n]:
        raise ValueError(f"{what}: a has as many {names[m]} as b has {names[n]}; got blocks {left} and {right}")
    return q


def total(terms: Iterable[Value]) -> Value:
    """The sum of at least one term."""
    return functools.reduce(operator.add, terms)
