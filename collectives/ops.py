"""The collectives as operations: their types and transposes (JEP 17111's table).

===================== ======================= ============== ============================
operation             type                    communicates   transpose
===================== ======================= ============== ============================
psum                  varying -> invariant    all-reduce     pbroadcast
psum                  unreduced -> invariant  all-reduce     reduced
psum, in groups       varying -> varying      all-reduce     psum, in groups
pbroadcast            invariant -> varying    no             psum
pbroadcast            reduced -> varying      no             unreduced
reduced               invariant -> reduced    no             psum (of unreduced)
unreduced             varying -> unreduced    no             pbroadcast (of reduced)
all_gather            varying -> varying      all-gather     psum_scatter
psum_scatter          varying -> varying      reduce-scatter all_gather
psum_scatter          unreduced -> varying    reduce-scatter all_gather_reduced
all_gather_reduced    varying -> reduced      all-gather     psum_scatter (of unreduced)
all_gather_invariant  varying -> invariant    all-gather     pscatter
pscatter              invariant -> varying    no             all_gather_invariant
pscatter              reduced -> varying      no             placing the slice in zeros
all_to_all            varying -> varying      all-to-all     all_to_all
ragged_all_to_all     varying -> varying      all-to-all     ragged_all_to_all
ppermute              varying -> varying      point to point ppermute, reversed
axis_index            () -> varying           no             (integers)
===================== ======================= ============== ============================

Related modules: `collective.py` has the rules common to all collectives, `operands.py` casts their operands,
`casts.py` has the casts, which users write or the library inserts, `axes.py` the axes argument, `reference.py` the
meaning of each, and `backends/` runs them. Further collectives: `rooted.py` (broadcast, reduce, gather, scatter),
`reductions.py` (extrema, products, scans, user-defined functions), `in_flight.py` (messages that arrive later).

With `axis_index_groups`, a collective runs separately within each group of ranks. Results may differ between groups, so
they always vary; the transpose is the ungrouped transpose, run in the same groups. `ragged_all_to_all` is `all_to_all`
of parts of different lengths; its second operand, the table of these, is invariant.

In a `shard_map` with `check_rep=False` values are untyped: `psum` is then its own transpose, and `pbroadcast` and
`pscatter`, which exist for the types, are not used. The same holds along the axis of a `vmap(f, axis_name=...)`, whose
elements act as ranks: they are stacked, and `backends/simulated.py` runs the collectives. A collective may name mesh
axes and vmap axes together.

The examples assume `np`, `md`, `spmd`, `P` (which is `spmd.P`), and two ranks along one axis:
`mesh = spmd.make_mesh((2,), ('i',), backend='simulated')`.

Each public function has a drawing on the same two ranks: the operand, the result, and for the backward pass the
cotangents of the result and of the operand. A pair of brackets is a rank's block, and braces say how the value varies,
as in types: `{i}` is varying, `{U:i}` unreduced, `{R:i}` reduced, and none is invariant. A test evaluates every
drawing.

Source: "Efficient transposition of replication-inducing collectives" (JEP 17111), the table in the section "Tracking
device invariance in avals"; for the unreduced and reduced states JAX, "Autodiff and sharding".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from collectives.axes import Axes, AxisName, CollectiveAxes, collective_axes, rank_count, single_axes
from collectives.checks import checks
from collectives.collective import AxisIndex, Collective, check_operand, gathered_shape, scattered_shape
from collectives.operands import (
    array_of,
    as_factor,
    bind_over,
    convert_booleans,
    each_leaf,
    gather_over,
    make_varying,
    parts_over,
    scatter_over,
    sum_copies,
    varying_axes,
)
from minidiff import tree
from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING
from minidiff.core.tracer import Tracer, Value, states_of
from minidiff.core.types import ShapedArray, typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops import indexing, reduction
from minidiff.ops.base import run_in_float32
from minidiff.ops.shape import stack
from minidiff.values.dtypes import as_plain, is_scalar_constant

#: A tree of arrays. A collective returns a tree of the same structure, which type checkers take to be of the same type.
Tree = TypeVar("Tree")

# ---------------------------------------------------------------- the table


def _all_to_all_shape(x: ShapedArray, axes, size, split_axis, concat_axis, tiled, **params):
    part = ShapedArray(*scattered_shape(x, axes, size, split_axis, tiled))
    return gathered_shape(part, axes, size, concat_axis, tiled)


class RaggedAllToAll(Collective):
    """`all_to_all` of parts of different lengths. A table, the second operand, has their numbers of rows.

    The table is the same on all ranks: a value of the program, or a constant. The result has `rows` rows.
    """

    linear_operands = 1

    def check_variance(self, types, params):
        super().check_variance(types[:1], params)
        check_operand("splits of all_to_all", (INVARIANT,), types[1], params)

    def _transposed(self, ct, operands, axis, rows, **params):
        x, splits = operands
        return [self.bind(ct, splits.T, axis=axis, rows=x.shape[axis], **params)]

    def _batched(self, _, args, batched, axis, **params):
        x, splits = args
        if not batched[1]:
            return self.bind(x, splits, axis=axis + 1, **params)
        return stack(
            [self.bind(x[k] if batched[0] else x, table, axis=axis, **params) for k, table in enumerate(splits)]
        )


def _ragged_shape(x: ShapedArray, axes, size, axis, rows):
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype


psum_p = Collective(
    "psum", {VARYING: lambda: pbroadcast_p, UNREDUCED: lambda: reduced_p}, INVARIANT, cost="ring_all_reduce", sums=True
)
pbroadcast_p = Collective(
    "pbroadcast", {INVARIANT: lambda: psum_p, REDUCED: lambda: unreduced_p}, VARYING, is_view=True, shares_memory=True
)
reduced_p = Collective("reduced", {INVARIANT: lambda: psum_p}, REDUCED, is_view=True, shares_memory=True)
unreduced_p = Collective("unreduced", {VARYING: lambda: pbroadcast_p}, UNREDUCED, is_view=True, shares_memory=True)
all_gather_p = Collective(
    "all_gather", {VARYING: lambda: psum_scatter_p}, VARYING, shape=gathered_shape, cost="ring_all_gather", copies=True
)
psum_scatter_p = Collective(
    "psum_scatter",
    {VARYING: lambda: all_gather_p, UNREDUCED: lambda: all_gather_reduced_p},
    VARYING,
    shape=scattered_shape,
    cost="ring_reduce_scatter",
    sums=True,
)
all_gather_reduced_p = Collective(
    "all_gather_reduced", {VARYING: lambda: psum_scatter_p}, REDUCED, shape=gathered_shape, cost="ring_all_gather"
)
all_gather_invariant_p = Collective(
    "all_gather_invariant", {VARYING: lambda: pscatter_p}, INVARIANT, shape=gathered_shape, cost="ring_all_gather"
)
pscatter_p = Collective(
    "pscatter", {INVARIANT: lambda: all_gather_invariant_p}, VARYING, shape=scattered_shape, shares_memory=True
)
all_to_all_p = Collective(
    "all_to_all",
    {VARYING: lambda: all_to_all_p},
    VARYING,
    shape=_all_to_all_shape,
    transpose_params=lambda split_axis, concat_axis, **_: {"split_axis": concat_axis, "concat_axis": split_axis},
    cost="pairwise_all_to_all",
)
ragged_all_to_all_p = RaggedAllToAll(
    "ragged_all_to_all", {VARYING: None}, shape=_ragged_shape, cost="pairwise_all_to_all"
)


def reverse_permutation(perm: Sequence[tuple[int, int]], **_: Any) -> dict:
    return {"perm": tuple((d, s) for s, d in perm)}


ppermute_p = Collective(
    "ppermute", {VARYING: lambda: ppermute_p}, VARYING, transpose_params=reverse_permutation, cost="point_to_point"
)

#: Operations that change only the type of their operand.
CASTS = (pbroadcast_p, reduced_p, unreduced_p)

#: `psum` without types: nothing says that its result is invariant, so it transposes to itself.
untyped_psum_p = Collective(
    "psum", {VARYING: lambda: untyped_psum_p}, VARYING, cost="ring_all_reduce", one_result=True, sums=True
)


axis_index_p = AxisIndex()

#: The collectives of this table.
COLLECTIVES = (psum_p, all_gather_p, all_gather_invariant_p, all_gather_reduced_p, psum_scatter_p,
               all_to_all_p, ragged_all_to_all_p, ppermute_p, pscatter_p, *CASTS)  # fmt: skip


def check_explicit(name: str, x: Value, group: CollectiveAxes) -> None:
    """With `auto_pbroadcast=False`, raise VarianceError if `x` needs a pbroadcast."""
    if group.scope.checks and not is_scalar_constant(x):
        check_operand(name, psum_p.takes, typeof(x), group.params)


# ---------------------------------------------------------------- public functions


def psum(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None, exact: bool = False, axis: Any = None) -> Tree:
    """Return the sum over ranks (all-reduce). Varying or unreduced -> invariant.

        x:             [a]    [b]    {i}
        psum(x, 'i'):  [a+b]  [a+b]
        backward:      [u]    [u]  ->  [u]  [u]  {i}

    It transposes to `pbroadcast` for a varying value, to `reduced` for an unreduced one; neither communicates.
    `x` is a tree of arrays; each result has its array's shape and dtype (booleans are counted, as integers).
    A value that does not vary along an axis is multiplied by the axis's size, without communication: so
    `psum(1, 'i')` is the number of ranks. For a traced value this is rarely intended: a VarianceWarning says so. (In a
    `shard_map` with `auto_pbroadcast=False` this raises VarianceError, except for Python numbers.) Pass several axes
    as a tuple or a set, as in `psum(x, md.typeof(x).variance)`. Raises UnboundAxisError if no enclosing `shard_map` or
    `vmap` has such an axis.

    >>> f = lambda x: psum(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([7, 2])

    `axis_index_groups` partitions the indices along the axis into lists; each group is summed separately. Groups may
    differ, so this is varying -> varying and its own transpose. (If the groups are rows or columns of a grid, prefer a
    mesh with two axes: a psum over one of them is typed as invariant along it.) Raises ValueError if an index is
    missing, out of range or repeated.

    >>> pairs = lambda x: psum(x, 'i', axis_index_groups=[[0, 2], [1, 3]])
    >>> md.vmap(pairs, axis_name='i')(np.array([3, 1, 4, 1]))
    array([7, 2, 7, 2])

    With `exact`, the sum is rounded once, to the nearest number: so it has the same bits in any order, on any ranks,
    fused or not. With `axis`, it is also over this axis of the blocks, without rounding in between, and so the same on
    any number of ranks among which the axis is split; it then transposes to `pcopies`. Such sums take longer, and send
    about twice the bytes; they have no groups. `make_mesh(..., exact_sums=True)` makes all sums over a mesh exact.

    >>> f = lambda x: psum(x, 'i', exact=True, axis=0)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([1e16, 1.0, 1.0, -1e16])).item()
    2.0

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum".
    """
    if exact or axis is not None:
        return checks.exact_psum(x, axis_name, axis_index_groups, exact, axis)
    axis_groups = collective_axes("psum", axis_name, axis_index_groups, uniform=False, ordered=False)
    if len(axis_groups) == 1:
        return each_leaf(_psum, x, axis_groups[0])
    return each_leaf(lambda leaf: run_in_float32(lambda x: functools.reduce(_psum, axis_groups, x), array_of(leaf)), x)


def _psum(x: Value, group: CollectiveAxes) -> Value:
    scope = group.scope
    if not isinstance(x, Tracer) and (is_scalar_constant(x) or not scope.checks) and group.uniform:
        return as_plain(x, tree.class_names) * as_factor(group.size, x)
    x = convert_booleans(array_of(x))
    if group.groups is None and states_of(x).varying.issuperset(group.axes):  # most sums are of such a value
        return bind_over(psum_p, x, group)
    varying = varying_axes(x, group)
    if not varying and group.uniform:
        checks.copies_summed(group.axes, group.size)
        return sum_copies(x, group.size)
    if not scope.typed or group.groups is not None:
        return bind_over(untyped_psum_p, make_varying(x, group), group)
    part = group if varying == group.axes else group._replace(axes=varying)
    copies = 1 if part is group else group.size // part.size
    if copies == 1:
        return bind_over(psum_p, parts_over(x, part), part)
    checks.copies_summed(tuple(a for a in group.axes if a not in varying), copies)
    return run_in_float32(lambda x: bind_over(psum_p, sum_copies(parts_over(x, part), copies), part), x)


def pmean(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Return the mean over ranks: `psum(x) / psum(1)`. Varying -> invariant.

        x:              [a]        [b]        {i}
        pmean(x, 'i'):  [(a+b)/2]  [(a+b)/2]
        backward:       [u]        [u]  ->  [u/2]  [u/2]  {i}

    Integers and booleans become float64 before they are summed, as in `np.mean`. A value that does not vary along an
    axis is its own mean there. `axis_index_groups` are as in `psum`, but all of the same size. Raises UnboundAxisError
    and ValueError as `psum` does.

    >>> f = lambda x: pmean(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3.0, 1.0, 4.0, 1.0]))
    array([3.5, 1. ])

    Source: shard_map tutorial, "8-way batch data parallelism".
    """
    axis_groups = collective_axes("pmean", axis_name, axis_index_groups, ordered=False)

    def mean(x):
        count = 1
        for group in axis_groups:
            if axes := varying_axes(x, group):
                part = group._replace(axes=axes) if axes != group.axes and group.groups is None else group
                x, count = _psum(x, part), count * part.size
        return x if count == 1 else x / count

    def mean_of_leaf(leaf):
        if is_scalar_constant(leaf):
            return as_plain(leaf, tree.class_names) * 1.0
        leaf = array_of(leaf)
        for group in axis_groups:
            check_explicit("pmean", leaf, group)
        return run_in_float32(mean, reduction.as_inexact(leaf))

    return each_leaf(mean_of_leaf, x)


def all_gather(
    x: Tree,
    axis_name: AxisName,
    axis: int = 0,
    tiled: bool = False,
    *,
    axis_index_groups: Any = None,
    to: str = VARYING,
) -> Tree:
    """Return all ranks' blocks, on every rank: stacked, or with `tiled` concatenated.

        x:                               [a]      [b]      {i}
        all_gather(x, 'i', tiled=True):  [a,b]    [a,b]    {i}
        backward:                        [u0,u1]  [v0,v1]  {i}  ->  [u0+v0]  [u1+v1]  {i}

    Blocks are placed along `axis`. Shapes over n ranks: [a, b] -> [n, a, b], tiled [n*a, b]. Varying -> varying;
    transposes to `psum_scatter`. With `axis_index_groups` (as in `psum`, but all of the same size n), gather within
    each group. `to` is the state of the result: with `"invariant"` it is `all_gather_invariant`; with `"reduced"` the
    result is reduced, and its transpose is the `psum_scatter` of an unreduced value. Raises ValueError for an
    unknown `to`.

    >>> f = lambda x: all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_gather".
    """
    if to not in _GATHERS or (axis_index_groups is not None and to != VARYING):
        states = ", ".join(map(repr, _GATHERS)) if axis_index_groups is None else f"{VARYING!r}, with axis_index_groups"
        raise ValueError(f"all_gather: to={to!r}; write one of {states}")
    return _all_gather(_GATHERS[to], x, collective_axes("all_gather", axis_name, axis_index_groups), axis, tiled)


#: `all_gather` by the state of its result.
_GATHERS = {p.gives: p for p in (all_gather_p, all_gather_invariant_p, all_gather_reduced_p)}


def all_gather_invariant(x: Tree, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Tree:
    """`all_gather` with a result typed as invariant. Transposes to `pscatter`.

        x:                                         [a]    [b]    {i}
        all_gather_invariant(x, 'i', tiled=True):  [a,b]  [a,b]
        backward:                                  [u,v]  [u,v]  ->  [u]  [v]  {i}

    >>> f = lambda x: all_gather_invariant(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 9]))
    array([3, 9])

    Source: JEP 17111, Example 4.
    """
    return _all_gather(all_gather_invariant_p, x, collective_axes("all_gather_invariant", axis_name), axis, tiled)


def _all_gather(primitive: Collective, x: Any, axis_groups: Sequence[CollectiveAxes], axis: int, tiled: bool) -> Any:
    def step(leaf, group, at, tiled):
        gather_p = primitive if group.scope.typed else all_gather_p
        return bind_over(gather_p, make_varying(leaf, group), group, axis=at, tiled=tiled)

    return each_leaf(lambda leaf: gather_over(primitive.name, step, leaf, axis_groups, axis, tiled), x)


def psum_scatter(
    x: Tree, axis_name: AxisName, scatter_dimension: int = 0, tiled: bool = False, *, axis_index_groups: Any = None
) -> Tree:
    """Return the sum over ranks, scattered: each rank gets its part (a reduce-scatter).

        x:                                 [a0,a1]  [b0,b1]  {i}
        psum_scatter(x, 'i', tiled=True):  [a0+b0]  [a1+b1]  {i}
        backward:                          [u]      [v]      {i}  ->  [u,v]  [u,v]  {i}

    Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Varying -> varying, and transposes to `all_gather`; or
    unreduced -> varying, and transposes to `all_gather(to='reduced')`.
    With `axis_index_groups` (as in `psum`, but all of the same size n), sum and scatter within each group.
    Raises ValueError if the dimension cannot be split over the ranks.

    >>> f = lambda x: psum_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum_scatter".
    """
    axis_groups = collective_axes("psum_scatter", axis_name, axis_index_groups)

    def step(leaf, group, at, tiled):
        return bind_over(psum_scatter_p, convert_booleans(parts_over(leaf, group)), group, axis=at, tiled=tiled)

    def scattered(leaf):
        return scatter_over("psum_scatter", step, leaf, axis_groups, scatter_dimension, tiled)

    return each_leaf(scattered if len(axis_groups) == 1 else lambda leaf: run_in_float32(scattered, array_of(leaf)), x)


def pscatter(x: Tree, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Tree:
    """Return the local slice of an invariant or reduced value, which varies.

        x:                             [a,b]  [a,b]
        pscatter(x, 'i', tiled=True):  [a]    [b]    {i}
        backward:                      [u]    [v]    {i}  ->  [u,v]  [u,v]

    It does not communicate. Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. For an invariant value it
    transposes to `all_gather_invariant`. For a reduced value the transpose does not communicate: it places the slice in
    zeros, as the rank's partial sum. Indexing by `axis_index` gives the same numbers, but the compiler does not see
    that it is a local slice: only `pscatter` of a psum becomes a `psum_scatter`.

    >>> f = lambda x: pscatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 1, 4, 1], P('i'))

    Source: JEP 17111, table of collectives and Example 4.
    """
    axis_groups = collective_axes("pscatter", axis_name)
    return each_leaf(lambda leaf: scatter_over("pscatter", local_slice, leaf, axis_groups, axis, tiled), x)


def local_slice(x: Value, group: CollectiveAxes, axis: int, tiled: bool) -> Value:
    """`pscatter` of one array; if it is reduced or untyped, index it by `axis_index`."""
    is_reduced = not states_of(x).reduced.isdisjoint(group.axes)
    if group.scope.typed and not is_reduced:
        pscatter_p.check_variance([typeof(x)], group.params)
        return bind_over(pscatter_p, x, group, axis=axis, tiled=tiled)
    index = axis_index(group.axes)
    x = make_varying(x, group) if is_reduced else x
    if tiled:
        shape = typeof(x).shape
        x = x.reshape((*shape[:axis], group.size, shape[axis] // group.size, *shape[axis + 1 :]))
    return indexing.getitem(x, (slice(None),) * axis + (index,))


def all_to_all(
    x: Tree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    *,
    axis_index_groups: Any = None,
    splits: Any = None,
    capacity: int | None = None,
) -> Tree:
    """Send part k along `split_axis` to rank k; put parts along `concat_axis`.

        x:                                     [a0,a1]  [b0,b1]  {i}
        all_to_all(x, 'i', 0, 0, tiled=True):  [a0,b0]  [a1,b1]  {i}
        backward:                              [u0,u1]  [v0,v1]  {i}  ->  [u0,v0]  [u1,v1]  {i}

    Shapes over n ranks, split_axis=0, concat_axis=1: [n, b] -> [b, n], tiled [n*a, b] -> [a, n*b].
    Varying -> varying; transposes to itself with the two axes swapped. With `axis_index_groups` (as in `psum`, but all
    of the same size n), it runs within each group.

    >>> f = lambda x: all_to_all(x, 'i', split_axis=0, concat_axis=0, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 4, 1, 1], P('i'))

    With `splits`, parts may have different lengths: `splits[s][d]` rows go from rank s to rank d. Rows are counted
    along `split_axis`, which must equal `concat_axis`. (So rank r's input splits are `splits[r]`, and its output splits
    are column r.) The table is the same on all ranks, and so are block shapes: an operand has as many rows as the rank
    that sends most, a result as many as the rank that receives most. Rows beyond a rank's own are padding: they are not
    sent, and are zeros in the result. MPI sends only the rows in `splits`; reports count whole operands. It transposes
    to itself with `splits` transposed.

    >>> ragged = lambda x: all_to_all(x, 'i', 0, 0, splits=[[1, 2], [2, 0]])
    >>> spmd.shard_map(ragged, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([1, 2, 3, 4, 5, 6]))
    ShardedArray([1, 4, 5, 2, 3, 0], P('i'))

    Splits may be known at run time only: an array of integers. The operand and the result then have room for any number
    of rows, the result for `capacity`. Every rank must have the whole table. Where each knows only its own row, gather
    them first: a small collective, of one integer for each pair of ranks. The way back needs no other: its table is
    `splits.T`. If a rank sends or receives more rows than there is room for, all ranks raise ValueError.

    >>> def even_and_odd(x):  # even numbers go to rank 0, odd ones to rank 1
    ...     row = np.stack([np.sum(x % 2 == 0), np.sum(x % 2 == 1)])
    ...     splits, x = all_gather_invariant(row, 'i'), x[np.argsort(x % 2, stable=True)]
    ...     return all_to_all(x, 'i', 0, 0, splits=splits, capacity=4)
    >>> spmd.shard_map(even_and_odd, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([1, 2, 4, 5, 7, 9]))
    ShardedArray([2, 4, 0, 0, 1, 5, 7, 9], P('i'))

    Raises ValueError if the dimension cannot be split in this way.

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_to_all"; MPI standard, `MPI_Alltoallv`.
    """
    group = single_axes("all_to_all", axis_name, axis_index_groups)

    def each(leaf):
        leaf = make_varying(array_of(leaf), group)
        split, concat = (normalize_axis(a, typeof(leaf).ndim, "all_to_all") for a in (split_axis, concat_axis))
        if splits is not None or capacity is not None:
            table, rows = checks.splits("all_to_all", leaf, (split, concat), splits, group, capacity)
            leaf = make_varying(leaf, group._replace(axes=tuple(states_of(table).varying.difference(group.axes))))
            return ragged_all_to_all_p.bind(leaf, array_of(table), **group.params, axis=split, rows=rows)
        checks.split("all_to_all", leaf, split, group.size, tiled)
        return bind_over(all_to_all_p, leaf, group, split_axis=split, concat_axis=concat, tiled=tiled)

    return each_leaf(each, x)


def ppermute(x: Tree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Tree:
    """Send blocks from rank to rank, for each (source, destination) in `perm`.

        x:                           [a]  [b]  {i}
        ppermute(x, 'i', [(0, 1)]):  [0]  [a]  {i}
        backward:                    [u]  [v]  {i}  ->  [v]  [0]  {i}

    A rank that is not a destination gets zeros. Varying -> varying; transposes to the reversed permutation.
    Raises TypeError if `perm` is not a list of pairs, ValueError for a source or a destination that is repeated or out
    of range.

    >>> f = lambda x: ppermute(x, 'i', [(0, 1), (1, 0)])
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 3, 1], P('i'))

    Source: shard_map tutorial, "ppermute".
    """
    group = single_axes("ppermute", axis_name)
    ranks = checks.permutation("ppermute", axis_name, group, perm)
    return each_leaf(lambda leaf: bind_over(ppermute_p, make_varying(array_of(leaf), group), group, perm=ranks), x)


def shift(x: Tree, axis_name: AxisName, by: int) -> Tree:
    """Send each value `by` ranks further around the ring of an axis (`ppermute`).

    >>> f = lambda x: shift(x, 'i', 1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 3, 1], P('i'))
    """
    n = axis_size(axis_name)
    return ppermute(x, axis_name, [(rank, (rank + by) % n) for rank in range(n)])


def axis_index(axis_name: AxisName) -> Value:
    """Return this rank's index along an axis, or several in order: a varying integer.

        x:                none
        axis_index('i'):  [0]  [1]  {i}
        backward:         none

    >>> f = lambda x: x + 10 * axis_index('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([ 3,  1, 14, 11], P('i'))

    Source: JEP 17111, table of collectives.
    """
    index: Value = 0
    for k, group in enumerate(collective_axes("axis_index", axis_name)):
        along_group = axis_index_p.bind(axes=group.axes, typed=group.scope.typed)
        index = index * group.size + along_group if k else along_group
    return index


def axis_size(axis_name: Axes) -> int:
    """Return the number of ranks along an axis, or along several together.

        x:               none
        axis_size('i'):  [2]  [2]
        backward:        none

    >>> f = lambda x: x + 10 * axis_size('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([23, 21, 24, 21], P('i'))
    """
    return rank_count(collective_axes("axis_size", axis_name, ordered=False))
