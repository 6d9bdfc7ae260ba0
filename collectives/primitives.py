"""The kinds of collectives: what holds for all of them, whatever they do. Each is declared in `ops.py` or `rooted.py`.

A collective takes values that vary along its axes, or values that do not, and gives such; it communicates, or does not;
it has a shape, and a transpose, which is another collective. Typing, batching, running along the axis of a `vmap`, in
groups of ranks, or on several values in one call: all that follows from these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from collectives.axes import (
    check_distinct,
    check_groups,
    check_perm,
    check_rank,
    check_split,
    check_splits,
    most,
    size_of,
)
from collectives.backends.simulated import Simulated
from minidiff.core import (
    Primitive,
    Scope,
    ShapedArray,
    UnboundAxisError,
    Value,
    VarianceError,
    check_call,
    show_axes,
    typeof,
)
from minidiff.location import joined, parted
from minidiff.ops.base import Linear
from minidiff.ops.shape import broadcast_to, expand_dims
from minidiff.tape import Equation
from minidiff.vmap import Batch, BatchTracer

VARYING = "varying"
INVARIANT = "invariant"


class Collective(Linear):
    """An operation across ranks: takes values varying or invariant along its axes, and gives such.

    Every one has the parameters `axes`, in the order in which ranks are counted, and `size`, how many
    ranks that makes. It runs in the backend of the mesh, by its name.
    """

    operands_agree = False
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

    def check_fits(self, types, params, scope):
        of_block = getattr(Simulated, f"_{self.name}")  # of the ranks, its data, and the axes it is held along
        check_call(of_block, 3, [name for name in params if name != "groups"])
        for x in types:
            _check_on_ranks(self, x, params, scope)

    def sends(self, params):
        return self.communicates and params["size"] > 1  # a rank alone has all there is

    def result_variance(self, variance: frozenset, params: dict) -> frozenset:
        """The variance of the result, from that of the operand."""
        if self.takes == self.gives:
            return variance
        return variance.difference(params["axes"]) if self.gives == INVARIANT else variance.union(params["axes"])

    def in_groups(self) -> Collective:
        """The same, in groups of the ranks along its axes."""
        return Collective(
            self.name, VARYING, VARYING, self.communicates, self.shape_rule, self.transpose_rule, self.batch_rule
        )

    def apply_checked(self, interpreter, args, params):
        if interpreter.scope.axes.keys() >= set(params["axes"]):
            return super().apply_checked(interpreter, args, params)
        return self.apply(interpreter, args, params)  # over the axis of a vmap, which types do not know

    def check_variance(self, types, params):
        for x in types:
            check_operand(self.name, self.takes, x, params)

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        """Over the axis of a named batch, whose elements are the ranks."""
        (x,) = args
        name = _WITHOUT_COPIES.get(self.name, self.name)
        held = (batch.axis_name,) if batch.owns(x) else ()
        return _unstacked(batch, *_ranks(batch).collective(name, batch.in_front(x), held, False, params))

    def show_params(self, params):
        others = [f"{k}={v!r}" for k, v in params.items() if k not in ("axes", "size")]
        return ", ".join([show_axes(params["axes"]), *others])


#: Along a vmap there are no types: what is the same for all elements need not be copied for each.
_WITHOUT_COPIES = {"all_gather": "all_gather_invariant", "broadcast_varying": "broadcast"}


def _ranks(batch: Batch) -> Simulated:
    """The elements of a named batch as simulated ranks."""
    return Simulated({batch.axis_name: batch.size_of_batch})


def _unstacked(batch: Batch, data: Value, held: tuple) -> Value:
    return BatchTracer(batch, data, 0) if held else data


def _unbound(name: str, *args: Value, axes: tuple[str, ...], **params: Any) -> Value:
    raise UnboundAxisError(f"{name} over {axes}: nothing binds these axes where it is run; it was recorded in a vmap")


def check_operand(name: str, takes: str, x: ShapedArray, params: dict) -> None:
    """Raise VarianceError where a collective of this name takes values of another variance than that of `x`."""
    wrong = tuple(a for a in params["axes"] if (a in x.variance) != (takes == VARYING))
    if wrong:
        wanted, has, instead = _WRONG[takes]
        if "groups" not in params:
            instead = _INSTEAD.get(name, instead)
        raise VarianceError(
            f"{name} over {show_axes(params['axes'])} takes a value that {wanted} there, but {x} {has} "
            f"{show_axes(wrong)}: {instead.format(axes=show_axes(wrong))}"
        )


#: What an operand of the wrong variance should do, what it does, and what to write instead.
_WRONG = {
    VARYING: ("varies", "is the same on all ranks along", "write pbroadcast(x, {axes}) for it"),
    INVARIANT: ("is the same on all ranks", "already varies along", "leave those axes out"),
}
_INSTEAD = {
    "psum": "for the sum of so many copies write x * axis_size({axes}), or psum of pbroadcast(x, {axes})",
    "pmean": "it is the mean itself: leave those axes out",
    "pmax": "it is the maximum itself: leave those axes out",
    "pmin": "it is the minimum itself: leave those axes out",
    "pscatter": "each rank has a value of its own there. Leave those axes out; or first make it the same, with psum or "
    "all_gather_invariant over {axes}",
    "broadcast": "every rank has the root's value already: leave those axes out",
    "scatter": "each rank can take its part itself: write pscatter over {axes}",
    "at_root": "each rank has a value of its own there. Of these, reduce gives the root the sum, and gather all",
}


# ---------------------------------------------------------------- what `Tape.check` asks


def _ranks_of(name: str, scope: Scope | None, axes: tuple[str, ...]) -> int | None:
    """How many ranks there are along axes of a body; None where that is not known. ValueError if they are not bound."""
    check_distinct(name, axes)
    unbound = [] if scope is None else [a for a in axes if a not in scope.axes]
    if unbound and scope.typed:
        raise ValueError(f"no axis {unbound[0]!r} is bound there; the axes of this shard_map are {tuple(scope.axes)}")
    return None if unbound or scope is None else size_of(scope, axes)


def _check_on_ranks(of: Collective, x: ShapedArray, params: dict, scope: Scope | None) -> None:
    """Raise ValueError where parameters do not fit the ranks of a body, or the operand cannot be split among them."""
    axes, size = params["axes"], params["size"]
    ranks = _ranks_of(of.name, scope, axes)
    if "groups" in params:
        groups = params["groups"]
        check_groups(f"groups={groups}", groups, sum(map(len, groups)) if ranks is None else ranks, alike=False)
        ranks = max(map(len, groups))
    if ranks is not None and ranks != size:
        raise ValueError(f"there are {ranks} ranks along {show_axes(axes)}, not size={size}")
    if "root" in params:
        check_rank(of.name, "the root", params["root"], axes, size)
    if "perm" in params:
        check_perm(of.name, params["perm"], axes, size)
    new = of.shape_rule is gathered_shape and not params["tiled"]
    for name in ("axis", "split_axis", "concat_axis"):
        if name in params and not 0 <= params[name] < x.ndim + new:
            raise ValueError(f"{x} has no axis {params[name]}")
    if "splits" in params:
        axis, rows = params["axis"], most(check_splits(of.name, params["splits"], size))
        if x.shape[axis] != rows:
            raise ValueError(f"axis {axis} of {x} must have {rows} rows")
    if "split_axis" in params or of.shape_rule is scattered_shape:
        check_split(of.name, x, params.get("split_axis", params.get("axis")), size, params["tiled"])


# ---------------------------------------------------------------- rules


def same_shape(x: ShapedArray, **params: Any) -> tuple[tuple[int, ...], Any]:
    """What is communicated keeps its shape."""
    return x.shape, x.dtype


def gathered_shape(
    x: ShapedArray, axes: Any, size: int, axis: int, tiled: bool, **params: Any
) -> tuple[tuple[int, ...], Any]:
    """As many blocks as there are ranks: along a new axis, or with `tiled` along one that is there."""
    if tiled:
        return (*x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], size, *x.shape[axis:]), x.dtype


def scattered_shape(
    x: ShapedArray, axes: Any, size: int, axis: int, tiled: bool, **params: Any
) -> tuple[tuple[int, ...], Any]:
    """A rank's part of a block: one entry along the axis, or with `tiled` one slice."""
    if tiled:
        return (*x.shape[:axis], x.shape[axis] // size, *x.shape[axis + 1 :]), x.dtype
    return (*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype


def batches(*array_axes: str) -> Callable:
    """Along a batch axis put in front, a collective is itself, its array axes counted from one further."""

    def rule(primitive, args, batched, **params):
        return primitive.bind(*args, **{k: v + 1 if k in array_axes else v for k, v in params.items()})

    return rule


def transposes_to(find: Callable[[], Primitive], **changes: Callable) -> Callable:
    """The transpose is another collective over the same axes (and groups); `changes` are parameters computed anew."""

    def rule(ct, operands, **params):
        new = {name: change(params) for name, change in changes.items()}
        transposed = grouped(find()) if "groups" in params else find()
        return [transposed.bind(ct, **{**params, **new})]

    return rule


# ---------------------------------------------------------------- further kinds


@functools.cache
def grouped(of: Collective) -> Collective:
    """A collective in groups of the ranks along its axes, in each for itself: the parameter `groups` lists them.

    What it makes the same in a group may differ from group to group: it gives varying values.
    """
    return of.in_groups()


class Variadic(Collective):
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

    def without_unused_results(self, eqn, used):
        wanted = [i for i, yes in enumerate(used) if yes]
        inputs, outputs = ([atoms[i] for i in wanted] for atoms in (eqn.inputs, eqn.outputs))
        sources = parted(eqn.source, len(used))
        one = self if len(wanted) > 1 else self.each
        return Equation(one, inputs, eqn.params, outputs, joined([sources[i] for i in wanted]))

    def batch(self, args, batched, params):
        size = next(x.shape[0] for x, yes in zip(args, batched) if yes)
        results = self.bind(*args, **params)
        return [
            x if yes else broadcast_to(expand_dims(x, 0), (size, *typeof(x).shape)) for x, yes in zip(results, batched)
        ]

    def batch_along(self, batch, args, params):
        return [self.each.batch_along(batch, [x], params) for x in args]


#: `together(psum_p)` is `psum` of several values.
variadic = functools.cache(Variadic)


class AxisIndex(Primitive):
    """The rank's index along some axes: an integer, varying along them where the body is typed."""

    on_ranks = True

    def __init__(self):
        super().__init__("axis_index", functools.partial(_unbound, "axis_index"))

    def typecheck(self, types, params):
        return [ShapedArray((), int, params["axes"] if params["typed"] else ())]

    def check_fits(self, types, params, scope):
        _ranks_of(self.name, scope, params["axes"])

    def batch_along(self, batch: Batch, args: Sequence[Value], params: dict) -> Value:
        return _unstacked(batch, *_ranks(batch).axis_index(params["axes"]))

    def show_params(self, params):
        return show_axes(params["axes"])
