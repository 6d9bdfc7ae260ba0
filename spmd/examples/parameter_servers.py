"""Parameters on several servers: each array has a home, and no rank sends or receives all of them.

    mpirun -n 4 python -m spmd.examples.parameter_servers

The program prints, for one server, two, and four, how many numbers the busiest server sends in a step,
beside the least that any placement allows, the collectives of a step, and the losses, beside those of one rank.

A single server (`parameter_server`) sends its parameters to all workers, and receives all their gradients: its link
limits the job. Here each array of parameters is on one of several ranks, which are workers as well. A worker pulls each
array from its home, by a `broadcast_varying`, whose transpose is a `reduce` of the gradients to that home, where the
array is updated. `place` gives the largest array left to the server that has least. With n ranks, a server whose arrays
have m numbers sends and receives (n - 1) * m of them in a step; with one server, m is all of them.

Arrays stay whole, so more servers than two do not help a network with one large array. If every array is split over
all ranks, a step is `all_gather` and `psum_scatter`: fully sharded data parallelism (`fully_sharded`).

Source: Li et al., "Scaling distributed machine learning with the parameter server", section 4.3 (ranges of keys).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import at_root, broadcast, pmean
from collectives.rooted import broadcast_varying
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P


def place(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each array, given their sizes: the largest first, each to the server that has least.

    >>> place([10, 60, 30, 20], servers=2)
    [1, 0, 1, 1]
    """
    totals, homes = [0] * servers, [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        homes[k] = totals.index(min(totals))
        totals[homes[k]] += sizes[k]
    return homes


def busiest(sizes: Sequence[int], homes: Sequence[int]) -> int:
    """Return how many numbers the server with most of them has.

    >>> busiest([10, 60, 30, 20], [1, 0, 1, 1])
    60
    """
    return max(sum(n for n, home in zip(sizes, homes) if home == server) for server in {*homes})


def servers_step(loss: Callable, stored: Any, homes: Any, block: Any, rate: float, axis: str) -> tuple[Any, Any]:
    """Return the loss, and new parameters after a step of gradient descent, in the body of a `shard_map`.

    `stored` has each array on its home, a rank, and zeros elsewhere, as has the result. `homes` is a tree of ranks.
    """

    def mean_loss(stored: Any) -> Any:
        pulled = md.tree.map(lambda leaf, home: broadcast_varying(leaf, axis, home), stored, homes)
        return pmean(loss(pulled, block), axis)

    value, gradients = md.value_and_grad(mean_loss)(stored)
    return value, md.tree.map(lambda p, g: p - rate * g, stored, gradients)


def squared_error(params: Any, block: Any) -> Any:
    x, y = block
    for w, b in params[:-1]:
        x = np.tanh(x @ w + b)
    return np.mean((x @ params[-1][0] + params[-1][1] - y) ** 2)


def show(mesh: spmd.Mesh) -> None:
    """Train a network of three layers with one server, with two, and with as many as ranks."""
    rng, widths, steps = numpy.random.default_rng(0), (6, 12, 12, 3), 4
    params = [(rng.normal(size=(m, n)) / 3, np.zeros(n)) for m, n in itertools.pairwise(widths)]
    data = rng.normal(size=(8 * mesh.size, 6)), rng.normal(size=(8 * mesh.size, 3))
    leaves, structure = md.tree.flatten(params)
    sizes = [leaf.size for leaf in leaves]
    expected, whole = [], params
    for _ in range(steps):
        value, gradients = md.value_and_grad(squared_error)(whole, data)
        whole = md.tree.map(lambda p, g: p - 0.1 * g, whole, gradients)
        expected.append(value)
    for servers in sorted({1, min(2, mesh.size), min(4, mesh.size)}):
        homes = md.tree.unflatten(structure, place(sizes, servers))
        least = min(busiest(sizes, choice) for choice in itertools.product(range(servers), repeat=len(sizes)))

        def train(params: Any, block: Any, homes: Any = homes) -> Any:
            losses, stored = [], md.tree.map(lambda leaf, home: at_root(leaf, "ranks", home), params, homes)
            for _ in range(steps):
                value, stored = servers_step(squared_error, stored, homes, block, 0.1, "ranks")
                losses.append(value)
            return losses, md.tree.map(lambda leaf, home: broadcast(leaf, "ranks", home), stored, homes)

        most = busiest(sizes, md.tree.leaves(homes)) * (mesh.size - 1)
        print(f"{servers} servers: the busiest sends {most} numbers; the least is {least * (mesh.size - 1)}")
        program = spmd.shard_map(train, mesh=mesh, in_specs=(P(), P("ranks")), out_specs=P())
        losses, trained = print_calls(f"{steps} steps", program, params, data)
        same = all(numpy.allclose(a, b) for a, b in zip(*map(md.tree.leaves, (trained, whole))))
        print(f"losses: {numbers(losses)}; as one rank: {'yes' if same and numpy.allclose(losses, expected) else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
