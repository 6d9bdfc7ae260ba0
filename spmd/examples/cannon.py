"""Cannon's algorithm: products of matrices whose blocks are on a square grid of ranks, by shifts around rings.

    mpirun -n 4 python -m spmd.examples.cannon

The program multiplies two matrices by each of the three products, compares with NumPy, and prints the collectives.

Blocks are placed as in `summa.py`, but never broadcast. First they are skewed, so that each rank has two blocks that
can be multiplied. In each of q steps a rank multiplies its two blocks. Then A's block moves to the neighbor along the
rows of the grid, and B's along its columns. In products with a transposed operand, that operand's blocks move, and so
do the sums. These are complete after q steps, and then move to their places. With blocks of a, b and c bytes:

=========  ======  =================  ==========  =============  ===================
product    value   blocks that move   collective  count, a pass  bytes, in each pass
=========  ======  =================  ==========  =============  ===================
cannon     A @ B   A and B            ppermute    2*q            q*a + q*b
cannon_nt  A @ Bᵀ  B and C            ppermute    2*q            q*b + q*c
cannon_tn  Aᵀ @ B  A and C            ppermute    2*q            q*a + q*c
=========  ======  =================  ==========  =============  ===================

Of each pair, q - 1 calls are shifts along one axis, and one is a permutation of the whole grid. The backward pass has
as many, in the other direction. The bytes are those of `summa.py`, but each block goes over one link; a broadcast to q
ranks passes its block on about log2(q) times, one after the other.

Source: Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

import spmd
from collectives import ppermute
from collectives.ops import shift
from minidiff.core.tracer import Value
from spmd.examples.study import print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.summa import Axes, check_blocks


def cannon(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``A @ B``: blocks of A move along the rows of the grid, those of B along its columns.

    Blocks on a q×q mesh: ``[m/q, k/q], [k/q, n/q] -> [m/q, n/q]``. In step s, rank (r, c) multiplies the blocks (r, l)
    and (l, c), l = r + c + s modulo q. Raises ValueError if the blocks do not fit, or if the mesh is not square.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(cannon, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.arange(4.0).reshape(2, 2), np.array([[1.0, 2.0], [3.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    q, (rows, columns) = check_blocks("cannon", a, b, axes, (1, 0)), axes
    a = _permute(a, axes, q, lambda r, c: (r, c - r))
    b = _permute(b, axes, q, lambda r, c: (r - c, c))
    out = a @ b
    for _ in range(q - 1):
        a, b = shift(a, columns, -1), shift(b, rows, -1)
        out = out + a @ b
    return out


def cannon_nt(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``A @ Bᵀ``: blocks of B move along the columns of the grid, sums along its rows.

    Blocks on a q×q mesh: ``[m/q, k/q], [n/q, k/q] -> [m/q, n/q]``. In step s, rank (r, c) adds the product of the
    blocks (r, c) of A and (l, c) of B, l = r + c + s modulo q, to the sum (r, l). Raises ValueError as `cannon` does.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(cannon_nt, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.arange(4.0).reshape(2, 2), np.array([[1.0, 3.0], [2.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    q, (rows, columns) = check_blocks("cannon_nt", a, b, axes, (1, 1)), axes
    b = _permute(b, axes, q, lambda r, c: (r - c, c))
    out = a @ b.T
    for _ in range(q - 1):
        b = shift(b, rows, -1)
        out = shift(out, columns, -1) + a @ b.T
    return _permute(out, axes, q, lambda r, c: (r, r + c - 1))


def cannon_tn(a: Value, b: Value, axes: Axes = ("rows", "columns")) -> Value:
    """``Aᵀ @ B``: blocks of A move along the rows of the grid, sums along its columns.

    Blocks on a q×q mesh: ``[k/q, m/q], [k/q, n/q] -> [m/q, n/q]``. It is the transpose of ``Bᵀ @ A``, on the transposed
    grid. Raises ValueError as `cannon` does.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(cannon_tn, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.array([[0.0, 2.0], [1.0, 3.0]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    check_blocks("cannon_tn", a, b, axes, (0, 0))
    first, second = axes
    return cannon_nt(b.T, a.T, (second, first)).T


def _permute(x: Value, axes: Axes, q: int, place: Callable[[int, int], tuple[int, int]]) -> Value:
    """Send the block at (r, c) to `place(r, c)`, modulo q."""
    if q == 1:
        return x
    places = [place(r, c) for r in range(q) for c in range(q)]
    return ppermute(x, tuple(axes), [(rank, r % q * q + c % q) for rank, (r, c) in enumerate(places)])


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Multiply by each of the three products, and print whether NumPy's is the same, and the collectives."""
    rng, spec, n = numpy.random.default_rng(0), P("rows", "columns"), 6 * mesh.shape["rows"]
    a, b = rng.integers(-3, 4, size=(2, n, n)).astype(float)
    for product, expected in ((cannon, a @ b), (cannon_nt, a @ b.T), (cannon_tn, a.T @ b)):
        program = spmd.shard_map(product, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        same = numpy.array_equal(spmd.gather(print_calls(product.__name__, program, a, b)), expected)
        print(f"the same as NumPy's: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("rows", "columns"), argv)


if __name__ == "__main__":
    main()
