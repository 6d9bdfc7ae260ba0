"""A curriculum of lengths: short texts first, then longer ones.

    mpirun -n 4 python -m spmd.examples.curriculum

The program prints how many steps have each length, the programs that were compiled, the tokens and the pairs of tokens
that attend to each other, beside those of training at full length, and the losses of full texts after both. It compares
the loss of short texts, and its gradients, with those of full texts whose later tokens have weight zero.

Early in training, long texts cost much and teach little: gradients vary most there, and attention takes time with the
square of the length. So batches are cut to a length that grows, here in proportion to the step, or to one of its roots:

    length = first + (last - first) * min(1, step / steps) ** (1 / root)

Lengths are rounded down to a multiple: for the matrix units of a device, and because each length is a program of its
own, which `jit` compiles once. Ranks cut their examples alike, so nothing is sent, and a mean over the batch stays one.

Source: Li et al., "The stability-efficiency dilemma: Investigating sequence length warmup for training GPT models";
DeepSpeed, "Curriculum learning", whose schedules are fixed_linear and fixed_root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd.examples.study import numbers, run_study
from spmd.mesh.specs import P
from spmd.parallel import Config, init_transformer, label_cross_entropy, transformer

CONFIG = Config(vocabulary=12, features=16, heads=2, layers=1, hidden=32)
FIRST, LAST, STEPS = 8, 32, 36


def length_at(step: int, first: int, last: int, steps: int, multiple: int = 8, root: float = 1.0) -> int:
    """Return the length of texts in a step: from `first` to `last`, which is reached after a number of steps.

    >>> [length_at(step, 8, 32, 12) for step in range(0, 16, 2)], length_at(3, 8, 32, 12, root=2)
    ([8, 8, 16, 16, 24, 24, 32, 32], 16)
    """
    share = min(1.0, step / steps) ** (1 / root)
    return int((first + (last - first) * share) // multiple) * multiple


def loss_of(mesh: spmd.Mesh) -> Callable:
    """Return the mean cross entropy of next tokens, whose positions have weights, for texts that are split."""

    def loss(params: Any, texts: Any, weights: Any) -> Any:
        errors = label_cross_entropy(transformer(CONFIG, params, texts[:, :-1]), texts[:, 1:])
        return pmean(np.sum(errors * weights) / (len(texts) * np.sum(weights)), "data")

    return spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())


def show(mesh: spmd.Mesh) -> None:
    """Train with a curriculum, and at full length for as many tokens."""
    rng, examples = numpy.random.default_rng(0), 4 * mesh.size
    steps = rng.integers(1, 4, size=(STEPS, examples, 1))  # a text counts in steps of 1 to 3
    texts = (steps * numpy.arange(LAST + 1) + rng.integers(12, size=(STEPS, examples, 1))) % 12
    params, optimizer, loss, traced = init_transformer(rng, CONFIG), md.optim.adam(0.01), loss_of(mesh), []

    @md.jit
    def step(params: Any, state: Any, texts: Any) -> Any:
        traced.append(texts.shape[1] - 1)  # when it is compiled
        gradients = md.grad(loss)(params, texts, np.ones(texts.shape[1] - 1))
        updates, state = optimizer.update(gradients, state, params)
        return md.optim.apply_updates(params, updates), state

    lengths = [length_at(i, FIRST, LAST, STEPS * 2 // 3) for i in range(STEPS)]
    full = [LAST] * (sum(lengths) // LAST)
    after = []
    for schedule in (lengths, full):
        now, state = params, optimizer.init(params)
        for batch, n in zip(texts, schedule):
            now, state = step(now, state, batch[:, : n + 1])
        after.append(loss(now, texts[-1], np.ones(LAST)))
    print(f"steps of each length: {dict(Counter(lengths))}; compiled: {sorted({*traced})}, {len(traced)} programs")
    for name, schedule in (("a curriculum", lengths), ("full length", full)):
        pairs = sum(n * (n + 1) // 2 for n in schedule)
        print(f"{name}: {len(schedule)} steps, {sum(schedule)} tokens of a text, {pairs} pairs that attend")
    print(f"losses of full texts: {numbers([loss(params, texts[-1], np.ones(LAST)), *after], 2)}")
    short = md.value_and_grad(loss)(params, texts[0, :, : FIRST + 1], np.ones(FIRST))
    masked = md.value_and_grad(loss)(params, texts[0], (numpy.arange(LAST) < FIRST) * 1.0)
    same = all(numpy.allclose(a, b) for a, b in zip(*map(md.tree.leaves, (short, masked))))
    print(f"short texts are full ones with weights: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("data",), argv)


if __name__ == "__main__":
    main()
