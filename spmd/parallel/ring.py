"""Blocks of matrices on a ring of ranks: neighbors, parts of blocks, and checks of shapes."""

from __future__ import annotations

from minidiff import dynamic_slice_in_dim, typeof
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray

UP, DOWN = 1, -1  # to the rank of the next index, or of the one before


def neighbor(here: Value, by: int, n: int) -> Value:
    """The index of the rank that is `by` places further up a ring of n."""
    return (here + by) % n if by % n else here


def block_of(x: Value, owner: Value, size: int, part: int, parts: int, axis: int) -> Value:
    """One of equal parts of the `size` elements of rank `owner`, along an axis of x."""
    start, each = owner * size, size // parts
    return dynamic_slice_in_dim(x, start + part * each if part else start, each, axis)


def matrices(what: str, lhs: Value, rhs: Value) -> tuple[ShapedArray, ShapedArray]:
    """The types of two operands, which must be matrices."""
    left, right = typeof(lhs), typeof(rhs)
    if left.ndim != 2 or right.ndim != 2:
        raise ValueError(f"{what} multiplies blocks of matrices; got {left} and {right}")
    return left, right


def check_halves(what: str, name: str, t: ShapedArray, rows: int, parts: int) -> None:
    """Raise ValueError unless rows can be split into so many parts (two: one for each direction)."""
    if rows % parts:
        one_way = what.replace("bidirectional", "overlapped")
        raise ValueError(f"{what}: {name} has {rows} rows ({t}), which cannot be halved; use {one_way}")
