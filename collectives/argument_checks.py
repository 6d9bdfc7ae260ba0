"""Checks of the arguments of collectives: their errors say what to write instead."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy

from collectives.axes import CollectiveAxes, Groups, mapped_axes, size_of
from collectives.backends.functions import check_rows
from collectives.backends.simulated import Simulated
from collectives.checks import Checks
from collectives.collective import ARRAY_AXES, Collective, check_operand, gathered_shape, scattered_shape
from collectives.exact import exact_psum
from minidiff.checks.typecheck import check_call
from minidiff.core.ranks import Scope, ranks
from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import UnboundAxisError, VarianceError, VarianceWarning, did_you_mean, show_axes

# ---------------------------------------------------------------- axes


def check_distinct(name: str, axes: Sequence[str]) -> None:
    """Raise ValueError if an axis is named twice."""
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name}: an axis is named twice in {axes!r}")


def check_bound(name: str, axis_name: Any, axis: str, scope: Scope | None, vmapped: dict) -> None:
    """Raise TypeError, UnboundAxisError or ValueError unless `axis` is the name of an axis here."""
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
    mesh = () if scope is None else tuple(mapped_axes(scope))
    if axis not in mesh and axis not in vmapped:
        bound = [f"the axes of this shard_map's mesh are {mesh}"] if mesh else []
        bound += [f"those named by a vmap are {tuple(vmapped)}"] if vmapped else []
        meant = did_you_mean(axis, [*mesh, *vmapped])
        raise UnboundAxisError(f"{name}: there is no axis {axis!r} here; {', '.join(bound)}{meant}")
    if axis in mesh and axis in vmapped:
        raise ValueError(f"{name}: an axis of the mesh and that of a vmap are both named {axis!r}: rename one")


# ---------------------------------------------------------------- ranks, and parts of arrays


def check_groups(call: str, groups: Groups, size: int, uniform: bool) -> None:
    """Raise ValueError, about `call`, unless each rank is in exactly one group; `uniform` requires equal sizes."""
    named = [rank for group in groups for rank in group]
    for rank in named:
        if not 0 <= rank < size:
            raise ValueError(f"{call}: {rank} is not one of the {size} ranks, 0 to {size - 1}")
        if named.count(rank) > 1:
            raise ValueError(f"{call}: rank {rank} occurs {named.count(rank)} times; each rank is in one group")
    for rank in range(size):
        if rank not in named:
            raise ValueError(f"{call}: rank {rank} is in no group; for a group of its own, add [{rank}]")
    sizes = sorted({len(group) for group in groups})
    if not sizes[0] or (uniform and len(sizes) > 1):
        must = "have the same number of ranks" if sizes[0] else "not be empty"
        raise ValueError(f"{call}: groups have {' and '.join(map(str, sizes))} ranks; they must {must}")


def as_integer(name: str, role: str, rank: Any) -> int:
    """Return a rank argument as an integer; TypeError if it is a number of another type."""
    if not hasattr(rank, "__index__"):
        raise TypeError(f"{name}: {role} is {rank!r}, which is no integer: write int({rank!r}), or // in place of /")
    return operator.index(rank)


def check_rank(name: str, role: str, rank: Any, axis_name: Any, size: int) -> int:
    """Return a rank argument as an integer; ValueError if it is out of range."""
    rank = as_integer(name, role, rank)
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
            f"multiple of {size}, with np.pad"
        )
    if not tiled and length != size:
        raise ValueError(
            f"{name}: axis {axis} of {typeof(x)} must have one entry for each of the {size} ranks; "
            "with tiled=True it may have any multiple of that"
        )


def check_table(name: str, t: ShapedArray, size: int) -> None:
    """Raise ValueError unless a table of row counts has one integer for each pair of ranks."""
    if t.shape != (size, size) or t.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: splits is {t}: pass integers, [{size}, {size}], the rows from each rank to each other"
        )


def check_splits(name: str, splits: Any, size: int) -> Groups:
    """Return the row counts `splits[source][destination]` as tuples, or raise ValueError."""
    table = tuple(tuple(operator.index(n) for n in row) for row in splits)
    if [len(row) for row in table] != [size] * size:
        raise ValueError(
            f"{name}: splits[s][d] says how many rows go from rank s to rank d: {size} lists of {size} numbers, "
            f"got {[list(row) for row in table]}"
        )
    return table


@functools.lru_cache(maxsize=16)  # few, as they are long on many ranks
def check_perm(name: str, perm: tuple[tuple[int, int], ...], axis_name: Any, size: int) -> None:
    """Raise ValueError if a source or a destination is out of range or occurs twice."""
    for role, named in (("source", [s for s, _ in perm]), ("destination", [d for _, d in perm])):
        for rank in named:
            check_rank(name, role, rank, axis_name, size)
        for rank, times in Counter(named).items():
            if times > 1:
                raise ValueError(
                    f"{name}: {role} {rank} occurs {times} times in {list(perm)}; a rank sends once and receives once"
                )


# ---------------------------------------------------------------- states

#: The state that a collective takes along its axes, in words.
_WANTED = {VARYING: "varies", INVARIANT: "is the same on all ranks"}
#: The state of a value along an axis in words, and what to write instead.
_STATES = {
    VARYING: ("already varies along", "remove these axes"),
    INVARIANT: ("is the same on all ranks along", "write pbroadcast(x, {axes}) for it"),
    UNREDUCED: ("is unreduced along", "there ranks hold partial sums; write psum(x, {axes}) first, or psum_scatter"),
    REDUCED: ("is reduced along", "write pbroadcast(x, {axes}) for it"),
}
_INSTEAD = {
    "splits of all_to_all": "each rank has its own row there: to make the whole table, write "
    "all_gather_invariant(row, {axes})",
    "psum": "to sum one copy per rank, write x * axis_size({axes}), or psum of pbroadcast(x, {axes})",
    "pmean": "it is already the mean: remove these axes",
    "reduced": "each rank has its own value there; to join them, write all_gather(x, {axes}, to='reduced')",
    "unreduced": "there ranks hold the same value; to use it as a partial sum, write unreduced(at_root(x, {axes}), "
    "{axes}), and to add up the copies, unreduced(pbroadcast(x, {axes}), {axes})",
    "pprod": "for the product of one copy per rank, write x ** axis_size({axes}), or pprod of pbroadcast(x, {axes})",
    "pmax": "it is already the maximum: remove these axes",
    "pmin": "it is already the minimum: remove these axes",
    "pscatter": "each rank has its own value there. Remove these axes; or first make it the same, with psum or "
    "all_gather_invariant over {axes}",
    "broadcast": "every rank already has the root's value: remove these axes",
    "scatter": "each rank can take its part itself: write pscatter over {axes}",
    "at_root": "each rank has its own value there. To send them to the root, write reduce (their sum) or gather (all)",
}


# ---------------------------------------------------------------- collectives on tapes


def ranks_along(name: str, scope: Scope | None, axes: tuple[str, ...]) -> int | None:
    """Return the number of ranks along axes, None if unknown. Raises ValueError for unbound or repeated axes."""
    check_distinct(name, axes)
    if scope is None:
        return None
    unbound = [a for a in axes if a not in scope.axes]
    if unbound and scope.typed:
        raise ValueError(f"there is no axis {unbound[0]!r} here; the axes of this shard_map are {tuple(scope.axes)}")
    return None if unbound else size_of(scope, axes)


def check_on_ranks(of: Collective, x: ShapedArray, params: dict, scope: Scope | None) -> None:
    """Raise ValueError if parameters or shapes do not fit the body's ranks."""
    axes, size = params["axes"], params["size"]
    ranks = ranks_along(of.name, scope, axes)
    if "groups" in params:
        groups = params["groups"]
        check_groups(f"groups={groups}", groups, sum(map(len, groups)) if ranks is None else ranks, uniform=False)
        ranks = max(map(len, groups))
    if ranks is not None and ranks != size:
        raise ValueError(f"there are {ranks} ranks along {show_axes(axes)}, not size={size}")
    if "root" in params:
        check_rank(of.name, "the root", params["root"], axes, size)
    if "perm" in params:
        check_perm(of.name, params["perm"], axes, size)
    new = of.shape_rule is gathered_shape and not params["tiled"]
    for name in ARRAY_AXES:
        if name in params and not 0 <= params[name] < x.ndim + new:
            raise ValueError(f"{x} has no axis {params[name]}")
    if "split_axis" in params or of.shape_rule is scattered_shape:
        axis = params["split_axis"] if "split_axis" in params else params["axis"]
        check_split(of.name, x, axis, size, params["tiled"])


class ArgumentChecks(Checks):
    """The checks of this file."""

    split = staticmethod(check_split)
    rows = staticmethod(check_rows)
    axes_in = staticmethod(ranks_along)
    exact_psum = staticmethod(exact_psum)

    def axis_names(self, name: str, axis_name: Any, ordered: bool, scope: Scope | None, vmapped: dict) -> Sequence[str]:
        """Return the names of axes in order, checked. In a set they have that of the scope, on all ranks."""
        axes: tuple[str, ...] = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
        if isinstance(axis_name, (set, frozenset)):
            bound = [*(scope.axes if scope is not None else ()), *vmapped]  # in this order on all ranks
            axes = tuple(sorted(axis_name, key=lambda a: (bound.index(a) if a in bound else len(bound), str(a))))
            if ordered:
                meant = "the name" if len(axes) == 1 else "a tuple"
                raise TypeError(
                    f"{name} over the set {{{', '.join(map(repr, axes))}}}: the order of the axes matters here, and a "
                    f"set has none; write {meant}, {show_axes(axes)}"
                )
        for axis in axes:
            check_bound(name, axis_name, axis, scope, vmapped)
        check_distinct(name, axes)
        return axes

    def one_group(self, name: str, axis_name: Any, axis_groups: Sequence[CollectiveAxes]) -> None:
        """Raise ValueError unless one operation can run over the axes."""
        if not axis_groups:
            raise ValueError(f"{name} over {axis_name!r}: no axis is named; name at least one")
        if len(axis_groups) != 1:
            raise ValueError(
                f"{name} over {axis_name!r}: an axis named by a vmap cannot be combined with other axes; "
                "write one collective for each"
            )

    def groups(self, name: str, axis_name: Any, groups: Groups, size: int, uniform: bool) -> None:
        call = f"{name} over {axis_name!r}: axis_index_groups={[*map(list, groups)]}"
        check_groups(call, groups, size, uniform)

    def splits(self, name: str, x: Value, axes: tuple, splits: Any, group: Any, capacity: Any) -> tuple[Any, int]:
        """Return the row counts as an array, and the rows of results; ValueError unless operands have these rows."""
        axis, concat_axis = axes
        if group.groups is not None:
            raise ValueError(f"{name}: splits say what each rank sends to each other rank: remove axis_index_groups")
        if splits is None:
            raise ValueError(f"{name}: capacity is the number of rows that splits fill: pass splits, or remove it")
        if axis != concat_axis:
            raise ValueError(
                f"{name}: blocks with different lengths along axis {axis} can be joined only along that axis, not "
                f"along {concat_axis}: write concat_axis={axis}"
            )
        if isinstance(splits, Tracer):
            check_table(name, typeof(splits), group.size)
            if group.scope.typed:
                check_operand(f"splits of {name}", (INVARIANT,), typeof(splits), group.params)
            if capacity is None:
                raise ValueError(f"{name}: splits are known at run time only: write capacity=, the rows of a result")
            return splits, operator.index(capacity)
        table, rows = numpy.array(check_splits(name, splits, group.size)), typeof(x).shape[axis]
        if capacity is None and rows != table.sum(1).max():
            raise ValueError(
                f"{name}: axis {axis} of {typeof(x)} must have {table.sum(1).max()} rows, the most "
                "that a rank sends by these splits; the other ranks pad their rows, and the padding is not sent"
            )
        capacity = int(table.sum(0).max()) if capacity is None else operator.index(capacity)
        check_rows(table, rows, capacity)
        return table, capacity

    def permutation(self, name: str, axis_name: Any, group: CollectiveAxes, perm: Any) -> tuple[tuple[int, int], ...]:
        """Return the pairs of a permutation of ranks, or raise TypeError or ValueError."""
        try:
            pairs = tuple(map(tuple, perm))
        except TypeError:  # not iterable
            pairs = ((),)
        if {*map(len, pairs)} - {2}:
            raise TypeError(
                f"{name}: perm is {perm!r}; write a list of pairs (source, destination), such as [(0, 1), (1, 0)]"
            )
        pairs = tuple([(as_integer(name, "source", s), as_integer(name, "destination", d)) for s, d in pairs])
        check_perm(name, pairs, axis_name if isinstance(axis_name, str) else group.axes, group.size)
        return pairs

    def copies_summed(self, axes: tuple[str, ...], copies: int) -> None:
        if copies == 1:
            return
        along, names = show_axes(axes), repr(axes[0] if len(axes) == 1 else axes)
        ranks.warn(
            f"psum of a value that is already the same on all ranks along {along}: the result is {copies} times the "
            "value. If this is the gradient of parameters that are the same on all ranks, the backward pass has summed "
            f"it: remove this psum. To add up the copies, write x * axis_size({names})",
            VarianceWarning,
        )

    def state_error(self, name: str, takes: Collection[str], x: ShapedArray, params: dict) -> VarianceError:
        """Return the error for an operand in states that the collective does not take, and what to write instead."""
        by_state: dict[str, list[str]] = {}
        for a in params["axes"]:
            by_state.setdefault(x.states.along(a), []).append(a)
        allowed = [state for state in takes if state in by_state][:1]  # one state for all axes
        state, axes = next((state, axes) for state, axes in by_state.items() if state not in allowed)
        wanted, (has, instead) = _WANTED[next(iter(takes))], _STATES[state]
        if "groups" not in params and state in (VARYING, INVARIANT):
            instead = _INSTEAD.get(name, instead)
        if state == name:
            instead = "remove these axes"
        elif state == REDUCED and VARYING not in takes:
            instead = "write pmean(pbroadcast(x, {axes}), {axes}) for it, or use the value before it was reduced"
        return VarianceError(
            f"{name} over {show_axes(params['axes'])} takes a value that {wanted} there, but {x} {has} "
            f"{show_axes(axes)}: {instead.format(axes=show_axes(axes))}"
        )

    def parameters(self, of: Collective, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        of_block = getattr(Simulated, f"_{of.name}")  # takes the backend and the data
        names = [name for name in params if name not in ("axes", "groups")]
        if of.ungrouped is not None and "groups" not in params:
            raise ValueError("groups= is missing")
        tables = bool(of.linear_operands)  # one operand is the table of splits
        check_call(of_block, 1 + len(types) - tables, [*names, "splits"] if tables else names)
        if of.linear_operands:
            check_table(of.name, types[1], params["size"])
        for x in types[: of.linear_operands]:
            check_on_ranks(of, x, params, scope)
