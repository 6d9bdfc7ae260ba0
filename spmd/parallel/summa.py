"""SUMMA: products of matrices whose blocks are on a square grid of ranks, with broadcasts and reductions.

A matrix [m, k] is split over both axes of a q×q mesh, ``P('rows', 'columns')``: the rank in row r and column c has the
block [m/q, k/q] at place (r, c). A product takes q steps. Each step broadcasts blocks along rows or columns of the
grid, or sums products of blocks along them; no rank ever has a whole matrix. Three products are enough, since the
derivatives of each are products of the same three kinds:

=========  ======  ==========================  =======================  =================================
product    value   broadcast, in each step     reduced, in each step    derivatives, given that of C
=========  ======  ==========================  =======================  =================================
summa      A @ B   A over columns, B over rows                          dA = dC @ Bᵀ, dB = Aᵀ @ dC
summa_nt   A @ Bᵀ  B over rows                 C over columns           dA = dC @ B,  dB = dCᵀ @ A
summa_tn   Aᵀ @ B  A over columns              C over rows              dA = B @ dCᵀ, dB = A @ dC
=========  ======  ==========================  =======================  =================================

The code has none of these derivatives: `broadcast_varying` and `reduce` are each other's transposes, so the backward
pass of `summa` communicates like `summa_nt` and `summa_tn`. With blocks of a, b and c bytes on each rank (a collective
counts the block that each rank passes to it):

=========  ========  =================  =====  =======  =====
product    pass      collective         axis   count    bytes
=========  ========  =================  =====  =======  =====
summa      forward   broadcast_varying  cols   q        q*a
summa      forward   broadcast_varying  rows   q        q*b
summa      backward  reduce             cols   q        q*a
summa      backward  reduce             rows   q        q*b

summa_nt   forward   broadcast_varying  rows   q        q*b
summa_nt   forward   reduce             cols   q        q*c
summa_nt   backward  broadcast_varying  cols   q        q*c
summa_nt   backward  reduce             rows   q        q*b

summa_tn   forward   broadcast_varying  cols   q        q*a
summa_tn   forward   reduce             rows   q        q*c
summa_tn   backward  broadcast_varying  rows   q        q*c
summa_tn   backward  reduce             cols   q        q*a
=========  ========  =================  =====  =======  =====

The backward pass keeps the blocks that were received: q times as much memory as the operands. With `md.checkpoint`
they are broadcast again instead; then the backward pass of `summa` is `summa_nt` and `summa_tn`, call for call.

Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997); Xu and You, "An
efficient 2D method for training super-large deep learning models" (Optimus, 2021).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

from collectives import axis_size, broadcast_varying, reduce
from minidiff.core.tracer import Value
from spmd.parallel.matmul import matrices

Axes = tuple[str, str]  # of the rows of the grid, and of its columns


def summa(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``A @ B``: in step k, column k of A's blocks times row k of B's.

    Blocks on a q×q mesh: ``[m/q, k/q], [k/q, n/q] -> [m/q, n/q]``. Raises ValueError if the blocks do not fit, or if
    the mesh is not square.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(summa, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.arange(4.0).reshape(2, 2), np.array([[1.0, 2.0], [3.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    q, (rows, columns) = check_blocks("summa", a, b, axes, (1, 0)), axes
    return _total(broadcast_varying(a, columns, k) @ broadcast_varying(b, rows, k) for k in range(q))


def summa_nt(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``A @ Bᵀ``: in step k, row k of B's blocks makes column k of the product's.

    Blocks on a q×q mesh: ``[m/q, k/q], [n/q, k/q] -> [m/q, n/q]``. Raises ValueError as `summa` does.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(summa_nt, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.arange(4.0).reshape(2, 2), np.array([[1.0, 3.0], [2.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    q, (rows, columns) = check_blocks("summa_nt", a, b, axes, (1, 1)), axes
    return _total(reduce(a @ broadcast_varying(b, rows, k).T, columns, k) for k in range(q))


def summa_tn(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``Aᵀ @ B``: in step k, column k of A's blocks makes row k of the product's.

    Blocks on a q×q mesh: ``[k/q, m/q], [k/q, n/q] -> [m/q, n/q]``. Raises ValueError as `summa` does.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(summa_tn, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.array([[0.0, 2.0], [1.0, 3.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    q, (rows, columns) = check_blocks("summa_tn", a, b, axes, (0, 0)), axes
    return _total(reduce(broadcast_varying(a, columns, k).T @ b, rows, k) for k in range(q))


def check_blocks(function: str, a: Value, b: Value, axes: Axes, contracted: tuple[int, int]) -> int:
    """Return the size q of a q×q grid of ranks.

    Raises ValueError for other grids, and unless a and b are blocks whose `contracted` dimensions agree.
    """
    if not isinstance(axes, (tuple, list)) or len(axes) != 2 or axes[0] == axes[1]:
        raise ValueError(f"{function}: axes={axes!r}; write two axes of the mesh, such as ('rows', 'columns')")
    p, q = map(axis_size, axes)
    if p != q:
        raise ValueError(
            f"{function} takes a square grid of ranks; {axes[0]!r} has size {p} and {axes[1]!r} has size {q}: write "
            f"make_mesh(({min(p, q)}, {min(p, q)}), {tuple(axes)})"
        )
    (left, right), (m, n), names = matrices(function, a, b), contracted, ("rows", "columns")
    if left.shape[m] != right.shape[n]:
        raise ValueError(f"{function}: a has as many {names[m]} as b has {names[n]}; got blocks {left} and {right}")
    return q


def _total(terms: Iterable[Value]) -> Value:
    """Return the sum of at least one term."""
    return functools.reduce(operator.add, terms)
