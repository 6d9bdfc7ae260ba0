"""Partition specs: which dimension of an array is split along which mesh axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minidiff.core.states import ALL_INVARIANT, NONE, AxisStates, combine_states
from minidiff.core.types import ShapedArray
from minidiff.errors import show_axes
from minidiff.errors.tracebacks import hide_own_frames

Entry = Any  # None, an axis's name, or a tuple of names
Names = str | Iterable[str]  # an axis's name, or several


class PartitionSpec:
    """The split of an array's dimensions over a mesh: `P('x', None, ('y', 'z'))`.

    Here the first dimension is split along x, the third along y and z (y major). Dimensions without an entry are not
    split. An axis that is not named is *unmapped*: every rank along it has the same block. Along the axes in
    `unreduced` ranks hold partial sums; along those in `reduced` they hold the same block, whose cotangent is
    unreduced. `sum`, in `out_specs`, is `unreduced` followed by the sum: the blocks are added up, and the result is
    unmapped there. Raises TypeError for an entry that is not None, the name of a mesh axis, or a tuple of names.

    >>> PartitionSpec('x', None)
    P('x', None)
    >>> sorted(PartitionSpec(('y', 'x')).axes)
    ['x', 'y']
    >>> PartitionSpec('x', sum='y')
    P('x', sum='y')
    >>> PartitionSpec('x', unreduced={'y'})
    P('x', unreduced={'y'})

    Source: shard_map tutorial, "in_specs" and "out_specs"; JEP 17111, "Partial solution 'P-sum'"; JAX, "Autodiff and
    sharding", for `unreduced` and `reduced`.
    """

    __slots__ = (
        *("entries", "unreduced", "reduced", "summed", "path"),
        *("axes", "split_axes", "is_trivial", "key", "_known_states"),
    )

    @hide_own_frames
    def __init__(self, *entries: Entry, unreduced: Names = (), reduced: Names = (), sum: Names = ()):
        for name, entry in [*[("an entry", e) for e in entries], ("sum", sum)]:
            if not all(isinstance(name, str) for name in axes_of_entry(entry)):
                raise TypeError(
                    f"{_show_spec(entries, {'sum': axes_of_entry(sum)})}: {name} is None, the name of a mesh axis, or "
                    "a tuple of names"
                )
        for name, axes in (("unreduced", unreduced), ("reduced", reduced)) if unreduced or reduced else ():
            if not (isinstance(axes, (str, tuple, set, frozenset)) and all(isinstance(a, str) for a in _set(axes))):
                raise TypeError(
                    f"{_show_spec(entries)}: {name} is {axes!r}; write the set of mesh axes, {name}={{'i'}}"
                )
        self.entries = entries
        self.unreduced: frozenset[str] = _set(unreduced) if unreduced else NONE
        self.reduced: frozenset[str] = _set(reduced) if reduced else NONE
        self.summed: tuple[str, ...] = axes_of_entry(sum)
        self.path = ""  # the argument that this is the spec of, named in errors; equality ignores it
        entry_axes = [axes_of_entry(e) for e in entries]
        while entry_axes and not entry_axes[-1]:
            entry_axes.pop()
        #: The mesh axes that dimensions are split along, and those along which ranks have different blocks.
        self.axes: frozenset[str] = frozenset([a for axes in entry_axes for a in axes])
        self.split_axes: frozenset[str] = self.axes | self.unreduced
        self.is_trivial = not (self.split_axes or self.reduced)  # that of a plain array, which is the same on all ranks
        self.key = (tuple(entry_axes), self.unreduced, self.reduced, frozenset(self.summed))  # that of all equal specs
        self._known_states: AxisStates | None = None

    @property
    def states(self) -> AxisStates:
        """The states of a block along mesh axes."""
        if self._known_states is None:
            self._known_states = AxisStates.of(self.axes, self.unreduced, self.reduced)
        return self._known_states

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """For each of `ndim` dimensions, the axes it is split along."""
        split = self.key[0]
        return split + ((),) * (ndim - len(split))

    @classmethod
    def of_dims(cls, dims: Sequence[tuple[str, ...]], unreduced: Names = (), reduced: Names = ()) -> PartitionSpec:
        """The spec with these axes for each dimension: the inverse of `dims`."""
        entries = [axes[0] if len(axes) == 1 else axes or None for axes in dims]
        while entries and entries[-1] is None:
            entries.pop()
        return cls(*entries, unreduced=unreduced, reduced=reduced)

    def with_dims(self, dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """This spec with other axes for each dimension."""
        return PartitionSpec.of_dims(dims, self.unreduced, self.reduced)

    def batched(self, axes: tuple[str, ...] = ()) -> PartitionSpec:
        """The spec with a batch dimension inserted before those of the block, split along `axes`."""
        return self._like(axes or None, *self.entries)

    def extended(self, minor: PartitionSpec) -> PartitionSpec:
        """The spec with the dimensions split further, along the axes of another spec."""
        ndim = max(len(self.entries), len(minor.entries))
        both = [(*major, *axes) for major, axes in zip(self.dims(ndim), minor.dims(ndim))]
        return self._like(*PartitionSpec.of_dims(both).entries) if minor.axes else self

    def transposed(self) -> PartitionSpec:
        """The spec of the cotangent: reduced where the value is unreduced, and unreduced where it is reduced."""
        return self.with_states(self.reduced, self.unreduced) if self.unreduced or self.reduced else self

    def before_sum(self) -> PartitionSpec:
        """The spec of a result whose sum, over the axes in `sum`, is not taken yet."""
        return self.with_states(self.unreduced.union(self.summed), self.reduced) if self.summed else self

    def with_states(self, unreduced: Names, reduced: Names) -> PartitionSpec:
        """This spec with other unreduced and reduced axes, and without `sum`."""
        return self._like(*self.entries, unreduced=unreduced, reduced=reduced, sum=())

    def summed_up(self) -> PartitionSpec:
        """The spec of the value whose partial sums are added up."""
        return self.with_states((), self.reduced)

    def summing(self, axes: Iterable[str]) -> PartitionSpec:
        """The spec with these axes in `sum`."""
        return self._like(*self.entries, sum=tuple(axes))

    def _like(self, *entries: Entry, **changed: Names) -> PartitionSpec:
        """The spec with other entries, or other states, of the same argument."""
        states = {"unreduced": self.unreduced, "reduced": self.reduced, "sum": self.summed, **changed}
        spec = PartitionSpec(*entries, **states)
        spec.path = self.path
        return spec

    def for_argument(self, path: str) -> PartitionSpec:
        """The same spec, for the argument at `path`."""
        spec = self._like(*self.entries)
        spec.path = path
        return spec

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PartitionSpec) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)  # not cached: a process that unpickles the spec has other hashes of strings

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return _show_spec(self.entries, {"unreduced": self.unreduced, "reduced": self.reduced, "sum": self.summed})


P = PartitionSpec


def _show_spec(entries: tuple, others: Mapping[str, Collection[str]] = {}) -> str:
    shown = [repr(e) for e in entries]
    for name, axes in others.items():
        if axes:
            in_set = f"{{{', '.join(map(repr, sorted(axes)))}}}"
            shown.append(f"{name}={show_axes(axes) if name == 'sum' else in_set}")
    return f"P({', '.join(shown)})"


def _set(axes: Names) -> frozenset[str]:
    return frozenset((axes,) if isinstance(axes, str) else axes)


def axes_of_entry(entry: Entry) -> tuple[str, ...]:
    """Return the axes that one entry names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def part_count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of parts of a dimension that is split along these axes."""
    return math.prod(map(sizes.__getitem__, axes))


def is_spec(x: Any) -> bool:
    """Whether x is a partition spec, the leaf of a tree of specs."""
    return isinstance(x, PartitionSpec)


def block_type(t: ShapedArray, spec: PartitionSpec, sizes: dict[str, int], typed: bool = True) -> ShapedArray:
    """The type of a rank's block of an array of type `t`; its states join those of `t` and of the spec."""
    shape = t.shape
    if spec.axes:
        shape = tuple([n // part_count(axes, sizes) for n, axes in zip(shape, spec.dims(t.ndim))])
    return ShapedArray(shape, t.dtype, combine_states(t.states, spec.states) if typed else ALL_INVARIANT)


def global_type(block: ShapedArray, spec: PartitionSpec, sizes: dict[str, int]) -> ShapedArray:
    """The type of the array whose blocks have the type `block`."""
    shape = [n * part_count(axes, sizes) for n, axes in zip(block.shape, spec.dims(block.ndim))]
    unreduced, reduced = block.unreduced | spec.unreduced, block.reduced | spec.reduced
    return ShapedArray(shape, block.dtype, block.variance - spec.split_axes, unreduced=unreduced, reduced=reduced)


#: The spec of an array that is whole on every rank.
WHOLE = P()
