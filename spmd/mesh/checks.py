"""Checks of meshes and of partition specs: their errors say what to write instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from collectives.backends.base import Backend
from minidiff.core.interpreter import current_scope
from minidiff.core.types import ShapedArray
from minidiff.errors import VarianceError, did_you_mean
from spmd.mesh.specs import PartitionSpec, axes_of_entry, is_spec, part_count

# ---------------------------------------------------------------- meshes


def check_mesh(shape: dict[str, int], ranks: Backend) -> None:
    """Raise TypeError if a mesh is made of anything but a shape and a backend."""
    if not (isinstance(shape, dict) and isinstance(ranks, Backend)):
        raise TypeError(
            "make a mesh with make_mesh, from its axes' sizes and names, as in make_mesh((4, 2), ('x', 'y')); got "
            f"{shape!r} and {ranks!r}. Its ranks are the launcher's (mpirun -n 8), or simulated: do not list them"
        )


def check_shape(axis_shapes: Sequence[int], axis_names: Sequence[str]) -> dict[str, int]:
    """Return the shape of a mesh, in which a size may be -1; TypeError or ValueError for other arguments."""
    if isinstance(axis_shapes, dict):
        sizes = tuple(axis_shapes.values())
        raise TypeError(
            "make_mesh takes the sizes of the axes first, then their names: write "
            f"make_mesh({sizes}, {tuple(axis_shapes)}), got {axis_shapes!r}"
        )
    if not all(hasattr(x, "__len__") and not isinstance(x, (str, dict)) for x in (axis_shapes, axis_names)):
        raise TypeError(
            f"make_mesh takes a tuple of sizes and a tuple of names, as in make_mesh((4, 2), ('x', 'y')); "
            f"got {axis_shapes!r} and {axis_names!r}"
        )
    if len(axis_shapes) != len(axis_names):
        raise ValueError(
            f"make_mesh: {len(axis_shapes)} sizes for {len(axis_names)} axis names: {tuple(axis_shapes)} and "
            f"{tuple(axis_names)}; pass one size and one name for each axis"
        )
    for name, size in zip(axis_names, axis_shapes):
        if not isinstance(name, str):
            raise TypeError(f"make_mesh: the name of an axis must be a string, as in ('x', 'y'); got {name!r}")
        if axis_names.count(name) > 1:
            raise ValueError(
                f"make_mesh: the axis name {name!r} occurs twice in {tuple(axis_names)}; rename one of them"
            )
        if not hasattr(size, "__index__"):
            raise TypeError(f"make_mesh: the axis {name!r} has size {size!r}; it must be an integer: write int({size})")
        if operator.index(size) < 1 and operator.index(size) != -1:
            raise ValueError(
                f"make_mesh: the axis {name!r} has size {size}; it must be at least 1, or -1 for all remaining ranks"
            )
    shape = dict(zip(axis_names, map(operator.index, axis_shapes)))
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"make_mesh: the sizes {tuple(shape.values())} leave several axes open: at most one may be -1")
    return shape


def fill_in(shape: dict[str, int], ranks: int | None) -> dict[str, int]:
    """Return the shape with -1 replaced by the size that `ranks` leaves for it; by 1 if they are unknown."""
    axis = next((name for name, size in shape.items() if size == -1), None)
    if axis is None:
        return shape
    known = -math.prod(shape.values())
    ranks = known if ranks is None else ranks
    if ranks % known:
        other_sizes = ", ".join(f"{name}: {size}" for name, size in shape.items() if name != axis)
        raise ValueError(
            f"make_mesh: the axis {axis!r} has size -1, but the {ranks} ranks of the launcher cannot be divided by the "
            f"other axes ({other_sizes}): start the program with a multiple of {known}, as in `mpirun -n {2 * known}`"
        )
    return {**shape, axis: ranks // known}


def check_no_body(name: str) -> None:
    """Raise VarianceError if `name`, a rank's number, is used in a body."""
    scope = current_scope()
    if scope is not None:
        axes = tuple(scope.axes) if len(scope.axes) > 1 else next(iter(scope.axes), "")
        raise VarianceError(
            f"{name} in the body of a shard_map is a plain number: its type does not say that it differs "
            f"from rank to rank, and it is 0 where ranks are simulated. Write collectives.axis_index({axes!r}), whose "
            "type says so, and np.where instead of an `if`"
        )


# ---------------------------------------------------------------- partition specs


def check_is_spec(path: str, spec: Any) -> None:
    """Raise TypeError if the leaf at `path` of a tree of specs is not a partition spec."""
    if not is_spec(spec):
        meant = f"P({spec!r})" if isinstance(spec, str) else "P(...), or P() for an array that is the same on all ranks"
        raise TypeError(f"{path} is {spec!r}, which is not a partition spec; write {meant}")


def check_spec(spec: PartitionSpec, sizes: dict[str, int], name: str) -> None:
    """Raise TypeError or ValueError, about `name`, unless it is a spec that names axes of the mesh, each once."""
    check_is_spec(name, spec)
    named = [a for e in (*spec.entries, spec.summed, *spec.unreduced, *spec.reduced) for a in axes_of_entry(e)]
    for a in named:
        if a not in sizes:
            raise ValueError(
                f"{name} = {spec} names the axis {a!r}, but the axes of the mesh are {name_sizes(sizes, sizes)}: name "
                f"one of them, or write None for a dimension that is not split{did_you_mean(a, sizes)}"
            )
        if named.count(a) > 1:
            raise ValueError(
                f"{name} = {spec} names the axis {a!r} twice; an axis splits one dimension, or is summed over: name "
                f"{name_sizes([a], sizes)} once, and write None for a dimension that is not split"
            )


def check_not_summed(spec: PartitionSpec, name: str) -> None:
    """Raise ValueError if a whole array's spec has `sum=`: it has no partial sums."""
    if spec.summed:
        raise ValueError(
            f"{name} = {spec}: sum= adds up partial results on their way out of a shard_map, and is only for its "
            f"out_specs; an axis that is not named gives all ranks the same block: write {spec.summing(())}"
        )


def check_sharding(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int], array: str) -> None:
    """Raise TypeError or ValueError unless a whole array of this shape can be split by `spec`."""
    check_spec(spec, sizes, "spec")
    check_not_summed(spec, "spec")
    check_divides(spec, shape, sizes, "spec", array)


def check_ndim(spec: PartitionSpec, shape: tuple[int, ...], name: str, array: str) -> None:
    """Raise ValueError if a spec has more entries than the array has dimensions."""
    if len(spec.entries) > len(shape):
        advice = "a spec has one entry for each dimension, or fewer"
        if name == "out_specs" and not shape:
            advice = "to return one number from each rank, as a vector, return x[None]"
        entries = "1 entry" if len(spec.entries) == 1 else f"{len(spec.entries)} entries"
        raise ValueError(
            f"{name} = {spec} has {entries}, but {array} has {len(shape)} dimension{'s' * (len(shape) != 1)} (shape "
            f"{shape}): {advice}"
        )


def check_divides(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int], name: str, array: str) -> None:
    """Raise ValueError if a spec has too many entries, or the ranks along a dimension's axes do not divide its size."""
    check_ndim(spec, shape, name, array)
    for d, (entry, n) in enumerate(zip(spec.entries, shape)):
        ranks = part_count(axes_of_entry(entry), sizes)
        if n % ranks:
            raise ValueError(
                f"{array} has shape {shape}: dimension {d}, of size {n}, cannot be split evenly along "
                f"{name_sizes(axes_of_entry(entry), sizes)}, as {name} = {spec} says; make it a multiple of {ranks}, "
                f"or do not split it, with None in its place; x, mask = spmd.pad(x, mesh, {spec}) pads an array"
            )


def name_sizes(axes: Iterable[str], sizes: dict[str, int]) -> str:
    return " and ".join(f"{a!r} ({sizes[a]})" for a in axes)


# ---------------------------------------------------------------- a shard_map on a tape


def check_fits(types: Sequence[ShapedArray], params: dict) -> None:
    """Raise ValueError unless a `shard_map` can have these parameters, on operands of these types."""
    mesh, in_specs = params["mesh"], params["in_specs"]
    if len(in_specs) != len(types):
        raise ValueError(f"there are {len(types)} operands, but in_specs for {len(in_specs)}")
    for name, specs in (("in_specs", in_specs), ("out_specs", params["out_specs"])):
        for i, spec in enumerate(specs):
            check_spec(spec, mesh.shape, f"{name}[{i}]")
    for i, (x, spec) in enumerate(zip(types, in_specs)):
        check_not_summed(spec, f"in_specs[{i}]")
        check_divides(spec, x.shape, mesh.shape, "in_specs", f"an operand of type {x}")
    for t, spec in zip(params["body"].out_types, params["out_specs"]):
        check_ndim(spec, t.shape, "out_specs", f"a result of type {t}")


def check_variance(params: dict) -> None:
    """Raise VarianceError if a result of a body may differ where its spec says it does not."""
    for t, spec in zip(params["body"].out_types, params["out_specs"]):
        differs = t.variance - spec.axes or (t.unreduced, t.reduced) != (spec.unreduced, spec.reduced)
        if differs and params["check_rep"]:
            raise VarianceError(f"shard_map: a result of type {t} may differ where its spec {spec} says it does not")
