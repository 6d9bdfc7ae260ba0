"""A machine as data, and the axes of a mesh on its links."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from collectives.cost import Number
from spmd.checks import ranges
from spmd.checks.ranges import Allowed, by_name, check_ranges, instance_of
from spmd.prices.forecast import FASTEST, CostModel
from spmd.prices.tape_cost import OperationCosts
from spmd.prices.work import ProductSize, Work


@dataclass(frozen=True)
class Efficiency:
    """The share of the peak that a matrix product reaches, by its size, in three constants.

    The size of a product is the harmonic mean of its rows, columns and terms, which is near the smallest. The share is
    `best` for large ones, and half of that at `half`; `power` says how fast it grows.

    >>> Efficiency(best=0.8, half=100).of(ProductSize(1, 100, 100, 100))
    0.4
    """

    best: float = 1.0
    half: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        check_ranges("Efficiency", {"best": ranges.SHARE, "half": ranges.SIZE, "power": ranges.FACTOR}, vars(self))

    def of(self, product: ProductSize) -> float:
        return self.best / (1 + (self.half / self.size(product)) ** self.power)

    @staticmethod
    def size(product: ProductSize) -> float:
        """Return the harmonic mean of rows, columns and terms."""
        return 3 / (1 / product.rows + 1 / product.columns + 1 / product.terms)


@dataclass(frozen=True)
class Link:
    """A network that joins `ranks` devices with consecutive numbers, and the cost of messages between them.

    `model` has the latency, the seconds a byte (one way, of one device) and those of summing a byte.

    >>> Link("wire", 4, CostModel(alpha=1.0, beta=1.0)).model.seconds("ppermute", 2, 1000)
    1001.0
    """

    name: str
    ranks: float
    model: CostModel
    source: str = ""

    def __post_init__(self) -> None:
        fields = {"name": ranges.TEXT, "ranks": ranges.MANY, "model": instance_of(CostModel), "source": ranges.TEXT}
        check_ranges("Link", fields, vars(self))


def link(name: str, ranks: float, latency: float, bandwidth: float, source: str = "") -> Link:
    """Make a link; its collectives use the fastest algorithms.

    Args:
        name: its name.
        ranks: the number of devices with consecutive numbers that it joins.
        latency: seconds of a step.
        bandwidth: bytes a second, one way, of one device.
        source: the source of the numbers.

    >>> print(link("wire", 4, latency=1e-6, bandwidth=1e9).model)
    1.00 µs a step, 1.00 ns a byte (1 GB/s)
    """
    values = {"latency": latency, "bandwidth": bandwidth}
    check_ranges(f"link {name!r}", {"latency": ranges.SECONDS, "bandwidth": ranges.RATE}, values)
    return Link(name, ranks, CostModel(latency, 1 / bandwidth, algorithms=FASTEST), source)


def _are_caches(x: Any) -> bool:
    """Return whether `x` is a tuple of pairs of bytes, in ascending order, and bytes a second."""
    if not (isinstance(x, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in x)):
        return False
    sizes = [size for size, _ in x]
    fit = all(ranges.CAPACITY.contains(size) and ranges.RATE.contains(rate) for size, rate in x)
    return fit and sorted({*sizes}) == sizes


#: The ranges of the fields of a `Machine`.
_RANGES = {
    **{"name": ranges.TEXT, "sources": by_name(ranges.TEXT), "efficiency": instance_of(Efficiency)},
    **{"flops": by_name(ranges.RATE), "elementwise": ranges.RATE, "bandwidth": ranges.RATE, "memory": ranges.CAPACITY},
    "attention": Allowed("a share", "one above 0, at most 1, or None", lambda x: x is None or ranges.SHARE.contains(x)),
    **{"launch": ranges.SECONDS, "issue": ranges.SECONDS, "hides_memory": ranges.FLAG, "overlap": ranges.FLAG},
    **{"steps": by_name(ranges.FACTOR), "steps_in_loops": by_name(ranges.FACTOR)},
    "links": instance_of(Link, "link(name, ranks, latency, bandwidth)", of=tuple),
    "caches": Allowed("a tuple of pairs", "(bytes, bytes a second), ..., above 0, fewer bytes first", _are_caches),
    "fuses": Allowed("a frozenset of names", "one, or None", lambda x: x is None or isinstance(x, (frozenset, set))),
}


@dataclass(frozen=True)
class Machine:
    """A machine: devices of one kind, and the links between them.

    A time may be zero, and a rate infinite: those of an ideal machine.

    Attributes:
        name: its name.
        flops: by dtype, the peak of matrix products, in operations a second.
        elementwise: the peak of other operations a second.
        bandwidth: bytes a second of memory.
        memory: bytes of memory.
        launch: seconds that it takes to start an operation on the device.
        links: networks between devices; the first is the fastest, and joins the fewest.
        efficiency: the share of the peak that a matrix product reaches, by its size.
        attention: the share of the peak that attention reaches as one kernel, whose scores stay on the chip. None: its
            operations run by themselves.
        issue: seconds in which the host launches an operation, ahead of the device.
        fuses: names of operations that run in one loop with elementwise ones, as kernels written by hand and compilers
            for the machine have them. Without names, loops are those of `jit`; None: each operation runs alone.
        steps: by function, the factor by which it takes longer than its count of operations if it runs alone.
        steps_in_loops: the same in a fused loop.
        caches: pairs of bytes, in ascending order, and the bandwidth of operations that move at most so many.
        hides_memory: whether an operation computes while it waits for memory, as many threads do.
        overlap: whether messages travel while a rank computes: not where the processors that compute move them.
        sources: by attribute, the source of the number.

    Raises:
        ValueError: for a machine without links, for links that do not join more and more devices, and for numbers that
            make no sense, such as a negative time.

    >>> from spmd.machines import A100
    >>> work = Work(flops=2 * 8192**3, bytes=3 * 2 * 8192**2, product=ProductSize(1, 8192, 8192, 8192))
    >>> ideal = A100.replace(efficiency=Efficiency(), launch=0.0)
    >>> print(f"{ideal.seconds(work, 'float16'):.2e} s, {A100.seconds(work, 'float16'):.2e} s")
    3.52e-03 s, 4.30e-03 s
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    elementwise: float
    bandwidth: float
    memory: float
    launch: float
    links: tuple[Link, ...]
    efficiency: Efficiency = Efficiency()
    attention: float | None = None
    issue: float = 0.0
    fuses: frozenset[str] | None = frozenset()
    steps: Mapping[str, float] = field(default_factory=dict, hash=False)
    steps_in_loops: Mapping[str, float] = field(default_factory=dict, hash=False)
    caches: tuple[tuple[float, float], ...] = ()
    hides_memory: bool = True
    overlap: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(f"Machine {self.name!r}", _RANGES, vars(self))
        reaches = [link.ranks for link in self.links]
        if not reaches or sorted({*reaches}) != reaches:
            raise ValueError(f"{self.name}: each link joins more devices than the one before; got {reaches}")

    def replace(self, **changes: Any) -> Machine:
        """Return the same machine with other numbers."""
        return replace(self, **changes)

    def seconds(self, work: Work, dtype: Any) -> float:
        """Return the seconds of an operation. Raises ValueError for a product of a dtype without a peak."""
        if not work.bytes:
            return 0.0
        if work.product is None:
            arithmetic = work.flops / self.elementwise
        else:
            arithmetic = work.flops / (self.peak(dtype) * self.efficiency.of(work.product)) if work.flops else 0.0
        bandwidth = next((rate for size, rate in self.caches if work.bytes <= size), self.bandwidth)
        moving = work.bytes / bandwidth
        return self.launch + (max(arithmetic, moving) if self.hides_memory else arithmetic + moving)

    def peak(self, dtype: Any) -> float:
        """Return the peak of matrix products of a dtype. Raises ValueError if there is none."""
        name = str(numpy.dtype(dtype)) if not isinstance(dtype, str) else dtype
        if name not in self.flops:
            raise ValueError(f"{self.name} has no peak for {name}, only for {', '.join(self.flops)}: cast, or add it")
        return self.flops[name]

    def on(self, shape: Mapping[str, int], nearest: Sequence[str] | None = None) -> Placement:
        """Place the axes of a mesh on the devices: those of the first axis in `nearest` are next to each other.

        By default the last axis of the mesh is the nearest. Raises ValueError for an axis that the mesh does not have,
        and for one along which no link joins all ranks.
        """
        order = tuple(shape)[::-1] if nearest is None else nearest
        check_ranges(self.name, {"nearest": ranges.NAMES}, {"nearest": order})
        if unknown := [axis for axis in order if axis not in shape]:
            raise ValueError(f"{self.name}: the mesh has no axis {unknown[0]!r}, only {', '.join(shape)}")
        order = *order, *(axis for axis in [*shape][::-1] if axis not in order)
        return Placement(self, tuple((axis, shape[axis]) for axis in order))


@dataclass(frozen=True)
class Placement:
    """The axes of a mesh on the links of a machine. `axes` has their sizes, the nearest ranks first.

    >>> from spmd.machines import A100
    >>> placed = Placement(A100, (('feats', 4), ('data', 16)))
    >>> [(link.name, ranks) for link, ranks in placed.levels(('data',))]
    [('NVLink', 2), ('InfiniBand', 8)]
    """

    machine: Machine
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        check_ranges("Placement", {"axes": by_name(ranges.COUNT)}, {"axes": dict(self.axes)})
        for axis, size in self.axes:
            if size > 1:
                self.levels((axis,))

    @property
    def costs(self) -> OperationCosts:
        """The cost model of operations on the machine, and of collectives along these axes."""
        m = self.machine
        attend = m.attention and (lambda flops, dtype: flops / (m.peak(dtype) * m.attention))
        return OperationCosts(m.seconds, self._send, m.fuses, m.issue, m.steps, m.steps_in_loops, attend or None)

    def _send(self, collective: str, ranks: int, nbytes: float, axes: tuple[str, ...]) -> tuple[float, str]:
        return self.seconds(collective, ranks, nbytes, axes), self.slowest(axes).name

    def levels(self, axes: Sequence[str]) -> list[tuple[Link, int]]:
        """Return the links of a collective over some axes, the fastest first, and the number of ranks of each."""
        return list(_levels(self, tuple(axes)))

    def slowest(self, axes: Sequence[str]) -> Link:
        """Return the slowest link that a collective over these axes uses."""
        levels = self.levels(axes)
        return levels[-1][0] if levels else self.machine.links[0]

    def seconds(self, collective: str, ranks: int, nbytes: Number, axes: Sequence[str] = ()) -> float:
        """Return the seconds of a collective over `ranks` ranks along `axes`, if each rank passes `nbytes` bytes.

        Over links of several speeds it runs in levels: sums are scattered over the fast links, summed over the slow
        ones and gathered again, so that a slow link has to carry a part only.
        """
        return _seconds(self, collective, ranks, float(nbytes), tuple(axes))


@functools.lru_cache(maxsize=4096)
def _levels(placed: Placement, axes: tuple[str, ...]) -> tuple[tuple[Link, int], ...]:
    links = placed.machine.links
    counts, stride = [1] * len(links), 1
    for axis, size in placed.axes:
        if axis in axes:
            left, step = size, stride
            for k, each in enumerate(links):
                inside = left if each.ranks >= step * left else math.gcd(left, max(int(each.ranks // step), 1))
                counts[k] *= inside
                left, step = left // inside, step * inside
            if left > 1:
                raise ValueError(
                    f"{placed.machine.name} has no link for axis {axis!r}: its {links[-1].name} joins "
                    f"{links[-1].ranks:,.0f} devices, and the axis has {size} ranks, {stride:,} apart"
                )
        stride *= size
    return tuple((each, n) for each, n in zip(links, counts) if n > 1)


@functools.lru_cache(maxsize=65536)
def _seconds(placed: Placement, collective: str, ranks: int, nbytes: float, axes: tuple[str, ...]) -> float:
    levels = placed.levels(axes)
    if len(levels) < 2 or collective.startswith("ppermute"):
        return placed.slowest(axes).model.seconds(collective, ranks, nbytes) if ranks > 1 else 0.0
    (fast, n), *slow = levels
    slower = functools.partial(_over, slow)
    if collective in ("psum", "pprod", "pmax", "pmin"):
        ends = fast.model.seconds("psum_scatter", n, nbytes) + fast.model.seconds("all_gather", n, nbytes / n)
        return ends + slower(collective, nbytes / n)
    if collective == "psum_scatter":
        return fast.model.seconds(collective, n, nbytes) + slower(collective, nbytes / n)
    if collective.startswith(("all_gather", "gather")):  # over the slow links first, when there is least to send
        return slower(collective, nbytes) + fast.model.seconds(collective, n, nbytes * ranks / n)
    return _over(levels, collective, nbytes)


def _over(levels: Sequence[tuple[Link, int]], collective: str, nbytes: float) -> float:
    """Return the seconds of a collective over one level after the other."""
    seconds = 0.0
    for each, n in levels:
        seconds += each.model.seconds(collective, n, nbytes)
        nbytes = nbytes / n if collective in ("psum_scatter", "psum") else nbytes
    return seconds
