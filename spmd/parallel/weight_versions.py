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
double       max(0, m // group - 1)                        2                      one update of a group before
===========  ============================================  =====================  =============================

Versions are counted in updates. `train_with_versions` is a simulation on one device: it computes each microbatch's
gradient with the versions that the rule gives it.

Sources: Narayanan et al., "PipeDream: Generalized pipeline parallelism for DNN training" and "Memory-efficient
pipeline-parallel DNN training" (2BW).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import minidiff as md
from minidiff import tree
from spmd.parallel.schedule import BACKWARD, FORWARD, Schedule
from spmd.report.table import labeled_rows

Versions = list[list[int]]  # of each stage: the version that each microbatch sees


def pipedream_versions(schedule: Schedule) -> Versions:
    """The version that each microbatch sees in its forward pass, if each backward pass is an update.

    With stashed weights its backward pass sees the same. Raises ValueError for a schedule of several chunks.

    >>> from spmd.parallel.schedules import one_f_one_b
    >>> pipedream_versions(one_f_one_b(3, 5))
    [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    """
    found = []
    for stage, row in enumerate(schedule.table):
        steps = [step for step in row if step]
        if any(step.chunk for step in steps):
            raise ValueError(f"pipedream_versions: stage {stage} has several chunks of layers; write one_f_one_b(...)")
        updates = [sum(s.direction == BACKWARD for s in steps[:k]) for k in range(len(steps))]
        seen = {s.microbatch: n for s, n in zip(steps, updates) if s.direction == FORWARD}
        found.append([seen[m] for m in sorted(seen)])
    return found


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


def show_versions(versions: Versions) -> str:
    """A table of stages by microbatches.

    >>> print(show_versions([[0, 0, 1], [0, 1, 2]]))
    microbatch 0 1 2
    stage 0    0 0 1
    stage 1    0 1 2
    """
    rows = [("microbatch", range(len(versions[0]))), *((f"stage {i}", row) for i, row in enumerate(versions))]
    return "\n".join(labeled_rows([[name, *map(str, row)] for name, row in rows], right=True))


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
