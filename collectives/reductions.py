"""Further reductions over ranks, and scans: extrema, products, tests of booleans, user-defined functions, prefix sums.

========== ==================== ============ ====================
operation  type                 communicates transpose
========== ==================== ============ ====================
pmax, pmin varying -> invariant all-reduce   (not linear)
pprod      varying -> invariant all-reduce   (not linear)
pscan      varying -> varying   scan         pscan, the other way
========== ==================== ============ ====================

`pany` and `pall` are extrema of booleans, and `preduce` gathers. The examples and drawings are of the same two ranks as
those of `ops.py`, which explains them.

Source: MPI standard, chapter "Collective Communication".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from collectives.axes import Axes, AxisName, CollectiveAxes, collective_axes, single_axes
from collectives.collective import Collective, grouped_collective
from collectives.operands import array_of, bind_over, convert_booleans, each_leaf, make_varying, varying_axes
from collectives.ops import Tree, all_gather, psum, untyped_psum_p
from minidiff import tree
from minidiff.core.primitive import Primitive
from minidiff.core.states import INVARIANT, VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.ops import elementwise, reduction
from minidiff.ops.base import run_in_float32

# ---------------------------------------------------------------- the table

pscan_p = Collective(
    "pscan",
    {VARYING: lambda: pscan_p},
    VARYING,
    transpose_params=lambda reverse, **_: {"reverse": not reverse},
    cost="recursive_doubling_scan",
    sums=True,
)


class Extremum(Collective):
    """`pmax` and `pmin`: ranks that attain the extremum share the derivative equally."""

    transpose = Primitive.transpose
    is_linear_in = Primitive.is_linear_in

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)

        def shared(t):
            attained = elementwise.convert(elementwise.equal(x, out), typeof(t).dtype)
            return _sum_likewise(elementwise.multiply(attained, t), params) / _sum_likewise(attained, params)

        return out, run_in_float32(shared, t)


def _sum_likewise(x: Value, params: dict) -> Value:
    """Sum `x` over the axes and groups of a collective with these parameters."""
    return grouped_collective(untyped_psum_p).bind(x, **params) if "groups" in params else psum(x, params["axes"])


pmax_p = Extremum("pmax", {VARYING: None}, INVARIANT, cost="ring_all_reduce")
pmin_p = Extremum("pmin", {VARYING: None}, INVARIANT, cost="ring_all_reduce")


class ProductOverRanks(Extremum):
    """`pprod`: its derivative is that of the product of gathered factors, so it is right where some are zero."""

    def jvp(self, primals, tangents, params):
        to = VARYING if "groups" in params else INVARIANT
        every = [
            all_gather(x, params["axes"], axis_index_groups=params.get("groups"), to=to) for x in (*primals, *tangents)
        ]
        return reduction.prod_p.jvp(every[:1], every[1:], {"axes": (0,)})


pprod_p = ProductOverRanks("pprod", {VARYING: None}, INVARIANT, cost="ring_all_reduce", sums=True)

#: The collectives of this table.
REDUCTIONS = (pmax_p, pmin_p, pprod_p, pscan_p)

# ---------------------------------------------------------------- public functions


def pmax(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Return the elementwise maximum over ranks. Varying -> invariant.

        x:             [1]  [4]  {i}
        pmax(x, 'i'):  [4]  [4]
        backward:      [u]  [u]  ->  [0]  [u]  {i}

    Tied ranks share the derivative. The derivative counts the tied ranks with an all-reduce in the forward pass; the
    backward pass does not communicate. With `axis_index_groups`, as in `psum`: varying -> varying.

    >>> f = lambda x: pmax(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([4, 1])
    """
    return extremum_over(pmax_p, x, axis_name, axis_index_groups)


def pmin(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Return the elementwise minimum over ranks; otherwise like `pmax`.

        x:             [1]  [4]  {i}
        pmin(x, 'i'):  [1]  [1]
        backward:      [u]  [u]  ->  [u]  [0]  {i}

    >>> f = lambda x: pmin(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([3, 1])
    """
    return extremum_over(pmin_p, x, axis_name, axis_index_groups)


def extremum_over(primitive: Extremum, x: Any, axis_name: Axes, groups: Any, name: str = "") -> Any:
    axis_groups = collective_axes(name or primitive.name, axis_name, groups, uniform=False, ordered=False)

    def extremum(leaf):
        leaf = array_of(leaf)
        if typeof(leaf).dtype.kind == "c":
            raise TypeError(f"{primitive.name}: complex numbers have no order, got {typeof(leaf)}")
        return reduce_over(primitive, leaf, axis_groups)

    return each_leaf(extremum, x)


def reduce_over(
    primitive: Extremum, x: Value, axis_groups: Sequence[CollectiveAxes], repeat: Callable = lambda x, ranks: x
) -> Value:
    """Reduce along each axis group. `ranks` ranks that have the same x have the result `repeat(x, ranks)`."""
    primitive.result_states([typeof(x)], {"axes": ()})  # raises for unreduced values
    for group in axis_groups:
        same = group.size
        if varying := varying_axes(x, group):
            part = group._replace(axes=varying) if group.groups is None else group
            x, same = bind_over(primitive, make_varying(x, part), part), group.size // part.size
        x = repeat(x, same) if same > 1 else x
    return x


def pprod(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Return the elementwise product over ranks. Varying -> invariant.

        x:              [a]    [b]    {i}
        pprod(x, 'i'):  [a*b]  [a*b]
        backward:       [u]    [u]  ->  [u*b]  [u*a]  {i}

    A value that does not vary along an axis is raised to the power of the axis's size. The derivative gathers the
    factors in the forward pass, so it is right at zeros too; the backward pass does not communicate. With
    `axis_index_groups`, as in `pmean`: varying -> varying.

    >>> f = lambda x: pprod(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 5]))
    array([12,  5])

    Source: MPI standard, `MPI_PROD`.
    """
    axis_groups = collective_axes("pprod", axis_name, axis_index_groups, ordered=False)
    product = lambda leaf: reduce_over(pprod_p, convert_booleans(array_of(leaf)), axis_groups, operator.pow)  # noqa: E731
    return each_leaf(product, x)


def pany(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Whether an element is true, or not zero, on any rank: booleans. Varying -> invariant.

        x:             [0]     [1]     {i}
        pany(x, 'i'):  [True]  [True]
        backward:      none

    All ranks agree on the result, so that it may decide whether they leave a loop. It is the `pmax` of booleans.

    >>> f = lambda x: pany(x > 3, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([ True, False])
    """
    return extremum_over(pmax_p, is_true(x), axis_name, axis_index_groups, "pany")


def pall(x: Tree, axis_name: Axes, *, axis_index_groups: Any = None) -> Tree:
    """Whether an element is true, or not zero, on all ranks; otherwise like `pany`.

        x:             [0]      [1]      {i}
        pall(x, 'i'):  [False]  [False]
        backward:      none

    >>> f = lambda x: pall(x > 0, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 0, 4, 1]))
    array([ True, False])
    """
    return extremum_over(pmin_p, is_true(x), axis_name, axis_index_groups, "pall")


def is_true(x: Any) -> Any:
    return each_leaf(lambda leaf: elementwise.not_equal(array_of(leaf), 0), x)


def preduce(
    x: Tree, axis_name: AxisName, combine: Callable[[Tree, Tree], Tree], *, axis_index_groups: Any = None
) -> Tree:
    """Combine all ranks' trees in rank order, two at a time, with `combine`. Varying -> invariant.

        x:                          [a]    [b]    {i}
        preduce(x, 'i', multiply):  [a*b]  [a*b]
        backward:                   [u]    [u]  ->  [u*b]  [u*a]  {i}

    `combine` is associative, and need not be commutative; it returns a tree of the same structure and types, such as a
    pair of a number and its index, or the count, mean and squared deviations of a sample. Every rank gathers all
    trees, one `all_gather_invariant` for each leaf, and combines them; derivatives are those of `combine`. With
    `axis_index_groups` of one size, it runs within each group: varying -> varying.

    >>> from collectives import axis_index
    >>> def larger(a, b):
    ...     return md.tree.map(lambda p, q: np.where(a[0] >= b[0], p, q), a, b)
    >>> f = lambda x: preduce((x, axis_index('i')), 'i', larger)  # the maximum, and the first rank that has it
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    (array([4, 1]), array([1, 0]))

    Source: MPI standard, `MPI_Op_create` and `MPI_MAXLOC`.
    """
    for group in reversed(collective_axes("preduce", axis_name, axis_index_groups)):
        to = INVARIANT if group.groups is None else VARYING
        every = all_gather(x, group.axes, axis_index_groups=group.groups, to=to)
        x = functools.reduce(combine, [tree.map(lambda leaf, k=k: leaf[k], every) for k in range(group.size)])
    return x


def pscan(x: Tree, axis_name: AxisName, *, reverse: bool = False, exclusive: bool = False) -> Tree:
    """Return the sum of the blocks of the ranks up to this one: a prefix sum (MPI_Scan).

        x:              [a]  [b]    {i}
        pscan(x, 'i'):  [a]  [a+b]  {i}
        backward:       [u]  [v]    {i}  ->  [u+v]  [v]  {i}

    With `exclusive`, the sum of those before this rank (MPI_Exscan): zeros on the first one. With `reverse`, ranks are
    counted from the last one. `x` is a tree of arrays; booleans are counted. Varying -> varying; transposes to itself
    in the other direction. An exclusive scan of lengths says where each rank's entries begin in the whole array.

    >>> f = lambda x: pscan(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 1, 7, 2], P('i'))
    >>> f = lambda x: pscan(x, 'i', exclusive=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([0, 0, 3, 1], P('i'))

    Source: MPI standard, `MPI_Scan` and `MPI_Exscan`.
    """
    group = single_axes("pscan", axis_name)
    direction = {"reverse": bool(reverse), "exclusive": bool(exclusive)}
    return each_leaf(
        lambda leaf: bind_over(pscan_p, convert_booleans(make_varying(array_of(leaf), group)), group, **direction), x
    )
