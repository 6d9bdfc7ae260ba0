"""Multiply, then sum and scatter: ``psum_scatter([m, k/n] @ [k/n, p]) -> [m/n, p]``.

`matmul.py` compares the three forms with those that gather first, and counts what they communicate.
"""

from __future__ import annotations

from collections.abc import Sequence

import minidiff.numpy as np
from collectives import axis_index, axis_size, psum_scatter
from collectives.axes import AxisName
from collectives.ops import shift
from minidiff.core.tracer import Value
from spmd.parallel.ring import DOWN, UP, block_of, check_halves, matrices, neighbor


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


def _scatter_by_steps(what: str, lhs: Value, rhs: Value, axis_name: AxisName, ways: Sequence[int]) -> Value:
    _check_scatter(what, lhs, rhs, axis_name, len(ways))
    n, here = axis_size(axis_name), axis_index(axis_name)

    def product(part: int, way: int, step: int) -> Value:
        owner = neighbor(here, -way * (step + 1), n)
        return block_of(lhs, owner, lhs.shape[0] // n, part, len(ways), axis=0) @ rhs

    sums = [product(part, way, 0) for part, way in enumerate(ways)]
    for step in range(1, n):
        coming = [shift(x, axis_name, way) for x, way in zip(sums, ways)]
        sums = [x + product(part, way, step) for part, (x, way) in enumerate(zip(coming, ways))]
    return np.concatenate(sums) if len(ways) > 1 else sums[0]


def _check_scatter(what: str, lhs: Value, rhs: Value, axis_name: AxisName, parts: int = 1) -> None:
    n, (left, right) = axis_size(axis_name), matrices(what, lhs, rhs)
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"{what}: lhs has as many columns as rhs has rows; got {left} and {right}")
    if left.shape[0] % n:
        raise ValueError(
            f"{what} over {axis_name!r}: the {left.shape[0]} rows of lhs, {left}, are split over {n} ranks; make them "
            f"a multiple of {n}"
        )
    check_halves(what, "each rank's part of lhs", left, left.shape[0] // n, parts)
