"""Halos: a rank's block of an array, with the neighbors' edges around it.

A halo is made of slices, permutations of ranks and concatenations, so it has their types, derivatives and costs. The
transpose of a slice adds, so the backward pass adds the cotangents of a halo to the blocks that its values came from.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from collectives import axis_index, ppermute
from collectives.axes import CollectiveAxes, single_axes
from collectives.operands import array_of, each_leaf, make_varying
from collectives.ops import Tree
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.ops.elementwise import where
from minidiff.ops.indexing import slice_along
from minidiff.ops.rearranging import pairs_per_axis
from minidiff.ops.shape import broadcast_to, concatenate
from minidiff.ops.slices import dynamic_slice_in_dim
from spmd.mesh.specs import PartitionSpec

Width = tuple[int, int]  # before and after
MODES = ("periodic", "zeros", "edge")


def halo(x: Tree, widths: Any, axes: Any, mode: str | Sequence[str] = "periodic") -> Tree:
    """Put the neighbors' edges around this rank's block, in the body of a `shard_map`.

        x:                      [a b]      [c d]      {i}
        halo(x, 1, 'i'):        [d a b c]  [b c d a]  {i}
        ... mode='zeros':       [0 a b c]  [b c d 0]  {i}
        ... mode='edge':        [a a b c]  [b c d d]  {i}

    It costs two messages for each axis, one in each direction, and none along an axis of one rank. A halo that is wider
    than a block comes from several neighbors, and costs two messages for each of them. Corners come from the diagonal
    neighbors. The transpose adds the halo to the blocks that it came from. Each result varies along the axes.

    Args:
        x: a tree of arrays, this rank's blocks.
        widths: those of `np.pad`: a number, a pair (before, after), or a pair for each dimension; a dictionary has the
            pairs of some dimensions.
        axes: what each dimension is split over, as in a partition spec: the name of a mesh axis, several, or None for a
            dimension that every rank has whole, which is padded on the spot.
        mode: what is around the whole array: "periodic", the array again, "zeros", or "edge", its edge repeated; one
            for all dimensions, or one for each.

    Raises:
        ValueError: with the type, for widths, axes or modes that do not fit.

    >>> import spmd, minidiff as md, minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda x: halo(x, 1, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=spmd.P('i'), out_specs=spmd.P('i'))(np.array([3, 1, 4, 5]))
    ShardedArray([5, 3, 1, 4, 1, 4, 5, 3], P('i'))
    """
    return each_leaf(lambda leaf: _halo(array_of(leaf), widths, axes, mode), x)


def _halo(x: Value, widths: Any, axes: Any, mode: str | Sequence[str]) -> Value:
    for dim, (width, names, outside) in enumerate(_for_each_dimension(typeof(x), widths, axes, mode)):
        if any(width):
            x = HaloDimension(dim, names, outside).extended(x, *width)
    return x


def _for_each_dimension(t: ShapedArray, widths: Any, axes: Any, mode: Any) -> list[tuple[Width, tuple[str, ...], str]]:
    """For each dimension of a block its width before and after, the axes it is split over, and its mode."""
    spec = as_spec(axes)
    shown = f"halo of {t} with widths={widths!r} along {spec}"
    if len(spec.entries) > t.ndim:
        raise ValueError(
            f"{shown}: there are {len(spec.entries)} entries for {t.ndim} dimensions; write one for each, "
            "and a tuple of names for a dimension that is split over several axes"
        )
    try:
        pairs = [(operator.index(b), operator.index(a)) for b, a in pairs_per_axis(widths, t.ndim)]
    except (TypeError, ValueError):
        raise ValueError(
            f"{shown}: widths must be an int, a pair (before, after), one pair for each of the {t.ndim} "
            "dimensions, or a dictionary of them, as for np.pad"
        ) from None
    if any(width < 0 for pair in pairs for width in pair):
        raise ValueError(f"{shown}: a width is negative; to drop the edges of a block, slice it")
    modes = (mode,) * t.ndim if isinstance(mode, str) else tuple(mode)
    if len(modes) != t.ndim or not set(modes) <= set(MODES):
        raise ValueError(
            f"{shown}: mode must be one of {MODES}, or one of them for each of the {t.ndim} dimensions, got {mode!r}"
        )
    for dim, (pair, n) in enumerate(zip(pairs, t.shape)):
        if any(pair) and not n:
            raise ValueError(f"{shown}: dimension {dim} has no entries, so it has no edges")
    return list(zip(pairs, spec.dims(t.ndim), modes))


def as_spec(axes: Any) -> PartitionSpec:
    """The axes of dimensions as a partition spec: of a spec, of its entries, or of the only axis."""
    return axes if isinstance(axes, PartitionSpec) else PartitionSpec(*((axes,) if isinstance(axes, str) else axes))


def reach(start: int, n: int, length: int, size: int) -> Width:
    """The width of the halo in which all blocks find theirs of a part of an array, as far as it is in the array.

    The array is in `size` blocks of n; the part begins at `start`, and is in as many blocks of `length`.

    >>> reach(2, 8, 7, 4), reach(-1, 8, 8, 4)  # x[2:-2] of 32, and a shift by 1
    ((1, 1), (1, 0))
    """
    blocks = [(rank, max(start + rank * length, 0), min(start + (rank + 1) * length, n * size)) for rank in range(size)]
    needed = [(rank * n - first, stop - (rank + 1) * n) for rank, first, stop in blocks if first < stop]
    before, after = ([*side, 0] for side in zip(*needed))
    return max(before), max(after)


class HaloDimension:
    """One dimension of blocks, split over the axes `names`."""

    def __init__(self, dim: int, names: tuple[str, ...], mode: str):
        self.dim = dim
        self.names = names
        self.mode = mode
        self.run: CollectiveAxes | None = single_axes("halo", names) if names else None
        self.size = self.run.size if self.run else 1

    def extended(self, x: Value, before: int, after: int) -> Value:
        """`x` with as many entries of the ranks before and after this one."""
        if self.run is not None:
            x = make_varying(x, self.run)
        pieces = [*self.side(x, before, 1)[::-1], x, *self.side(x, after, -1)]
        return concatenate(pieces, self.dim) if len(pieces) > 1 else x

    def rolled(self, x: Value, shift: int) -> Value:
        """`x` of the whole array rolled by `shift`: only what crosses from a rank to another is sent."""
        n = typeof(x).shape[self.dim]
        by, count = divmod(shift, n)
        x = make_varying(x, self.run) if self.run else x
        parts = [slice_along(x, self.dim, n - count, n), slice_along(x, self.dim, 0, n - count)]
        parts = [self.shifted(part, k) for part, k in zip(parts, (by + 1, by)) if typeof(part).shape[self.dim]]
        return concatenate(parts, self.dim)

    def part(self, x: Value, start: int, length: int) -> Value:
        """The block of a part of the whole array, from `start` on, in blocks of this length: see `reach`."""
        n = typeof(x).shape[self.dim]
        sent = reach(start, n, length, self.size)
        first, last = sorted((start, start + (self.size - 1) * (length - n)))  # of any rank, seen from its block
        outside = max(0, -first - sent[0]), max(0, last + length - n - sent[1])
        x = self.extended(x, *sent)
        if any(outside):
            x = numpy.pad(x, [outside if d == self.dim else (0, 0) for d in range(typeof(x).ndim)])
        moved = (length - n) * (axis_index(self.names) if length != n else 0)
        return dynamic_slice_in_dim(x, start + sent[0] + outside[0] + moved, length, self.dim)

    def side(self, x: Value, width: int, by: int) -> list[Value]:
        """The `width` entries on one side of `x`, nearest first, in pieces that the ranks pass on to `by` further."""
        pieces, piece, n = [], x, typeof(x).shape[self.dim]
        while width:
            count = min(width, n)
            piece = self.shifted(self.edge(piece, count, by), by)
            if self.mode == "edge":
                piece = self.repeated(self.edge(x, 1, -by), piece, by)
            pieces.append(piece)
            width -= count
        return pieces

    def edge(self, x: Value, count: int, by: int) -> Value:
        """The entries of `x` that its neighbor needs, which is `by` further: the last ones, or the first."""
        n = typeof(x).shape[self.dim]
        return slice_along(x, self.dim, n - count, n) if by > 0 else slice_along(x, self.dim, 0, count)

    def shifted(self, x: Value, by: int) -> Value:
        """The value of the rank that is `by` before this one; of no rank, zeros."""
        if self.size == 1:
            return x if self.mode == "periodic" else zeros_like(x)
        if by % self.size == 0 and self.mode == "periodic":
            return x
        pairs = [(rank, (rank + by) % self.size) for rank in range(self.size)]
        return ppermute(x, self.names, [(a, b) for a, b in pairs if self.mode == "periodic" or b - a == by])

    def repeated(self, edge: Value, piece: Value, by: int) -> Value:
        """`piece`; on the rank that has no neighbor there, `edge` as often."""
        edge = broadcast_to(edge, typeof(piece).shape)
        if self.size == 1:
            return edge
        return where(axis_index(self.names) == (0 if by > 0 else self.size - 1), edge, piece)
