"""Matrix products of split operands, with one collective or step by step.

They are called inside a `shard_map` body. There are two ways to contract the split dimension k:

- *gather* an operand. `lhs` is split along its rows, `rhs` along k, and each rank needs all of `rhs`:
  ``[m/n, k] @ all_gather([k/n, p]) -> [m/n, p]``.
- *scatter* the product. Both are split along k, so each rank's product is one summand of the whole result:
  ``psum_scatter([m, k/n] @ [k/n, p]) -> [m/n, p]``.

Each takes one collective, but nothing is computed while it runs. Both collectives are n - 1 steps around a ring of n
ranks, in which each rank passes a block on to its neighbor. With `directions=1`, the products take these steps one by
one, and multiply one block while they send another. With `directions=2`, they halve the blocks and send the halves in
opposite directions, over links that are otherwise idle.

=====================  ==========  =================  ==================  ================================
product                directions  calls              bytes a rank sends  what a rank holds in addition
=====================  ==========  =================  ==================  ================================
`matmul_all_gather`    0           1 all_gather       (n - 1) s           all of `rhs`: n blocks
`matmul_all_gather`    1           n - 1 ppermute     (n - 1) s           two blocks: one here, one coming
`matmul_all_gather`    2           2(n - 1) ppermute  (n - 1) s           two blocks
`matmul_psum_scatter`  0           1 psum_scatter     (n - 1) s           the whole product: n blocks
`matmul_psum_scatter`  1           n - 1 ppermute     (n - 1) s           two blocks: a sum, and a summand
`matmul_psum_scatter`  2           2(n - 1) ppermute  (n - 1) s           two blocks
=====================  ==========  =================  ==================  ================================

On n ranks, a block has s bytes. It is a block [k/n, p] of `rhs` if that is gathered, or a block [m/n, p] of the product
if that is scattered. All forms have the same values, up to rounding, and the same derivatives. `all_gather` and
`psum_scatter` are each other's transposes. So a product that gathers has a backward pass that scatters, and vice versa,
and the steps of a ring transpose to steps in the other direction. The backward pass of the products in steps keeps the
blocks that were received; with `md.checkpoint` they are sent around again instead. In a compiled program (`md.jit`) on
MPI ranks, blocks are in fact sent while others are multiplied.

Source: shard_map tutorial, "Matrix multiplication", Examples 1 and 2; Wang et al., "Overlap communication with
dependent computation via decomposition in large deep learning models" (ASPLOS 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import minidiff.numpy as np
from collectives import all_gather, axis_index, axis_size, psum_scatter
from collectives.axes import AxisName
from collectives.ops import shift
from minidiff import dynamic_slice_in_dim, typeof
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.errors.other_libraries import module_getattr

UP, DOWN = 1, -1  # to the rank of the next index, or of the one before

#: Functions that are others with an option now.
OLD_NAMES = {
    f"{name}_{form}": f"spmd.parallel.{name}(directions={count})"
    for name in ("matmul_all_gather", "matmul_psum_scatter")
    for form, count in (("overlapped", 1), ("bidirectional", 2))
}
if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept any name
    __getattr__ = module_getattr(__name__, moved=OLD_NAMES)

# ---------------------------------------------------------------- gather, then multiply


def matmul_all_gather(lhs: Value, rhs: Value, axis_name: AxisName, directions: int = 0) -> Value:
    """Return ``lhs @ all_gather(rhs)``: each rank gathers `rhs`, and multiplies it by its own rows of `lhs`.

    Shapes on n ranks: ``[m/n, k], [k/n, p] -> [m/n, p]``; all vary along the axis. With directions, blocks of `rhs` go
    around the ring, and ranks multiply them as they arrive: after s steps rank i holds the block that rank i - s
    started with. It sends the block on to rank i + 1, and adds the product of the matching columns of `lhs` and the
    block. In two directions, rank i holds the first half of the rows that rank i - s started with, and the second half
    of those of rank i + s.

    Args:
        lhs: this rank's rows of the left operand.
        rhs: this rank's rows of the right operand.
        axis_name: the axis of the mesh along which both are split.
        directions: the number of directions in which blocks go around the ring; by default one collective gathers all.

    Raises:
        ValueError: if the shapes do not fit; with two directions, also for an odd number of rows of `rhs`.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda lhs, rhs: matmul_all_gather(lhs, rhs, 'i', directions=2)
    >>> shard_map(f, mesh, in_specs=P('i'), out_specs=P('i'))(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    n, (left, right) = axis_size(axis_name), matrices("matmul_all_gather", lhs, rhs)
    rows = right.shape[0]
    if left.shape[1] != n * rows:
        raise ValueError(
            f"matmul_all_gather over {axis_name!r}, of {n} ranks: rhs has {rows} rows on each, {n * rows} together, so "
            f"lhs needs {n * rows} columns; got {left} and {right}"
        )
    _check_directions("matmul_all_gather", directions, f"rhs has {rows} rows ({right})", rows)
    if not directions:
        return lhs @ all_gather(rhs, axis_name, tiled=True)
    here, ways = axis_index(axis_name), (UP, DOWN)[:directions]
    blocks = np.split(rhs, directions)  # one for each direction
    out = None
    for step in range(n):
        # Send before multiplying, so that communication and computation overlap.
        coming = [shift(b, axis_name, way) for b, way in zip(blocks, ways)] if step < n - 1 else []
        for part, (block, way) in enumerate(zip(blocks, ways)):
            term = _block_of(lhs, _neighbor(here, -way * step, n), rows, (part, directions), axis=1) @ block
            out = term if out is None else out + term
        blocks = coming
    return out


# ---------------------------------------------------------------- multiply, then sum and scatter


def matmul_psum_scatter(lhs: Value, rhs: Value, axis_name: AxisName, directions: int = 0) -> Value:
    """Return ``psum_scatter(lhs @ rhs)``: sum the ranks' products, and give each rank its rows of the sum.

    Shapes on n ranks: ``[m, k/n], [k/n, p] -> [m/n, p]``; all vary along the axis. With directions, sums of blocks of
    rows go around the ring, and accumulate: after s steps rank i holds, for the rows of rank i + s + 1, the sum of its
    own summand and those of the s ranks above it. It sends the sum on to rank i - 1, and meanwhile computes the product
    that it adds to the next sum. In two directions, it holds sums for the first half of the rows of rank i - s - 1, and
    for the second half of those of rank i + s + 1.

    Args:
        lhs: this rank's columns of the left operand.
        rhs: this rank's rows of the right operand.
        axis_name: the axis of the mesh along which both are split.
        directions: the number of directions in which sums go around the ring; by default, each rank computes a summand
            of the whole product, and one collective sums and scatters them.

    Raises:
        ValueError: if the shapes do not fit; with two directions, also for an odd number of rows of a rank's result.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda lhs, rhs: matmul_psum_scatter(lhs, rhs, 'i', directions=1)
    >>> f = shard_map(f, mesh, in_specs=(P(None, 'i'), P('i')), out_specs=P('i'))
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    n, (left, right) = axis_size(axis_name), matrices("matmul_psum_scatter", lhs, rhs)
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"matmul_psum_scatter: lhs has as many columns as rhs has rows; got {left} and {right}")
    if left.shape[0] % n:
        raise ValueError(
            f"matmul_psum_scatter over {axis_name!r}: the {left.shape[0]} rows of lhs, {left}, are split over {n} "
            f"ranks; make them a multiple of {n}, with np.pad"
        )
    rows = left.shape[0] // n
    _check_directions("matmul_psum_scatter", directions, f"each rank's part of lhs has {rows} rows ({left})", rows)
    if not directions:
        return psum_scatter(lhs @ rhs, axis_name, tiled=True)
    here, ways = axis_index(axis_name), (UP, DOWN)[-directions:]

    def product(part: int, way: int, step: int) -> Value:
        owner = _neighbor(here, -way * (step + 1), n)
        return _block_of(lhs, owner, rows, (part, directions), axis=0) @ rhs

    sums = [product(part, way, 0) for part, way in enumerate(ways)]
    for step in range(1, n):
        coming = [shift(x, axis_name, way) for x, way in zip(sums, ways)]
        sums = [x + product(part, way, step) for part, (x, way) in enumerate(zip(coming, ways))]
    return np.concatenate(sums) if directions > 1 else sums[0]


# ---------------------------------------------------------------- blocks, and checks of shapes


def _neighbor(here: Value, by: int, n: int) -> Value:
    """Return the index of the rank that is `by` places further up a ring of n."""
    return (here + by) % n if by % n else here


def _block_of(x: Value, owner: Value, size: int, part: tuple[int, int], axis: int) -> Value:
    """Return one of equal parts, (number, count), of the `size` elements of rank `owner`, along an axis of x."""
    start, each = owner * size, size // part[1]
    return dynamic_slice_in_dim(x, start + part[0] * each if part[0] else start, each, axis)


def matrices(function: str, lhs: Value, rhs: Value) -> tuple[ShapedArray, ShapedArray]:
    """Return the types of two operands, which must be matrices."""
    left, right = typeof(lhs), typeof(rhs)
    if left.ndim != 2 or right.ndim != 2:
        raise ValueError(f"{function} multiplies blocks of matrices; got {left} and {right}")
    return left, right


def _check_directions(function: str, directions: int, operand: str, rows: int) -> None:
    """Raise ValueError for other directions than 0, 1 and 2, and if rows cannot be halved, one half for each of two."""
    if directions not in (0, 1, 2):
        raise ValueError(f"{function}: directions={directions!r}; write 1 or 2, or 0 for one collective")
    if directions == 2 and rows % 2:
        raise ValueError(f"{function}: {operand}, which cannot be halved; write directions=1")
