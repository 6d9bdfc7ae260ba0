"""The collectives as operations: the type and the transpose of each (the JEP's table, as code).

===================== ======================= ============== ======================
operation             type                    communicates   transpose
===================== ======================= ============== ======================
psum                  varying -> invariant    all-reduce     pbroadcast
psum, in groups       varying -> varying      all-reduce     psum, in groups
pbroadcast            invariant -> varying    no             psum
all_gather            varying -> varying      all-gather     psum_scatter
psum_scatter          varying -> varying      reduce-scatter all_gather
all_gather_invariant  varying -> invariant    all-gather     pscatter
pscatter              invariant -> varying    no             all_gather_invariant
all_to_all            varying -> varying      all-to-all     all_to_all
ragged_all_to_all     varying -> varying      all-to-all     ragged_all_to_all
ppermute              varying -> varying      point to point ppermute, reversed
axis_index            () -> varying           no             (integers)
pmax, pmin            varying -> invariant    all-reduce     (not linear)
===================== ======================= ============== ======================

What holds for all of them is in `kinds.py`, those with a root (broadcast, reduce, gather, scatter) are in `rooted.py`,
what each means in `reference.py`, what they may be told to run along in `along.py`. With `axis_index_groups` an
operation runs in each of several groups of the ranks for itself: what is the same in a group may differ between groups,
so all results vary, and the transpose is that without groups, in the same groups. `ragged_all_to_all` is `all_to_all`
of parts of different lengths.

Source: "Efficient transposition of replication-inducing collectives" (JEP 17111), the table in the
section "Tracking device invariance in avals". How they run is in `stacked.py` and `mpi.py`.

Where the running `shard_map` has `check_rep=False` there are no types: `psum` is then an operation
that is its own transpose, and the two operations that exist for the types' sake are done without.
So it is along the axis of a `vmap(f, axis_name=...)`, whose elements are ranks as well: they are stacked,
and the collectives run in `stacked.py`. A collective may name axes of both kinds together.

The examples take for granted `np`, `md`, `spmd`, `P` (which is `spmd.P`), and two ranks along one axis:
`mesh = spmd.make_mesh((2,), ('i',), backend='simulated')`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy

from collectives.axes import (
    Axes,
    AxisName,
    CollectiveAxes,
    axes_in_scope,
    check_perm,
    check_split,
    check_splits,
    collective_axes,
    grouped_axes,
    most,
    rank_count,
    single_axes,
)
from collectives.primitives import (
    INVARIANT,
    VARYING,
    AxisIndex,
    Collective,
    batches,
    check_operand,
    gathered_shape,
    grouped,
    same_shape,
    scattered_shape,
    transposes_to,
)
from minidiff import core, tree
from minidiff.core import (
    Primitive,
    Scope,
    ShapedArray,
    Tracer,
    Value,
    VarianceError,
    current_scope,
    enter,
    is_scalar_constant,
    plain,
    running,
    typeof,
)
from minidiff.forward import as_value
from minidiff.ops import elementwise, indexing
from minidiff.ops.shape import expand_dims, normalize_axis, squeeze

# ---------------------------------------------------------------- the table


def _exchanged_shape(x: ShapedArray, axes, size, split_axis, concat_axis, tiled, **params):
    shape = list(x.shape)
    if tiled:
        shape[split_axis] //= size
        shape[concat_axis] *= size
    else:
        del shape[split_axis]
        shape.insert(concat_axis, size)
    return tuple(shape), x.dtype


def _ragged_shape(x: ShapedArray, axes, size, axis, splits):
    return (*x.shape[:axis], most(zip(*splits)), *x.shape[axis + 1 :]), x.dtype


psum_p = Collective("psum", VARYING, INVARIANT, True, same_shape, transposes_to(lambda: pbroadcast_p), batches())
pbroadcast_p = Collective("pbroadcast", INVARIANT, VARYING, False, same_shape, transposes_to(lambda: psum_p), batches())
all_gather_p = Collective(
    "all_gather", VARYING, VARYING, True, gathered_shape, transposes_to(lambda: psum_scatter_p), batches("axis")
)
psum_scatter_p = Collective(
    "psum_scatter", VARYING, VARYING, True, scattered_shape, transposes_to(lambda: all_gather_p), batches("axis")
)
all_gather_invariant_p = Collective(
    "all_gather_invariant", VARYING, INVARIANT, True, gathered_shape, transposes_to(lambda: pscatter_p), batches("axis")
)
pscatter_p = Collective(
    "pscatter",
    INVARIANT,
    VARYING,
    False,
    scattered_shape,
    transposes_to(lambda: all_gather_invariant_p),
    batches("axis"),
)
all_to_all_p = Collective(
    "all_to_all",
    VARYING,
    VARYING,
    True,
    _exchanged_shape,
    transposes_to(
        lambda: all_to_all_p,
        split_axis=lambda params: params["concat_axis"],
        concat_axis=lambda params: params["split_axis"],
    ),
    batches("split_axis", "concat_axis"),
)
ragged_all_to_all_p = Collective(
    "ragged_all_to_all",
    VARYING,
    VARYING,
    True,
    _ragged_shape,
    transposes_to(lambda: ragged_all_to_all_p, splits=lambda params: tuple(zip(*params["splits"]))),
    batches("axis"),
)
ppermute_p = Collective(
    "ppermute",
    VARYING,
    VARYING,
    True,
    same_shape,
    transposes_to(lambda: ppermute_p, perm=lambda params: tuple((d, s) for s, d in params["perm"])),
    batches(),
)

pbroadcast_p.is_view = True
pbroadcast_p.shares_memory = pscatter_p.shares_memory = True

#: `psum` without types: what it returns may, for all that is known, vary; so it transposes to itself.
untyped_psum_p = Collective(
    "psum", VARYING, VARYING, True, same_shape, transposes_to(lambda: untyped_psum_p), batches()
)


class Extremum(Collective):
    """`pmax` and `pmin`: the derivative is shared equally among the ranks that attain the extremum."""

    def __init__(self, name: str, gives: str = INVARIANT):
        super().__init__(name, VARYING, gives, True, same_shape, None, batches())

    def jvp(self, primals, tangents, params):
        (x,), (t,) = primals, tangents
        out = self.bind(x, **params)
        attained = elementwise.convert(elementwise.equal(x, out), typeof(t).dtype)
        return out, _sum_likewise(elementwise.multiply(attained, t), params) / _sum_likewise(attained, params)

    transpose = Primitive.transpose

    def in_groups(self) -> Extremum:
        return Extremum(self.name, VARYING)


def _sum_likewise(x: Value, params: dict) -> Value:
    """The sum of what a collective with these parameters takes together."""
    return grouped(untyped_psum_p).bind(x, **params) if "groups" in params else psum(x, params["axes"])


pmax_p = Extremum("pmax")
pmin_p = Extremum("pmin")


axis_index_p = AxisIndex()


# ---------------------------------------------------------------- lifting


def insert_pbroadcast(x: Value, axes: frozenset) -> Value:
    """`x` typed as varying along further `axes`: one `pbroadcast` for a value and axes, however often it is used.

    It is made where the value belongs: at its interpreter, or at the body's lowest if it is a plain array.
    A view is lifted by lifting what it is a view of, and taking the view again.
    """
    scope = current_scope()
    owner = x.interpreter if isinstance(x, Tracer) else scope.bottom
    key = (id(x), axes)
    if key not in owner.lifted:
        with running(owner):
            owner.lifted.update(((id(old), axes), (old, new)) for old, new in _inserted_pbroadcasts(x, axes, scope))
    return owner.lifted[key][1]


def _inserted_pbroadcasts(x: Value, axes: frozenset, scope: Scope) -> Iterable[tuple[Value, Value]]:
    """`x` and its `pbroadcast`, or those of all results of the operation of which `x` is one view."""
    view = scope.view_of(x)
    if view is None or view[1] is pbroadcast_p:
        return [(x, _pbroadcast(x, axes, scope))]
    views, primitive, operand, params = view
    found = primitive.bind(insert_pbroadcast(operand, axes), **params)
    return zip(views, found if primitive.multiple_results else [found])


def _pbroadcast(x: Value, axes: Collection[str], scope: Scope) -> Value:
    return pbroadcast_p.bind(x, **axes_in_scope(scope, axes).params)


def varying_type(t: ShapedArray, axes: Collection[str]) -> ShapedArray:
    """The type of a value of type `t`, lifted along these axes."""
    return t.update(variance=t.variance.union(axes))


core.insert_pbroadcast = insert_pbroadcast


# ---------------------------------------------------------------- operands


def array_of(x: Any) -> Value:
    """A leaf as a value that the running body knows."""
    return enter(x) if isinstance(x, Tracer) else as_value(x)


def each_leaf(collective: Callable[[Any], Value], x: Any) -> Any:
    """A collective of each leaf of a tree. Where one's variance is wrong, the error says which."""
    leaves, structure = tree.flatten(x)
    results: list[Value] = []
    try:
        for leaf in leaves:
            results.append(collective(leaf))
    except VarianceError as error:
        path = tree.paths(structure, "x")[len(results)]
        if path == "x":
            raise
        raise VarianceError(f"{path}: {error}") from None
    return tree.unflatten(structure, results)


def varying_over(x: Value, run: CollectiveAxes) -> Value:
    """`x` lifted where it does not vary along the axes (or refused, when the collective is applied to it)."""
    missing = frozenset(run.axes) - typeof(x).variance
    if not missing or not run.scope.typed or (run.scope.checks and not is_scalar_constant(x)):
        return x
    return insert_pbroadcast(x, missing)


def check_written(name: str, x: Value, run: CollectiveAxes) -> None:
    """Raise VarianceError where a function that takes varying values is given another, which the user must lift."""
    if run.scope.checks and not is_scalar_constant(x):
        check_operand(name, VARYING, typeof(x), run.params)


def varying_axes(x: Value, run: CollectiveAxes) -> tuple[str, ...]:
    """Of the axes those that `x` varies along (or, where there are no types or the user writes all, as told)."""
    if not run.scope.typed or (run.scope.checks and not is_scalar_constant(x)):
        return run.axes
    return tuple(a for a in run.axes if a in typeof(x).variance)


def counted(x: Value) -> Value:
    """Booleans as integers: they are counted where others are summed."""
    if is_scalar_constant(x):
        return as_value(int(x)) if isinstance(x, (bool, numpy.bool_)) else x
    return elementwise.convert(x, int) if x.dtype == bool else x


def times(x: Value, copies: int) -> Value:
    """The sum of so many copies."""
    return x if copies == 1 else x * as_factor(copies, x)


def as_factor(copies: int, x: Value | ShapedArray) -> int:
    """A number of copies as what `x` is multiplied by: small integers wrap around, as where they are added up."""
    dtype = getattr(x, "dtype", None)  # Python's own numbers have none
    return int(numpy.asarray(copies).astype(dtype)) if dtype is not None and dtype.kind in "iu" else copies


def bind_over(primitive: Collective, x: Value, run: CollectiveAxes, **params: Any) -> Value:
    """A collective of `x`, over the ranks it is told."""
    primitive = primitive if run.groups is None else grouped(primitive)
    return primitive.bind(x, **run.params, **params)


# ---------------------------------------------------------------- what users call


def psum(x: Any, axis_name: Axes, *, axis_index_groups: Any = None) -> Any:
    """The sum over ranks: an all-reduce. Varying -> invariant; transposes to `pbroadcast`.

    `x` is a tree of arrays; each result has its array's shape and dtype (booleans are counted, as integers).
    A value that does not vary along an axis is multiplied by the axis's size, without communication: so
    `psum(1, 'i')` is the number of ranks. (But for numbers, it is a VarianceError in a `shard_map` with
    `auto_pbroadcast=False`.) Several axes are a tuple or a set, as in `psum(x, md.typeof(x).variance)`. Raises
    UnboundAxisError where no `shard_map` or `vmap` around it has an axis.

    >>> f = lambda x: psum(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([7, 2])

    With `axis_index_groups`, lists of indices along the axis with each index in one, it is the sum over the ranks of
    each group. Groups may differ, so: varying -> varying, its own transpose. (Where groups are rows or columns of a
    grid, a mesh with two axes says more: a psum over one is typed as the same along it.) Raises ValueError where an
    index is missing, is none or occurs twice.

    >>> pairs = lambda x: psum(x, 'i', axis_index_groups=[[0, 2], [1, 3]])
    >>> md.vmap(pairs, axis_name='i')(np.array([3, 1, 4, 1]))
    array([7, 2, 7, 2])

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum".
    """
    runs = grouped_axes("psum", axis_name, axis_index_groups, alike=False, ordered=False)
    return each_leaf(lambda leaf: _psum_runs(leaf, runs), x)


def _psum_runs(x: Value, runs: Sequence[CollectiveAxes]) -> Value:
    for run in runs:
        x = _psum(x, run)
    return x


def _psum(x: Value, run: CollectiveAxes) -> Value:
    scope = run.scope
    if not isinstance(x, Tracer) and (is_scalar_constant(x) or not scope.checks) and run.alike:
        return plain(x, is_leaf=True) * as_factor(run.size, x)
    x = counted(array_of(x))
    varying = varying_axes(x, run)
    if not varying and run.alike:
        return times(x, run.size)
    if not scope.typed or run.groups is not None:
        return bind_over(untyped_psum_p, varying_over(x, run), run)
    part = run._replace(axes=varying)
    return bind_over(psum_p, times(x, run.size // part.size), part)


def pmean(x: Any, axis_name: Axes, *, axis_index_groups: Any = None) -> Any:
    """The mean over ranks: `psum(x) / psum(1)`. Varying -> invariant; over groups as `psum`, all of one size.

    >>> f = lambda x: pmean(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3.0, 1.0, 4.0, 1.0]))
    array([3.5, 1. ])

    Source: shard_map tutorial, "8-way batch data parallelism".
    """
    runs = grouped_axes("pmean", axis_name, axis_index_groups, ordered=False)

    def mean(leaf):
        for run in runs:
            check_written("pmean", array_of(leaf), run)
        return _psum_runs(leaf, runs) / rank_count(runs)

    return each_leaf(mean, x)


def pmax(x: Any, axis_name: Axes, *, axis_index_groups: Any = None) -> Any:
    """The maximum over ranks, element by element. Varying -> invariant; ranks that tie share the derivative.

    Its derivative counts the ranks that tie, by an all-reduce on the way forward; the way back communicates nothing.
    Over groups, as `psum`: varying -> varying.

    >>> f = lambda x: pmax(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([4, 1])
    """
    return _extremum(pmax_p, x, axis_name, axis_index_groups)


def pmin(x: Any, axis_name: Axes, *, axis_index_groups: Any = None) -> Any:
    """The minimum over ranks, element by element; as `pmax`.

    >>> f = lambda x: pmin(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([3, 1])
    """
    return _extremum(pmin_p, x, axis_name, axis_index_groups)


def _extremum(primitive: Extremum, x: Any, axis_name: Axes, groups: Any) -> Any:
    runs = grouped_axes(primitive.name, axis_name, groups, alike=False, ordered=False)

    def extremum(leaf):
        leaf = array_of(leaf)
        if typeof(leaf).dtype.kind == "c":
            raise TypeError(f"{primitive.name}: complex numbers have no order, got {typeof(leaf)}")
        for run in runs:
            varying = varying_axes(leaf, run)
            if varying and run.groups is not None:
                leaf = bind_over(primitive, varying_over(leaf, run), run)
            elif varying:
                leaf = bind_over(primitive, leaf, run._replace(axes=varying))
        return leaf

    return each_leaf(extremum, x)


def pbroadcast(x: Any, axis_name: Axes) -> Any:
    """The same value, typed as varying: invariant -> varying, without communication. Transposes to `psum`.

    Operations insert it by themselves where their operands disagree, once for each value; in a `shard_map` with
    `auto_pbroadcast=False` it is written, and done as often as it is. Raises VarianceError for a value that varies
    along one of the axes already. (To send one rank's value to all is `broadcast`.)

    >>> f = lambda x: pbroadcast(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([3, 1, 3, 1], P('i'))

    Source: JEP 17111, "Full solution".
    """
    axes = tuple(
        a for run in collective_axes("pbroadcast", axis_name, ordered=False) if run.scope.typed for a in run.axes
    )
    if not axes:
        return x
    scope = current_scope()

    def broadcast(leaf):
        leaf = array_of(leaf)
        pbroadcast_p.check_variance([typeof(leaf)], {"axes": axes})
        if scope.checks:  # it is done where it is written, as often as it is written
            return _pbroadcast(leaf, axes, scope)
        return insert_pbroadcast(leaf, frozenset(axes))

    return each_leaf(broadcast, x)


def all_gather(
    x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False, *, axis_index_groups: Any = None
) -> Any:
    """All ranks' blocks, on every rank: stacked along a new `axis`, or with `tiled` joined along that axis.

    Shapes over n ranks: [a, b] -> [n, a, b], tiled [n*a, b]. Varying -> varying; transposes to `psum_scatter`.
    With `axis_index_groups`, as in `psum` but of one size n, those of each group.

    >>> f = lambda x: all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_gather".
    """
    return _all_gather(all_gather_p, x, grouped_axes("all_gather", axis_name, axis_index_groups), axis, tiled)


def all_gather_invariant(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """As `all_gather`, with a result typed as the same on all ranks. Varying -> invariant; transposes to `pscatter`.

    >>> f = lambda x: all_gather_invariant(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 9]))
    array([3, 9])

    Source: JEP 17111, Example 4.
    """
    return _all_gather(all_gather_invariant_p, x, collective_axes("all_gather_invariant", axis_name), axis, tiled)


def _all_gather(primitive: Collective, x: Any, runs: Sequence[CollectiveAxes], axis: int, tiled: bool) -> Any:
    def step(leaf, run, at, tiled):
        gather_p = primitive if run.scope.typed else all_gather_p
        return bind_over(gather_p, varying_over(leaf, run), run, axis=at, tiled=tiled)

    return each_leaf(lambda leaf: join_runs(primitive.name, step, leaf, runs, axis, tiled), x)


def join_runs(name: str, step: Callable, leaf: Any, runs: Sequence[CollectiveAxes], axis: int, tiled: bool) -> Value:
    """Blocks of all ranks of several runs put together by `step`, one run after the other, the last one first."""
    leaf = array_of(leaf)
    at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), name)
    if len(runs) != 1 and not tiled:  # along an axis that is there already
        leaf, tiled = expand_dims(leaf, at), True
    for run in reversed(runs):
        leaf = step(leaf, run, at, tiled)
    return leaf


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    scatter_dimension: int = 0,
    tiled: bool = False,
    *,
    axis_index_groups: Any = None,
) -> Any:
    """The sum over ranks, of which each rank gets its part: a reduce-scatter.

    Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Varying -> varying; transposes to `all_gather`.
    With `axis_index_groups`, as in `psum` but of one size n, the sum over each group.
    Raises ValueError where the dimension cannot be split over the ranks.

    >>> f = lambda x: psum_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum_scatter".
    """
    runs = grouped_axes("psum_scatter", axis_name, axis_index_groups)

    def step(leaf, run, at, tiled):
        return bind_over(psum_scatter_p, counted(varying_over(leaf, run)), run, axis=at, tiled=tiled)

    return each_leaf(lambda leaf: split_runs("psum_scatter", step, leaf, runs, scatter_dimension, tiled), x)


def split_runs(name: str, step: Callable, leaf: Any, runs: Sequence[CollectiveAxes], axis: int, tiled: bool) -> Value:
    """A dimension split by `step` over all ranks of several runs, over those of the first run first."""
    leaf = array_of(leaf)
    at = normalize_axis(axis, typeof(leaf).ndim, name)
    check_split(name, leaf, at, rank_count(runs), tiled)
    cut = tiled or len(runs) != 1
    for run in runs:
        leaf = step(leaf, run, at, cut)
    return leaf if cut == tiled else squeeze(leaf, at)


def pscatter(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """Each rank's part of a value that all ranks have: invariant -> varying, without communication.

    Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Transposes to `all_gather_invariant`. Indexing by
    `axis_index` gives the same numbers, but does not say so: compiled, only `pscatter` of a psum is a `psum_scatter`.

    >>> f = lambda x: pscatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 1, 4, 1], P('i'))

    Source: JEP 17111, table of collectives and Example 4.
    """
    runs = collective_axes("pscatter", axis_name)
    return each_leaf(lambda leaf: split_runs("pscatter", local_slice, leaf, runs, axis, tiled), x)


def local_slice(x: Value, run: CollectiveAxes, axis: int, tiled: bool) -> Value:
    """`pscatter` of one array; where there are no types each rank indexes its own copy."""
    if run.scope.typed:
        pscatter_p.check_variance([typeof(x)], run.params)
        return bind_over(pscatter_p, x, run, axis=axis, tiled=tiled)
    index = axis_index(run.axes)
    if tiled:
        shape = typeof(x).shape
        x = x.reshape((*shape[:axis], run.size, shape[axis] // run.size, *shape[axis + 1 :]))
    return indexing.getitem(x, (slice(None),) * axis + (index,))


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    *,
    axis_index_groups: Any = None,
    splits: Any = None,
) -> Any:
    """A transposition of blocks: part k of `split_axis` goes to rank k, what arrives is put along `concat_axis`.

    Shapes over n ranks, split_axis=0, concat_axis=1: [n, b] -> [b, n], tiled [n*a, b] -> [a, n*b].
    Varying -> varying; transposes to itself with the axes exchanged. With `axis_index_groups`, as in `psum` but of
    one size n, within each group.

    >>> f = lambda x: all_to_all(x, 'i', split_axis=0, concat_axis=0, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 4, 1, 1], P('i'))

    Parts may be of different lengths: `splits[s][d]` rows go from rank s to rank d, where rows are along `split_axis`,
    which is the `concat_axis` too. (So rank r has the input splits `splits[r]`, and as output splits column r.) It is
    the same table on all ranks, and blocks have one shape: of as many rows as the rank needs that sends most, or
    receives most. Those beyond a rank's own are not sent; they arrive as zeros. MPI moves what `splits` says, and
    reports count the longest block. It transposes to itself with `splits` transposed.

    >>> ragged = lambda x: all_to_all(x, 'i', 0, 0, splits=[[1, 2], [2, 0]])
    >>> spmd.shard_map(ragged, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([1, 2, 3, 4, 5, 6]))
    ShardedArray([1, 4, 5, 2, 3, 0], P('i'))

    Raises ValueError where the dimension cannot be split so.

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_to_all"; MPI standard, `MPI_Alltoallv`.
    """
    if splits is not None:
        if axis_index_groups is not None:
            raise ValueError("all_to_all: splits say what every rank sends to every other: leave out axis_index_groups")
        run = single_axes("all_to_all", axis_name)
        return each_leaf(lambda leaf: _ragged(leaf, run, split_axis, concat_axis, splits), x)
    run = single_axes("all_to_all", axis_name, axis_index_groups)

    def exchange(leaf):
        leaf = varying_over(array_of(leaf), run)
        ndim = typeof(leaf).ndim
        split = normalize_axis(split_axis, ndim, "all_to_all")
        concat = normalize_axis(concat_axis, ndim, "all_to_all")
        check_split("all_to_all", leaf, split, run.size, tiled)
        return bind_over(all_to_all_p, leaf, run, split_axis=split, concat_axis=concat, tiled=tiled)

    return each_leaf(exchange, x)


def _ragged(x: Any, run: CollectiveAxes, split_axis: int, concat_axis: int, splits: Any) -> Value:
    x = varying_over(array_of(x), run)
    axis, other = (normalize_axis(a, typeof(x).ndim, "all_to_all") for a in (split_axis, concat_axis))
    if axis != other:
        raise ValueError(
            f"all_to_all: parts of different lengths along axis {axis} fit together along that alone, not along "
            f"{other}: write concat_axis={split_axis}"
        )
    splits = check_splits("all_to_all", splits, run.size)
    if typeof(x).shape[axis] != most(splits):
        raise ValueError(
            f"all_to_all: axis {axis} of {typeof(x)} must have {most(splits)} rows: as many as the rank sends that, by "
            "these splits, sends most; others have further rows, which are not sent"
        )
    return bind_over(ragged_all_to_all_p, x, run, axis=axis, splits=splits)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Blocks sent from rank to rank: `perm` lists pairs (source, destination) of indices along the axis.

    A rank that is no destination gets zeros. Varying -> varying; transposes to the permutation reversed.
    Raises ValueError for a source or a destination that occurs twice or is no rank.

    >>> f = lambda x: ppermute(x, 'i', [(0, 1), (1, 0)])
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 3, 1], P('i'))

    Source: shard_map tutorial, "ppermute".
    """
    run = single_axes("ppermute", axis_name)
    pairs = [tuple(pair) if numpy.iterable(pair) else () for pair in perm] if numpy.iterable(perm) else [()]
    if any(len(pair) != 2 for pair in pairs):
        raise TypeError(
            f"ppermute: perm is {perm!r}; write a list of pairs (source, destination), such as [(0, 1), (1, 0)]"
        )
    pairs = tuple((int(source), int(destination)) for source, destination in pairs)
    check_perm("ppermute", pairs, axis_name, run.size)
    return each_leaf(lambda leaf: bind_over(ppermute_p, varying_over(array_of(leaf), run), run, perm=pairs), x)


def shifted(x: Any, axis_name: AxisName, by: int) -> Any:
    """Everyone's value, `by` ranks further along the ring of an axis: a `ppermute`.

    >>> f = lambda x: shifted(x, 'i', 1)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 3, 1], P('i'))
    """
    n = axis_size(axis_name)
    return ppermute(x, axis_name, [(rank, (rank + by) % n) for rank in range(n)])


def axis_index(axis_name: AxisName) -> Value:
    """This rank's index along an axis, or along several counted in the order given: an integer that varies there.

    >>> f = lambda x: x + 10 * axis_index('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([ 3,  1, 14, 11], P('i'))

    Source: JEP 17111, table of collectives.
    """
    index: Value = 0
    for k, run in enumerate(collective_axes("axis_index", axis_name)):
        here = axis_index_p.bind(axes=run.axes, typed=run.scope.typed)
        index = index * run.size + here if k else here
    return index


def axis_size(axis_name: Axes) -> int:
    """How many ranks there are along an axis, or along several together.

    >>> f = lambda x: x + 10 * axis_size('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([23, 21, 24, 21], P('i'))
    """
    return rank_count(collective_axes("axis_size", axis_name, ordered=False))
