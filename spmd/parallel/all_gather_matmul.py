"""Gather an operand, then multiply: ``[m/n, k] @ all_gather([k/n, p]) -> [m/n, p]``.

`matmul.py` compares the three forms with those that multiply first, and counts what they communicate.
"""

from __future__ import annotations

from collections.abc import Sequence

import minidiff.numpy as np
from collectives import all_gather, axis_index, axis_size
from collectives.axes import AxisName
from collectives.ops import shift
from minidiff.core.tracer import Value
from spmd.parallel.ring import DOWN, UP, block_of, check_halves, matrices, neighbor


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


def _gather_by_steps(what: str, lhs: Value, rhs: Value, axis_name: AxisName, ways: Sequence[int]) -> Value:
    _check_gather(what, lhs, rhs, axis_name, len(ways))
    n, here = axis_size(axis_name), axis_index(axis_name)
    blocks = np.split(rhs, len(ways))  # one for each direction
    out = None
    for step in range(n):
        # Send before multiplying, so that communication and computation overlap.
        coming = [shift(b, axis_name, way) for b, way in zip(blocks, ways)] if step < n - 1 else []
        for part, (block, way) in enumerate(zip(blocks, ways)):
            term = block_of(lhs, neighbor(here, -way * step, n), rhs.shape[0], part, len(ways), axis=1) @ block
            out = term if out is None else out + term
        blocks = coming
    return out


def _check_gather(what: str, lhs: Value, rhs: Value, axis_name: AxisName, parts: int = 1) -> None:
    n, (left, right) = axis_size(axis_name), matrices(what, lhs, rhs)
    rows = right.shape[0]
    if left.shape[1] != n * rows:
        raise ValueError(
            f"{what} over {axis_name!r}, of {n} ranks: rhs has {rows} rows on each, {n * rows} together, so lhs needs "
            f"{n * rows} columns; got {left} and {right}"
        )
    check_halves(what, "rhs", right, rows, parts)
