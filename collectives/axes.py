"""The axes a collective runs over: of a mesh or a `vmap`, perhaps in groups."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from collectives.checks import checks
from minidiff.api.vmap import named_axes
from minidiff.core.interpreter import current_interpreter
from minidiff.core.ranks import Scope

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
    if scope is not None and not vmapped and type(axis_name) is str and axis_name in mapped_axes(scope):
        return [CollectiveAxes(scope, (axis_name,))]  # as below, in short
    axes = checks.axis_names(name, axis_name, ordered, scope, vmapped)
    axis_groups: list[CollectiveAxes] = []
    for axis in axes:
        if axis in vmapped:
            axis_groups.append(CollectiveAxes(Scope({axis: vmapped[axis]}, typed=False), (axis,)))
        elif axis_groups and axis_groups[-1].scope is scope:
            axis_groups[-1] = CollectiveAxes(scope, (*axis_groups[-1].axes, axis))
        else:
            axis_groups.append(CollectiveAxes(scope, (axis,)))
    return axis_groups


def mapped_axes(scope: Scope) -> Collection[str]:
    """Return the axes of the mesh that the body maps over."""
    return scope.bottom.mapped or scope.axes


def single_axes(name: str, axis_name: AxisName, groups: Any = None, uniform: bool = True) -> CollectiveAxes:
    """Check the named axes and return them as one axis group, optionally with groups of indices."""
    axis_groups = collective_axes(name, axis_name)
    checks.one_group(name, axis_name, axis_groups)
    if groups is None:
        return axis_groups[0]
    groups = tuple(tuple(operator.index(rank) for rank in group) for group in groups)
    checks.groups(name, axis_name, groups, axis_groups[0].size, uniform)
    return axis_groups[0]._replace(groups=groups)
