"""Loss spikes: find them by a robust z-score, then skip the batch, or resume from before.

    mpirun -n 4 python -m spmd.examples.loss_spikes

The program trains on batches of which three have wrong numbers: as they are, skipping what is flagged, and resuming
from an earlier state. It prints the steps that are flagged, with their scores, the loss in the end, and whether the
parameters are those of a run that never saw the batches.

A loss is compared with the last ones. Their mean and standard deviation would be moved by a spike; their median, and
the median absolute deviation from it (MAD), are not:

    z = 0.6745 * (loss - median) / MAD

For normal numbers, z has a standard deviation of 1. Losses fall, and their noise has long tails, so a spike is flagged
from 8 on. `skip` drops the batch: the loss is known before its update is applied. `resume` goes back to an earlier
state, and drops all batches since then, as PaLM's training did: the same batches did no harm at other times. All ranks
have the same loss, so all decide alike. Where memory is short, `spmd.checkpoint` saves the states.

Source: Chowdhery et al., "PaLM: Scaling language modeling with pathways", section 5.1; Iglewicz and Hoaglin, "How to
detect and handle outliers" (the modified z-score).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

import minidiff as md
import spmd
from spmd.examples.study import numbers, run_study
from spmd.parallel import data_parallel, init_params

WINDOW, THRESHOLD = 16, 8.0


class WatchedRun(NamedTuple):
    """The state in the end, the losses of the updates, the steps that were flagged with scores, and dropped batches."""

    state: Any
    losses: list[float]
    flagged: list[tuple[int, float]]
    dropped: list[int]


def robust_z(value: float, history: Sequence[float]) -> float:
    """Return by how many standard deviations a number is above the median of others.

    >>> round(robust_z(9.0, [1.0, 2.0, 3.0, 4.0, 100.0]), 2)
    4.05
    """
    median = numpy.median(history)
    deviation = numpy.median(abs(numpy.asarray(history) - median))
    return float(0.6745 * (value - median) / max(deviation, 1e-30))


def train(step: Callable, state: Any, batches: Sequence, response: str | None = None, every: int = 5) -> WatchedRun:
    """Train on batches in turn; `step(state, batch)` returns the loss and the next state.

    `response` to a spike is "skip", "resume" or None. Every so many steps a state is kept; `resume` goes back by at
    least as many steps.
    """
    losses: list[float] = []
    flagged, dropped, saved, i = [], [], [(0, state, 0)], 0
    while i < len(batches):
        value, after = step(state, batches[i])
        score = robust_z(float(value), losses[-WINDOW:]) if len(losses) >= WINDOW // 2 else 0.0
        if response and not score < THRESHOLD:  # a NaN is flagged too
            flagged.append((i, score))
            start = i
            if response == "resume":
                saved = [entry for entry in saved if entry[0] <= max(i - every, 0)]
                start, state, count = saved[-1]
                del losses[count:]
            dropped += [k for k in range(start, i + 1) if k not in dropped]
        else:
            state = after
            losses.append(float(value))
        i += 1
        if i % every == 0:
            saved.append((i, state, len(losses)))
    return WatchedRun(state, losses, flagged, dropped)


def show(mesh: spmd.Mesh) -> None:
    """Train in three ways."""
    rng, optimizer = numpy.random.default_rng(0), md.optim.adam(0.02)
    params, target = init_params(rng, (6, 12, 2)), rng.normal(size=(6, 2))
    inputs = rng.normal(size=(60, 8 * mesh.size, 6))
    batches = [(x, numpy.tanh(x @ target)) for x in inputs]
    for i in (25, 26, 44):
        batches[i] = (batches[i][0], 50 * batches[i][1])
    gradient = md.value_and_grad(data_parallel(mesh))

    @md.jit
    def step(state: Any, batch: Any) -> Any:
        value, gradients = gradient(state[0], batch)
        updates, after = optimizer.update(gradients, state[1], state[0])
        return value, (md.optim.apply_updates(state[0], updates), after)

    state = params, optimizer.init(params)
    for response in (None, "skip", "resume"):
        run = train(step, state, batches, response)
        print(f"{response or 'no response'}: the last losses are {numbers(run.losses[-3:])}")
        if response:
            clean = train(step, state, [b for i, b in enumerate(batches) if i not in run.dropped])
            same = all(numpy.allclose(a, b) for a, b in zip(*map(md.tree.leaves, (run.state, clean.state))))
            print(f"flagged: {', '.join(f'{i} (z = {z:.0f})' for i, z in run.flagged)}; {len(run.dropped)} dropped")
            print(f"as a run without these batches: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
