"""A user's program with annotations: a network that is trained data-parallel.

`mypy --strict` accepts it, which `tests/house/test_install.py` checks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_size, pmean, psum
from minidiff import optim
from spmd import P

Array = NDArray[np.float64]


class Params(NamedTuple):
    """One hidden layer."""

    hidden: Array
    out: Array


mesh = spmd.make_mesh((4,), ("batch",), backend="simulated")
optimizer = optim.adam(0.1)


@spmd.shard_map(mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))
def center(block: Array) -> Array:
    """Subtract the mean of all ranks' examples."""
    total: Array = psum(np.sum(block, axis=0), "batch")
    centered: Array = block - total / (len(block) * axis_size("batch"))
    return centered


def predict(params: Params, x: Array) -> Array:
    return np.tanh(x @ params.hidden) @ params.out


def error(params: Params, x: Array, y: Array) -> np.floating[Any]:
    """The mean error of all examples; `x` and `y` are this rank's."""
    return pmean(np.mean((predict(params, x) - y) ** 2), "batch")


loss = spmd.shard_map(error, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())


@md.jit
def step(params: Params, state: Any, x: Array, y: Array) -> tuple[Params, Any, Array]:
    value, gradient = md.value_and_grad(loss)(params, x, y)
    updates, state = optimizer.update(gradient, state, params)
    return optim.apply_updates(params, updates), state, value


def train(steps: int) -> list[float]:
    rng = np.random.default_rng(0)
    x: Array = spmd.gather(center(rng.normal(size=(16, 3))))
    y = np.sin(x @ np.array([1.0, -2.0, 0.5]))
    params = Params(rng.normal(size=(3, 8)), np.zeros(8))
    state = optimizer.init(params)
    losses: list[float] = []
    for _ in range(steps):
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = train(30)
    print(f"{losses[0]:.3f} -> {losses[-1]:.3f}")
