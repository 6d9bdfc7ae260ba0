"""Collectives with a root: one rank sends to all, or receives from all.

================== ======================= ============== ===================
operation          type                    communicates   transpose
================== ======================= ============== ===================
broadcast          varying -> invariant    broadcast      at_root
at_root            invariant -> varying    no             broadcast
broadcast_varying  varying -> varying      broadcast      reduce
reduce             varying -> varying      reduce         broadcast_varying
gather             varying -> varying      gather         scatter
scatter            varying -> varying      scatter        gather
================== ======================= ============== ===================

A value that only the root has is a varying value that is zero on all other ranks. (MPI leaves the others undefined, but
an operation must be linear on every rank to have a transpose.) So each of these is the exact transpose of its
transpose. `broadcast` and `at_root` relate to `broadcast_varying` and `reduce` as `all_gather_invariant` and `pscatter`
relate to `all_gather` and `psum_scatter`: the result of a broadcast is the same on every rank, so it is invariant, and
so is its cotangent; the root already has that cotangent, and the backward pass costs nothing. `broadcast_varying` is a
`broadcast` with a `pbroadcast` fused into it. A `gather` with an invariant result would be `all_gather_invariant`; a
`scatter` of an invariant operand is `pscatter`.

All take a `root`, an index along the axes as `axis_index` counts them. If the operand is invariant along them all, no
communication is needed: a broadcast is the identity, a sum is a product, a scatter takes local slices. In a `shard_map`
with `check_rep=False` values are untyped: `broadcast` is then `broadcast_varying`.

The examples and drawings are of the same two ranks as those of `ops.py`, which explains them.

Sources: the MPI standard, chapter "Collective Communication"; types and transposes follow JEP 17111.
"""

from __future__ import annotations

import numpy

from collectives.argument_checks import check_rank
from collectives.axes import AxisName, CollectiveAxes, single_axes
from collectives.collective import Collective, gathered_shape, scattered_shape
from collectives.operands import (
    array_of,
    bind_over,
    convert_booleans,
    each_leaf,
    gather_over,
    make_varying,
    scatter_over,
    sum_copies,
    varying_axes,
)
from collectives.ops import Tree, axis_index, local_slice
from minidiff.core.states import INVARIANT, VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.ops.elementwise import where
from minidiff.ops.shape import concatenate, stack

# ---------------------------------------------------------------- the table

broadcast_p = Collective("broadcast", {VARYING: lambda: at_root_p}, INVARIANT, cost="binomial_tree_broadcast")
at_root_p = Collective("at_root", {INVARIANT: lambda: broadcast_p})
broadcast_varying_p = Collective(
    "broadcast_varying", {VARYING: lambda: reduce_p}, cost="binomial_tree_broadcast", copies=True
)
reduce_p = Collective("reduce", {VARYING: lambda: broadcast_varying_p}, cost="binomial_tree_reduce", sums=True)
gather_p = Collective("gather", {VARYING: lambda: scatter_p}, shape=gathered_shape, cost="binomial_tree_gather")
scatter_p = Collective("scatter", {VARYING: lambda: gather_p}, shape=scattered_shape, cost="binomial_tree_scatter")

#: The collectives of this table.
ROOTED = (broadcast_p, broadcast_varying_p, reduce_p, gather_p, scatter_p, at_root_p)

# ---------------------------------------------------------------- the root


def _bind_rooted(name: str, axis_name: AxisName, root: int) -> tuple[CollectiveAxes, int]:
    group = single_axes(name, axis_name)
    return group, check_rank(name, "the root", root, axis_name, group.size)


# ---------------------------------------------------------------- public functions


def broadcast(x: Tree, axis_name: AxisName, root: int = 0) -> Tree:
    """Return the root's value, on every rank. Varying -> invariant; transpose `at_root`.

        x:                          [a]  [b]  {i}
        broadcast(x, 'i', root=1):  [b]  [b]
        backward:                   [u]  [u]  ->  [0]  [u]  {i}

    This is MPI_Bcast. `x` is a tree of arrays. The transpose does not communicate. A value that is already invariant is
    returned unchanged. (To type an invariant value as varying, use `pbroadcast`.) Raises ValueError for a root out of
    range.

    >>> f = lambda x: broadcast(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([4, 1])
    """
    group, root = _bind_rooted("broadcast", axis_name, root)
    primitive = broadcast_p if group.scope.typed else broadcast_varying_p

    def sent(x):
        x = array_of(x)
        return bind_over(primitive, make_varying(x, group), group, root=root) if varying_axes(x, group) else x

    return each_leaf(sent, x)


def broadcast_varying(x: Tree, axis_name: AxisName, root: int = 0) -> Tree:
    """`broadcast` with a result typed as varying. Transposes to `reduce`.

        x:                                  [a]  [b]  {i}
        broadcast_varying(x, 'i', root=1):  [b]  [b]  {i}
        backward:                           [u]  [v]  {i}  ->  [0]  [u+v]  {i}

    Varying -> varying. Use it for a value that is then combined with varying values: its cotangents are summed by a
    reduce to the root. With `broadcast` they would be summed by an all-reduce, of which only the root uses the result.

    >>> f = lambda x: broadcast_varying(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 4, 1], P('i'))
    """
    group, root = _bind_rooted("broadcast_varying", axis_name, root)

    def sent(x):
        x = array_of(x)
        varying = make_varying(x, group)
        return bind_over(broadcast_varying_p, varying, group, root=root) if varying_axes(x, group) else varying

    return each_leaf(sent, x)


def at_root(x: Tree, axis_name: AxisName, root: int = 0) -> Tree:
    """Return an invariant value on the root, zeros elsewhere. Transposes to `broadcast`.

        x:                        [a]  [a]
        at_root(x, 'i', root=1):  [0]  [a]  {i}
        backward:                 [u]  [v]  {i}  ->  [v]  [v]

    Invariant -> varying. It does not communicate. Raises VarianceError for a value that varies along one of the axes.

    >>> f = lambda x: at_root(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([0, 0, 3, 1], P('i'))
    """
    group, root = _bind_rooted("at_root", axis_name, root)
    return each_leaf(lambda leaf: _at_root(array_of(leaf), group, root), x)


def _at_root(x: Value, group: CollectiveAxes, root: int) -> Value:
    if not group.scope.typed:
        return where(axis_index(group.axes) == root, x, numpy.zeros((), typeof(x).dtype))
    at_root_p.check_variance([typeof(x)], group.params)
    return bind_over(at_root_p, x, group, root=root)


def reduce(x: Tree, axis_name: AxisName, root: int = 0) -> Tree:
    """Return the sum over ranks on the root, zeros elsewhere (MPI_Reduce).

        x:                       [a]  [b]    {i}
        reduce(x, 'i', root=1):  [0]  [a+b]  {i}
        backward:                [u]  [v]    {i}  ->  [v]  [v]  {i}

    Transposes to `broadcast_varying`. Varying -> varying. Booleans are counted. An invariant value is multiplied by the
    number of ranks, without communication.

    >>> f = lambda x: reduce(x, 'i', root=1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([0, 0, 7, 2], P('i'))
    """
    group, root = _bind_rooted("reduce", axis_name, root)

    def reduced(x):
        x = convert_booleans(array_of(x))
        if varying_axes(x, group):
            return bind_over(reduce_p, make_varying(x, group), group, root=root)
        return _at_root(sum_copies(x, group.size), group, root)

    return each_leaf(reduced, x)


def gather(x: Tree, axis_name: AxisName, root: int = 0, axis: int = 0, tiled: bool = False) -> Tree:
    """Return all ranks' blocks on the root, stacked or with `tiled` concatenated.

        x:                                   [a]      [b]      {i}
        gather(x, 'i', root=1, tiled=True):  [0,0]    [a,b]    {i}
        backward:                            [u0,u1]  [v0,v1]  {i}  ->  [v0]  [v1]  {i}

    Other ranks get zeros. This is MPI_Gather. Shapes over n ranks: [a, b] -> [n, a, b], tiled [n*a, b]; blocks are
    placed along `axis`. Varying -> varying; transposes to `scatter`. (To gather on every rank, use `all_gather`.)

    >>> f = lambda x: gather(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([0, 0, 3, 9], P('i'))
    """
    group, root = _bind_rooted("gather", axis_name, root)

    def gathered(x, group, axis, tiled):
        if varying_axes(x, group):
            return bind_over(gather_p, make_varying(x, group), group, root=root, axis=axis, tiled=tiled)
        return (concatenate if tiled else stack)([_at_root(x, group, root)] * group.size, axis)

    return each_leaf(lambda x: gather_over("gather", gathered, x, [group], axis, tiled), x)


def scatter(x: Tree, axis_name: AxisName, root: int = 0, axis: int = 0, tiled: bool = False) -> Tree:
    """Return the root's value, split along `axis` over the ranks. Transposes to `gather`.

        x:                                    [a0,a1]  [b0,b1]  {i}
        scatter(x, 'i', root=1, tiled=True):  [b0]     [b1]     {i}
        backward:                             [u]      [v]      {i}  ->  [0,0]  [u,v]  {i}

    This is MPI_Scatter. Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Varying -> varying. For an
    invariant value it is `pscatter`, without communication. Raises ValueError if the dimension cannot be split over the
    ranks.

    >>> f = lambda x: scatter(x, 'i', root=1, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1], P('i'))
    """
    group, root = _bind_rooted("scatter", axis_name, root)

    def part(x, group, axis, tiled):
        if varying_axes(x, group):
            return bind_over(scatter_p, make_varying(x, group), group, root=root, axis=axis, tiled=tiled)
        return local_slice(x, group, axis, tiled)

    return each_leaf(lambda x: scatter_over("scatter", part, x, [group], axis, tiled), x)
