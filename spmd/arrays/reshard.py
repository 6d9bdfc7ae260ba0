"""Resharding: split an array in another way, by the collectives of its route (`routes.py`)."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, overload

import numpy

from minidiff import tree
from minidiff.core.interpreter import current_scope
from minidiff.core.ranks import cast_to
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof, zeros_like
from minidiff.errors import PrintedText, show_axes
from minidiff.inputs.arguments import as_value, is_zero
from spmd.checks.agreement import check_blocks, checks_values
from spmd.mesh.checks import check_is_spec, check_ndim, check_sharding, check_spec
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, PartitionSpec, is_spec, part_count
from spmd.shard_map.operation import shard_map_p, typed_params
from spmd.sharding.routes import Route, follow, route_of_specs
from spmd.sharding.sharded_array import ShardedArray, Sharding, not_unreduced_error

# ---------------------------------------------------------------- what users call


def route_of(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Route:
    """The route for `x` between two specs. Raises VarianceError if `x` cannot be unreduced where `want` says so."""
    if not (want.unreduced <= have.unreduced or is_zero(x)):
        raise not_unreduced_error(typeof(x), have, want)
    return route_of_specs(typeof(x), have, want, mesh.shape)


def redistribute(x: Value, mesh: Mesh, have: PartitionSpec, want: PartitionSpec) -> Value:
    """`reshard_p` as a `shard_map`, whose body is the route."""
    steps = route_of(x, mesh, have, want)

    def body(block: Value) -> tuple:
        block = follow(steps, block)
        return [cast_to(zeros_like(block) if is_zero(x) else block, want.states)], (want,)

    return shard_map_p.bind(x, body=body, in_specs=(have,), **typed_params(mesh))[0]


# To type checkers the result is always a `ShardedArray`: they cannot tell whether a spec splits the array at all.
@overload
def distribute(x: numpy.ndarray | ShardedArray, mesh: Mesh, spec: PartitionSpec) -> ShardedArray: ...
@overload
def distribute(x: Any, mesh: Mesh, spec: Any) -> Any: ...


def distribute(x: Any, mesh: Mesh, spec: Any) -> Any:
    """Split `x` over `mesh` by `spec` into a `ShardedArray`, without communication.

    `x` is a tree of arrays, the same on all ranks, and `spec` a tree of partition specs that is a prefix of it. An
    array that its spec does not split is replicated: it stays a plain array. Either is a copy, which does not change
    when you write into `x` later. Only zeros may be distributed as unreduced: `P(unreduced={'i'})`.
    Differentiable: the cotangent of a whole array is gathered to a whole array; where the array is distributed as
    reduced, the parts of its cotangent are summed. Raises ValueError if a spec does not fit the mesh or the array.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> distribute(np.arange(4), mesh, spmd.P('i'))
    ShardedArray([0, 1, 2, 3], P('i'))
    """
    check_mesh("distribute", mesh)
    return _place("distribute", x, spec, lambda leaf: mesh)


def pad(x: Any, mesh: Mesh, spec: Any, **options: Any) -> tuple[Any, Any]:
    """Pad `x` until `spec` can split it over `mesh`, and return it distributed, with the mask of its own elements.

    Each dimension that the spec splits is filled up at its end to a multiple of its ranks; one that is a multiple stays
    as it is. The mask is a boolean array, True for elements of `x`, False for padding. It is split as the padded array,
    has its size along the dimensions that the spec splits, and size 1 along the others. So it broadcasts with the
    array, and is the `where=` of NumPy's reductions, of `minidiff.nn` and of `minidiff.optim`.

    Under MPI every rank must call it. Differentiable: the cotangent of the padding is dropped.

    Args:
        x: a tree of arrays, the same on all ranks.
        mesh: the mesh over which they are split.
        spec: a tree of partition specs that is a prefix of `x`.
        options: those of `numpy.pad`, which fills up with zeros; `mode='edge'` repeats the last element, where a
            function of zero is not finite, or has no finite derivative.

    Returns:
        The tree of padded arrays, and the tree of their masks.

    Raises:
        ValueError: if a spec does not fit the mesh, or has more entries than its array has dimensions.
        TypeError: in the body of a `shard_map`.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> x, mask = pad(np.arange(1.0, 7.0), mesh, spmd.P('i'))
    >>> x
    ShardedArray([1., 2., 3., 4., 5., 6., 0., 0.], P('i'))
    >>> mask.local[-2:]
    [array([ True,  True]), array([False, False])]
    >>> float(np.mean(x, where=mask)), mask.shape, pad(np.ones((6, 3)), mesh, spmd.P('i'))[1].shape
    (3.5, (8,), (8, 1))
    """
    check_mesh("pad", mesh)
    check_no_body("pad")
    leaves, structure = tree.flatten_with_paths(x, "pad: x")
    pairs = [_pad(path, as_value(leaf), mesh, to, options) for (path, leaf), to in zip(leaves, specs_for(x, spec))]
    arrays, masks = zip(*pairs) if pairs else ((), ())
    return tree.unflatten(structure, arrays), tree.unflatten(structure, masks)


def reshard(x: Any, spec: Any) -> Any:
    """Change how arrays are split over their mesh, to another `spec`.

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
    """Replace the sharded arrays of a tree with whole NumPy arrays, on every rank.

    Plain and replicated arrays are unchanged. Differentiable, as `reshard(x, P())` is. Under MPI every rank must call
    it; there is one all-gather for each sharded array.

    >>> import numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> gather({'w': spmd.distribute(np.arange(4.0), mesh, spmd.P('i')), 'n': 3})
    {'n': 3, 'w': array([0., 1., 2., 3.])}
    """
    check_no_body("gather")
    return tree.map(_gather_leaf, x)


def _gather_leaf(x: Any) -> Any:
    if isinstance(x, ShardedArray):
        return x.gather()
    sharding = typeof(as_value(x)).sharding if isinstance(x, Tracer) else None
    return x if sharding is None else sharding.gather(as_value(x))


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

    Each step shows the spec after it and the bytes that each rank receives. Raises ValueError for a spec that does not
    fit the array or its mesh.

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
    return PrintedText("\n  ".join([head, *lines]))


def check_mesh(name: str, mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{name}: mesh is {mesh!r}, which is not a mesh: write {name}(x, mesh, P(...))")


def check_no_body(name: str) -> None:
    """Raise TypeError if `name`, a function of whole arrays, is called in the body of a `shard_map`."""
    scope = current_scope()
    if scope is not None:
        raise TypeError(
            f"{name} shards whole arrays, outside of any body; in the body of {scope.function or 'a shard_map'}, "
            f"over {show_axes(tuple(scope.axes))}, collectives move blocks: pscatter splits what all ranks have, "
            "all_gather joins blocks, all_to_all splits them along another dimension"
        )


def specs_for(x: Any, spec: Any) -> list[PartitionSpec]:
    """A spec for each leaf of a tree, from a tree of specs that is a prefix of it."""
    for path, leaf in tree.flatten_with_paths(spec, "spec")[0]:
        check_is_spec(path, leaf)
    return tree.broadcast_prefix(spec, x, is_spec, "spec")


def _place(name: str, x: Any, spec: Any, mesh_of: Callable[[Value], Mesh | None]) -> Any:
    """Shard each array of a tree by its spec, over the mesh that `mesh_of` gives for it."""
    check_no_body(name)
    leaves, structure = tree.flatten_with_paths(x, f"{name}: x")

    def placed(path: str, leaf: Value, to: PartitionSpec) -> Value:
        mesh = mesh_of(leaf)
        if mesh is None and to.is_trivial:
            return leaf
        mesh = mesh or sharding_of(leaf, path).mesh  # raises TypeError
        check_sharding(to, typeof(leaf).shape, mesh.shape, path)
        if checks_values() and not isinstance(leaf, Tracer):
            check_blocks(mesh, [(path, leaf, ())])
        resharded = Sharding(mesh, to).reshard(leaf)
        return (
            leaf.copy() if resharded is leaf and name == "distribute" and isinstance(leaf, numpy.ndarray) else resharded
        )

    return tree.unflatten(
        structure, [placed(p, as_value(leaf), to) for (p, leaf), to in zip(leaves, specs_for(x, spec))]
    )


def _pad(path: str, x: Value, mesh: Mesh, spec: PartitionSpec, options: dict) -> tuple[Value, Value]:
    """Return an array, padded and distributed, and its mask."""
    check_spec(spec, mesh.shape, "spec")
    shape = typeof(x).shape
    check_ndim(spec, shape, "spec", path)
    dims = spec.dims(len(shape))
    missing = [-n % part_count(axes, mesh.shape) for n, axes in zip(shape, dims)]
    masks = [numpy.arange(n + k) < n if axes else [True] for n, k, axes in zip(shape, missing, dims)]
    mask = functools.reduce(operator.and_, numpy.meshgrid(*masks, indexing="ij", sparse=True), numpy.array(True))
    x = numpy.pad(x, [(0, k) for k in missing], **options) if any(missing) else x
    return distribute(x, mesh, spec), distribute(mask, mesh, spec.with_states((), ()))


def sharding_of(x: Value, path: str) -> Sharding:
    """The sharding of `x`. Raises TypeError if it is not sharded."""
    sharding = typeof(x).sharding
    if sharding is None:
        raise TypeError(
            f"{path} has type {typeof(x)} and is on no mesh, so the ranks to split it over are unknown: write "
            "distribute(x, mesh, spec)"
        )
    return sharding
