"""Pipelines without a flush: which version of the weights each microbatch sees, and how that changes training.

    mpirun -n 4 python -m spmd.examples.weight_versions

The program trains by each rule, on ranks and simulated, and prints the losses of both.

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
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives.rooted import broadcast
from minidiff import tree
from spmd.examples.study import numbers, run_study
from spmd.mesh.specs import P
from spmd.pipeline.library import one_f_one_b
from spmd.pipeline.run import PipelineStage, run_stage, select_chunk, take, zeros
from spmd.pipeline.tables import BACKWARD, FORWARD, NOTHING, Entry, Schedule, Step

Versions = list[list[int]]  # of each stage: the version that each microbatch sees


def pipedream_versions(schedule: Schedule, vertical: bool = False) -> Versions:
    """The version that each microbatch sees in its forward pass, if each backward pass is an update.

    With stashed weights its backward pass sees the same. With `vertical` synchronization, all stages give a microbatch
    the version that the first one gives it. Raises ValueError for a schedule of several chunks.

    >>> pipedream_versions(one_f_one_b(3, 5))
    [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    >>> pipedream_versions(one_f_one_b(3, 5), vertical=True)
    [[0, 0, 0, 1, 2], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    """
    versions = []
    for steps in _steps_of_stages("pipedream_versions", schedule):
        updates = [sum(s.direction == BACKWARD for s in steps[:k]) for k in range(len(steps))]
        seen = {s.microbatch: n for s, n in zip(steps, updates) if s.direction == FORWARD}
        versions.append([seen[m] for m in sorted(seen)])
    return versions[:1] * len(versions) if vertical else versions


def _steps_of_stages(name: str, schedule: Schedule) -> list[list[Step]]:
    """The steps of each stage, in order."""
    steps_of_stages = [[step for step in row if step] for row in schedule.table]
    for stage, steps in enumerate(steps_of_stages):
        if schedule.is_split or any(step.chunk for step in steps):
            raise ValueError(
                f"{name}: stage {stage} has several chunks of layers, or splits backward passes; write one_f_one_b(...)"
            )
    return steps_of_stages


def version_slots(schedule: Schedule, versions: Versions, group: int) -> tuple[int, numpy.ndarray, numpy.ndarray]:
    """Return the most versions that a stage keeps, and the slots that steps read and write, [stages, ticks] each.

    Version v is in slot v % count. A step that makes no version writes to slot -1. Raises ValueError if a forward pass
    comes before the update that makes its version, and for another number of stages or microbatches.

    >>> schedule = one_f_one_b(2, 3)
    >>> count, read, written = version_slots(schedule, pipedream_versions(schedule), group=1)
    >>> count, written[0].tolist()
    (2, [-1, -1, -1, 1, -1, 0, -1, 1])
    """
    if group < 1 or [*map(len, versions)] != [schedule.microbatches] * schedule.stages:
        raise ValueError(
            f"scheduled_training: {group=}, with versions of {[*map(len, versions)]} microbatches: pass a group of at "
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


def scheduled_training(
    schedule: Schedule,
    layers: tuple,
    params: tuple,
    inputs: Any,
    targets: Any,
    axis: str,
    versions: Versions,
    rate: float,
    group: int = 1,
) -> tuple:
    """(losses [microbatches], parameters): train without a flush, in the order of a schedule, by gradient descent.

    A stage updates its parameters by the mean of its gradients after each `group` of its backward passes, and does not
    wait for other stages. Both passes of a microbatch take the version that `versions` gives it: `train_with_versions`
    with the same ones returns the same numbers. The other arguments are those of `scheduled`; the first layer is
    trained on the first stage, the last layer on the last one. All ranks have room for as many versions as one of them
    needs. Raises ValueError if a stage has several chunks, or does not have a version yet.

    >>> from spmd import P, make_mesh, shard_map
    >>> schedule = one_f_one_b(2, 2)
    >>> layers = (lambda v, t: v * t, lambda w, x: w[0] * x, lambda u, x, y: u * x - y)
    >>> f = lambda *args: scheduled_training(schedule, layers, *args, 'stages', pipedream_versions(schedule), rate=1.0)
    >>> mesh, specs = make_mesh((2,), ('stages',), backend='simulated'), (P(), P(None, 'stages'), P())
    >>> run = shard_map(f, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs))
    >>> losses, (v, w, u) = run((1.0, np.array([[2.0, 3.0]]), 1.0), np.ones(2), np.zeros(2))
    >>> print(losses, w)
    [  6. -10.] [[ 4. 11.]]
    """
    count, seen, written = version_slots(schedule, versions, group)
    stage = VersionedStage(schedule, layers, params, (inputs, targets), axis)
    stage.set_versions(count, seen, written, lambda p, g: p - rate * (g / group))
    stash = md.tree.map(lambda leaf: np.at(zeros(leaf, axis, count))[0].set(leaf), stage.params)
    gradients = md.tree.map(lambda leaf: zeros(leaf, axis), stage.params)
    stash, losses, _ = run_stage(stage, stash, zeros(stage.no_loss, axis, schedule.microbatches), gradients)
    first, blocks, last = md.tree.map(lambda slots: slots[schedule.microbatches // group % count], stash)
    losses, last = broadcast((losses, last), axis, schedule.stages - 1)
    return losses, (broadcast(first, axis), blocks, last)


class VersionedStage(PipelineStage):
    """A stage that stashes the versions of its parameters, and updates them after its own backward passes.

    The columns `residuals` and `loss` of its entries, which passes that recompute do not use, have the slots of the
    versions that a step reads and writes.
    """

    def set_versions(self, count: int, seen: numpy.ndarray, written: numpy.ndarray, update: Callable) -> None:
        seen, written = (take(column, self.rank) for column in (seen, written))
        self.rows = self.rows._replace(residuals=seen, loss=written)
        self.count, self.update = count, update

    def params_of(self, entry: Entry, stash: Any) -> tuple:
        return select_chunk(md.tree.map(lambda slots: take(slots, entry.residuals), stash), entry.chunk)

    def forward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        x, _, _, term, _ = super().forward(entry, x, cotangent, stash, self.no_loss, ())
        return x, cotangent, stash, np.at(loss)[entry.microbatch].set(term), gradients

    def backward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        x, cotangent, _, _, gradients = super().backward(entry, x, cotangent, stash, self.no_loss, gradients)

        def update(stash, gradients):
            latest = md.tree.map(lambda slots: take(slots, (entry.loss - 1) % self.count), stash)
            latest = md.tree.map(self.update, latest, gradients)
            stash = md.tree.map(lambda slots, p: np.at(slots)[entry.loss].set(p), stash, latest)
            return stash, md.tree.map(np.zeros_like, gradients)

        unchanged = lambda *same: same  # noqa: E731
        stash, gradients = md.cond(entry.loss == NOTHING, unchanged, update, stash, gradients)
        return x, cotangent, stash, loss, gradients


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Train by each rule on ranks and on one device, and print the losses of the microbatches."""
    stages, count = mesh.size, 2 * mesh.size + 2
    schedule, specs = one_f_one_b(stages, count), (P(), P(None, "stages"), P())
    layers = (lambda v, x: v * x, lambda w, x: np.tanh(w[0] * x), lambda u, x, y: (u * x - y) ** 2)
    params: Any = (1.0, numpy.linspace(0.5, 1, stages)[None], 1.0)
    inputs, targets = numpy.linspace(0, 1, count), numpy.linspace(1, 0, count)

    def loss(per_stage: Sequence, microbatch: tuple) -> Any:
        x, (first, blocks, last) = microbatch[0], zip(*per_stage)
        x = layers[0](first[0], x)
        for block in blocks:
            x = layers[1]([block], x)
        return layers[2](last[-1], x, microbatch[1])

    rules = {
        "PipeDream": (pipedream_versions(schedule), 1),
        "vertical": (pipedream_versions(schedule, vertical=True), 1),
        "2BW": (double_buffered_versions(stages, count, stages), stages),
    }
    for name, (versions, group) in rules.items():

        def train(params, inputs, targets, versions=versions, group=group):
            return scheduled_training(schedule, layers, params, inputs, targets, "stages", versions, 0.1, group)

        program = spmd.shard_map(train, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs))
        per_stage = [(params[0], block, params[2]) for block in params[1][0]]
        _, expected = train_with_versions(loss, per_stage, [*zip(inputs, targets)], versions, 0.1, group)
        print(f"{name}, ranks:     {numbers(program(params, inputs, targets)[0])}")
        print(f"{name}, simulated: {numbers(expected)}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("stages",), argv)


if __name__ == "__main__":
    main()
