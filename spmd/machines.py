"""Machines as data: what a device computes a second, what it holds, and the links between devices.

A `Machine` has the numbers of a data sheet, each with its source. A roofline turns the work of an operation into
seconds: the longer of its arithmetic and of its memory traffic, and a cost of launching it. Of the peak, a matrix
product gets the share that an `Efficiency` says, by its size. Links join devices, the fast ones a few, the slow ones
all; `Machine.on(shape, nearest)` places the axes of a mesh on them.

>>> import spmd
>>> machine = spmd.machines.A100
>>> placed = machine.on({'data': 8, 'feats': 8}, nearest=('feats', 'data'))
>>> [(link.name, ranks) for link, ranks in placed.levels(('feats',))], placed.levels(('data',))[0][0].name
([('NVLink', 8)], 'InfiniBand')
>>> placed.seconds('psum', 8, 10**8, ('feats',)) < placed.seconds('psum', 8, 10**8, ('data',))
True
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

import minidiff.numpy as np
from collectives import algorithms
from collectives.cost import Number, message_steps
from minidiff import jit, make_tape, nn
from minidiff.compiler import native
from minidiff.core.types import ShapedArray
from minidiff.ops.costs import ProductSize, Work, work_of_equation
from spmd.mesh.mesh import Mesh, make_mesh
from spmd.mesh.specs import P
from spmd.report.calibrate import calibrate, maximum, seconds_of
from spmd.report.forecast import FASTEST, CostModel
from spmd.shard_map.shard_map import shard_map

__all__ = [
    *("A100", "H100", "TPU_V5E", "TPU_V5P", "Efficiency", "Link", "Machine", "Placement", "Topology"),
    *("link", "this_machine"),
]


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

    def of(self, product: ProductSize) -> float:
        return self.best / (1 + (self.half / self.size(product)) ** self.power)

    @staticmethod
    def size(product: ProductSize) -> float:
        """The harmonic mean of rows, columns and terms."""
        return 3 / (1 / product.rows + 1 / product.columns + 1 / product.terms)


@dataclass(frozen=True)
class Link:
    """What joins `ranks` devices that are numbered one after the other: the cost of messages between them.

    `model` has the latency, the seconds a byte (one way, of one device) and those of summing a byte.

    >>> Link("wire", 4, CostModel(alpha=1.0, beta=1.0)).model.seconds("ppermute", 2, 1000)
    1001.0
    """

    name: str
    ranks: float
    model: CostModel
    source: str = ""


def link(name: str, ranks: float, latency: float, bandwidth: float, source: str = "") -> Link:
    """A link by its latency in seconds and its bandwidth in bytes a second, one way; algorithms are the fastest.

    >>> print(link("wire", 4, latency=1e-6, bandwidth=1e9).model)
    1.00 µs a step, 1.00 ns a byte (1 GB/s)
    """
    return Link(name, ranks, CostModel(latency, 1 / bandwidth, algorithms=FASTEST), source)


@dataclass(frozen=True)
class Machine:
    """A machine: devices of one kind, and the links between them.

    `flops` has the peak of matrix products a second by dtype, and `elementwise` that of other operations. `bandwidth`
    is that of memory in bytes a second, `memory` its size in bytes, `launch` the seconds that it takes to start an
    operation on the device, `issue` those in which the host issues it, ahead of the device. `links` begin with the
    fastest, which joins the fewest. `fuses` names operations that run in one loop with elementwise ones, as kernels
    written by hand and compilers for the machine have them; None says that each operation runs by itself. `steps` has
    how many times as long as it counts operations a function takes. `caches` have bytes, and the bandwidth of an
    operation that moves at most so many, the fewest first. `overlap` says whether messages travel beside computation:
    not where the processors that compute move them. `sources` says where each number is from.

    Raises ValueError for a machine without links, or with links that do not join more and more devices.

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
    issue: float = 0.0
    fuses: frozenset[str] | None = frozenset()
    steps: Mapping[str, float] = field(default_factory=dict, hash=False)
    caches: tuple[tuple[float, float], ...] = ()
    overlap: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        reaches = [link.ranks for link in self.links]
        if not reaches or sorted({*reaches}) != reaches:
            raise ValueError(f"{self.name}: each link joins more devices than the one before; got {reaches}")

    def replace(self, **changes: Any) -> Machine:
        """The same machine with other numbers."""
        return replace(self, **changes)

    def seconds(self, work: Work, dtype: Any) -> float:
        """The seconds of an operation. Raises ValueError for a product of a dtype without a peak."""
        if not work.bytes:
            return 0.0
        if work.product is None:
            arithmetic = work.flops / self.elementwise
        else:
            arithmetic = work.flops / (self.peak(dtype) * self.efficiency.of(work.product)) if work.flops else 0.0
        bandwidth = next((rate for size, rate in self.caches if work.bytes <= size), self.bandwidth)
        return self.launch + max(arithmetic, work.bytes / bandwidth)

    def peak(self, dtype: Any) -> float:
        """The peak of matrix products of a dtype. Raises ValueError if there is none."""
        name = str(numpy.dtype(dtype)) if not isinstance(dtype, str) else dtype
        if name not in self.flops:
            raise ValueError(f"{self.name} has no peak for {name}, only for {', '.join(self.flops)}: cast, or add it")
        return self.flops[name]

    def on(self, shape: Mapping[str, int], nearest: Sequence[str] | None = None) -> Placement:
        """Place the axes of a mesh on the devices: those of the first axis in `nearest` are next to each other.

        By default the last axis of the mesh is the nearest. Raises ValueError for an axis that the mesh does not have,
        and for one along which no link joins all ranks.
        """
        order = tuple([*shape][::-1] if nearest is None else nearest)
        if unknown := [axis for axis in order if axis not in shape]:
            raise ValueError(f"{self.name}: the mesh has no axis {unknown[0]!r}, only {', '.join(shape)}")
        order += tuple(axis for axis in [*shape][::-1] if axis not in order)
        return Placement(self, tuple((axis, shape[axis]) for axis in order))


@dataclass(frozen=True)
class Placement:
    """A mesh on a machine: which links its axes use. `axes` has their sizes, the nearest ranks first.

    >>> placed = Placement(A100, (('feats', 4), ('data', 16)))
    >>> [(link.name, ranks) for link, ranks in placed.levels(('data',))]
    [('NVLink', 2), ('InfiniBand', 8)]
    """

    machine: Machine
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for axis, size in self.axes:
            if size > 1:
                self.levels((axis,))

    def levels(self, axes: Sequence[str]) -> list[tuple[Link, int]]:
        """The links of a collective over some axes, the fastest first, and how many ranks each joins."""
        return list(_levels(self, tuple(axes)))

    def slowest(self, axes: Sequence[str]) -> Link:
        """The slowest link that a collective over these axes uses."""
        levels = self.levels(axes)
        return levels[-1][0] if levels else self.machine.links[0]

    def seconds(self, collective: str, ranks: int, nbytes: Number, axes: Sequence[str] = ()) -> float:
        """The seconds of a collective over `ranks` ranks along `axes`, if each rank passes `nbytes` bytes.

        Over links of several speeds it runs in levels: sums are scattered over the fast links, summed over the slow
        ones and gathered again, so that a slow link has to carry a part only.
        """
        return _seconds(self, collective, ranks, float(nbytes), tuple(axes))


#: The numbers of a model of one link, which are the same for all axes.
_alpha, _beta = (operator.attrgetter(name) for name in ("alpha", "beta"))


@dataclass(frozen=True)
class Topology:
    """Devices, numbered from 0, switches, and the links that join them; messages over one link share it.

    `links` has the cost of each link, both ways, and `places` says where nodes are drawn: notebooks show a picture.
    On a ring, a message passes all devices between its ends; a `tree` has switches, whose links are as fast as those
    of devices, or, if it is `fat`, as all devices beneath together; devices of a `torus` have four neighbors.

    >>> wire = link("NVLink", 8, latency=4e-6, bandwidth=300e9)
    >>> for topology in (Topology.ring(8, wire), Topology.tree(8, wire), Topology.tree(8, wire, fat=True)):
    ...     times = (topology.all_reduce(10**8, name) for name in ("ring_all_reduce", "halving_doubling_all_reduce"))
    ...     print(f"{topology.name:8}", *(f"{1000 * seconds:.2f} ms" for seconds in times))
    ring     0.64 ms 1.81 ms
    tree     0.92 ms 1.85 ms
    fat tree 0.92 ms 0.68 ms

    Source: C. E. Leiserson, "Fat-trees: universal networks for hardware-efficient supercomputing", 1985.
    """

    name: str
    ranks: int
    links: Mapping[tuple, CostModel] = field(hash=False)
    places: Mapping[Any, tuple[float, float]] = field(hash=False, repr=False)

    @classmethod
    def _of(cls, name: str, ranks: int, links: Mapping[tuple, CostModel], places: Mapping) -> Topology:
        return cls(name, ranks, {**links, **{(b, a): model for (a, b), model in links.items()}}, places)

    @classmethod
    def ring(cls, ranks: int, link: Link) -> Topology:
        """Devices in a ring, each joined to two."""
        turns = [2 * math.pi * r / ranks for r in range(ranks)]
        at = {r: (2 + 2 * math.sin(turn), 2 - 2 * math.cos(turn)) for r, turn in enumerate(turns)}
        return cls._of("ring", ranks, {(r, (r + 1) % ranks): link.model for r in range(ranks)}, at)

    @classmethod
    def tree(cls, ranks: int, link: Link, fat: bool = False) -> Topology:
        """Devices beneath switches, two beneath each, and these beneath others."""
        links: dict[tuple, CostModel] = {}
        places: dict[Any, tuple[float, float]] = {r: (r, (ranks - 1).bit_length()) for r in range(ranks)}
        level: list[tuple[Any, int]] = [(r, 1) for r in range(ranks)]  # the nodes, and the devices beneath each
        while len(level) > 1:
            pairs, level = [level[k : k + 2] for k in range(0, len(level), 2)], []
            for k, pair in enumerate(pairs):
                switch = f"s{len(pairs)}.{k}"
                at = [places[node] for node, _ in pair]
                places[switch] = sum(x for x, _ in at) / len(at), at[0][1] - 1
                for node, beneath in pair:
                    links[node, switch] = replace(link.model, beta=_beta(link.model) / (beneath if fat else 1))
                level.append((switch, sum(m for _, m in pair)))
        return cls._of("fat tree" if fat else "tree", ranks, links, places)

    @classmethod
    def torus(cls, rows: int, columns: int, link: Link) -> Topology:
        """Devices in a grid, numbered by rows; the last in a row or a column is joined to the first."""
        at = {r * columns + c: (c, r) for r in range(rows) for c in range(columns)}
        steps = (1, 0), (0, 1), (-1, 0), (0, -1)
        ends = [(k, (r + y) % rows * columns + (c + x) % columns) for k, (c, r) in at.items() for x, y in steps]
        return cls._of("torus", len(at), dict.fromkeys(ends, link.model), at)

    def route(self, source: int, destination: int) -> list[tuple]:
        """The links of a shortest way between two devices, in order; on a torus, along the row first."""
        ways: dict[Any, list[tuple]] = {source: []}
        for node in (reached := [source]):
            for a, b in self.links:
                if a == node and b not in ways:
                    ways[b] = [*ways[a], (a, b)]
                    reached.append(b)
        return ways[destination]

    def seconds(self, steps: Sequence[Sequence[tuple[int, int, Number]]]) -> float:
        """The time of messages (source, destination, bytes) in steps, of which each waits for the one before.

        A step takes the longest latency of a route, and then as long as the link with the most bytes.
        """
        total = 0.0
        for step in steps:
            load: Counter = Counter()
            for source, destination, nbytes in step:
                load.update(dict.fromkeys(self.route(source, destination), nbytes))
            latency = max(sum(_alpha(self.links[hop]) for hop in self.route(s, d)) for s, d, _ in step)
            total += latency + max(nbytes * _beta(self.links[hop]) for hop, nbytes in load.items())
        return total

    def all_reduce(self, nbytes: int, algorithm: str = "ring_all_reduce") -> float:
        """The seconds of an algorithm of `collectives.algorithms` that sums `nbytes` bytes of each device."""
        mesh = make_mesh((self.ranks,), ("i",), backend="simulated")
        f = shard_map(lambda x: getattr(algorithms, algorithm)(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        tape = make_tape(f)(ShapedArray((self.ranks * nbytes,), "int8"))
        return self.seconds(message_steps(tape.equations[0].bodies[0]))

    def _repr_svg_(self) -> str:
        at = {node: (round(50 + 70 * x), round(40 + 70 * y)) for node, (x, y) in self.places.items()}
        width, height = (40 + max(values) for values in zip(*at.values()))
        drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="12">']
        slowest = max(map(_beta, self.links.values()))
        for (a, b), model in self.links.items():
            (x, y), (u, v) = at[a], at[b]
            bend = 0.15 if a in range(self.ranks) and math.hypot(u - x, v - y) > 130 else 0.0  # past the nodes between
            middle = f"{(x + u) / 2 + bend * (v - y):.0f},{(y + v) / 2 - bend * (u - x):.0f}"
            look = f'fill="none" stroke="gray" stroke-width="{slowest / _beta(model):.0f}"'
            drawn.append(f'<path d="M{x},{y} Q{middle} {u},{v}" {look}/>')
        for node, (x, y) in at.items():
            color, text = ("lightblue", node) if node in range(self.ranks) else ("lightgray", "")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="12" fill="{color}"/>')
            drawn.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle">{text}</text>')
        return "\n".join([*drawn, "</svg>\n"])


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
    rest = functools.partial(_over, slow)
    if collective in ("psum", "pprod", "pmax", "pmin"):
        ends = fast.model.seconds("psum_scatter", n, nbytes) + fast.model.seconds("all_gather", n, nbytes / n)
        return ends + rest(collective, nbytes / n)
    if collective == "psum_scatter":
        return fast.model.seconds(collective, n, nbytes) + rest(collective, nbytes / n)
    if collective.startswith(("all_gather", "gather")):  # over the slow links first, when there is least to send
        return rest(collective, nbytes) + fast.model.seconds(collective, n, nbytes * ranks / n)
    return _over(levels, collective, nbytes)


def _over(levels: Sequence[tuple[Link, int]], collective: str, nbytes: float) -> float:
    """A collective over one level after the other."""
    seconds = 0.0
    for each, n in levels:
        seconds += each.model.seconds(collective, n, nbytes)
        nbytes = nbytes / n if collective in ("psum_scatter", "psum") else nbytes
    return seconds


# ---------------------------------------------------------------- data sheets

GB, TERA = 1e9, 1e12

#: What runs in one loop with elementwise operations on accelerators: a row stays in registers while it is reduced.
FUSED = frozenset(
    (
        *("sum", "prod", "max", "min", "mean", "var", "any", "all", "argmax", "argmin", "softmax", "log_softmax"),
        *("logsumexp", "random_bits", "convert", "concatenate", "split", "stack", "unslice", "in_turn"),
    )
)

A100 = Machine(
    "A100 80 GB SXM",
    flops={"bfloat16": 312 * TERA, "float16": 312 * TERA, "float32": 156 * TERA, "float64": 19.5 * TERA},
    elementwise=19.5 * TERA,
    bandwidth=2039 * GB,
    memory=80 * 2**30,
    launch=4e-6,
    fuses=FUSED,
    links=(
        link("NVLink", 8, 4e-6, 300 * GB, "A100 data sheet: 600 GB/s a device, both ways; 8 devices a node (DGX A100)"),
        link("InfiniBand", math.inf, 8e-6, 25 * GB, "DGX A100 data sheet: 8 × 200 Gb/s a node, one adapter a device"),
    ),
    efficiency=Efficiency(best=0.85, half=300),
    sources={
        "flops": "NVIDIA A100 data sheet (2021): tensor cores, dense; float32 as TF32",
        "elementwise": "the same: float32 outside of tensor cores",
        "bandwidth": "the same: HBM2e of the 80 GB SXM model",
        "memory": "the same",
        "launch": "about 4 µs from one kernel's start to the next's (CUDA programming guide, graphs aside)",
        "efficiency": "large products of cuBLAS reach 85 % of the peak; small ones less",
    },
)

H100 = Machine(
    "H100 80 GB SXM",
    flops={"bfloat16": 989 * TERA, "float16": 989 * TERA, "float32": 495 * TERA, "float64": 67 * TERA},
    elementwise=67 * TERA,
    bandwidth=3350 * GB,
    memory=80 * 2**30,
    launch=4e-6,
    fuses=FUSED,
    links=(
        link("NVLink", 8, 4e-6, 450 * GB, "H100 data sheet: 900 GB/s a device, both ways; 8 devices a node (DGX H100)"),
        link("InfiniBand", math.inf, 8e-6, 50 * GB, "DGX H100 data sheet: 8 × 400 Gb/s a node, one adapter a device"),
    ),
    efficiency=Efficiency(best=0.75, half=400),
    sources={
        "flops": "NVIDIA H100 data sheet (2023): tensor cores, dense; float32 as TF32",
        "elementwise": "the same: float32 outside of tensor cores",
        "bandwidth": "the same: HBM3 of the SXM model",
        "memory": "the same",
        "launch": "as A100",
        "efficiency": "large products reach 75 % of the peak, where power limits the clock",
    },
)

TPU_V5E = Machine(
    "TPU v5e",
    flops={"bfloat16": 197 * TERA, "int8": 394 * TERA, "float32": 197 / 6 * TERA},
    elementwise=6.1 * TERA,
    bandwidth=819 * GB,
    memory=16 * 2**30,
    launch=1e-6,
    fuses=FUSED,
    links=(
        link("ICI", 256, 1e-6, 90 * GB, "Google Cloud, TPU v5e: pods of 16 × 16; a ring uses two links of 45 GB/s"),
        link("DCN", math.inf, 1e-5, 3.125 * GB, "Austin et al., How to scale your model (2025): 25 Gb/s a chip"),
    ),
    efficiency=Efficiency(best=0.95, half=60),
    sources={
        "flops": "Google Cloud, TPU v5e; float32 by six passes of bfloat16",
        "elementwise": "Austin et al., How to scale your model (2025): vector unit",
        "bandwidth": "Google Cloud, TPU v5e",
        "memory": "Google Cloud, TPU v5e",
        "launch": "one program for a step: a fraction of a microsecond an operation",
        "efficiency": "Austin et al.: products of multiples of 128 reach nearly the peak",
    },
)

TPU_V5P = Machine(
    "TPU v5p",
    flops={"bfloat16": 459 * TERA, "int8": 918 * TERA, "float32": 459 / 6 * TERA},
    elementwise=14 * TERA,
    bandwidth=2765 * GB,
    memory=95 * 2**30,
    launch=1e-6,
    fuses=FUSED,
    links=(
        link("ICI", 8960, 1e-6, 180 * GB, "Google Cloud, TPU v5p: pods of 8,960; a ring uses two links of 90 GB/s"),
        link("DCN", math.inf, 1e-5, 6.25 * GB, "Austin et al., How to scale your model (2025): 50 Gb/s a chip"),
    ),
    efficiency=Efficiency(best=0.95, half=60),
    sources={
        "flops": "Google Cloud, TPU v5p; float32 by six passes of bfloat16",
        "elementwise": "Austin et al., How to scale your model (2025): vector unit",
        "bandwidth": "Google Cloud, TPU v5p",
        "memory": "Google Cloud, TPU v5p",
        "launch": "one program for a step: a fraction of a microsecond an operation",
        "efficiency": "Austin et al.: products of multiples of 128 reach nearly the peak",
    },
)

# ---------------------------------------------------------------- the machine that this runs on

_LASTING = 0.001  # seconds for which an operation is repeated
_SIZES = (16, 32, 64, 128, 256, 512)  # of matrices that are multiplied
_LENGTHS = tuple(1 << k for k in (12, 15, 17, 19, 22))  # of arrays that are added
_FUNCTIONS: tuple[Callable, ...] = (
    *(np.exp, np.exp2, np.expm1, np.log, np.log1p, np.log2, np.log10, np.sqrt, np.cbrt, np.sin, np.cos, np.tan),
    *(np.sinh, np.cosh, np.tanh, np.arcsin, np.arccos, np.arctan, np.sum, np.max, np.absolute, np.square),
    *(nn.erf, nn.sigmoid, nn.silu, nn.relu, nn.gelu, functools.partial(nn.gelu, approximate=False)),
    *(nn.softmax, nn.log_softmax, nn.logsumexp),
    *(lambda x, f=f: f(x, x) for f in (np.divide, np.power, np.arctan2, np.hypot, np.maximum, np.logaddexp)),
)


def this_machine(mesh: Mesh, *, repeats: int = 20) -> Machine:
    """The machine that this runs on, measured on all ranks of a mesh at the same time.

    Products of matrices of several sizes give the peak and the efficiency, a sum of long arrays the bandwidth of
    memory, shorter ones that of caches and the other operations, one of a few numbers what starting an operation takes:
    each the mean of `repeats` times a millisecond, of the rank that is slowest each time, since ranks wait for each
    other. Functions (exp, tanh, softmax, ...) are compared with a sum. The link is a `spmd.calibrate` of the mesh. All
    ranks must call it, and all get the same machine. A mesh of one rank has a link that is never used.

    >>> import spmd
    >>> machine = this_machine(spmd.make_mesh((2,), ('i',), backend='simulated'), repeats=1)
    >>> machine.name, sorted(machine.flops), machine.links[0].name
    ('this machine', ['float32', 'float64'], 'messages')
    """

    def measure(call: Callable[[], Any]) -> float:
        calls = max(1, int(_LASTING / max(seconds_of(call), 1e-9)))
        maximum(mesh, numpy.zeros(1))  # all ranks begin together
        times = numpy.array([seconds_of(call, calls) for _ in range(repeats)])
        return float(maximum(mesh, times).mean())

    products = []
    for dtype, n in itertools.product(("float32", "float64"), _SIZES):
        a, out = numpy.ones((n, n), dtype), numpy.empty((n, n), dtype)
        products.append(measure(functools.partial(numpy.matmul, a, a, out)))
    singles, doubles = products[: len(_SIZES)], products[len(_SIZES) :]
    pairs = [(numpy.ones(n), numpy.empty(n)) for n in (1, *_LENGTHS)]
    launch, *sums = (measure(functools.partial(numpy.add, x, x, y)) for x, y in pairs)
    elementwise, *_ = rates_of_sums = [n / max(t - launch, 1e-12) for n, t in zip(_LENGTHS, sums)]
    steps = {name: max(elementwise * t, 1.0) for name, t in (_time_function(f, measure) for f in _FUNCTIONS)}
    rates = [[2 * n**3 / t for n, t in zip(_SIZES, times)] for times in (singles, doubles)]
    model = calibrate(mesh, mesh.axis_names, repeats=repeats) if mesh.size > 1 else CostModel(0.0, 0.0)
    return Machine(
        "this machine",
        flops=dict(zip(("float32", "float64"), map(max, rates))),
        elementwise=elementwise,
        bandwidth=24 * rates_of_sums[-1],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / mesh.size,
        launch=launch,
        links=(Link("messages", math.inf, model, model.source),),
        efficiency=_efficiency(rates[1]),
        caches=tuple((24 * n, 24 * rate) for n, rate in zip(_LENGTHS[:-1], rates_of_sums)),
        overlap=False,
        fuses=frozenset() if native.is_available() else None,
        steps=steps,
        sources={"flops": f"measured on {mesh.size} {mesh.backend} ranks at the same time"},
    )


def _time_function(function: Callable, measure: Callable[[Callable], float]) -> tuple[str, float]:
    """The operation that a function runs, and the seconds of each operation that it counts in a long array."""
    x = numpy.linspace(0.1, 0.9, 1 << 16).reshape(1 << 8, 1 << 8)
    (eqn,) = make_tape(function)(x).equations
    long, short = (functools.partial(jit(function), each) for each in (x, x[:1]))
    return eqn.primitive.name, max(measure(long) - measure(short), 0.0) / work_of_equation(eqn).flops


def _efficiency(rates: Sequence[float]) -> Efficiency:
    """The curve nearest to the rates of products of `_SIZES`, by the sum of |log|."""

    def off(curve: Efficiency) -> float:
        return sum(abs(math.log(curve.of(ProductSize(1, n, n, n)) * max(rates) / r)) for n, r in zip(_SIZES, rates))

    return min((Efficiency(1.0, half, power) for half in range(0, 200, 4) for power in (0.5, 1.0, 1.5, 2.0)), key=off)
