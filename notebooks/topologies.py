"""Devices and the links between them as a graph: the time of messages that share links.

`docs/guide/predict.md` compares an all-reduce on four of them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from collectives import algorithms
from collectives.cost import Number, message_steps
from minidiff import make_tape
from minidiff.core.types import ShapedArray
from spmd.mesh.mesh import make_mesh
from spmd.mesh.specs import P
from spmd.prices.forecast import CostModel
from spmd.prices.machine import Link
from spmd.shard_map.shard_map import shard_map

#: The numbers of a model of one link, which are the same for all axes.
_alpha, _beta = (operator.attrgetter(name) for name in ("alpha", "beta"))


@dataclass(frozen=True)
class Topology:
    """Devices, numbered from 0, switches, and the links that join them; messages over one link share it.

    `links` has the cost of each link, both ways, and `places` says where nodes are drawn: notebooks show a picture.
    On a ring, a message passes all devices between its ends; a `tree` has switches, whose links are as fast as those
    of devices, or, if it is `fat`, as all devices beneath together; devices of a `torus` have four neighbors.

    >>> from spmd.machines import link
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
        seen: set[tuple] = set()
        for (a, b), model in self.links.items():
            if (b, a) in seen and self.links[b, a] == model:  # the same both ways: one line
                continue
            seen.add((a, b))
            (x, y), (u, v) = at[a], at[b]
            bend = 0.2 if a in range(self.ranks) and math.hypot(u - x, v - y) > 130 else 0.0  # past the nodes between
            middle = f"{(x + u) / 2 + bend * (v - y):.0f},{(y + v) / 2 - bend * (u - x):.0f}"
            look = f'fill="none" stroke="gray" stroke-width="{slowest / _beta(model):.0f}"'
            drawn.append(f'<path d="M{x},{y} Q{middle} {u},{v}" {look}/>')
        for node, (x, y) in at.items():
            color, text = ("lightblue", node) if node in range(self.ranks) else ("lightgray", "")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="12" fill="{color}"/>')
            drawn.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle">{text}</text>')
        return "\n".join([*drawn, "</svg>\n"])
