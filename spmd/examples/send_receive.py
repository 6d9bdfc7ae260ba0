"""Send and receive between two ranks, as one typed operation.

    mpirun -n 4 python -m spmd.examples.send_receive

The program prints a value that rank 0 sends to the last rank, two values that these ranks exchange, the collectives of
a network whose halves are on these ranks, and its loss and gradients beside those of one rank.

In PyTorch or MPI, one rank calls `send` and another `recv`, and the program waits forever if a call has no partner. In
a `shard_map`, all ranks run one line, which names both: a `ppermute` of one pair. The receiver gets the value, and the
others zeros. The transpose is the same operation with the roles exchanged: a cotangent travels back. Each is one
message of the size of the block, and ranks that do not take part do not wait.

===============================  ======================================================
PyTorch                          here
===============================  ======================================================
`send(x, 1)` and `recv(y, 0)`    `y = send_receive(x, 0, 1, axis)`
`isend`, `irecv`, then `wait()`  `start = send_receive_start(x, 0, 1, axis)`, `start.wait()`
both directions                  `exchange(x, 0, 1, axis)`: no order can deadlock
===============================  ======================================================

Ranks compute different things between messages by `md.cond` on `axis_index(axis)`: only the branch of the rank runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, ppermute, psum
from collectives.in_flight import InFlight, ppermute_start
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.specs import P


def send_receive(x: Any, source: int, destination: int, axis: str) -> Any:
    """Send the source's block to the destination, in a body; other ranks get zeros.

    >>> mesh = spmd.make_mesh((3,), ('ranks',), backend='simulated')
    >>> body = lambda x: send_receive(x, 0, 2, 'ranks')
    >>> f = spmd.shard_map(body, mesh=mesh, in_specs=P('ranks'), out_specs=P('ranks'))
    >>> value, pullback = md.vjp(f, np.array([3.0, 1.0, 4.0]))
    >>> value, pullback(np.array([0.0, 0.0, 5.0]))[0]
    (ShardedArray([0., 0., 3.], P('ranks')), ShardedArray([5., 0., 0.], P('ranks')))
    """
    return ppermute(x, axis, [(source, destination)])


def send_receive_start(x: Any, source: int, destination: int, axis: str) -> InFlight:
    """Start to send; the result's `wait()` returns what `send_receive` does, and ranks compute meanwhile."""
    return ppermute_start(x, axis, [(source, destination)])


def exchange(x: Any, source: int, destination: int, axis: str) -> Any:
    """Exchange the blocks of two ranks; other ranks get zeros."""
    return ppermute(x, axis, [(source, destination), (destination, source)])


def two_halves(params: Any, x: Any, axis: str, last: int) -> Any:
    """Return the loss of a network whose first layer is on rank 0 and whose second layer is on rank `last`."""
    rank, (first, second) = axis_index(axis), params
    hidden = md.cond(rank == 0, lambda: np.tanh(x @ first), lambda: np.zeros((len(x), first.shape[1])))
    arrived = send_receive_start(hidden, 0, last, axis).wait()
    error = md.cond(rank == last, lambda: np.mean((arrived @ second) ** 2), lambda: 0.0)
    return psum(error, axis)


def show(mesh: spmd.Mesh) -> None:
    """Send, exchange, and differentiate a network on two ranks."""
    last, rng, x = mesh.size - 1, numpy.random.default_rng(0), numpy.arange(1.0, mesh.size + 1)
    for title, move in (("sent", send_receive), ("exchanged", exchange)):
        body = partial(move, source=0, destination=last, axis="ranks")
        moved = spmd.shard_map(body, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))(x)
        print(f"{numbers(x, 0)} {title} between 0 and {last}: {numbers(spmd.gather(moved), 0)}")
    params, x = [rng.normal(size=(3, 4)), rng.normal(size=(4, 2))], rng.normal(size=(8, 3))

    def loss(params: Any) -> Any:
        return two_halves(params, x, "ranks", last)

    def one_rank(params: Any) -> Any:
        return np.mean((np.tanh(x @ params[0]) @ params[1]) ** 2)

    program = spmd.shard_map(loss, mesh=mesh, in_specs=P(), out_specs=P())
    print_calls("forward", program, params)
    (value, actual), (expected, wanted) = (md.value_and_grad(f)(params) for f in (program, one_rank))
    same = all(numpy.allclose(a, b) for a, b in zip(actual, wanted))
    print(f"the same gradients: {'yes' if same else 'NO'}; loss: {numbers([value, expected])} (one rank)")
    print_calls("gradient", md.grad(program), params)


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
