"""Train a network on handwritten digits, data-parallel: mpirun -n 4 python -m spmd.examples.data_parallel

The batch is split over the ranks, every rank has all parameters. The gradient is taken outside the
`shard_map`, of the loss as a whole; the types of the values in the body decide where it communicates:
one all-reduce for the loss on the way forward, one for the gradients of all parameters on the way back.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib import resources
from itertools import pairwise
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P
from spmd.launch import launcher_size

try:
    from tqdm import tqdm
except ImportError as error:
    raise ImportError("the examples show their progress with tqdm: pip install 'minidiff[mpich]' brings it") from error

LAYERS = (64, 128, 64, 10)
BATCH = 240  # divided by 1, 2, 3, 4, 5, 6, 8, 10 and 12 ranks
TRAINING = 1440
LEARNING_RATE, MOMENTUM = 0.1, 0.9

# ---------------------------------------------------------------- the model


def init_params(rng: np.random.Generator) -> list:
    """Weights and biases of each layer: the same on every rank, because every rank starts from the same seed."""
    return [(rng.normal(size=(n, m)) / np.sqrt(n), np.zeros(m)) for n, m in pairwise(LAYERS)]


def predict(params: list, images: Any) -> Any:
    """The logits of each image: [n, 64] -> [n, 10]."""
    *hidden, (W, b) = params
    x = images
    for V, c in hidden:
        x = np.tanh(x @ V + c)
    return x @ W + b


def cross_entropy(params: list, batch: tuple) -> Any:
    """The mean over a batch of -log of the probability that the model gives to the right digit."""
    images, targets = batch
    logits = predict(params, images)
    logits = logits - np.max(logits, axis=-1, keepdims=True)
    log_probabilities = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return -np.mean(np.sum(targets * log_probabilities, axis=-1))


def data_parallel(mesh: spmd.Mesh, check_rep: bool = True) -> Any:
    """The same loss, each rank computing its part of the batch."""

    def loss(params, batch):
        @partial(spmd.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P(), check_rep=check_rep)
        def loss_of_block(block):
            return pmean(cross_entropy(params, block), "batch")

        return loss_of_block(batch)

    return loss


# ---------------------------------------------------------------- the data


def load_digits(rng: np.random.Generator) -> tuple:
    """Training and held-out (images, targets), shuffled; targets are one-hot."""
    with resources.files("spmd.examples").joinpath("data/digits.npz").open("rb") as file:
        data = np.load(file)
        images, labels = data["images"] / 16.0, data["labels"]
    order = rng.permutation(len(images))
    images, targets = images[order], np.eye(10)[labels[order]]
    return (images[:TRAINING], targets[:TRAINING]), (images[TRAINING:], targets[TRAINING:])


def batches(data: tuple, steps: int, rng: np.random.Generator) -> Any:
    """`steps` batches, drawn anew in each epoch."""
    images, targets = data
    order = np.array([], int)
    for _ in range(steps):
        if len(order) < BATCH:
            order = rng.permutation(len(images))
        chosen, order = order[:BATCH], order[BATCH:]
        yield images[chosen], targets[chosen]


# ---------------------------------------------------------------- training


def train(mesh: spmd.Mesh, steps: int, seed: int, progress: bool = False) -> tuple[list[float], float]:
    """Stochastic gradient descent with momentum: the losses, and the accuracy on held-out images."""
    rng = np.random.default_rng(seed)
    training, (images, targets) = load_digits(rng)
    params = init_params(rng)
    velocity = md.tree.map(np.zeros_like, params)
    step = md.value_and_grad(data_parallel(mesh))
    losses = []
    with tqdm(batches(training, steps, rng), total=steps, disable=not progress, unit="step") as bar:
        for batch in bar:
            loss, grads = step(params, batch)
            velocity = md.tree.map(lambda v, g: MOMENTUM * v - LEARNING_RATE * g, velocity, grads)
            params = md.tree.map(np.add, params, velocity)
            losses.append(float(loss))
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
    right = np.argmax(predict(params, images), axis=1) == np.argmax(targets, axis=1)
    return losses, float(np.mean(right))


def explain(mesh: spmd.Mesh) -> None:
    """Show what the gradient does on each rank: its tape, and what it communicates with and without types."""
    rng = np.random.default_rng(0)
    batch = tuple(x[:BATCH] for x in load_digits(rng)[0])
    params = init_params(rng)
    typed = md.grad(data_parallel(mesh))
    untyped = md.grad(data_parallel(mesh, check_rep=False))
    print("The gradient, as a typed tape:\n")
    print(md.make_tape(typed)(params, batch))
    print("\nWhat it communicates:\n")
    print(spmd.communication(typed)(params, batch))
    print("\nWhat it would communicate without the types (check_rep=False):\n")
    print(spmd.communication(untyped)(params, batch), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spmd.examples.data_parallel", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, help="ranks (default: as many as the launcher started; else 4, simulated)")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order and the parameters (default: 0)")
    options = parser.parse_args(argv)
    ranks = options.ranks or launcher_size() or 4
    mesh = spmd.make_mesh((ranks,), ("batch",))
    first = mesh.rank == 0
    if first:
        print(mesh)
        if mesh.backend == "simulated":
            print(f"No MPI launcher: {ranks} ranks are simulated in this process. For real ones, mpirun -n {ranks}.")
        explain(mesh)
        print(f"\nTraining a network {' - '.join(map(str, LAYERS))} for {options.steps} steps:\n", flush=True)
    start = time.perf_counter()
    losses, accuracy = train(mesh, options.steps, options.seed, progress=first)
    if first:
        print(f"\nfinal loss {losses[-1]:.6f}, held-out accuracy {accuracy:.4f}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
