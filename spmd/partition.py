"""Partition specs: which dimension of an array is split along which mesh axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from minidiff.errors import show_axes
from minidiff.keywords import did_you_mean
from minidiff.types import ShapedArray

Entry = Any  # None, an axis's name, or a tuple of names


class PartitionSpec:
    """The split of an array's dimensions over a mesh: `P('x', None, ('y', 'z'))`.

    Here the first dimension is split along x, the third along y and z (y major). Dimensions without an entry are not
    split. An axis that is not named is *unmapped*: every rank along it has the same block. `sum`, in `out_specs`, names
    axes whose ranks hold partial sums: the blocks along them are added up, and the sum is unmapped there.

    >>> PartitionSpec('x', None)
    P('x', None)
    >>> sorted(PartitionSpec(('y', 'x')).axes)
    ['x', 'y']
    >>> PartitionSpec('x', sum='y')
    P('x', sum='y')

    Source: shard_map tutorial, "in_specs" and "out_specs"; JEP 17111, "Partial solution 'P-sum'".
    """

    __slots__ = ("entries", "summed", "varying", "path", "_known_key")

    def __init__(self, *entries: Entry, sum: str | tuple[str, ...] = ()):
        for entry in (*entries, sum):
            if not all(isinstance(name, str) for name in names(entry)):
                what = "sum" if entry is sum else "an entry"
                raise TypeError(
                    f"{_shown(entries, names(sum))}: {what} is None, the name of a mesh axis, or a tuple of names"
                )
        self.entries = entries
        self.summed: tuple[str, ...] = names(sum)
        #: For an input: unmapped axes along which its blocks, though equal, are typed as varying. The transpose of
        #: `sum` has such inputs. Equality of specs ignores it; the type of the body's input shows it.
        self.varying: tuple[str, ...] = ()
        self.path = ""  # the argument that this is the spec of, named in errors; equality ignores it
        self._known_key: tuple | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that dimensions are split along."""
        return frozenset().union(*[names(e) for e in self.entries])

    def dims(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """For each of `ndim` dimensions, the axes it is split along."""
        return (*map(names, self.entries), *[()] * (ndim - len(self.entries)))

    @classmethod
    def of_dims(cls, dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
        """The spec with these axes for each dimension: the inverse of `dims`."""
        entries = [axes[0] if len(axes) == 1 else axes or None for axes in dims]
        while entries and entries[-1] is None:
            entries.pop()
        return cls(*entries)

    def batched(self, axes: tuple[str, ...] = ()) -> PartitionSpec:
        """The spec with a batch dimension inserted before those of the block, split along `axes`."""
        return self._like(axes or None, *self.entries)

    def extended(self, minor: PartitionSpec) -> PartitionSpec:
        """The spec with the dimensions split further, along the axes of another spec."""
        ndim = max(len(self.entries), len(minor.entries))
        both = [(*major, *axes) for major, axes in zip(self.dims(ndim), minor.dims(ndim))]
        return self._like(*PartitionSpec.of_dims(both).entries) if minor.axes else self

    def transposed(self) -> PartitionSpec:
        """The spec of the cotangent: a result's spec becomes an input's, and the reverse."""
        spec = self._like(*self.entries)
        spec.summed, spec.varying = self.varying, self.summed
        return spec

    def without_sum(self, done: Collection[str] | None = None) -> PartitionSpec:
        """The spec once the partial sums are added up: along all axes, or those in `done`."""
        if not (self.summed or self.varying):
            return self
        spec = self._like(*self.entries)
        spec.summed = () if done is None else tuple(a for a in self.summed if a not in done)
        spec.varying = ()
        return spec

    def _like(self, *entries: Entry) -> PartitionSpec:
        spec = PartitionSpec(*entries)
        spec.summed, spec.varying, spec.path = self.summed, self.varying, self.path
        return spec

    def of(self, path: str) -> PartitionSpec:
        """The same spec, for the argument at `path`."""
        spec = self._like(*self.entries)
        spec.path = path
        return spec

    def _key(self) -> tuple:
        if self._known_key is None:
            own = [names(e) for e in self.entries]
            while own and not own[-1]:
                own.pop()
            self._known_key = tuple(own), frozenset(self.summed)
        return self._known_key

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PartitionSpec) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return _shown(self.entries, self.summed)


P = PartitionSpec


def _shown(entries: tuple, summed: tuple) -> str:
    shown = [repr(e) for e in entries]
    return f"P({', '.join([*shown, f'sum={show_axes(summed)}'] if summed else shown)})"


def names(entry: Entry) -> tuple[str, ...]:
    """The axes that one entry names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def part_count(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """The number of parts of a dimension that is split along these axes."""
    return math.prod(sizes[a] for a in axes)


def is_spec(x: Any) -> bool:
    """Whether x is a partition spec, the leaf of a tree of specs."""
    return isinstance(x, PartitionSpec)


def check_is_spec(path: str, spec: Any) -> None:
    """Raise TypeError if a leaf of a tree of specs is not a partition spec.

    `path` is where it is in the tree.
    """
    if not is_spec(spec):
        meant = f"P({spec!r})" if isinstance(spec, str) else "P(...), or P() for an array that is the same on all ranks"
        raise TypeError(f"{path} is {spec!r}, which is not a partition spec; write {meant}")


def check_spec(spec: PartitionSpec, sizes: dict[str, int], what: str) -> None:
    """Raise ValueError if a spec names an axis that the mesh lacks, or one twice.

    Raise TypeError if it is not a partition spec. `what` is what the message calls it.
    """
    check_is_spec(what, spec)
    named = [a for e in (*spec.entries, spec.summed) for a in names(e)]
    for a in named:
        if a not in sizes:
            raise ValueError(
                f"{what} = {spec} names the axis {a!r}, but the axes of the mesh are {_with_sizes(sizes, sizes)}: name "
                f"one of them, or write None for a dimension that is not split{did_you_mean(a, sizes)}"
            )
        if named.count(a) > 1:
            raise ValueError(
                f"{what} = {spec} names the axis {a!r} twice; an axis splits one dimension, or is summed over: name "
                f"{_with_sizes([a], sizes)} once, and write None for a dimension that is not split"
            )


def check_not_summed(spec: PartitionSpec, what: str) -> None:
    """Raise ValueError if a whole array's spec has `sum=`.

    A whole array has no partial sums.
    """
    if spec.summed:
        raise ValueError(
            f"{what} = {spec}: sum= adds up partial results on their way out of a shard_map, and is only for its "
            f"out_specs; an axis that is not named gives all ranks the same block: write {spec.without_sum()}"
        )


def check_sharding(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int], array: str) -> None:
    """Raise TypeError or ValueError unless a whole array of this shape can be split by `spec`.

    Its spec has no `sum=`, which is for the results of bodies only.
    """
    check_spec(spec, sizes, "spec")
    check_not_summed(spec, "spec")
    check_ndim(spec, shape, "spec", array)
    check_divides(spec, shape, sizes, "spec", array)


def check_ndim(spec: PartitionSpec, shape: tuple[int, ...], what: str, array: str) -> None:
    """Raise ValueError if a spec has more entries than the array has dimensions."""
    if len(spec.entries) > len(shape):
        advice = "a spec has one entry for each dimension, or fewer"
        if what == "out_specs" and not shape:
            advice = "to return one number from each rank, as a vector, return x[None]"
        entries = "1 entry" if len(spec.entries) == 1 else f"{len(spec.entries)} entries"
        raise ValueError(
            f"{what} = {spec} has {entries}, but {array} has {len(shape)} dimension{'s' * (len(shape) != 1)} (shape "
            f"{shape}): {advice}"
        )


def check_divides(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int], what: str, array: str) -> None:
    """Raise ValueError if the ranks along a dimension's axes do not divide its size."""
    for d, (entry, n) in enumerate(zip(spec.entries, shape)):
        ranks = part_count(names(entry), sizes)
        if n % ranks:
            raise ValueError(
                f"{array} has shape {shape}: dimension {d}, of size {n}, cannot be split evenly along "
                f"{_with_sizes(names(entry), sizes)}, as {what} = {spec} says; make it a multiple of {ranks}, or leave "
                "it whole, with None in its place"
            )


def check_fits(t: ShapedArray, spec: PartitionSpec, sizes: dict[str, int]) -> None:
    """Raise ValueError if an array of type `t` cannot be split by a spec."""
    check_ndim(spec, t.shape, "in_specs", f"an operand of type {t}")
    check_divides(spec, t.shape, sizes, "in_specs", f"an operand of type {t}")


def _with_sizes(axes: Iterable[str], sizes: dict[str, int]) -> str:
    return " and ".join(f"{a!r} ({sizes[a]})" for a in axes)


def block_type(t: ShapedArray, spec: PartitionSpec, sizes: dict[str, int], typed: bool = True) -> ShapedArray:
    """The type of a rank's block of an array of type `t`.

    A variance of `t`, which an array outside a body should not have, shows in the block's.
    """
    shape = [n // part_count(axes, sizes) for n, axes in zip(t.shape, spec.dims(t.ndim))]
    return ShapedArray(shape, t.dtype, t.variance.union(spec.axes, spec.varying) if typed else ())


def global_type(block: ShapedArray, spec: PartitionSpec, sizes: dict[str, int]) -> ShapedArray:
    """The type of the array whose blocks have the type `block`."""
    return ShapedArray(
        [n * part_count(axes, sizes) for n, axes in zip(block.shape, spec.dims(block.ndim))],
        block.dtype,
        block.variance.difference(spec.axes, spec.summed),
    )
