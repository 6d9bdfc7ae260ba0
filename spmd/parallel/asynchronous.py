"""Training by workers that do not wait for each other: a simulation of a parameter server.

A worker pulls the parameters, computes the gradient of its next batch, and pushes it to the server. Meanwhile, others
may have updated the parameters: the number of these updates is the gradient's *staleness*. One rule gives three ways of
training. The server holds the gradients that arrive until its next update makes no other gradient staler than a bound.
Then it subtracts all of them in one update, and their workers continue.

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

Time is simulated, but gradients are real. Nothing depends on the speed of the machine: the same arguments give the same
training.

Source: Li et al., "Scaling distributed machine learning with the parameter server" (bounded delay); Ho et al., "More
effective distributed ML via a stale synchronous parallel parameter server".
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import minidiff as md
import minidiff.numpy as np


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
    workers, gradient, streams = len(batches), md.value_and_grad(loss), [*map(itertools.cycle, batches)]
    pulled: dict[int, tuple] = {}  # of each worker: the number of updates before it, the loss and the gradient
    computing: list[tuple[float, int]] = []  # a heap: when a worker will push its gradient
    held: list[tuple[float, int]] = []  # when a worker pushed it
    now, starting, waited = 0.0, [*range(workers)], [0.0] * workers
    updates: list[Any] = []

    def wait(until: float) -> None:
        for since, worker in held:
            waited[worker] += until - since

    while True:
        for worker in starting:
            pulled[worker] = len(updates), *gradient(params, next(streams[worker]))
            heapq.heappush(computing, (now + seconds[worker], worker))
        now, worker = heapq.heappop(computing)
        if now > until:
            break
        held.append((now, worker))
        oldest = min((pulled[other][0] for _, other in computing), default=math.inf)
        if len(updates) + 1 - oldest > bound:
            starting = []
            continue
        starting = sorted(worker for _, worker in held)
        versions, losses, gradients = zip(*(pulled[worker] for worker in starting))
        staleness = tuple(len(updates) - version for version in versions)
        updates.append(Update(now, float(np.mean(np.array(losses))), tuple(starting), staleness))
        params = md.tree.map(lambda p, *g: p - rate * (sum(g) / workers), params, *gradients)
        wait(now)
        held.clear()
    wait(until)
    return Training(params, updates, waited)


def _check(batches: Sequence[Sequence[Any]], seconds: Sequence[float], bound: float) -> None:
    if not batches or not all(map(len, batches)):
        raise ValueError(
            f"batches are {[*map(len, batches)]}: give at least one worker, and at least one batch to each"
        )
    if len(seconds) != len(batches) or not all(s > 0 for s in seconds):
        raise ValueError(f"seconds are {seconds!r}: give a positive number for each of the {len(batches)} workers")
    if not bound >= 0:
        raise ValueError(f"bound is {bound!r}: give 0 (synchronous), a positive number, or math.inf (asynchronous)")
