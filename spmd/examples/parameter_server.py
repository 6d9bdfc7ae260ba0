"""Parameter servers: a worker pulls parameters, and pushes gradients; it waits for the others, or does not.

    mpirun -n 4 python -m spmd.examples.parameter_server

The program prints the losses of steps with a server, of a server that waits for all workers, on ranks and simulated,
and how stale gradients are if it does not wait.

`server_step` is data parallelism with a root: a `broadcast` of the parameters and a `reduce` of the gradients replace
the `psum`. You do not write the `reduce`: it is the transpose of the broadcast. With `leaves` arrays of parameters, of
`params` elements in all, a step takes, per rank:

===========  =========  =================  =======  ======  ========
step         direction  collective         axes     count   elements
===========  =========  =================  =======  ======  ========
server_step  forward    broadcast_varying  workers  leaves  params
server_step  forward    psum               workers  1       1
server_step  backward   reduce             workers  leaves  params
===========  =========  =================  =======  ======  ========

The other workers do not run in step. A worker pulls the parameters, computes the gradient of its next batch, and pushes
it to the server. Meanwhile, others may have updated the parameters: the number of these updates is the gradient's
*staleness*. One rule gives three ways of training. The server holds the gradients that arrive until its next update
makes no other gradient staler than a bound. Then it subtracts all of them in one update, and their workers continue.

===============  ========  =========  =================================================
training         bound     staleness  a worker waits
===============  ========  =========  =================================================
synchronous      0         0          for the slowest, at every update: data parallelism
semi-synchronous s         0 to s     if the slowest is s updates behind
asynchronous     math.inf  any        never
===============  ========  =========  =================================================

With n workers of equal speed, the staleness of asynchronous gradients is n - 1. Gradient descent on a parabola of
curvature c, with steps of `a` for gradients of staleness s, converges if c * a < 2 * sin(pi / (4 * s + 2)): staleness
makes large steps unstable.

In `simulate_parameter_server` time is simulated, but gradients are real. Nothing depends on the speed of the machine:
the same arguments give the same training. `run_parameter_server` measures time. Its server follows the same rule, and
takes gradients in the order in which messages come (`MPI.ANY_SOURCE`).

Source: Li et al., "Scaling distributed machine learning with the parameter server" (bounded delay); Ho et al., "More
effective distributed ML via a stale synchronous parallel parameter server".
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import at_root, broadcast, pmean
from collectives.rooted import broadcast_varying
from spmd.checks.agreement import make_and_compare
from spmd.examples.study import numbers, print_calls, run_study
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P

# ---------------------------------------------------------------- steps in which all ranks take part


def server_step(loss: Callable, server: Any, block: Any, rate: float, axis: str, root: int = 0) -> tuple[Any, Any]:
    """One step of gradient descent: the loss before it, and the server's new parameters.

    It is called in the body of a `shard_map`. `server` has the parameters on the rank `root` and zeros on the others,
    as from `at_root(params, axis, root)`; so has the result, and `broadcast` sends it to all ranks. `loss(params,
    block)` is the mean over the examples of this rank's block. Raises ValueError for a root out of range.

    >>> from collectives import at_root, broadcast
    >>> mesh = spmd.make_mesh((2,), ('workers',), backend='simulated')
    >>> def train(w, targets):
    ...     server = at_root(w, 'workers')
    ...     for _ in range(2):
    ...         value, server = server_step(lambda w, t: np.mean((w - t) ** 2), server, targets, 0.25, 'workers')
    ...     return broadcast(server, 'workers')
    >>> specs = {'in_specs': (spmd.P(), spmd.P('workers')), 'out_specs': spmd.P()}
    >>> float(spmd.shard_map(train, mesh=mesh, **specs)(0.0, np.arange(4.0)))
    1.125
    """

    def mean_loss(server: Any) -> Any:
        return pmean(loss(broadcast_varying(server, axis, root), block), axis)

    value, gradients = md.value_and_grad(mean_loss)(server)
    return value, md.tree.map(lambda p, g: p - rate * g, server, gradients)


# ---------------------------------------------------------------- workers that do not wait for each other


@dataclass(frozen=True)
class Update:
    """One update of the server's parameters, at `time`, by the gradients of `workers`, each of a `staleness`.

    `loss` is the mean of these workers' losses, at the parameters that they had pulled.

    >>> Update(time=3.0, loss=5.0, workers=(0, 1), staleness=(0, 1)).workers
    (0, 1)
    """

    time: float
    loss: float
    workers: tuple[int, ...]
    staleness: tuple[int, ...]


@dataclass(frozen=True)
class Training:
    """The parameters at the end, the updates in the order of time, and the seconds that each worker waited.

    >>> training = Training(0.5, [Update(1.0, 4.0, (0,), (0,)), Update(2.0, 3.0, (0, 1), (0, 1))], [0.0, 0.0])
    >>> training.losses, training.staleness
    ([(1.0, 4.0), (2.0, 3.0)], {0: 2, 1: 1})
    """

    params: Any
    updates: list[Update]
    waited: list[float]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The time and the loss of each update."""
        return [(update.time, update.loss) for update in self.updates]

    @property
    def staleness(self) -> dict[int, int]:
        """A histogram: how many gradients had each staleness."""
        return dict(sorted(Counter(s for update in self.updates for s in update.staleness).items()))


def simulate_parameter_server(
    loss: Callable,
    params: Any,
    batches: Sequence[Sequence[Any]],
    rate: float,
    seconds: Sequence[float],
    until: float,
    bound: float = 0,
) -> Training:
    """Train with a parameter server for `until` simulated seconds.

    `batches[worker]` are a worker's batches, which it takes in turn, again and again. It computes the gradient of
    `loss(params, batch)` in `seconds[worker]`; messages take no time. A gradient g moves the parameters by
    -rate / workers * g, so one gradient of each worker moves them as far as a step of data parallelism. `bound` is the
    largest staleness. Events of the same time happen in the order of workers. Raises ValueError if there are not as
    many seconds as workers, if one is not positive, and for a negative bound.

    >>> targets = [[1.0], [3.0]]  # of two workers, of which the second is slow
    >>> train = lambda bound: simulate_parameter_server(
    ...     lambda w, t: (w - t) ** 2, 0.0, targets, rate=0.1, seconds=[1, 3], until=6, bound=bound)
    >>> synchronous, asynchronous = train(0), train(math.inf)
    >>> synchronous.waited, [update.time for update in synchronous.updates]
    ([4.0, 0.0], [3.0, 6.0])
    >>> asynchronous.waited, [update.workers for update in asynchronous.updates]
    ([0.0, 0.0], [(0,), (0,), (0,), (1,), (0,), (0,), (0,), (1,)])
    >>> asynchronous.staleness
    {0: 5, 1: 1, 3: 2}
    """
    _check(batches, seconds, bound)
    gradient, streams = md.value_and_grad(loss), [*map(itertools.cycle, batches)]
    server, now, starting = _Server(params, len(batches), rate, bound), 0.0, [*range(len(batches))]
    computing: list[tuple[float, int]] = []  # a heap: when a worker will push its gradient
    pushed: dict[int, tuple] = {}  # what it will push
    while True:
        for worker in starting:
            pushed[worker] = gradient(server.params, next(streams[worker]))
            heapq.heappush(computing, (now + seconds[worker], worker))
        now, worker = heapq.heappop(computing)
        if now > until:
            return server.training(until)
        starting = server.push(now, worker, *pushed[worker])


class _Server:
    """The server's rule: it holds gradients until its next update makes no other gradient staler than the bound."""

    def __init__(self, params: Any, workers: int, rate: float, bound: float):
        self.params, self.rate, self.bound = params, rate, bound
        self.updates: list[Update] = []
        self._waited = [0.0] * workers
        self._pulled = dict.fromkeys(range(workers), 0)  # of each that computes: the number of updates before it
        self._held: dict[int, tuple] = {}  # of each other one: when it pushed, that number, its loss and gradient

    def push(self, now: float, worker: int, loss: Any, gradient: Any) -> list[int]:
        """Take a gradient, and return the workers that continue with the new parameters."""
        self._held[worker] = now, self._pulled.pop(worker), loss, gradient
        if len(self.updates) + 1 - min(self._pulled.values(), default=math.inf) > self.bound:
            return []
        workers = sorted(self._held)
        _, versions, losses, gradients = zip(*map(self._held.get, workers))
        staleness = tuple(len(self.updates) - version for version in versions)
        step = self.rate / len(self._waited)
        self.params = md.tree.map(lambda p, *g: p - step * sum(g), self.params, *gradients)
        self.updates.append(Update(now, float(np.mean(np.array(losses))), tuple(workers), staleness))
        self._waited = self._waited_until(now)
        self._held, self._pulled = {}, {**self._pulled, **dict.fromkeys(workers, len(self.updates))}
        return workers

    def _waited_until(self, now: float) -> list[float]:
        return [s + (now - self._held[w][0] if w in self._held else 0.0) for w, s in enumerate(self._waited)]

    def training(self, until: float) -> Training:
        return Training(self.params, self.updates, self._waited_until(until))


def run_parameter_server(
    mesh: Mesh,
    loss: Callable,
    params: Any,
    batches: Sequence[Sequence[Any]],
    rate: float,
    updates: int,
    bound: float = 0,
) -> Training:
    """Train on MPI ranks: rank 0 is the server, worker w is rank w + 1; stop after a number of `updates`.

    The arguments are those of `simulate_parameter_server`, and so is the `Training`, which all ranks return; its times
    are seconds on the server's clock. With a bound of 0 the numbers are the simulation's, too; with another one they
    depend on the order in which gradients come. A gradient that comes after the last update is dropped. All ranks of
    the mesh must call it, and `loss` must not communicate. Raises ValueError on all ranks if one of them fails, saying
    which ones and why, if arguments differ, and for a mesh that is simulated or has not one rank more than workers.

    >>> mesh = spmd.make_mesh((3,), ('ranks',), backend='simulated')
    >>> run_parameter_server(mesh, lambda w, t: (w - t) ** 2, 0.0, [[1.0], [3.0]], rate=0.1, updates=3)
    Traceback (most recent call last):
    ...
    ValueError: run_parameter_server: ranks of Mesh(ranks: 3; 3 ranks, simulated) are simulated: start the program \
with `mpirun -n 3`, or use simulate_parameter_server
    """
    name = "run_parameter_server"
    if mesh.backend == "simulated":
        raise ValueError(
            f"{name}: ranks of {mesh} are simulated: start the program with `mpirun -n {mesh.size}`, or use "
            "simulate_parameter_server"
        )

    def described() -> tuple[None, list[str]]:
        _check(batches, [1] * len(batches), bound)
        if len(batches) != mesh.size - 1:
            raise ValueError(f"batches for {len(batches)} workers, but {mesh} has {mesh.size - 1} and a server")
        if not isinstance(updates, int) or updates < 1:
            raise ValueError(f"updates is {updates!r}: pass a positive integer")
        return None, [f"{rate=}", f"{updates=}", f"{bound=}"]

    def trained() -> tuple[Any, list[str]]:
        ranks: Any = mesh.ranks  # which have a communicator: they are MPI's
        messages = _Messages(ranks.comm)
        if mesh.rank:
            return _work(messages, md.value_and_grad(loss), batches[mesh.rank - 1]), ["no error"]
        server = _Server(params, len(batches), rate, bound)
        return _serve(messages, server, range(len(batches)), updates), ["no error"]

    make_and_compare(name, mesh, described)
    return make_and_compare(name, mesh, trained)


TAG = 31996  # of messages
PAUSE = 1e-4  # seconds between two looks for a message
_POSTED: list[Any] = []  # requests of messages that may not have arrived


class _Messages:
    """Messages between the ranks of a communicator, which a rank takes in the order in which they come."""

    def __init__(self, comm: Any):
        self.comm = comm
        self.rank = comm.Get_rank()

    def post(self, message: Any, rank: int) -> None:
        """Send a message to a rank, and do not wait."""
        request = self.comm.isend(message, rank, TAG)  # raises for what cannot be pickled
        _POSTED[:] = [*(r for r in _POSTED if not r.Test()), request]

    def next_message(self) -> Any:
        """Wait for a message from any rank, and return it."""
        while (message := self.comm.improbe(tag=TAG)) is None:
            time.sleep(PAUSE)  # others may share the processor
        return message.recv()


def _serve(messages: _Messages, server: _Server, workers: Sequence[int], updates: int) -> Training | None:
    """Answer each message, in the order in which they come; at the end all workers, with the training."""
    start, computing = time.perf_counter(), set()
    result: Training | None = None
    error: Exception | None = None
    continuing = workers
    try:
        while result is None:
            for worker in continuing:
                messages.post((False, server.params), worker + 1)
                computing.add(worker)
            worker, *pushed = messages.next_message()
            computing.remove(worker)
            if not pushed:  # it has failed, and will say why
                break
            now = time.perf_counter() - start
            continuing = server.push(now, worker, *pushed)
            if len(server.updates) == updates:
                result = server.training(now)
    except Exception as caught:  # no worker must wait for this rank
        error = caught
    while computing:
        computing.remove(messages.next_message()[0])
    for worker in workers:
        messages.post((True, result), worker + 1)
    if error is not None:
        raise error
    return result


def _work(messages: _Messages, gradient: Callable, batches: Sequence[Any]) -> Training | None:
    """Push gradients to the server, each at the parameters that it has answered with, until it says that it is done."""
    error: BaseException | None = None
    for batch in itertools.cycle(batches):
        ended, message = messages.next_message()
        if ended:
            break
        try:
            messages.post((messages.rank - 1, *gradient(message, batch)), 0)
        except (Exception, SystemExit) as caught:  # the server must not wait for this rank
            error = caught
            messages.post((messages.rank - 1,), 0)
    if error is not None:
        raise error
    return message


def _check(batches: Sequence[Sequence[Any]], seconds: Sequence[float], bound: float) -> None:
    if not batches or not all(map(len, batches)):
        raise ValueError(
            f"batches are {[*map(len, batches)]}: pass at least one worker, and at least one batch for each"
        )
    if len(seconds) != len(batches) or not all(s > 0 for s in seconds):
        raise ValueError(f"seconds are {seconds!r}: pass a positive number for each of the {len(batches)} workers")
    if not bound >= 0:
        raise ValueError(f"bound is {bound!r}: pass 0 (synchronous), a positive number, or math.inf (asynchronous)")


# ---------------------------------------------------------------- the program


def error(w: Any, targets: Any) -> Any:
    return np.mean((w - targets) ** 2)


def show(mesh: Mesh) -> None:
    """Train in step, then with workers that wait and that do not, and print losses and staleness."""

    def train(w: Any, targets: Any) -> tuple[Any, list]:
        server, losses = at_root(w, "ranks"), []
        for _ in range(4):
            value, server = server_step(error, server, targets, 0.25, "ranks")
            losses.append(value)
        return broadcast(server, "ranks"), losses

    program = spmd.shard_map(train, mesh=mesh, in_specs=(P(), P("ranks")), out_specs=P())
    _, losses = print_calls("four steps with a server", program, 0.0, np.arange(2.0 * mesh.size))
    print(f"losses: {numbers(losses)}")

    workers = max(1, mesh.size - 1)
    batches, seconds = [[float(w)] for w in range(workers)], [1 + w for w in range(workers)]

    def simulate(bound: float, until: float) -> Training:
        return simulate_parameter_server(error, 0.0, batches, 0.25, seconds, until, bound)

    training = simulate(0, 4 * max(seconds))
    if mesh.backend == "mpi" and mesh.size > 1:
        training = run_parameter_server(mesh, error, 0.0, batches, 0.25, updates=4)
    print(f"losses of a server that waits: {numbers(update.loss for update in training.updates)}")
    for bound in (0, 2, math.inf):
        training = simulate(bound, 12)
        print(f"bound {bound}, updates in 12 s: {len(training.updates)}; gradients by staleness: {training.staleness}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("ranks",), argv)


if __name__ == "__main__":
    main()
