"""Resharding by the collectives that move the fewest bytes.

A sharding gives for each dimension the mesh axes that it is split along, the last running fastest. A route from one
sharding to another is a sequence of steps, each of them one collective:

=========== ====================================================== ==========================
step        what it does to the sharding                           bytes that a rank receives
=========== ====================================================== ==========================
pscatter    an unused axis splits a dimension further              none
all_gather  the last axes of a dimension no longer split it        (n - 1) blocks
all_to_all  the last axes of a dimension split another one instead (n - 1) / n of a block
ppermute    axes change places; blocks keep their shape            a block
=========== ====================================================== ==========================

The cheapest route is a shortest path in the graph of shardings (Dijkstra's algorithm). It never moves more bytes than
gathering the whole array and slicing it, which is one of the paths. All ranks compute the same route without
communicating, since it depends only on shardings, shape and mesh.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, overload

import numpy

import collectives
from collectives.backends.base import index_along
from minidiff import tree
from minidiff.arguments import as_value
from minidiff.core import Tracer, Value, current_scope, pbroadcast_to
from minidiff.errors import show_axes
from minidiff.text import Text
from minidiff.types import typeof
from spmd.arrays.sharded_array import ShardedArray, Sharding
from spmd.mesh import Mesh
from spmd.partition import (
    P,
    PartitionSpec,
    check_is_spec,
    check_sharding,
    is_spec,
    part_count,
)
from spmd.primitive import everywhere, shard_map_p

Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes it is split along
Sizes = tuple[tuple[str, int], ...]  # the axes of a mesh, and their sizes
#: The number of mesh axes that a route may use: besides those that split the array, others are tried up to this number.
#: Blocks that are split further on the way may be cheaper to move.
SEARCHED = 3


class Step(NamedTuple):
    """One collective: the sharding `after` it, and the `bytes` each rank receives."""

    collective: str
    axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    after: Dims
    bytes: int

    def __call__(self, x: Value) -> Value:
        return getattr(collectives, self.collective)(x, self.axes, **dict(self.options))

    def __str__(self) -> str:
        over = " and ".join(map(repr, self.axes))
        shown = "".join(f", {k}={v}" for k, v in self.options if k not in ("tiled", "perm"))
        return f"{self.collective} over {over}{shown}: {PartitionSpec.of_dims(self.after)}, {self.bytes:,} bytes"


class Route(NamedTuple):
    """The steps from one sharding to another."""

    steps: tuple[Step, ...]

    @property
    def bytes(self) -> int:
        """The number of bytes that each rank receives in all."""
        return sum(step.bytes for step in self.steps)

    def __call__(self, x: Value, varying: frozenset = frozenset()) -> Value:
        """Apply the steps to a block, in the body of a `shard_map`.

        If the result is used with values that vary along the axes `varying`, gathers over these use `all_gather`, whose
        result varies too, and whose transpose is a `psum_scatter` (JEP 17111, on `all_gather`).
        """
        for k, step in enumerate(self.steps):
            rest = frozenset(a for later in self.steps[k + 1 :] for a in later.axes)
            fused = step.collective == "all_gather_invariant" and varying.difference(rest).issuperset(step.axes)
            x = (step._replace(collective="all_gather") if fused else step)(x)
        return x


# ---------------------------------------------------------------- the cheapest route


@lru_cache(maxsize=4096)
def route(have: Dims, want: Dims, shape: tuple[int, ...], itemsize: int, sizes: Sizes) -> Route:
    """The cheapest route between two shardings of an array.

    It has the fewest bytes, then the fewest collectives, then the fewest steps.
    """
    if have == want:
        return Route(())
    known = dict(sizes)
    every, nbytes = math.prod(known.values()), itemsize * math.prod(shape)
    used = [a for a in known if any(a in split for split in (*have, *want))]
    others = [a for a in known if a not in used and known[a] > 1]
    useful = frozenset(used + others[: max(0, SEARCHED - len(used))])
    # The shape matters only by which axes divide a dimension; with gcds, more shapes share a cache entry.
    steps = _cheapest(have, useful, tuple(math.gcd(n, every) for n in shape), sizes)[want]
    befores = (have, *[step.after for step in steps])
    return Route(tuple(_of_size(_with_permutation(s, b, known), nbytes, every) for s, b in zip(steps, befores)))


def _of_size(step: Step, nbytes: int, every: int) -> Step:
    """Scale a step's bytes from an array of `every**2` bytes to one of `nbytes`."""
    return step._replace(bytes=step.bytes * nbytes // every**2)


@lru_cache(maxsize=256)
def _cheapest(have: Dims, useful: frozenset, shape: tuple[int, ...], sizes: Sizes) -> dict[Dims, tuple[Step, ...]]:
    """The cheapest steps from a sharding to each other one over the `useful` axes.

    They are priced for an array of (number of ranks)**2 bytes, so that every part has a whole number of bytes.
    """
    found: dict[Dims, tuple[Step, ...]] = {}
    least = {have: (0, 0, 0)}
    tail = itertools.count()  # breaks ties, so that the heap never compares shardings
    queue: list = [((0, 0, 0), next(tail), have, ())]
    known = dict(sizes)
    nbytes = math.prod(known.values()) ** 2
    while queue:
        (moved, calls, count), _, at, steps = heapq.heappop(queue)
        if at in found:
            continue
        found[at] = steps
        for step in _steps(at, shape, nbytes, known, useful):
            cost = (moved + step.bytes, calls + (step.bytes > 0), count + 1)
            if step.after not in least or cost < least[step.after]:
                least[step.after] = cost
                heapq.heappush(queue, (cost, next(tail), step.after, (*steps, step)))
    return found


def _steps(at: Dims, shape: tuple[int, ...], nbytes: int, sizes: dict[str, int], useful: frozenset) -> Iterator[Step]:
    """The possible next steps from a sharding, over `useful` axes."""
    ranks = [part_count(axes, sizes) for axes in at]
    block = nbytes // math.prod(ranks)
    taken = frozenset(a for axes in at for a in axes)
    dims = range(len(at))
    for a in sorted(useful - taken, key=list(sizes).index):
        for d in dims:
            # An axis of one rank may come, and go, anywhere.
            for k in range(len(at[d]) + 1) if sizes[a] == 1 else [len(at[d])]:
                if shape[d] // ranks[d] % sizes[a] == 0:
                    yield _step("pscatter", (a,), _changed(at, {d: (*at[d][:k], a, *at[d][k:])}), 0, axis=d)
    for d in dims:
        for k in range(len(at[d])):
            if sizes[at[d][k]] == 1:
                yield _step(
                    "all_gather_invariant", at[d][k : k + 1], _changed(at, {d: at[d][:k] + at[d][k + 1 :]}), 0, axis=d
                )
            kept, moved = at[d][:k], at[d][k:]
            n = part_count(moved, sizes)
            yield _step("all_gather_invariant", moved, _changed(at, {d: kept}), (n - 1) * block, axis=d)
            for e in dims:
                if e != d and shape[e] // ranks[e] % n == 0:
                    after = _changed(at, {d: kept, e: (*at[e], *moved)})
                    yield _step("all_to_all", moved, after, block * (n - 1) // n, split_axis=e, concat_axis=d)
    for after in _rearranged(at, sizes):
        axes = tuple(a for a in sizes if any(a in one and one != two for one, two in zip(at, after)))
        yield Step("ppermute", axes, (), after, block)  # `perm` is computed only for the steps of the final route


def _step(collective: str, axes: tuple[str, ...], after: Dims, nbytes: int, **options: int) -> Step:
    return Step(collective, axes, (*options.items(), ("tiled", True)), after, nbytes)


def _changed(sharding: Dims, dims: dict[int, tuple[str, ...]]) -> Dims:
    return tuple(dims.get(d, axes) for d, axes in enumerate(sharding))


def _rearranged(at: Dims, sizes: dict[str, int]) -> Iterator[Dims]:
    """The other shardings over the same axes with the same number of parts."""
    parts = [part_count(axes, sizes) for axes in at]
    for order in itertools.permutations([a for axes in at for a in axes]):
        rest, after = list(order), []
        for n in parts:
            taken: tuple[str, ...] = ()
            while rest and part_count(taken, sizes) < n:
                taken = (*taken, rest.pop(0))
            after.append(taken)
        if not rest and tuple(after) != at and [part_count(axes, sizes) for axes in after] == parts:
            yield tuple(after)


def _with_permutation(step: Step, before: Dims, sizes: dict[str, int]) -> Step:
    if step.collective != "ppermute":
        return step
    return step._replace(options=(("perm", _permutation(before, step.after, step.axes, sizes)),))


def _permutation(at: Dims, after: Dims, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple:
    """The `perm` of a ppermute: (source, destination) pairs of ranks along `axes`."""
    places = list(itertools.product(*[range(sizes[a]) for a in axes]))

    def block(sharding: Dims, place: tuple[int, ...]) -> tuple:
        """The index of the block on the rank at this place, along the axes that change."""
        coordinates = {**dict.fromkeys(sizes, 0), **dict(zip(axes, place))}
        return tuple(index_along(split, coordinates, sizes) for split in sharding)

    sources = {block(at, place): rank for rank, place in enumerate(places)}
    return tuple((sources[block(after, place)], rank) for rank, place in enumerate(places))


# ---------------------------------------------------------------- what users call


def sizes_of(mesh: Mesh) -> Sizes:
    """The axes of a mesh and their sizes, as a hashable cache key."""
    return tuple(mesh.shape.items())


def route_of(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Route:
    """The cheapest route for `x` from the spec `have` to `want`."""
    t = typeof(x)
    return route(have.dims(t.ndim), want.dims(t.ndim), t.shape, t.dtype.itemsize, sizes_of(mesh))


def redistribute(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Value:
    """`reshard_p` as a `shard_map`, whose body is the cheapest route."""
    steps = route_of(x, mesh, have, want)

    def body(block: Value) -> tuple:
        return [pbroadcast_to(steps(block), want.axes)], (want,)

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
    """Split arrays by another `spec` over their mesh, with the cheapest collectives.

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
    P('x', 'y') -> P('y', 'x') of f64[8,8]: 120 bytes for each rank
      all_to_all over 'y', split_axis=0, concat_axis=1: P(('x', 'y')), 32 bytes
      all_to_all over 'x' and 'y', split_axis=1, concat_axis=0: P(None, ('x', 'y')), 56 bytes
      all_to_all over 'y', split_axis=0, concat_axis=1: P('y', 'x'), 32 bytes
    """
    x = as_value(x)
    mesh, have, _ = sharding_of(x, "explain_reshard: x")
    check_sharding(spec, typeof(x).shape, mesh.shape, "explain_reshard: x")
    steps = route_of(x, mesh, have, spec)
    head = f"{have} -> {spec} of {typeof(x)}: {f'{steps.bytes:,} bytes for each rank' if steps.steps else 'as it is'}"
    return Text("\n  ".join([head, *map(str, steps.steps)]))


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
        if mesh is None and to == P():
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
