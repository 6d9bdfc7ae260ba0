"""Overflow in float16: infinity, a step that is skipped, or the largest number (saturation).

    mpirun -n 4 python -m spmd.examples.saturation

The program trains in float16 with a loss scale, on batches of which one overflows, in three ways. It prints how many
gradients of that batch are not finite, how large they are in float32, the losses in the end, and whether a run that
skips the step is a run without the batch.

A device in saturating mode returns 65504 where a result of float16 is beyond it, so training goes on without a NaN. But
such a gradient is still the largest by far, and it stays in the averages of Adam: the second moment remembers it for
about 1 / (1 - b2) steps, in which updates are too small. Skipping the step loses one batch, and nothing else. All ranks
skip together, since `all_finite` is the same on all.

Source: Micikevicius et al., "Mixed precision training", section 3.2; NVIDIA, "Train with mixed precision", user guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.precision import LossScale, Policy, all_finite, select
from spmd.examples.study import numbers, run_study
from spmd.parallel import data_parallel, init_params

LARGEST, SCALE = 65504.0, 2.0**9


def saturate(values: Any, largest: float = LARGEST) -> Any:
    """Replace what is beyond the largest number in a tree by it, with the sign, and NaNs too.

    >>> saturate(np.array([1.0, numpy.inf, -1e9, numpy.nan]))
    array([ 1.0000e+00,  6.5504e+04, -6.5504e+04,  6.5504e+04])
    """
    return md.tree.map(lambda x: np.clip(np.where(np.isnan(x), largest, x), -largest, largest), values)


def show(mesh: spmd.Mesh) -> None:
    """Train in three ways, on the same batches."""
    rng, optimizer, outlier = numpy.random.default_rng(0), md.optim.adam(0.03, b2=0.99), 12
    params = md.tree.map(numpy.float32, init_params(rng, (6, 12, 2)))
    inputs = rng.normal(size=(48, 8 * mesh.size, 6)).astype(numpy.float32)
    targets = np.tanh(inputs @ rng.normal(size=(6, 2)).astype(numpy.float32))
    targets[outlier] *= 1000
    loss = data_parallel(mesh)
    half = Policy("float16").apply(loss)

    @partial(md.jit, static_argnames="way")
    def step(params: Any, state: Any, batch: Any, way: str) -> Any:
        value, gradients = LossScale(SCALE).value_and_grad(half)(params, batch)
        finite = all_finite(gradients)
        if way == "saturated":
            gradients = saturate(gradients, LARGEST / SCALE)
        updates, after = optimizer.update(gradients, state, params)
        result = md.optim.apply_updates(params, updates), after
        return value, finite, *(select(finite, result, (params, state)) if way == "skipped" else result)

    def train(way: str, dropped: Sequence[int] = ()) -> tuple[list[float], list[int], Any]:
        losses: list[float] = []
        state, overflows, now = optimizer.init(params), list[int](), params
        for i in range(len(inputs)):
            if i not in dropped:
                with numpy.errstate(all="ignore"):
                    value, finite, now, state = step(now, state, (inputs[i], targets[i]), way)
                overflows = overflows if finite else [*overflows, i]
                losses.append(float(value))
        return losses, overflows, now

    with numpy.errstate(all="ignore"):
        scaled = md.grad(lambda p: half(p, (inputs[outlier], targets[outlier])) * SCALE)(params)
    wrong = sum(int((~numpy.isfinite(g)).sum()) for g in md.tree.leaves(scaled))
    exact = md.grad(loss)(params, (inputs[outlier], targets[outlier]))
    sizes = [abs(numpy.asarray(g)).max() * SCALE for g in md.tree.leaves(exact)]
    print(f"the overflowing batch: {wrong} of {sum(g.size for g in md.tree.leaves(exact))} gradients are not finite")
    print(f"the largest is {max(sizes) / LARGEST:.1f} times the largest number")
    for way in ("unchanged", "saturated", "skipped"):
        losses, overflows, _ = train(way)
        mean = numbers([np.mean(losses[-12:])], 1)
        print(f"{way}: overflows in {len(overflows)} steps; the mean of the last 12 losses is {mean}")
    same = all(map(numpy.array_equal, *map(md.tree.leaves, (train("skipped")[2], train("skipped", [outlier])[2]))))
    print(f"skipped is a run without the batch, to the last bit: {'yes' if same else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
