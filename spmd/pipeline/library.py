"""Pipeline schedules of the literature: GPipe, 1F1B, interleaved 1F1B, zero bubble.

Each is an order of forward and backward passes for every stage; a pass takes the first tick at which the pass that it
needs is done. With p stages, counted from 0, and M microbatches:

=================  ====================  =====================  ===================================
schedule           ticks                 bubble                 most activations stage i stashes
=================  ====================  =====================  ===================================
gpipe              2*(M + p - 1)         (p - 1)/(M + p - 1)    M
one_f_one_b        2*(M + p - 1)         (p - 1)/(M + p - 1)    min(M, p - i)
interleaved        2*(M*v + p - 1)       (p - 1)/(M*v + p - 1)  min(M*v, 2*(p - i) - 1 + (v - 1)*p)
=================  ====================  =====================  ===================================

The bubble is the fraction of ticks in which a stage is idle. With v chunks a stage has v blocks of layers, p blocks
apart, and a tick takes a v-th of the time. `zero_bubble` needs M of at least p, and its ticks are a third of a
microbatch's work, not half. An activation is stashed from the forward to the backward pass.

Sources: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism"; Narayanan et
al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-flush, which is 1F1B) and "Efficient large-scale
language model training on GPU clusters using Megatron-LM" (interleaved); Qi et al., "Zero bubble pipeline
parallelism" (ZB-H1).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from spmd.pipeline.tables import BACKWARD, FORWARD, WEIGHT, Schedule, Step


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Schedule all forward passes, then all backward passes, those of the last microbatch first.

    Args:
        stages: the number of stages.
        microbatches: the number of microbatches.

    >>> gpipe(4, 8).ticks, gpipe(4, 8).stashed
    (22, [8, 8, 8, 8])
    """
    forward, backward = _passes("gpipe", stages, microbatches)
    return scheduled_orders([forward + backward[::-1]] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Schedule one forward, one backward (1F1B): stage i begins with `stages - i` forward passes, then alternates.

    Args:
        stages: the number of stages.
        microbatches: the number of microbatches.

    >>> one_f_one_b(4, 8).ticks, one_f_one_b(4, 8).stashed
    (22, [4, 3, 2, 1])
    """
    forward, backward = _passes("one_f_one_b", stages, microbatches)
    return scheduled_orders([_alternate(forward, backward, stages - i) for i in range(stages)])


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Schedule 1F1B in which a stage has several blocks of layers: stage i has blocks i, stages + i, 2*stages + i, …

    Groups of `stages` microbatches pass through one chunk, then through the next.

    Args:
        stages: the number of stages.
        microbatches: the number of microbatches, a multiple of the stages.
        chunks: the number of blocks of layers of a stage.

    Raises:
        ValueError: if `stages` does not divide `microbatches`.

    >>> round(one_f_one_b(4, 8).bubble, 3), round(interleaved(4, 8, chunks=2).bubble, 3)
    (0.273, 0.158)
    """
    forward, backward = _passes("interleaved", stages, microbatches, chunks)
    if microbatches % stages:
        raise ValueError(
            f"interleaved: {microbatches} microbatches cannot be split into groups of {stages}, one a stage: choose "
            f"a multiple of {stages} microbatches"
        )
    warmup = [2 * (stages - i) - 1 + (chunks - 1) * stages for i in range(stages)]
    return scheduled_orders([_alternate(forward, backward, n) for n in warmup])


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Schedule ZB-H1: 1F1B with split backward passes, in which the gradients of weights fill most of the bubble.

    Stage i is `i` microbatches behind with them, so no stage holds more activations than the first one under 1F1B.

    Args:
        stages: the number of stages.
        microbatches: the number of microbatches.

    >>> from spmd import show_schedule
    >>> show_schedule(zero_bubble(2, 3))
    tick    0  1  2  3  4  5  6  7  8  9
    stage 0 F0 .  F1 B0 W0 F2 B1 W1 B2 W2
    stage 1 .  F0 B0 F1 B1 W0 F2 B2 W1 W2
    10 ticks, bubble 10%, activations stashed 2, 2
    """
    forward, backward = _passes("zero_bubble", stages, microbatches)
    orders = []
    for i in range(stages):
        order, left = [], deque(backward)
        for step in _alternate(forward, backward, stages - i):
            order.append(step)
            if step.direction == BACKWARD and step.microbatch >= i:
                order.append(left.popleft()._replace(direction=WEIGHT))
        orders.append([*order, *(step._replace(direction=WEIGHT) for step in left)])
    return scheduled_orders(orders)


def _passes(name: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[list[Step], list[Step]]:
    """Return all forward and all backward steps of a stage, in groups of as many microbatches as there are stages."""
    counts = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    for kind, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}: {kind} must be at least 1, got {count}")
    groups = [range(m, min(m + stages, microbatches)) for m in range(0, microbatches, stages)]
    forward = [Step(FORWARD, m, c) for group in groups for c in range(chunks) for m in group]
    return forward, [Step(BACKWARD, step.microbatch, chunks - 1 - step.chunk) for step in forward]


def _alternate(forward: list[Step], backward: list[Step], warmup: int) -> list[Step]:
    """Return `warmup` forward steps, then a backward and a forward step in turn."""
    pairs = itertools.zip_longest(backward, forward[warmup:])
    return forward[:warmup] + [step for pair in pairs for step in pair if step]


# ---------------------------------------------------------------- from orders to ticks


def scheduled_orders(orders: Sequence[Sequence[Step]]) -> Schedule:
    """Return the schedule in which each stage runs its steps in the given order, as early as it can.

    Forward passes are then delayed as far as possible without delaying any other pass, so that stages hold
    activations for as short a time as possible.

    Args:
        orders: the steps of each stage, in order.

    Raises:
        ValueError: if stages wait for each other.

    >>> scheduled_orders([[Step(BACKWARD, 0), Step(FORWARD, 0)]])
    Traceback (most recent call last):
    ...
    ValueError: deadlock at tick 0: stage 0's backward of microbatch 0 waits for the forward of microbatch 0 on stage 0
    """
    left, stages = [deque(order) for order in orders], len(orders)
    chunks = 1 + max((step.chunk for order in orders for step in order), default=0)
    table: list[list[Step | None]] = [[] for _ in orders]
    done: set[tuple[int, Step]] = set()
    while any(left):
        waits = {i: order[0].needs(i, stages, chunks) for i, order in enumerate(left) if order}
        unmet = {i: needed for i, needed in waits.items() if needed and needed not in done}
        ready = [bool(order) and i not in unmet for i, order in enumerate(left)]
        if not any(ready):
            waiting = [f"stage {i}'s {left[i][0]} waits for the {step} on stage {j}" for i, (j, step) in unmet.items()]
            raise ValueError(f"deadlock at tick {len(table[0])}: " + "; ".join(waiting))
        done.update((i, order[0]) for i, order in enumerate(left) if ready[i])
        for row, order, now in zip(table, left, ready):
            row.append(order.popleft() if now else None)
    _delay_forwards(table)
    return Schedule(tuple(map(tuple, table)))


def _delay_forwards(table: list[list[Step | None]]) -> None:
    """Move forward passes to the last idle tick before the next step of the stage, and before they are used."""
    stages, chunks = len(table), 1 + max(step.chunk for row in table for step in row if step)
    used = {step.needs(i, stages, chunks): tick for i, row in enumerate(table) for tick, step in enumerate(row) if step}
    for tick in reversed(range(len(table[0]))):
        for stage, row in enumerate(table):
            if (step := row[tick]) and step.direction == FORWARD and (stage, step) in used:
                later, end = tick, used[stage, step]
                while later + 1 < end and row[later + 1] is None:
                    later += 1
                row[tick], row[later] = None, step
                used[step.needs(stage, stages, chunks)] = later
