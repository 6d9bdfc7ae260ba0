"""Products of matrices whose blocks are on a square grid of ranks: Cannon's algorithm, by shifts, and SUMMA.

    mpirun -n 4 python -m spmd.examples.cannon

The program multiplies two matrices by each of the three products, compares with NumPy, and prints the collectives.

A matrix [m, k] is split over both axes of a q×q mesh, ``P('rows', 'columns')``: the rank in row r and column c has the
block [m/q, k/q] at place (r, c). No rank ever has a whole matrix.

**Cannon's algorithm** broadcasts no blocks. First they are skewed, so that each rank has two blocks that
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
as many, in the other direction. The bytes are those of SUMMA, but each block goes over one link; a broadcast to q
ranks passes its block on about log2(q) times, one after the other.

Source: Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969).

**SUMMA** takes q steps. Each step broadcasts blocks along rows or columns of the grid, or sums products of blocks along
them. Three products are enough, since the derivatives of each are products of the same three kinds:

=======  ==========================  =======================  =================================
product  broadcast, in each step     reduced, in each step    derivatives, given that of C
=======  ==========================  =======================  =================================
A @ B    A over columns, B over rows                          dA = dC @ Bᵀ, dB = Aᵀ @ dC
A @ Bᵀ   B over rows                 C over columns           dA = dC @ B,  dB = dCᵀ @ A
Aᵀ @ B   A over columns              C over rows              dA = B @ dCᵀ, dB = A @ dC
=======  ==========================  =======================  =================================

The code has none of these derivatives: `broadcast_varying` and `reduce` are each other's transposes, so the backward
pass of ``A @ B`` communicates like the two other products. With blocks of a, b and c bytes on each rank (a collective
counts the block that each rank passes to it):

=======  ========  =================  =====  =======  =====
product  pass      collective         axis   count    bytes
=======  ========  =================  =====  =======  =====
A @ B    forward   broadcast_varying  cols   q        q*a
A @ B    forward   broadcast_varying  rows   q        q*b
A @ B    backward  reduce             cols   q        q*a
A @ B    backward  reduce             rows   q        q*b

A @ Bᵀ   forward   broadcast_varying  rows   q        q*b
A @ Bᵀ   forward   reduce             cols   q        q*c
A @ Bᵀ   backward  broadcast_varying  cols   q        q*c
A @ Bᵀ   backward  reduce             rows   q        q*b

Aᵀ @ B   forward   broadcast_varying  cols   q        q*a
Aᵀ @ B   forward   reduce             rows   q        q*c
Aᵀ @ B   backward  broadcast_varying  rows   q        q*c
Aᵀ @ B   backward  reduce             cols   q        q*a
=======  ========  =================  =====  =======  =====

The backward pass keeps the blocks that were received: q times as much memory as the operands. With `md.checkpoint`
they are broadcast again instead; then the backward pass of ``A @ B`` is the two other products, call for call.

Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997); Xu and You, "An
efficient 2D method for training super-large deep learning models" (Optimus, 2021).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

import numpy

import spmd
from collectives import axis_size, broadcast_varying, ppermute, reduce
from collectives.ops import shift
from minidiff.core.tracer import Value
from spmd.examples.study import print_calls, run_study
from spmd.mesh.specs import P
from spmd.parallel.matmul import matrices

Axes = tuple[str, str]  # of the rows of the grid, and of its columns


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


# ---------------------------------------------------------------- SUMMA


def summa(a: Value, b: Value, axes: Axes = ("rows", "columns"), transposed: str | None = None) -> Value:
    """Return ``A @ B``, or with `transposed` ``Aᵀ @ B`` or ``A @ Bᵀ``, of blocks on a square grid of ranks.

    In step k, ``A @ B`` adds column k of A's blocks times row k of B's. With ``Bᵀ``, row k of B's blocks makes column k
    of the product's; with ``Aᵀ``, column k of A's blocks makes row k of the product's.

    Args:
        a: this rank's block of A: on a q×q mesh ``[m/q, k/q]``, or ``[k/q, m/q]`` if it is transposed.
        b: this rank's block of B: ``[k/q, n/q]``, or ``[n/q, k/q]`` if it is transposed.
        axes: the axes of the mesh, of the rows of the grid and of its columns.
        transposed: "a" or "b", if that operand is transposed.

    Returns:
        This rank's block of the product, ``[m/q, n/q]``.

    Raises:
        ValueError: if the blocks do not fit, or if the mesh is not square.

    >>> import numpy as np
    >>> from spmd import P, make_mesh, shard_map
    >>> mesh, spec = make_mesh((2, 2), ('rows', 'columns'), backend='simulated'), P('rows', 'columns')
    >>> f = shard_map(summa, mesh, in_specs=(spec, spec), out_specs=spec)
    >>> f(np.arange(4.0).reshape(2, 2), np.array([[1.0, 2.0], [3.0, 4.0]]))
    ShardedArray([[ 3.,  4.],
                  [11., 16.]], P('rows', 'columns'))
    """
    contracted = {None: (1, 0), "a": (0, 0), "b": (1, 1)}.get(transposed)
    if contracted is None:
        raise ValueError(f"summa: transposed={transposed!r}; write 'a', 'b' or None")
    q, (rows, columns) = check_blocks("summa", a, b, axes, contracted), axes
    if transposed == "a":
        return _total(reduce(broadcast_varying(a, columns, k).T @ b, rows, k) for k in range(q))
    if transposed == "b":
        return _total(reduce(a @ broadcast_varying(b, rows, k).T, columns, k) for k in range(q))
    return _total(broadcast_varying(a, columns, k) @ broadcast_varying(b, rows, k) for k in range(q))


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


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Multiply by each of the three products, and print whether NumPy's is the same, and the collectives."""
    rng, spec, n = numpy.random.default_rng(0), P("rows", "columns"), 6 * mesh.shape["rows"]
    a, b = rng.integers(-3, 4, size=(2, n, n)).astype(float)
    products = (cannon, a @ b), (cannon_nt, a @ b.T), (cannon_tn, a.T @ b), (summa, a @ b)
    for product, expected in products:
        program = spmd.shard_map(product, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        same = numpy.array_equal(spmd.gather(print_calls(product.__name__, program, a, b)), expected)
        print(f"the same as NumPy's: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("rows", "columns"), argv)


if __name__ == "__main__":
    main()
