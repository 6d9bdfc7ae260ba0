"""The collectives as operations: the type and the transpose of each (the JEP's table, as code).

===================== ======================= ============== ======================
operation             type                    communicates   transpose
===================== ======================= ============== ======================
psum                  varying -> invariant    all-reduce     pbroadcast
pbroadcast            invariant -> varying    no             psum
all_gather            varying -> varying      all-gather     psum_scatter
psum_scatter          varying -> varying      reduce-scatter all_gather
all_gather_invariant  varying -> invariant    all-gather     pscatter
pscatter              invariant -> varying    no             all_gather_invariant
all_to_all            varying -> varying      all-to-all     all_to_all
ppermute              varying -> varying      point to point ppermute, reversed
axis_index            () -> varying           no             (integers)
pmax, pmin            varying -> invariant    all-reduce     (not linear)
===================== ======================= ============== ======================

Source: "Efficient transposition of replication-inducing collectives" (JEP 17111), the table in the
section "Tracking device invariance in avals". How they run is in `stacked.py` and `mpi.py`.

Where the running `shard_map` has `check_rep=False` there are no types: `psum` is then an operation
that is its own transpose, and the two operations that exist for the types' sake are done without.
So it is along the axis of a `vmap(f, axis_name=...)`, whose elements are ranks as well: they are stacked,
and the collectives run in `stacked.py`. A collective may name axes of both kinds together.

The examples take for granted `np`, `spmd`, `P` (which is `spmd.P`), and two ranks along one axis:
`mesh = spmd.make_mesh((2,), ('i',), backend='simulated')`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collectives.stacked import Stacked
from minidiff import core, tree
from minidiff.batching import Batch, BatchTracer, named_axes
from minidiff.core import (
    Primitive,
    Scope,
    ShapedArray,
    Tracer,
    UnboundAxisError,
    Value,
    VarianceError,
    current_interpreter,
    current_scope,
    enter,
    is_scalar_constant,
    running,
    show_axes,
    typeof,
)
from minidiff.forward import as_value
from minidiff.ops import elementwise, indexing
from minidiff.ops.kinds import Linear
from minidiff.ops.shape import broadcast_to, expand_dims, normalize_axis, squeeze

AxisName = str | tuple[str, ...]

VARYING = "varying"
INVARIANT = "invariant"

# ---------------------------------------------------------------- declaration


class Collective(Linear):
    """An operation across ranks: takes values varying or invariant along its axes, and gives such.

    Every one has the parameters `axes`, in the order in which ranks are counted, and `size`, how many
    ranks that makes. It runs in the backend of the mesh, by its name.
    """

    lifts_operands = False
    on_ranks = True

    def __init__(self, name, takes, gives, communicates, shape_rule, transpose_rule, batch_rule):
        super().__init__(name, functools.partial(_unbound, name), shape_rule, transpose_rule, batch_rule)
        self.takes = takes
        self.gives = gives
        self.communicates = communicates

    def typecheck(self, types, params):
        (x,) = types
        shape, dtype = self.shape_rule(x, **params)
        return [ShapedArray(shape, dtype, self.result_variance(x.variance, params))]

    def sends(self, params):
        return self.communicates and params["size"] > 1  # a rank alone has all there is

    def result_variance(self, variance: frozenset, params: dict) -> frozenset:
        """The variance of the result, from that of the operand."""
        if self.takes == self.gives:
            return variance
        return variance.difference(params["axes"]) if self.gives == INVARIANT else variance.union(params["axes"])

    def apply_checked(self, interpreter, args, params):
        if interpreter.scope.axes.keys() >= set(params["axes"]):
            return super().apply_checked(interpreter, args, params)
        return self.apply(interpreter, args, params)  # over the axis of a vmap, which types do not know

    def check_variance(self, types, params):
        for x in types:
            wrong = tuple(a for a in params["axes"] if (a in x.variance) != (self.takes == VARYING))
            if wrong:
                takes, has, instead = _WRONG[self.takes]
                instead = _INSTEAD.get(self.name, instead).format(axes=show_axes(wrong))
                raise VarianceError(
                    f"{self.name} over {show_axes(params['axes'])} takes a value that {takes} there, but {x} {has} "
                    f"{show_axes(wrong)}: {instead}"
                )

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        """Over the axis of a named batch, whose elements are the ranks."""
        (x,) = args
        name = "all_gather_invariant" if self.name == "all_gather" else self.name  # no copy for each element
        held = (batch.axis_name,) if batch.owns(x) else ()
        return _unstacked(batch, *_ranks(batch).collective(name, batch.in_front(x), held, False, params))

    def show_params(self, params):
        others = [f"{k}={v!r}" for k, v in params.items() if k not in ("axes", "size")]
        return ", ".join([show_axes(params["axes"]), *others])


def _ranks(batch: Batch) -> Stacked:
    """The elements of a named batch as simulated ranks."""
    return Stacked({batch.axis_name: batch.size_of_batch})


def _unstacked(batch: Batch, data: Value, held: tuple) -> Value:
    return BatchTracer(batch, data, 0) if held else data


def _unbound(name: str, *args: Value, axes: tuple[str, ...], **params: Any) -> Value:
    raise UnboundAxisError(f"{name} over {axes}: nothing binds these axes where it is run; it was recorded in a vmap")


#: What an operand of the wrong variance should do, what it does, and what to write instead.
_WRONG = {
    VARYING: ("varies", "is the same on all ranks along", "write pbroadcast(x, {axes}) for it"),
    INVARIANT: ("is the same on all ranks", "already varies along", "leave those axes out"),
}
_INSTEAD = {
    "psum": "for the sum of so many copies write x * axis_size({axes}), or psum of pbroadcast(x, {axes})",
    "pmax": "it is the maximum itself: leave those axes out",
    "pmin": "it is the minimum itself: leave those axes out",
    "pscatter": "each rank has a value of its own there. Leave those axes out; or first make it the same, with psum or "
    "all_gather_invariant over {axes}",
}


def _same_shape(x: ShapedArray, **params):
    return x.shape, x.dtype


def _gathered_shape(x: ShapedArray, axes, size, axis, tiled):
    if tiled:
        return (*x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], size, *x.shape[axis:]), x.dtype


def _scattered_shape(x: ShapedArray, axes, size, axis, tiled):
    if tiled:
        return (*x.shape[:axis], x.shape[axis] // size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype


def _exchanged_shape(x: ShapedArray, axes, size, split_axis, concat_axis, tiled):
    shape = list(x.shape)
    if tiled:
        shape[split_axis] //= size
        shape[concat_axis] *= size
    else:
        del shape[split_axis]
        shape.insert(concat_axis, size)
    return tuple(shape), x.dtype


def _batch(*array_axes: str) -> Callable:
    """Along a batch axis put in front, a collective is itself, its array axes counted from one further."""

    def rule(primitive, args, batched, **params):
        return primitive.bind(*args, **{k: v + 1 if k in array_axes else v for k, v in params.items()})

    return rule


def _transpose_to(find: Callable[[], Primitive], **changes: Callable) -> Callable:
    """The transpose is another collective over the same axes; `changes` are parameters computed anew."""

    def rule(ct, operands, **params):
        new = {name: change(params) for name, change in changes.items()}
        return [find().bind(ct, **{**params, **new})]

    return rule


# ---------------------------------------------------------------- the table

psum_p = Collective("psum", VARYING, INVARIANT, True, _same_shape, _transpose_to(lambda: pbroadcast_p), _batch())
pbroadcast_p = Collective("pbroadcast", INVARIANT, VARYING, False, _same_shape, _transpose_to(lambda: psum_p), _batch())
all_gather_p = Collective(
    "all_gather", VARYING, VARYING, True, _gathered_shape, _transpose_to(lambda: psum_scatter_p), _batch("axis")
)
psum_scatter_p = Collective(
    "psum_scatter", VARYING, VARYING, True, _scattered_shape, _transpose_to(lambda: all_gather_p), _batch("axis")
)
all_gather_invariant_p = Collective(
    "all_gather_invariant", VARYING, INVARIANT, True, _gathered_shape, _transpose_to(lambda: pscatter_p), _batch("axis")
)
pscatter_p = Collective(
    "pscatter",
    INVARIANT,
    VARYING,
    False,
    _scattered_shape,
    _transpose_to(lambda: all_gather_invariant_p),
    _batch("axis"),
)
all_to_all_p = Collective(
    "all_to_all",
    VARYING,
    VARYING,
    True,
    _exchanged_shape,
    _transpose_to(
        lambda: all_to_all_p,
        split_axis=lambda params: params["concat_axis"],
        concat_axis=lambda params: params["split_axis"],
    ),
    _batch("split_axis", "concat_axis"),
)
ppermute_p = Collective(
    "ppermute",
    VARYING,
    VARYING,
    True,
    _same_shape,
    _transpose_to(lambda: ppermute_p, perm=lambda params: tuple((d, s) for s, d in params["perm"])),
    _batch(),
)

pbroadcast_p.is_view = True
pbroadcast_p.shares_memory = pscatter_p.shares_memory = True

#: `psum` without types: what it returns may, for all that is known, vary; so it transposes to itself.
untyped_psum_p = Collective(
    "psum", VARYING, VARYING, True, _same_shape, _transpose_to(lambda: untyped_psum_p), _batch()
)


class Together(Collective):
    """A collective on several values in one call: a result for each of them. All its rules follow from the one's.

    The values have one dtype; along other axes they may vary differently. (It is made for all-reduces, which take
    numbers one by one: nothing in them depends on the shapes of what they take.)
    """

    multiple_results = True

    def __init__(self, of: Collective):
        super().__init__(of.name, of.takes, of.gives, of.communicates, None, None, None)
        self.each = of

    def typecheck(self, types, params):
        if len({t.dtype for t in types}) > 1:
            raise TypeError(f"{self.name} of several values takes such of one dtype, got {', '.join(map(str, types))}")
        return [t for x in types for t in self.each.typecheck([x], params)]

    def jvp(self, primals, tangents, params):
        moving = [i for i, t in enumerate(tangents) if t is not None]
        moved = dict(zip(moving, self.bind(*[tangents[i] for i in moving], **params)))
        return self.bind(*primals, **params), [moved.get(i) for i in range(len(primals))]

    def transpose(self, cts, operands, params):
        return [None if ct is None else self.each.transpose(ct, [x], params)[0] for ct, x in zip(cts, operands)]

    def batch(self, args, batched, params):
        size = next(x.shape[0] for x, yes in zip(args, batched) if yes)
        results = self.bind(*args, **params)
        return [
            x if yes else broadcast_to(expand_dims(x, 0), (size, *typeof(x).shape)) for x, yes in zip(results, batched)
        ]

    def batch_along(self, batch, args, params):
        return [self.each.batch_along(batch, [x], params) for x in args]


#: `together(psum_p)` is `psum` of several values.
together = functools.cache(Together)


class Extremum(Collective):
    """`pmax` and `pmin`: the derivative is shared equally among the ranks that attain the extremum."""

    def __init__(self, name: str):
        super().__init__(name, VARYING, INVARIANT, True, _same_shape, None, _batch())

    def jvp(self, primals, tangents, params):
        (x,), (t,), axes = primals, tangents, params["axes"]
        out = self.bind(x, **params)
        attained = elementwise.convert(elementwise.equal(x, out), typeof(t).dtype)
        return out, psum(elementwise.multiply(attained, t), axes) / psum(attained, axes)

    transpose = Primitive.transpose


pmax_p = Extremum("pmax")
pmin_p = Extremum("pmin")


class AxisIndex(Primitive):
    """The rank's index along some axes: an integer, varying along them where the body is typed."""

    on_ranks = True

    def __init__(self):
        super().__init__("axis_index", functools.partial(_unbound, "axis_index"))

    def typecheck(self, types, params):
        return [ShapedArray((), int, params["axes"] if params["typed"] else ())]

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        return _unstacked(batch, *_ranks(batch).axis_index(params["axes"]))

    def show_params(self, params):
        return show_axes(params["axes"])


axis_index_p = AxisIndex()


# ---------------------------------------------------------------- lifting


def lift(x: Value, axes: frozenset) -> Value:
    """`x` typed as varying along further `axes`: one `pbroadcast` for a value and axes, however often it is used.

    It is made where the value belongs: at its interpreter, or at the body's lowest if it is a plain array.
    A view is lifted by lifting what it is a view of, and taking the view again.
    """
    scope = current_scope()
    owner = x.interpreter if isinstance(x, Tracer) else scope.bottom
    key = (id(x), axes)
    if key not in owner.lifted:
        with running(owner):
            owner.lifted[key] = (x, _lift(x, axes, scope))
    return owner.lifted[key][1]


def _lift(x: Value, axes: frozenset, scope: Scope) -> Value:
    view = scope.view_of(x)
    if view is not None and view[0] is not pbroadcast_p:
        primitive, operand, params = view
        return primitive.bind(lift(operand, axes), **params)
    return _pbroadcast(x, axes, scope)


def _pbroadcast(x: Value, axes: Iterable[str], scope: Scope) -> Value:
    ordered = tuple(a for a in scope.axes if a in axes)
    return pbroadcast_p.bind(x, axes=ordered, size=_size(scope, ordered))


core.lift = lift


# ---------------------------------------------------------------- arguments


def _groups(name: str, axis_name: Any) -> list[tuple[Scope, tuple[str, ...]]]:
    """The axes named, checked, in groups that one operation may run over: with each the scope that binds it.

    The axes of a mesh are bound together by the running body; each that a vmap has named is a scope of its own,
    without types.
    """
    scope, vmapped = current_scope(), named_axes(current_interpreter())
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    groups: list[tuple[Scope, tuple[str, ...]]] = []
    for axis in axes:
        _check_bound(name, axis_name, axis, scope, vmapped)
        if axis in vmapped:
            groups.append((Scope({axis: vmapped[axis]}, typed=False), (axis,)))
        elif groups and groups[-1][0] is scope:
            groups[-1] = (scope, (*groups[-1][1], axis))
        else:
            groups.append((scope, (axis,)))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: an axis is named twice in {axis_name!r}")
    return groups


def _check_bound(name: str, axis_name: Any, axis: str, scope: Scope | None, vmapped: dict) -> None:
    if scope is None and not vmapped:
        raise UnboundAxisError(
            f"{name} over {axis_name!r} was called outside a shard_map: the axes of a mesh are bound in its body only "
            f"(and those of vmap(f, axis_name=...) in f)"
        )
    mesh = () if scope is None else tuple(scope.axes)
    if axis not in mesh and axis not in vmapped:
        bound = [f"the axes of this shard_map's mesh are {mesh}"] if mesh else []
        bound += [f"those named by a vmap are {tuple(vmapped)}"] if vmapped else []
        raise UnboundAxisError(f"{name}: no axis {axis!r} is bound here; {', '.join(bound)}")
    if axis in mesh and axis in vmapped:
        raise ValueError(f"{name}: an axis of the mesh and that of a vmap are both named {axis!r}: rename one")


def _scope(name: str, axis_name: Any) -> tuple[Scope, tuple[str, ...]]:
    """The axes named, checked, and the scope that binds them all."""
    groups = _groups(name, axis_name)
    if len(groups) != 1:
        raise ValueError(
            f"{name} over {axis_name!r}: an axis named by a vmap cannot be taken together with others; "
            "write one collective for each"
        )
    return groups[0]


def _ranks_along(groups: Sequence[tuple[Scope, tuple[str, ...]]]) -> int:
    return math.prod(_size(scope, axes) for scope, axes in groups)


def _size(scope: Scope, axes: Sequence[str]) -> int:
    return math.prod(scope.axes[a] for a in axes)


def _array(x: Any) -> Value:
    """A leaf as a value that the running body knows."""
    return enter(x) if isinstance(x, Tracer) else as_value(x)


def _varying(x: Value, scope: Scope, axes: Sequence[str]) -> Value:
    """`x` lifted where it does not vary along `axes` (or refused, when the collective is applied to it)."""
    missing = frozenset(axes) - typeof(x).variance
    return lift(x, missing) if missing and scope.typed and not scope.checks else x


def _axes_of(x: Value, scope: Scope, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that a reduction of `x` is over: those that it varies along (or, where the user writes all, as told)."""
    if not scope.typed or (scope.checks and not is_scalar_constant(x)):
        return axes
    return tuple(a for a in axes if a in typeof(x).variance)


def _split_check(name: str, x: Value, axis: int, size: int, tiled: bool) -> None:
    length = typeof(x).shape[axis]
    if tiled and length % size:
        raise ValueError(f"{name}: axis {axis} of {typeof(x)} is split over {size} ranks, which do not divide {length}")
    if not tiled and length != size:
        raise ValueError(
            f"{name}: axis {axis} of {typeof(x)} must have one entry for each of the {size} ranks; "
            "with tiled=True it may have any multiple"
        )


# ---------------------------------------------------------------- what users call


def psum(x: Any, axis_name: AxisName) -> Any:
    """The sum over ranks: an all-reduce. Varying -> invariant; transposes to `pbroadcast`.

    `x` is a tree of arrays; each result has its array's shape and dtype (booleans are counted, as integers).
    A value that does not vary along an axis is multiplied by the axis's size, without communication: so
    `psum(1, 'i')` is the number of ranks. (But for numbers, it is a VarianceError in a `shard_map` with
    `auto_pbroadcast=False`.) Raises UnboundAxisError where no `shard_map` or `vmap` around it has that axis.

    >>> f = lambda x: psum(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([7, 2])

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum".
    """
    groups = _groups("psum", axis_name)
    return tree.map(lambda leaf: _psum_groups(leaf, groups), x)


def _psum_groups(x: Value, groups: Sequence[tuple[Scope, tuple[str, ...]]]) -> Value:
    for scope, axes in groups:
        x = _psum(x, scope, axes)
    return x


def _psum(x: Value, scope: Scope, axes: tuple[str, ...]) -> Value:
    if not isinstance(x, Tracer) and (is_scalar_constant(x) or not scope.checks):
        return x * _size(scope, axes)
    x = enter(x)
    if x.dtype == bool:
        x = elementwise.convert(x, int)
    if not scope.typed:
        return untyped_psum_p.bind(x, axes=axes, size=_size(scope, axes))
    varying = _axes_of(x, scope, axes)
    copies = _size(scope, axes) // _size(scope, varying)
    x = x * copies if copies != 1 else x
    return psum_p.bind(x, axes=varying, size=_size(scope, varying)) if varying else x


def pmean(x: Any, axis_name: AxisName) -> Any:
    """The mean over ranks: `psum(x) / psum(1)`. Varying -> invariant.

    >>> f = lambda x: pmean(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3.0, 1.0, 4.0, 1.0]))
    array([3.5, 1. ])

    Source: shard_map tutorial, "8-way batch data parallelism".
    """
    groups = _groups("pmean", axis_name)
    return tree.map(lambda leaf: _psum_groups(leaf, groups) / _ranks_along(groups), x)


def pmax(x: Any, axis_name: AxisName) -> Any:
    """The maximum over ranks, element by element. Varying -> invariant; ranks that tie share the derivative.

    >>> f = lambda x: pmax(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([4, 1])
    """
    return _extremum(pmax_p, x, axis_name)


def pmin(x: Any, axis_name: AxisName) -> Any:
    """The minimum over ranks, element by element. Varying -> invariant; ranks that tie share the derivative.

    >>> f = lambda x: pmin(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([3, 1])
    """
    return _extremum(pmin_p, x, axis_name)


def _extremum(primitive: Extremum, x: Any, axis_name: AxisName) -> Any:
    groups = _groups(primitive.name, axis_name)

    def extremum(leaf):
        leaf = _array(leaf)
        if typeof(leaf).dtype.kind == "c":
            raise TypeError(f"{primitive.name}: complex numbers have no order, got {typeof(leaf)}")
        for scope, axes in groups:
            varying = _axes_of(leaf, scope, axes)
            leaf = primitive.bind(leaf, axes=varying, size=_size(scope, varying)) if varying else leaf
        return leaf

    return tree.map(extremum, x)


def pbroadcast(x: Any, axis_name: AxisName) -> Any:
    """The same value, typed as varying: invariant -> varying, without communication. Transposes to `psum`.

    Operations insert it by themselves where their operands disagree, once for each value; in a `shard_map` with
    `auto_pbroadcast=False` it is written, and done as often as it is. Raises VarianceError for a value that varies
    along one of the axes already.

    >>> f = lambda x: pbroadcast(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([3, 1, 3, 1], P('i'))

    Source: JEP 17111, "Full solution".
    """
    axes = tuple(a for scope, axes in _groups("pbroadcast", axis_name) if scope.typed for a in axes)
    if not axes:
        return x
    scope = current_scope()

    def broadcast(leaf):
        leaf = _array(leaf)
        pbroadcast_p.check_variance([typeof(leaf)], {"axes": axes})
        if scope.checks:  # it is done where it is written, as often as it is written
            return _pbroadcast(leaf, axes, scope)
        return lift(leaf, frozenset(axes))

    return tree.map(broadcast, x)


def all_gather(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """All ranks' blocks, on every rank: stacked along a new `axis`, or with `tiled` joined along that axis.

    Shapes over n ranks: [a, b] -> [n, a, b], tiled [n*a, b]. Varying -> varying; transposes to `psum_scatter`.

    >>> f = lambda x: all_gather(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 9]))
    ShardedArray([3, 9, 3, 9], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_gather".
    """
    return _gather(all_gather_p, x, axis_name, axis, tiled)


def all_gather_invariant(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """As `all_gather`, with a result typed as the same on all ranks. Varying -> invariant; transposes to `pscatter`.

    >>> f = lambda x: all_gather_invariant(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 9]))
    array([3, 9])

    Source: JEP 17111, Example 4.
    """
    return _gather(all_gather_invariant_p, x, axis_name, axis, tiled)


def _gather(primitive: Collective, x: Any, axis_name: AxisName, axis: int, tiled: bool) -> Any:
    groups = _groups(primitive.name, axis_name)

    def gather(leaf):
        leaf = _array(leaf)
        at = normalize_axis(axis, typeof(leaf).ndim + (not tiled), primitive.name)
        joined = tiled
        if len(groups) > 1 and not tiled:  # one group after the other, along an axis that is there already
            leaf, joined = expand_dims(leaf, at), True
        for scope, axes in reversed(groups):
            leaf = _varying(leaf, scope, axes)
            gather_p = primitive if scope.typed else all_gather_p
            leaf = gather_p.bind(leaf, axes=axes, size=_size(scope, axes), axis=at, tiled=joined)
        return leaf

    return tree.map(gather, x)


def psum_scatter(x: Any, axis_name: AxisName, scatter_dimension: int = 0, tiled: bool = False) -> Any:
    """The sum over ranks, of which each rank gets its part: a reduce-scatter.

    Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Varying -> varying; transposes to `all_gather`.
    Raises ValueError where the dimension cannot be split over the ranks.

    >>> f = lambda x: psum_scatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([7, 2], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "psum_scatter".
    """
    groups = _groups("psum_scatter", axis_name)

    def scatter(leaf, scope, axes, at, tiled):
        leaf = _varying(leaf, scope, axes)
        if leaf.dtype == bool:
            leaf = elementwise.convert(leaf, int)
        return psum_scatter_p.bind(leaf, axes=axes, size=_size(scope, axes), axis=at, tiled=tiled)

    return tree.map(lambda leaf: _scatter_groups("psum_scatter", scatter, leaf, groups, scatter_dimension, tiled), x)


def _scatter_groups(name: str, scatter: Callable, leaf: Any, groups: Sequence, axis: int, tiled: bool) -> Value:
    """A dimension split over all ranks of several groups, over those of the first group first."""
    leaf = _array(leaf)
    at = normalize_axis(axis, typeof(leaf).ndim, name)
    _split_check(name, leaf, at, _ranks_along(groups), tiled)
    cut = tiled or len(groups) > 1
    for scope, axes in groups:
        leaf = scatter(leaf, scope, axes, at, cut)
    return leaf if cut == tiled else squeeze(leaf, at)


def pscatter(x: Any, axis_name: AxisName, axis: int = 0, tiled: bool = False) -> Any:
    """Each rank's part of a value that all ranks have: invariant -> varying, without communication.

    Shapes over n ranks: [n, b] -> [b], tiled [n*a, b] -> [a, b]. Transposes to `all_gather_invariant`.

    >>> f = lambda x: pscatter(x, 'i', tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 1, 4, 1], P('i'))

    Source: JEP 17111, table of collectives and Example 4.
    """
    groups = _groups("pscatter", axis_name)

    def scatter(leaf, scope, axes, at, tiled):
        size = _size(scope, axes)
        if not scope.typed:
            return _own_part(leaf, axes, size, at, tiled)
        pscatter_p.check_variance([typeof(leaf)], {"axes": axes})
        return pscatter_p.bind(leaf, axes=axes, size=size, axis=at, tiled=tiled)

    return tree.map(lambda leaf: _scatter_groups("pscatter", scatter, leaf, groups, axis, tiled), x)


def _own_part(x: Value, axes: tuple[str, ...], size: int, axis: int, tiled: bool) -> Value:
    """`pscatter` without types: each rank indexes its own copy."""
    index = axis_index(axes)
    if tiled:
        shape = typeof(x).shape
        x = x.reshape((*shape[:axis], size, shape[axis] // size, *shape[axis + 1 :]))
    return indexing.getitem(x, (slice(None),) * axis + (index,))


def all_to_all(x: Any, axis_name: AxisName, split_axis: int, concat_axis: int, tiled: bool = False) -> Any:
    """A transposition of blocks: part k of `split_axis` goes to rank k, what arrives is put along `concat_axis`.

    Shapes over n ranks, split_axis=0, concat_axis=1: [n, b] -> [b, n], tiled [n*a, b] -> [a, n*b].
    Varying -> varying; transposes to itself with the axes exchanged.

    >>> f = lambda x: all_to_all(x, 'i', split_axis=0, concat_axis=0, tiled=True)
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([3, 4, 1, 1], P('i'))

    Source: JEP 17111, table of collectives; shard_map tutorial, "all_to_all".
    """
    scope, axes = _scope("all_to_all", axis_name)

    def exchange(leaf):
        leaf = _varying(_array(leaf), scope, axes)
        ndim, size = typeof(leaf).ndim, _size(scope, axes)
        split = normalize_axis(split_axis, ndim, "all_to_all")
        concat = normalize_axis(concat_axis, ndim, "all_to_all")
        _split_check("all_to_all", leaf, split, size, tiled)
        return all_to_all_p.bind(leaf, axes=axes, size=size, split_axis=split, concat_axis=concat, tiled=tiled)

    return tree.map(exchange, x)


def ppermute(x: Any, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Any:
    """Blocks sent from rank to rank: `perm` lists pairs (source, destination) of indices along the axis.

    A rank that is no destination gets zeros. Varying -> varying; transposes to the permutation reversed.
    Raises ValueError for a source or a destination that occurs twice or is no rank.

    >>> f = lambda x: ppermute(x, 'i', [(0, 1), (1, 0)])
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([4, 1, 3, 1], P('i'))

    Source: shard_map tutorial, "ppermute".
    """
    scope, axes = _scope("ppermute", axis_name)
    size = _size(scope, axes)
    pairs = tuple((int(source), int(destination)) for source, destination in perm)
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        for rank in ranks:
            if not 0 <= rank < size:
                raise ValueError(f"ppermute: {what} {rank} is no index along {axis_name!r}, which has {size} ranks")
            if ranks.count(rank) > 1:
                raise ValueError(
                    f"ppermute: {what} {rank} occurs {ranks.count(rank)} times in {list(pairs)}; a rank sends once, "
                    "and receives once"
                )

    def permute(leaf):
        return ppermute_p.bind(_varying(_array(leaf), scope, axes), axes=axes, size=size, perm=pairs)

    return tree.map(permute, x)


def axis_index(axis_name: AxisName) -> Value:
    """This rank's index along an axis, or along several counted in the order given: an integer that varies there.

    >>> f = lambda x: x + 10 * axis_index('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([ 3,  1, 14, 11], P('i'))

    Source: JEP 17111, table of collectives.
    """
    index = None
    for scope, axes in _groups("axis_index", axis_name):
        here = axis_index_p.bind(axes=axes, typed=scope.typed)
        index = here if index is None else index * _size(scope, axes) + here
    return index


def axis_size(axis_name: AxisName) -> int:
    """How many ranks there are along an axis, or along several together.

    >>> f = lambda x: x + 10 * axis_size('i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([23, 21, 24, 21], P('i'))
    """
    return _ranks_along(_groups("axis_size", axis_name))
