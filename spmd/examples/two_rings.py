"""An all-reduce along the two rings of NVLinks in a DGX-1, both ways at once.

    mpirun -n 8 python -m spmd.examples.two_rings

The eight GPUs of a DGX-1 have six NVLinks each, to four others: two links to two of them, one to the other two. This
hybrid cube mesh is two rings, one of double links, one of single ones. (In a half with four GPUs, two rings share two
edges, which are double links, and leave one link unused.) The array is cut into lanes. Each lane is summed along one
ring in one direction, and no two lanes share a link.

For one ring, one ring both ways, two rings both ways and, with eight GPUs, two lanes along the double links, the
program prints whether the sum is that of `psum`; the bytes that a rank sends, as the backend counts; the links in use,
each way, and the bytes over the busiest, from the messages on the tape; steps and bytes as counted and by formula; and
milliseconds for 100 MB. A rank sends 2(N-1)K/N bytes of K in any case. L lanes share them, and take 1/L of the time:

    2(N-1) steps, and 2(N-1)K/(N L) bytes one after the other

Sources: NVIDIA, "NVIDIA DGX-1 with Tesla V100 system architecture", 2017; Wang et al., "Blink: Fast and generic
collectives for distributed ML", 2020; Zhang et al., "Dive into deep learning", section 13.7.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import cost, psum
from collectives.algorithms import MessageSchedule
from collectives.cost import Cost, message_steps
from spmd.examples.study import run_study
from spmd.mesh.specs import P

Ring = Sequence[int]  # ranks in the order in which a lane passes them
RINGS = {4: ((0, 1, 2, 3), (0, 2, 1, 3)), 8: ((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 5, 2, 4, 7, 1, 6))}
LINKS = {4: 18, 8: 48}  # of all GPUs, each way
ALPHA, BETA, PCIE = 1e-6, 1 / 18e9, 1 / 16e9  # seconds a message, and a byte over one NVLink or over PCIe


def lanes_of(ranks: int) -> dict[str, list[Ring]]:
    """Return ways to use the links, each as lanes."""
    first, second = RINGS[ranks]
    both_ways = lambda *rings: [ring[::way] for ring in rings for way in (1, -1)]  # noqa: E731
    ways = {"one ring": [first], "both ways": both_ways(first), "two rings": both_ways(first, second)}
    return ways | ({"all six links": both_ways(first, first, second)} if ranks == 8 else {})


def ring_schedule(ring: Ring, axis: str) -> MessageSchedule:
    """Plan that each rank sends the block that arrived last to the next rank of the ring."""
    n, order = len(ring), numpy.array(ring)
    place = numpy.argsort(order)
    steps = [(pairs_of(ring), k - 1, k) for k in range(1, n)]
    owner = lambda rank, slot: np.take(order, (np.take(place, rank) - slot) % n)  # noqa: E731
    slot = lambda rank, owner: (np.take(place, rank) - np.take(place, owner)) % n  # noqa: E731
    return MessageSchedule("ring_all_reduce", axis, steps, owner, slot)


def ring_all_reduce(x: Any, axis: str, ring: Ring) -> Any:
    """Sum a vector along a ring. A reduce-scatter is a gather backwards, so all messages go one way."""
    parts = np.pad(x, (0, -len(x) % len(ring))).reshape(len(ring), -1)
    part = ring_schedule(ring[::-1], axis).scatter(parts, lambda x, arrived, *_: x + arrived)
    return ring_schedule(ring, axis).gather(part).reshape(-1)[: len(x)]


def all_reduce(x: Any, axis: str, lanes: Sequence[Ring]) -> Any:
    """Sum an array over ranks, with a part of it along each lane."""
    parts = np.array_split(x.reshape(-1), len(lanes))
    return np.concatenate([ring_all_reduce(p, axis, ring) for p, ring in zip(parts, lanes)]).reshape(x.shape)


def pairs_of(ring: Ring) -> list[tuple[int, int]]:
    """Return who sends to whom: each rank to the next one."""
    return [*zip(ring, [*ring[1:], ring[0]])]


def ring_cost(lanes: int, ranks: int, nbytes: int) -> Cost:
    """Return the cost of the sum by formula: lanes work at the same time, each on its part."""
    return Cost(steps=2 * (ranks - 1), bytes=2 * (ranks - 1) * nbytes / (ranks * lanes))


def show(mesh: spmd.Mesh) -> None:
    """Sum an array along one to six lanes."""
    n = mesh.size
    if n not in RINGS:
        raise SystemExit(f"two_rings: the links are those of 4 or 8 GPUs, not of {n}: write --ranks 4 or --ranks 8")
    x = numpy.random.default_rng(0).integers(100, size=(n, 9600)).astype(numpy.float32)
    total = spmd.shard_map(lambda x: psum(x, "gpus"), mesh=mesh, in_specs=P("gpus"), out_specs=P())(x)
    for title, lanes in lanes_of(n).items():
        body = partial(all_reduce, axis="gpus", lanes=lanes)
        program = spmd.shard_map(body, mesh=mesh, in_specs=P("gpus"), out_specs=P("gpus"))
        mesh.reset_calls()
        sums, sent = program(x), mesh.bytes["ppermute"]
        same = numpy.array_equal(spmd.gather(sums), numpy.repeat(spmd.gather(total), n, axis=0))
        print(f"{title}: a rank sends {sent:,} bytes; the same as psum: {'yes' if same else 'NO'}")
        tape, used = md.make_tape(program)(x), Counter(pair for ring in lanes for pair in pairs_of(ring))
        over: dict[tuple[int, int], float] = defaultdict(float)
        for source, destination, nbytes in itertools.chain(*message_steps(tape.equations[0].bodies[0])):
            over[source, destination] += nbytes / used[source, destination]
        print(f"  {used.total()} of {LINKS[n]} links, {max(over.values()):,.0f} bytes over the busiest")
        count, formula = cost.counted(tape, ports=len(lanes)), ring_cost(len(lanes), n, x[0].nbytes)
        seconds = ring_cost(len(lanes), n, 10**8).seconds(ALPHA, BETA)
        print(f"  {count.steps} steps, {count.bytes:,} bytes; {formula.bytes:,.0f} by formula; {1e3 * seconds:.2f} ms")
    print(f"one ring over PCIe: {1000 * ring_cost(1, n, 10**8).seconds(ALPHA, PCIE):.2f} ms")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("gpus",), argv)


if __name__ == "__main__":
    main()
