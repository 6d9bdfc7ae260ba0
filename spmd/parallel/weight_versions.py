"""Pipelines without a flush: which version of the weights each microbatch sees, and how that changes training.

GPipe and 1F1B with a flush compute the gradient of a batch, and then update. PipeDream does not wait: a stage updates
its weights after each backward pass. A microbatch then meets a different version on each stage, and another one in its
backward pass, unless the stage stashes the version of the forward pass. 2BW (double-buffered weights) updates after
each group of at least p microbatches, and gives a microbatch the version before the latest on all stages: two versions
are enough.

===========  ============================================  =====================  =============================
rule         version of microbatch m in stage i of p       versions kept          gradients are of weights
===========  ============================================  =====================  =============================
pipedream    max(0, m - (p - 1 - i))                       p - i                  p - 1 - i updates before
vertical     max(0, m - (p - 1))                           p                      p - 1 updates before
double       max(0, m // group - 1)                        2                      one update of a group before
===========  ============================================  =====================  =============================

Versions are counted in updates. Vertical synchronization gives a microbatch the version of the first stage on all
stages. `train_with_versions` is a simulation on one device: it computes each microbatch's gradient with the versions
that the rule gives it. `scheduled_training` does the same on ranks, each of which keeps the versions in a ring.

Sources: Narayanan et al., "PipeDream: Generalized pipeline parallelism for DNN training" and "Memory-efficient
pipeline-parallel DNN training" (2BW).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

import minidiff as md
from minidiff import tree
from spmd.parallel.schedule import BACKWARD, FORWARD, Schedule, Step

Versions = list[list[int]]  # of each stage: the version that each microbatch sees


def pipedream_versions(schedule: Schedule, vertical: bool = False) -> Versions:
    """The version that each microbatch sees in its forward pass, if each backward pass is an update.

    With stashed weights its backward pass sees the same. With `vertical` synchronization, all stages give a microbatch
    the version that the first one gives it. Raises ValueError for a schedule of several chunks.

    >>> from spmd.parallel.schedules import one_f_one_b
    >>> pipedream_versions(one_f_one_b(3, 5))
    [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    >>> pipedream_versions(one_f_one_b(3, 5), vertical=True)
    [[0, 0, 0, 1, 2], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    """
    found = []
    for steps in _steps_of_stages("pipedream_versions", schedule):
        updates = [sum(s.direction == BACKWARD for s in steps[:k]) for k in range(len(steps))]
        seen = {s.microbatch: n for s, n in zip(steps, updates) if s.direction == FORWARD}
        found.append([seen[m] for m in sorted(seen)])
    return found[:1] * len(found) if vertical else found


def _steps_of_stages(name: str, schedule: Schedule) -> list[list[Step]]:
    """The steps of each stage, in order."""
    found = [[step for step in row if step] for row in schedule.table]
    for stage, steps in enumerate(found):
        if schedule.is_split or any(step.chunk for step in steps):
            raise ValueError(
                f"{name}: stage {stage} has several chunks of layers, or splits backward passes; write one_f_one_b(...)"
            )
    return found


def version_slots(schedule: Schedule, versions: Versions, group: int) -> tuple[int, numpy.ndarray, numpy.ndarray]:
    """How many versions a stage keeps at most, and the slots that its steps read and write: [stages, ticks] twice.

    Version v is in slot v % count. A step that makes no version writes to slot -1. Raises ValueError if a forward pass
    comes before the update that makes its version, and for another number of stages or microbatches.

    >>> from spmd.parallel.schedules import one_f_one_b
    >>> schedule = one_f_one_b(2, 3)
    >>> count, read, written = version_slots(schedule, pipedream_versions(schedule), group=1)
    >>> count, written[0].tolist()
    (2, [-1, -1, -1, 1, -1, 0, -1, 1])
    """
    if group < 1 or [*map(len, versions)] != [schedule.microbatches] * schedule.stages:
        raise ValueError(
            f"scheduled_training: {group=}, with versions of {[*map(len, versions)]} microbatches: give a group of at "
            f"least 1, and {schedule.microbatches} versions for each of the {schedule.stages} stages"
        )
    read, written, most = *numpy.full((2, schedule.stages, schedule.ticks), -1), 1
    for stage, steps in enumerate(_steps_of_stages("scheduled_training", schedule)):
        done, seen = 0, [versions[stage][step.microbatch] for step in steps]
        for k, (step, version) in enumerate(zip(steps, seen)):
            tick = schedule.tick(stage, step)
            read[stage, tick] = version
            if version > done // group:
                raise ValueError(
                    f"scheduled_training: microbatch {step.microbatch} sees version {version} on stage {stage}, after "
                    f"{done // group} updates only"
                )
            done += step.direction == BACKWARD
            if step.direction == BACKWARD and done % group == 0:
                written[stage, tick] = done // group
                most = max(most, 1 + done // group - min(seen[k + 1 :], default=done // group))
    return most, read % most, numpy.where(written < 0, -1, written % most)


def double_buffered_versions(stages: int, microbatches: int, group: int) -> Versions:
    """The version that each microbatch sees with 2BW, which updates after each `group`: the same on all stages.

    Raises ValueError for a group of fewer microbatches than stages: then two versions are not enough.

    >>> double_buffered_versions(2, 6, group=2)
    [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    """
    if group < stages:
        raise ValueError(
            f"double_buffered_versions: a group of {group} microbatches ends before {stages} stages have begun it; "
            f"choose at least {stages}"
        )
    return [[max(0, m // group - 1) for m in range(microbatches)] for _ in range(stages)]


def train_with_versions(
    loss: Callable, params: Sequence, microbatches: Sequence, versions: Versions, rate: float, group: int = 1
) -> tuple[list, list[float]]:
    """Train by gradient descent, with each microbatch's gradient taken at the versions that it sees.

    `loss(params, microbatch)` is the loss of the whole network; `params` has an entry for each stage. After each
    `group` of microbatches, all stages update by the mean of their gradients. Returns the last parameters and the
    losses of the microbatches. Raises ValueError if a microbatch sees a version that is not there yet.

    >>> square = lambda params, x: sum((p - x) ** 2 for p in params)
    >>> params, losses = train_with_versions(square, [1.0], [0.0, 0.0], [[0, 1]], rate=0.25)
    >>> [float(p) for p in params], [float(x) for x in losses]
    ([0.25], [1.0, 0.25])
    """
    history, losses, pending = [list(params)], [], []
    for m, microbatch in enumerate(microbatches):
        for stage, row in enumerate(versions):
            if row[m] >= len(history):
                raise ValueError(
                    f"train_with_versions: microbatch {m} sees version {row[m]} on stage {stage}, after "
                    f"{len(history) - 1} updates only"
                )
        seen = [history[row[m]][stage] for stage, row in enumerate(versions)]
        value, gradient = md.value_and_grad(loss)(seen, microbatch)
        losses.append(value)
        pending.append(gradient)
        if len(pending) == group:
            mean = tree.map(lambda *terms: sum(terms) / group, *pending)
            history.append(tree.map(lambda p, g: p - rate * g, history[-1], mean))
            pending = []
    return history[-1], losses
