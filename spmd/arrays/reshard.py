"""Resharding: the collectives between two shardings of an array.

A sharding gives for each dimension the mesh axes that it is split along, the last running fastest. Each step from one
sharding to another is one collective, the first of these that applies:

=========== ====================================================== ==========================
step        what it does to the sharding                           bytes that a rank receives
=========== ====================================================== ==========================
pscatter    an axis that the target adds splits a dimension        none
all_to_all  axes that split another dimension there move to it     (n - 1) / n of a block
all_gather  axes that the target lacks, or has elsewhere, leave    (n - 1) blocks
=========== ====================================================== ==========================

Before these, unreduced axes are summed: by a `psum_scatter` where the target splits a dimension along them, else by a
`psum`. After them, axes that are to be reduced are cast. This never moves more bytes than to gather the whole array and
slice it. All ranks find the same steps without communicating, since these depend only on the two shardings and the
mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy

import collectives
from minidiff import tree
from minidiff.arguments import as_value
from minidiff.axis_states import REDUCED
from minidiff.core import Tracer, Value, cast_to, current_scope
from minidiff.errors import VarianceError, show_axes
from minidiff.text import Text
from minidiff.types import ShapedArray, typeof, zeros_like
from spmd.arrays.sharded_array import ShardedArray, Sharding, not_parts
from spmd.mesh import Mesh
from spmd.partition import P, PartitionSpec, check_is_spec, check_sharding, is_spec, part_count
from spmd.primitive import everywhere, shard_map_p

Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes it is split along


class Step(NamedTuple):
    """One collective: the sharding `after` it, and the `bytes` each rank receives."""

    collective: str
    axes: tuple[str, ...]
    options: dict[str, Any]
    after: Dims
    bytes: int

    def __call__(self, x: Value) -> Value:
        return getattr(collectives, self.collective)(x, self.axes, **self.options)

    def __str__(self) -> str:
        over = " and ".join(map(repr, self.axes))
        shown = "".join(f", {k}={v!r}" for k, v in self.options.items() if k != "tiled")
        return f"{self.collective} over {over}{shown}"

    def spec(self, before: PartitionSpec) -> PartitionSpec:
        """The spec after the step."""
        reduced = self.axes if REDUCED in (self.collective, self.options.get("to")) else ()
        return PartitionSpec.of_dims(self.after, before.unreduced.difference(self.axes), before.reduced.union(reduced))


Route = tuple[Step, ...]  # from one sharding to another


def follow(route: Route, x: Value, varying: frozenset = frozenset()) -> Value:
    """Apply the steps to a block, in the body of a `shard_map`.

    If the result is used with values that vary along the axes `varying`, gathers over these use `all_gather`, whose
    result varies too, and whose transpose is a `psum_scatter` (JEP 17111, on `all_gather`).
    """
    for k, step in enumerate(route):
        rest = frozenset(a for later in route[k + 1 :] for a in later.axes)
        fused = step.collective == "all_gather_invariant" and varying.difference(rest).issuperset(step.axes)
        x = (step._replace(collective="all_gather") if fused else step)(x)
    return x


# ---------------------------------------------------------------- the steps


def route(have: Dims, want: Dims, nbytes: int, sizes: dict[str, int]) -> Route:
    """The steps between two shardings of an array of `nbytes` bytes."""
    steps = []
    # Axes of one rank split nothing: those that are wanted no more are gathered at once, at no cost.
    at, target = ([tuple(a for a in axes if sizes[a] > 1) for axes in dims] for dims in (have, want))
    wanted = _axes(want)
    alone = tuple(a for a in _axes(have) if sizes[a] == 1 and a not in wanted)
    if alone:
        steps.append(Step("all_gather_invariant", alone, {"axis": 0, "tiled": True}, tuple(at), 0))
    while at != target:
        axes, source, to = _next_move(at, target, sizes)
        n, block = part_count(axes, sizes), nbytes // part_count(_axes(at), sizes)
        if source is not None:
            at[source] = at[source][: -len(axes)]
        if to is not None:
            at[to] = (*at[to], *axes)
        if source is None:
            steps.append(Step("pscatter", axes, {"axis": to, "tiled": True}, tuple(at), 0))
        elif to is None:
            options = {"axis": source, "tiled": True}
            steps.append(Step("all_gather_invariant", axes, options, tuple(at), (n - 1) * block))
        else:
            options = {"split_axis": to, "concat_axis": source, "tiled": True}
            steps.append(Step("all_to_all", axes, options, tuple(at), block * (n - 1) // n))
    return tuple(steps)


def _next_move(
    at: Sequence[tuple[str, ...]], want: Sequence[tuple[str, ...]], sizes: dict[str, int]
) -> tuple[tuple[str, ...], int | None, int | None]:
    """The axes that move next, the dimension that they leave, and the one that they split; None for no dimension."""
    used, wanted = _axes(at), _axes(want)
    # For each dimension, the axes that are not in place, and those that it lacks.
    leaving = [tuple(a for k, a in enumerate(h) if h[: k + 1] != w[: k + 1]) for h, w in zip(at, want)]
    lacking = [w[len(h) - len(out) :] for h, w, out in zip(at, want, leaving)]
    ready = [(d, axes) for d, axes in enumerate(lacking) if not leaving[d]]
    for d, axes in ready:
        if unused := tuple(itertools.takewhile(lambda a: a not in used, axes)):
            return unused, None, d
    for d, axes in ready:
        for e, out in enumerate(leaving):
            for k in range(len(out)):
                if out[k:] == axes[: len(out) - k]:
                    return out[k:], e, d
    for e, out in enumerate(leaving):
        if unwanted := tuple(itertools.takewhile(lambda a: a not in wanted, reversed(out)))[::-1]:
            return unwanted, e, None
    in_the_way = [e for e, out in enumerate(leaving) if out]
    e = min(in_the_way, key=lambda e: (not lacking[e], part_count(leaving[e], sizes)))
    return leaving[e], e, None


def _axes(sharding: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(a for axes in sharding for a in axes)


# ---------------------------------------------------------------- what users call


def route_of(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Route:
    """The route for `x` from the spec `have` to `want`.

    Raises VarianceError if `x` is reduced along an axis, and is not to stay so: its cotangent is unreduced. Raises it
    also if `x` is to become unreduced.
    """
    t, sizes = typeof(x), mesh.shape
    if lost := have.reduced - want.reduced:
        raise VarianceError(
            f"reshard of {t} from {have} to {want}: it is reduced along {show_axes(lost)}, so that its cotangent is "
            f"unreduced there, and must stay so: write {want.with_states(want.unreduced, want.reduced | lost)}, or "
            "reshard the array that it was made from"
        )
    if not (want.unreduced <= have.unreduced or _is_zero(x)):
        raise not_parts(t, have, want)
    sums, at = _sums(have, want, t, sizes)
    steps = [*sums, *route(at, want.dims(t.ndim), t.nbytes, sizes)]
    new = tuple(mesh.ranks.ordered(want.reduced - have.reduced))
    for k, step in enumerate(steps):  # a gather of what is to be reduced transposes to a psum_scatter
        if step.collective == "all_gather_invariant" and new and set(step.axes) <= set(new):
            steps[k] = step._replace(collective="all_gather", options={**step.options, "to": REDUCED})
            new = tuple(a for a in new if a not in step.axes)
    if new:
        steps.append(Step("reduced", new, {}, want.dims(t.ndim), 0))
    return tuple(steps)


def _sums(have: PartitionSpec, want: PartitionSpec, t: ShapedArray, sizes: dict[str, int]) -> tuple[list[Step], Dims]:
    """The steps that sum along axes that are not to stay unreduced, and how the dimensions are split after them."""
    at, target = list(have.dims(t.ndim)), want.dims(t.ndim)
    steps, rest = [], [a for a in sizes if a in have.unreduced - want.unreduced]
    for a in tuple(rest):
        for d, axes in enumerate(target):
            if axes[: len(at[d]) + 1] == (*at[d], a):
                block = t.nbytes // part_count(_axes(at), sizes)
                at[d] = (*at[d], a)
                options = {"scatter_dimension": d, "tiled": True}
                steps.append(Step("psum_scatter", (a,), options, tuple(at), block * (sizes[a] - 1) // sizes[a]))
                rest.remove(a)
    if rest:
        n, block = part_count(rest, sizes), t.nbytes // part_count(_axes(at), sizes)
        steps.append(Step("psum", tuple(rest), {}, tuple(at), 2 * block * (n - 1) // n))
    return steps, tuple(at)


def _is_zero(x: Value) -> bool:
    """Whether `x` is constant zeros, which are parts of a sum that is zero."""
    return not isinstance(x, Tracer) and not numpy.any(x)


def redistribute(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Value:
    """`reshard_p` as a `shard_map`, whose body is the route."""
    steps = route_of(x, mesh, have, want)

    def body(block: Value) -> tuple:
        block = follow(steps, block)
        return [cast_to(zeros_like(block) if _is_zero(x) else block, want.states)], (want,)

    return shard_map_p.bind(x, body=body, in_specs=(have,), **everywhere(mesh))[0]


# To type checkers the result is always a `ShardedArray`: they cannot tell whether a spec splits the array at all.
@overload
def distribute(x: numpy.ndarray | ShardedArray, mesh: Mesh, spec: PartitionSpec) -> ShardedArray: ...
@overload
def distribute(x: Any, mesh: Mesh, spec: Any) -> Any: ...


def distribute(x: Any, mesh: Mesh, spec: Any) -> Any:
    """Split `x` over `mesh` by `spec` into a `ShardedArray`, without communication.

    `x` is a tree of arrays, the same on all ranks, and `spec` a tree of partition specs that is a prefix of it. An
    array that its spec does not split is replicated: it stays a plain array. Differentiable: the cotangent of a whole
    array is gathered to a whole array. Raises ValueError if a spec does not fit the mesh or the array.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> distribute(np.arange(4), mesh, spmd.P('i'))
    ShardedArray([0, 1, 2, 3], P('i'))
    """
    check_mesh("distribute", mesh)
    return _place("distribute", x, spec, lambda leaf: mesh)


def reshard(x: Any, spec: Any) -> Any:
    """Split arrays by another `spec` over their mesh.

    `x` is a tree of `ShardedArray`s, and `spec` a tree of partition specs that is a prefix of it; `P()` gives a plain
    array, the same on all ranks. Plain arrays in `x` are distributed over the mesh of the sharded ones. Differentiable:
    the transpose reshards in reverse. Under MPI every rank must call it. Under `vmap`, `spec` is that of the elements,
    and the batch axis stays split along the axes that `spec` does not name. `explain_reshard` shows which collectives
    it uses. Raises ValueError if a spec does not fit the mesh or the array, and TypeError if it splits a plain array
    and no array in `x` is on a mesh (see `distribute`).

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> x = spmd.distribute(np.arange(4.0).reshape(2, 2), mesh, spmd.P('i'))
    >>> reshard(x, spmd.P(None, 'i')).local
    [array([[0.],
           [2.]]), array([[1.],
           [3.]])]
    >>> spmd.communication(lambda x: reshard(x, spmd.P(None, 'i')))(x).counts
    {'all_to_all': 1}
    """
    shardings = [typeof(as_value(leaf)).sharding for leaf in tree.leaves(x)]
    beside = next((sharding.mesh for sharding in shardings if sharding is not None), None)

    def mesh_of(leaf: Value) -> Mesh | None:
        sharding = typeof(leaf).sharding
        return beside if sharding is None else sharding.mesh

    return _place("reshard", x, spec, mesh_of)


def gather(x: Any) -> Any:
    """Replace the sharded arrays of a tree by whole NumPy arrays, on every rank.

    Plain and replicated arrays are unchanged. Differentiable, as `reshard(x, P())` is. Under MPI every rank must call
    it; there is one all-gather for each sharded array.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> gather({'w': spmd.distribute(np.arange(4.0), mesh, spmd.P('i')), 'n': 3})
    {'n': 3, 'w': array([0., 1., 2., 3.])}
    """
    check_no_body("gather")
    return tree.map(_gathered, x)


def _gathered(x: Any) -> Any:
    if isinstance(x, ShardedArray):
        return x.gather()
    sharding = typeof(as_value(x)).sharding if isinstance(x, Tracer) else None
    return x if sharding is None else sharding.gathered(as_value(x))


def spec_of(x: Any) -> Any:
    """The tree of the arrays' partition specs.

    It has `.spec` for sharded arrays, and `P()` for plain and replicated ones. Use it as the `in_specs` of a
    `shard_map` that takes its arguments without moving data.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> spec_of({'w': spmd.distribute(np.arange(4.0), mesh, spmd.P('i')), 'b': np.zeros(3)})
    {'b': P(), 'w': P('i')}
    """
    return tree.map(_spec_of, x)


def _spec_of(x: Any) -> PartitionSpec:
    sharding = typeof(as_value(x)).sharding
    return P() if sharding is None else sharding.spec


def explain_reshard(x: Any, spec: PartitionSpec) -> str:
    """The steps of `reshard(x, spec)`, as text.

    Each step shows the spec after it and the bytes that each rank receives.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((4, 2), ('x', 'y'), backend='simulated')
    >>> x = spmd.distribute(np.zeros((8, 8)), mesh, spmd.P('x', 'y'))
    >>> print(explain_reshard(x, spmd.P('y', 'x')))
    P('x', 'y') -> P('y', 'x') of f64[8,8]: 160 bytes for each rank
      all_gather_invariant over 'y', axis=1: P('x'), 64 bytes
      all_to_all over 'x', split_axis=1, concat_axis=0: P(None, 'x'), 96 bytes
      pscatter over 'y', axis=0: P('y', 'x'), 0 bytes
    """
    x = as_value(x)
    mesh, have, _ = sharding_of(x, "explain_reshard: x")
    check_sharding(spec, typeof(x).shape, mesh.shape, "explain_reshard: x")
    steps = route_of(x, mesh, have, spec)
    received = f"{sum(step.bytes for step in steps):,} bytes for each rank" if steps else "as it is"
    head = f"{have} -> {spec} of {typeof(x)}: {received}"
    specs = itertools.accumulate(steps, lambda spec, step: step.spec(spec), initial=have)
    lines = [f"{step}: {spec}, {step.bytes:,} bytes" for step, spec in zip(steps, itertools.islice(specs, 1, None))]
    return Text("\n  ".join([head, *lines]))


def check_mesh(what: str, mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{what}: mesh is {mesh!r}, which is not a mesh: write {what}(x, mesh, P(...))")


def check_no_body(what: str) -> None:
    """Raise TypeError if `what` is called in the body of a `shard_map`.

    `what` is a function of whole arrays.
    """
    scope = current_scope()
    if scope is not None:
        raise TypeError(
            f"{what} shards whole arrays, outside of any body; in the body of {scope.function or 'a shard_map'}, "
            f"over {show_axes(tuple(scope.axes))}, collectives move blocks: pscatter splits what all ranks have, "
            "all_gather joins blocks, all_to_all splits them along another dimension"
        )


def specs_for(x: Any, spec: Any) -> list[PartitionSpec]:
    """A spec for each leaf of a tree, from a tree of specs that is a prefix of it."""
    for path, leaf in tree.flatten_with_paths(spec, "spec")[0]:
        check_is_spec(path, leaf)
    return tree.broadcast_prefix(spec, x, is_spec, "spec")


def _place(what: str, x: Any, spec: Any, mesh_of: Callable[[Value], Mesh | None]) -> Any:
    """Shard each array of a tree by its spec, over the mesh that `mesh_of` gives for it."""
    check_no_body(what)
    leaves, structure = tree.flatten_with_paths(x, f"{what}: x")

    def placed(path: str, leaf: Value, to: PartitionSpec) -> Value:
        mesh = mesh_of(leaf)
        if mesh is None and to.is_trivial:
            return leaf
        mesh = mesh or sharding_of(leaf, path).mesh  # raises TypeError
        check_sharding(to, typeof(leaf).shape, mesh.shape, path)
        return Sharding(mesh, to).resharded(leaf)

    return tree.unflatten(
        structure, [placed(p, as_value(leaf), to) for (p, leaf), to in zip(leaves, specs_for(x, spec))]
    )


def sharding_of(x: Value, path: str) -> Sharding:
    """The sharding of `x`. Raises TypeError if it is not sharded."""
    sharding = typeof(x).sharding
    if sharding is None:
        raise TypeError(
            f"{path} has type {typeof(x)} and is on no mesh, so nothing says over which ranks to split it: write "
            "distribute(x, mesh, spec)"
        )
    return sharding
