"""The axes a collective runs over: of a mesh or a `vmap`, perhaps in groups."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.api.vmap import named_axes
from minidiff.core.interpreter import current_interpreter
from minidiff.core.ranks import Scope
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.errors import UnboundAxisError, did_you_mean, show_axes

AxisName = str | tuple[str, ...]
Axes = AxisName | set[str] | frozenset[str]  # for collectives that ignore the order of the axes
Groups = tuple[tuple[int, ...], ...]


class CollectiveAxes(NamedTuple):
    """Axes that one operation can run over, and their scope; with `groups`, it runs within each group of indices."""

    scope: Scope
    axes: tuple[str, ...]
    groups: Groups | None = None

    @property
    def size(self) -> int:
        """The number of participating ranks; with groups, the size of the largest."""
        return size_of(self.scope, self.axes) if self.groups is None else max(map(len, self.groups))

    @property
    def uniform(self) -> bool:
        """Whether all groups have the same size."""
        return self.groups is None or len(set(map(len, self.groups))) == 1

    @property
    def params(self) -> dict[str, Any]:
        """The parameters `axes`, `size` and (if any) `groups` of a collective."""
        scope, axes, groups = self
        if groups is None:
            return {"axes": axes, "size": size_of(scope, axes)}
        return {"axes": axes, "size": self.size, "groups": groups}


def axes_in_scope(scope: Scope, axes: Collection[str]) -> CollectiveAxes:
    """Return `axes` of a scope as `CollectiveAxes`, in the scope's order."""
    return CollectiveAxes(scope, tuple(a for a in scope.axes if a in axes))


def size_of(scope: Scope, axes: Iterable[str]) -> int:
    """Return the number of ranks along `axes`."""
    return math.prod(map(scope.axes.__getitem__, axes))


def rank_count(axis_groups: Sequence[CollectiveAxes]) -> int:
    """Return the number of ranks along all of `axis_groups`."""
    return math.prod(group.size for group in axis_groups)


def collective_axes(
    name: str, axis_name: Any, groups: Any = None, uniform: bool = True, ordered: bool = True
) -> list[CollectiveAxes]:
    """Check the named axes and split them into axis groups, one for each operation.

    All axes of the body's mesh are in one scope; each axis named by a vmap is an untyped scope of its own. A set of
    axes is accepted only if their order does not matter (`ordered=False`). With `groups`, of equal size if `uniform`,
    the axes must be one axis group.
    """
    if groups is not None:
        return [single_axes(name, axis_name, groups, uniform)]
    interpreter = current_interpreter()
    scope, vmapped = interpreter.scope, named_axes(interpreter)
    if scope is not None and not vmapped and type(axis_name) is str and axis_name in _mapped(scope):
        return [CollectiveAxes(scope, (axis_name,))]  # as below, in short
    axes: tuple[str, ...] = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if isinstance(axis_name, (set, frozenset)):
        bound = [*(scope.axes if scope is not None else ()), *vmapped]  # in this order on all ranks
        axes = tuple(sorted(axis_name, key=lambda a: (bound.index(a) if a in bound else len(bound), str(a))))
        if ordered:
            meant = "the name" if len(axes) == 1 else "a tuple"
            raise TypeError(
                f"{name} over the set {{{', '.join(map(repr, axes))}}}: the order of the axes matters here, and a set "
                f"has none; write {meant}, {show_axes(axes)}"
            )
    axis_groups: list[CollectiveAxes] = []
    for axis in axes:
        _check_bound(name, axis_name, axis, scope, vmapped)
        if axis in vmapped:
            axis_groups.append(CollectiveAxes(Scope({axis: vmapped[axis]}, typed=False), (axis,)))
        elif axis_groups and axis_groups[-1].scope is scope:
            axis_groups[-1] = CollectiveAxes(scope, (*axis_groups[-1].axes, axis))
        else:
            axis_groups.append(CollectiveAxes(scope, (axis,)))
    check_distinct(name, axes)
    return axis_groups


def _mapped(scope: Scope) -> Collection[str]:
    """Return the axes of the mesh that the body maps over."""
    return scope.bottom.mapped or scope.axes


def check_distinct(name: str, axes: Sequence[str]) -> None:
    """Raise ValueError if an axis is named twice."""
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: an axis is named twice in {axes!r}")


def _check_bound(name: str, axis_name: Any, axis: str, scope: Scope | None, vmapped: dict) -> None:
    if not isinstance(axis, str) and (isinstance(axis, (Tracer, numpy.ndarray)) or not isinstance(axis, Hashable)):
        shown = axis if not hasattr(axis, "dtype") else typeof(axis)
        call = f"{name}('i')" if name in ("axis_index", "axis_size") else f"{name}(x, 'i')"
        raise TypeError(f"{name} over {shown}: that is not the name of an axis; write {call}")
    if scope is None and not vmapped:
        raise UnboundAxisError(
            f"{name} over {axis_name!r} was called outside a shard_map: call it in the function that "
            "spmd.shard_map(f, mesh, in_specs, out_specs) runs, over an axis of the mesh, or in that of "
            "vmap(f, axis_name=...)"
        )
    mesh = () if scope is None else tuple(_mapped(scope))
    if axis not in mesh and axis not in vmapped:
        bound = [f"the axes of this shard_map's mesh are {mesh}"] if mesh else []
        bound += [f"those named by a vmap are {tuple(vmapped)}"] if vmapped else []
        meant = did_you_mean(axis, [*mesh, *vmapped])
        raise UnboundAxisError(f"{name}: there is no axis {axis!r} here; {', '.join(bound)}{meant}")
    if axis in mesh and axis in vmapped:
        raise ValueError(f"{name}: an axis of the mesh and that of a vmap are both named {axis!r}: rename one")


def single_axes(name: str, axis_name: AxisName, groups: Any = None, uniform: bool = True) -> CollectiveAxes:
    """Check the named axes and return them as one axis group, optionally with groups of indices."""
    axis_groups = collective_axes(name, axis_name)
    if not axis_groups:
        raise ValueError(f"{name} over {axis_name!r}: no axis is named; name at least one")
    if len(axis_groups) != 1:
        raise ValueError(
            f"{name} over {axis_name!r}: an axis named by a vmap cannot be combined with other axes; "
            "write one collective for each"
        )
    if groups is None:
        return axis_groups[0]
    groups = tuple(tuple(operator.index(rank) for rank in group) for group in groups)
    check_groups(
        f"{name} over {axis_name!r}: axis_index_groups={[*map(list, groups)]}", groups, axis_groups[0].size, uniform
    )
    return axis_groups[0]._replace(groups=groups)


def check_groups(call: str, groups: Groups, size: int, uniform: bool) -> None:
    """Raise ValueError, about `call`, unless each rank is in exactly one group; `uniform` requires equal sizes."""
    named = [rank for group in groups for rank in group]
    for rank in named:
        if not 0 <= rank < size:
            raise ValueError(f"{call}: {rank} is not an index of the {size} ranks, which are 0 to {size - 1}")
        if named.count(rank) > 1:
            raise ValueError(f"{call}: rank {rank} occurs {named.count(rank)} times; each rank is in one group")
    for rank in range(size):
        if rank not in named:
            raise ValueError(f"{call}: rank {rank} is in no group; for a group of its own, add [{rank}]")
    sizes = sorted({len(group) for group in groups})
    if not sizes[0] or (uniform and len(sizes) > 1):
        must = "have equally many ranks" if sizes[0] else "not be empty"
        raise ValueError(f"{call}: there are groups of {' and of '.join(map(str, sizes))} ranks; they must {must}")


def check_rank(name: str, role: str, rank: Any, axis_name: AxisName, size: int) -> int:
    """Return a rank argument as an integer; ValueError if it is out of range."""
    rank = operator.index(rank)
    if not 0 <= rank < size:
        raise ValueError(
            f"{name}: {role} {rank} is not an index along {axis_name!r}, which has {size} ranks, 0 to {size - 1}"
        )
    return rank


def check_split(name: str, x: Value, axis: int, size: int, tiled: bool) -> None:
    """Raise ValueError if a dimension cannot be split into one part per rank."""
    length = typeof(x).shape[axis]
    if tiled and length % size:
        raise ValueError(
            f"{name}: axis {axis} of {typeof(x)} is split over {size} ranks, which do not divide {length}: make it a "
            f"multiple of {size}"
        )
    if not tiled and length != size:
        raise ValueError(
            f"{name}: axis {axis} of {typeof(x)} must have one entry for each of the {size} ranks; "
            "with tiled=True it may have any multiple"
        )


def check_splits(name: str, splits: Any, size: int) -> Groups:
    """Return the row counts `splits[source][destination]` as tuples, or raise ValueError."""
    table = tuple(tuple(operator.index(n) for n in row) for row in splits)
    if [len(row) for row in table] != [size] * size:
        raise ValueError(
            f"{name}: splits[s][d] says how many rows go from rank s to rank d: {size} lists of {size} numbers, "
            f"got {[list(row) for row in table]}"
        )
    for source, row in enumerate(table):
        for destination, rows in enumerate(row):
            if rows < 0:
                raise ValueError(f"{name}: splits[{source}][{destination}] is {rows}: for no rows, write 0")
    return table


@functools.lru_cache(maxsize=16)  # few, as they are long on many ranks
def check_perm(name: str, perm: tuple[tuple[int, int], ...], axis_name: AxisName, size: int) -> None:
    """Raise ValueError if a source or a destination is out of range or occurs twice."""
    for role, ranks in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        for rank in ranks:
            check_rank(name, role, rank, axis_name, size)
        for rank, times in Counter(ranks).items():
            if times > 1:
                raise ValueError(
                    f"{name}: {role} {rank} occurs {times} times in {list(perm)}; a rank sends once and receives once"
                )


def longest_block(splits: Iterable[Sequence[int]]) -> int:
    """Return the number of rows of the longest block: ranks pad theirs to it."""
    return max(map(sum, splits))
