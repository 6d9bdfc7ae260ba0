"""Matrix products of split operands, with one collective or step by step.

All six are called inside a `shard_map` body. There are two ways to contract the split dimension k:

- *gather* an operand. `lhs` is split along its rows, `rhs` along k, and each rank needs all of `rhs`:
  ``[m/n, k] @ all_gather([k/n, p]) -> [m/n, p]``.
- *scatter* the product. Both are split along k, so each rank's product is one summand of the whole result:
  ``psum_scatter([m, k/n] @ [k/n, p]) -> [m/n, p]``.

Each takes one collective, but nothing is computed while it runs. Both collectives are n - 1 steps around a ring of n
ranks, in which each rank passes a block on to its neighbor. *Overlapped* forms take these steps one by one, and
multiply one block while they send another. *Bidirectional* forms halve the blocks and send the halves in opposite
directions, over links that are otherwise idle.

===================================  ================  =================  ============================
on n ranks, a block has s bytes      calls             bytes a rank sends what a rank holds in addition
===================================  ================  =================  ============================
`matmul_all_gather`                  1 all_gather      (n - 1) s          all of `rhs`: n blocks
`matmul_all_gather_overlapped`       n - 1 ppermute    (n - 1) s          two blocks: one here, one coming
`matmul_all_gather_bidirectional`    2(n - 1) ppermute (n - 1) s          two blocks
`matmul_psum_scatter`                1 psum_scatter    (n - 1) s          the whole product: n blocks
`matmul_psum_scatter_overlapped`     n - 1 ppermute    (n - 1) s          two blocks: a sum, and a summand
`matmul_psum_scatter_bidirectional`  2(n - 1) ppermute (n - 1) s          two blocks
===================================  ================  =================  ============================

A block is a block [k/n, p] of `rhs` if that is gathered, or a block [m/n, p] of the product if that is scattered. All
forms have the same values, up to rounding, and the same derivatives. `all_gather` and `psum_scatter` are each other's
transposes. So a product that gathers has a backward pass that scatters, and vice versa, and the steps of a ring
transpose to steps in the other direction. The backward pass of the overlapped forms keeps the blocks that were
received; with `md.checkpoint` they are sent around again instead. In a compiled program (`md.jit`) on MPI ranks, blocks
are in fact sent while others are multiplied.

Source: shard_map tutorial, "Matrix multiplication", Examples 1 and 2; Wang et al., "Overlap communication with
dependent computation via decomposition in large deep learning models" (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import minidiff.numpy as np
from collectives import all_gather, axis_index, axis_size, psum_scatter
from collectives.axes import AxisName
from collectives.ops import shift
from minidiff import dynamic_slice_in_dim, typeof
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray

__all__ = [
    "matmul_all_gather",
    "matmul_all_gather_bidirectional",
    "matmul_all_gather_overlapped",
    "matmul_psum_scatter",
    "matmul_psum_scatter_bidirectional",
    "matmul_psum_scatter_overlapped",
]

UP, DOWN = 1, -1  # to the rank of the next index, or of the one before

# ---------------------------------------------------------------- gather, then multiply


def matmul_all_gather(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """``lhs @ all_gather(rhs)``: each rank gathers `rhs`, and multiplies it by its own rows of `lhs`.

    Shapes on n ranks: ``[m/n, k], [k/n, p] -> [m/n, p]``; all vary along the axis. Every rank holds all of `rhs`.
    Raises ValueError if the shapes do not fit.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> f = shard_map(lambda l, r: matmul_all_gather(l, r, 'i'), mesh, in_specs=P('i'), out_specs=P('i'))
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    _check_gather("matmul_all_gather", lhs, rhs, axis_name)
    return lhs @ all_gather(rhs, axis_name, tiled=True)


def matmul_all_gather_overlapped(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """`matmul_all_gather` in n steps: blocks of `rhs` go up the ring, and ranks multiply them as they arrive.

    Shapes on n ranks: ``[m/n, k], [k/n, p] -> [m/n, p]``. After s steps rank i holds the block that rank i - s started
    with. It sends the block on to rank i + 1, and adds the product of the matching columns of `lhs` and the block.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> f = shard_map(lambda l, r: matmul_all_gather_overlapped(l, r, 'i'), mesh, in_specs=P('i'), out_specs=P('i'))
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    return _gather_by_steps("matmul_all_gather_overlapped", lhs, rhs, axis_name, (UP,))


def matmul_all_gather_bidirectional(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """`matmul_all_gather_overlapped` with halves of blocks: the first half goes up the ring, the second down.

    Shapes on n ranks: ``[m/n, k], [k/n, p] -> [m/n, p]``, k/n even. After s steps rank i holds the first half of the
    rows that rank i - s started with, and the second half of those of rank i + s.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> f = shard_map(lambda l, r: matmul_all_gather_bidirectional(l, r, 'i'), mesh, in_specs=P('i'), out_specs=P('i'))
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    return _gather_by_steps("matmul_all_gather_bidirectional", lhs, rhs, axis_name, (UP, DOWN))


def _gather_by_steps(function: str, lhs: Value, rhs: Value, axis_name: AxisName, ways: Sequence[int]) -> Value:
    _check_gather(function, lhs, rhs, axis_name, len(ways))
    n, here = axis_size(axis_name), axis_index(axis_name)
    blocks = np.split(rhs, len(ways))  # one for each direction
    out = None
    for step in range(n):
        # Send before multiplying, so that communication and computation overlap.
        coming = [shift(b, axis_name, way) for b, way in zip(blocks, ways)] if step < n - 1 else []
        for part, (block, way) in enumerate(zip(blocks, ways)):
            term = _block_of(lhs, _neighbor(here, -way * step, n), rhs.shape[0], part, len(ways), axis=1) @ block
            out = term if out is None else out + term
        blocks = coming
    return out


def _check_gather(function: str, lhs: Value, rhs: Value, axis_name: AxisName, parts: int = 1) -> None:
    n, (left, right) = axis_size(axis_name), matrices(function, lhs, rhs)
    rows = right.shape[0]
    if left.shape[1] != n * rows:
        raise ValueError(
            f"{function} over {axis_name!r}, of {n} ranks: rhs has {rows} rows on each, {n * rows} together, so lhs "
            f"needs {n * rows} columns; got {left} and {right}"
        )
    _check_halves(function, "rhs", right, rows, parts)


# ---------------------------------------------------------------- multiply, then sum and scatter


def matmul_psum_scatter(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """``psum_scatter(lhs @ rhs)``: each rank's product is a summand of the result, of which it gets its own rows.

    Shapes on n ranks: ``[m, k/n], [k/n, p] -> [m/n, p]``; all vary along the axis. Every rank holds a summand of the
    whole product, [m, p]. Raises ValueError if the shapes do not fit.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> specs = dict(in_specs=(P(None, 'i'), P('i')), out_specs=P('i'))
    >>> f = shard_map(lambda l, r: matmul_psum_scatter(l, r, 'i'), mesh, **specs)
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    _check_scatter("matmul_psum_scatter", lhs, rhs, axis_name)
    return psum_scatter(lhs @ rhs, axis_name, tiled=True)


def matmul_psum_scatter_overlapped(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """`matmul_psum_scatter` in n steps: sums of blocks of rows go down the ring, and accumulate.

    Shapes on n ranks: ``[m, k/n], [k/n, p] -> [m/n, p]``. After s steps rank i holds, for the rows of rank i + s + 1,
    the sum of its own summand and those of the s ranks above it. It sends the sum on to rank i - 1, and meanwhile
    computes the product that it adds to the next sum.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> specs = dict(in_specs=(P(None, 'i'), P('i')), out_specs=P('i'))
    >>> f = shard_map(lambda l, r: matmul_psum_scatter_overlapped(l, r, 'i'), mesh, **specs)
    >>> f(np.arange(8.0).reshape(2, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.]], P('i'))
    """
    return _scatter_by_steps("matmul_psum_scatter_overlapped", lhs, rhs, axis_name, (DOWN,))


def matmul_psum_scatter_bidirectional(lhs: Value, rhs: Value, axis_name: AxisName) -> Value:
    """`matmul_psum_scatter_overlapped` with halves of blocks: sums of the first half go up, the second down.

    Shapes on n ranks: ``[m, k/n], [k/n, p] -> [m/n, p]``, m/n even. After s steps rank i holds sums for the first half
    of the rows of rank i - s - 1, and for the second half of those of rank i + s + 1.

    >>> from spmd import P, make_mesh, shard_map
    >>> mesh = make_mesh((2,), ('i',), backend='simulated')
    >>> specs = dict(in_specs=(P(None, 'i'), P('i')), out_specs=P('i'))
    >>> f = shard_map(lambda l, r: matmul_psum_scatter_bidirectional(l, r, 'i'), mesh, **specs)
    >>> f(np.arange(16.0).reshape(4, 4), np.ones((4, 1)))
    ShardedArray([[ 6.],
                  [22.],
                  [38.],
                  [54.]], P('i'))
    """
    return _scatter_by_steps("matmul_psum_scatter_bidirectional", lhs, rhs, axis_name, (UP, DOWN))


def _scatter_by_steps(function: str, lhs: Value, rhs: Value, axis_name: AxisName, ways: Sequence[int]) -> Value:
    _check_scatter(function, lhs, rhs, axis_name, len(ways))
    n, here = axis_size(axis_name), axis_index(axis_name)

    def product(part: int, way: int, step: int) -> Value:
        owner = _neighbor(here, -way * (step + 1), n)
        return _block_of(lhs, owner, lhs.shape[0] // n, part, len(ways), axis=0) @ rhs

    sums = [product(part, way, 0) for part, way in enumerate(ways)]
    for step in range(1, n):
        coming = [shift(x, axis_name, way) for x, way in zip(sums, ways)]
        sums = [x + product(part, way, step) for part, (x, way) in enumerate(zip(coming, ways))]
    return np.concatenate(sums) if len(ways) > 1 else sums[0]


def _check_scatter(function: str, lhs: Value, rhs: Value, axis_name: AxisName, parts: int = 1) -> None:
    n, (left, right) = axis_size(axis_name), matrices(function, lhs, rhs)
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"{function}: lhs has as many columns as rhs has rows; got {left} and {right}")
    if left.shape[0] % n:
        raise ValueError(
            f"{function} over {axis_name!r}: the {left.shape[0]} rows of lhs, {left}, are split over {n} ranks; make "
            f"them a multiple of {n}"
        )
    _check_halves(function, "each rank's part of lhs", left, left.shape[0] // n, parts)


# ---------------------------------------------------------------- blocks, and checks of shapes


def _neighbor(here: Value, by: int, n: int) -> Value:
    """Return the index of the rank that is `by` places further up a ring of n."""
    return (here + by) % n if by % n else here


def _block_of(x: Value, owner: Value, size: int, part: int, parts: int, axis: int) -> Value:
    """Return one of equal parts of the `size` elements of rank `owner`, along an axis of x."""
    start, each = owner * size, size // parts
    return dynamic_slice_in_dim(x, start + part * each if part else start, each, axis)


def matrices(function: str, lhs: Value, rhs: Value) -> tuple[ShapedArray, ShapedArray]:
    """Return the types of two operands, which must be matrices."""
    left, right = typeof(lhs), typeof(rhs)
    if left.ndim != 2 or right.ndim != 2:
        raise ValueError(f"{function} multiplies blocks of matrices; got {left} and {right}")
    return left, right


def _check_halves(function: str, name: str, t: ShapedArray, rows: int, parts: int) -> None:
    """Raise ValueError unless rows can be split into so many parts (two: one for each direction)."""
    if rows % parts:
        one_way = function.replace("bidirectional", "overlapped")
        raise ValueError(f"{function}: {name} has {rows} rows ({t}), which cannot be halved; use {one_way}")
