"""Handwritten digits: the data, the training step and the options of the examples that classify them.

Each example describes itself by an `Example`, with which its script calls `main`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

import minidiff as md
import spmd
from minidiff.optim import GradientTransformation, apply_updates, sgd
from spmd.data import Batches, batches
from spmd.examples.loop import parser_of, positive_integer, run_script, show_mesh, train_loop
from spmd.mesh.launch import launcher_size, silence_other_ranks
from spmd.parallel import init_params, predict

BATCH = 240  # divisible by 1, 2, 3, 4, 5, 6, 8, 10 and 12 ranks
TRAINING = 1440
#: Operations whose lines of a tape are shown, and the remarks on them.
SHOWN = {
    "matmul": "",
    "pbroadcast": "moves nothing",
    "psum": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
}
OPTIMIZER = sgd(0.1, momentum=0.9)


@dataclass(frozen=True)
class Example:
    """The settings of one example.

    `loss(mesh, **options)` makes the loss, a function of (params, (inputs, targets)); `options` are those of
    `shard_map`. `params` are the specs of its parameters: a tree that is a prefix of theirs, or one for all. `batch` is
    the spec of inputs and targets.
    """

    name: str  # of its module
    loss: Callable
    layers: tuple[int, ...]  # sizes: pixels, …, classes
    axes: tuple[str, ...]  # of the mesh
    params: Any
    batch: spmd.P
    shape: Callable[[int], tuple[int, ...]] = lambda ranks: (ranks,)  # of the mesh
    arranged: Callable = lambda params: params  # from the list of layers' parameters to the loss's argument
    restored: Callable = lambda params: params  # the inverse
    optimizer: GradientTransformation = OPTIMIZER
    jit: bool = False  # whether to compile by default, since a step has many small operations

    def mesh(self, ranks: int, backend: str | None = None) -> spmd.Mesh:
        return spmd.make_mesh(self.shape(ranks), self.axes, backend=backend)


# ---------------------------------------------------------------- the data


def load_digits(rng: np.random.Generator, classes: int) -> tuple:
    """Shuffled (images [n, 64], one-hot targets [n, classes]), for training and held out.

    Classes beyond ten never occur: they make the number of outputs divisible by the ranks.
    """
    with resources.files("spmd.examples").joinpath("data/digits.npz").open("rb") as file:
        data = np.load(file)
        images, labels = data["images"] / 16.0, data["labels"]
    order = rng.permutation(len(images))
    images, targets = images[order], np.eye(classes)[labels[order]]
    return (images[:TRAINING], targets[:TRAINING]), (images[TRAINING:], targets[TRAINING:])


# ---------------------------------------------------------------- training


@dataclass
class DigitsRun:
    """The state of training: `params` and the optimizer's `state` may be sharded, the rest is the same on all ranks."""

    params: Any
    state: Any
    batches: Batches
    held_out: tuple
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> int:
        return len(self.losses)

    def advance(self, loss_and_gradient: Callable, optimizer: GradientTransformation) -> None:
        """One training step."""
        loss, grads = loss_and_gradient(self.params, next(self.batches))
        updates, self.state = optimizer.update(grads, self.state, self.params)
        self.params = apply_updates(self.params, updates)
        self.losses.append(float(loss))

    def tree_to_save(self) -> dict[str, Any]:
        """The tree to save."""
        return {"params": self.params, "state": self.state, "batches": self.batches.state()}

    def restore(self, saved: dict[str, Any], losses: list[float]) -> None:
        self.params, self.state, self.losses = saved["params"], saved["state"], losses
        self.batches.restore(saved["batches"])


def start(example: Example, mesh: spmd.Mesh, seed: int) -> DigitsRun:
    """The initial state: all ranks draw the same numbers, and each keeps its blocks. Every rank must call it."""
    rng = np.random.default_rng(seed)
    training, held_out = load_digits(rng, example.layers[-1])
    params = spmd.distribute(example.arranged(init_params(rng, example.layers)), mesh, example.params)
    # The data are in memory: a thread that reads ahead has nothing to wait for.
    shuffled = batches(training, mesh, example.batch, batch=BATCH, seed=seed, prefetch=0)
    return DigitsRun(params, example.optimizer.init(params), shuffled, held_out)


def accuracy(example: Example, run: DigitsRun) -> float:
    """The fraction of held-out images that are classified correctly. Under MPI this is a collective."""
    images, targets = run.held_out
    logits = predict(example.restored(spmd.gather(run.params)), images)
    return float(np.mean(np.argmax(logits, axis=1) == np.argmax(targets, axis=1)))


def train(
    example: Example,
    mesh: spmd.Mesh,
    steps: int,
    seed: int = 0,
    checkpoint: str | None = None,
    every: int = 50,
    jit: bool = False,
    progress: bool = False,
) -> DigitsRun:
    """Train for `steps` steps in all; `checkpoint` and `every` are those of `train_loop`."""
    run = start(example, mesh, seed)
    options = {"example": example.name, "layers": list(example.layers), "seed": seed, "jit": jit}
    loss_and_gradient = step_of(example, mesh, jit)
    advance = lambda: run.advance(loss_and_gradient, example.optimizer)  # noqa: E731
    train_loop(run, advance, mesh, steps, options, checkpoint, every, progress)
    return run


# ---------------------------------------------------------------- output


def step_of(example: Example, mesh: spmd.Mesh, jit: bool) -> Callable:
    """The loss and its gradient, as a function of (params, batch), compiled with `jit`."""
    return (md.jit if jit else lambda f: f)(md.value_and_grad(example.loss(mesh)))


def show_tape(example: Example, mesh: spmd.Mesh, run: DigitsRun, whole: bool) -> None:
    """Print the gradient's tape, or some of its lines that multiply matrices or name an axis of the mesh."""
    lines = str(md.make_tape(md.grad(example.loss(mesh)))(run.params, next(run.batches))).splitlines()
    if whole:
        print("\nThe gradient, as a typed tape:", *lines, sep="\n")
        return
    passes: list[list[str]] = [[]]
    for line in lines:
        if " = shard_map(" in line:
            passes.append([])
        elif operation := re.search(rf" = ({'|'.join(SHOWN)})\(", line):
            remark = SHOWN[operation[1]]
            passes[-1].append((f"  {line.strip():56}" + f"  # {remark}" * bool(remark)).rstrip())
    passes = [passes[0] + passes[1], *passes[2:]]  # lines before the first shard_map belong to the forward pass
    shown = [[*chosen[:3], "  …", *chosen[-3:]] if len(chosen) > 6 else chosen for chosen in passes]
    count = sum(line != "  …" for chosen in shown for line in chosen)
    print(f"\nThe gradient, as a typed tape: {count} of its {len(lines)} lines (--tape shows all).")
    print("Braces in a type name the axes along which ranks differ. Without them, all ranks have the same value.")
    for name, chosen in zip(("forward pass:", "backward pass:"), shown):
        print(name, *chosen, sep="\n")


def show_communication(example: Example, ranks: int, jit: bool) -> None:
    """Print what a step sends, with types and without: both run on simulated ranks, and give the same numbers."""
    mesh = example.mesh(ranks, "simulated")
    run = start(example, mesh, seed=0)
    compared = spmd.compare(step_of(example, mesh, jit), run.params, next(run.batches))
    print(f"\nA step sends, with types and without them, when what is equal already is added up again:\n{compared}")


def show_one_rank(example: Example, steps: int, jit: bool) -> None:
    """Print how long the same steps take on one rank, which sends nothing: the median of a few, times their number."""
    mesh = spmd.make_mesh((1,) * len(example.axes), example.axes, backend="simulated")
    run, loss_and_gradient = start(example, mesh, seed=0), step_of(example, mesh, jit)
    seconds = []
    for _ in range(min(steps, 20) + 1):
        began = time.perf_counter()
        run.advance(loss_and_gradient, example.optimizer)
        seconds.append(time.perf_counter() - began)
    print(f"one rank alone takes about {steps * np.median(seconds[1:]):.1f} s for {steps} steps", flush=True)


# ---------------------------------------------------------------- scripts


def parse(example: Example, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(example.name, description, 300, "the data's order and the parameters")
    add = parser.add_argument
    add("--ranks", type=positive_integer, help="ranks (default: as many as the launcher started; else 4, simulated)")
    for name, default, text in (
        ("tape", False, "show all lines of the gradient's tape"),
        ("jit", example.jit, "compile the step"),
    ):
        text += " (it is, by default)" if default else ""
        add(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=text)
    with silence_other_ranks():
        return parser.parse_args(argv)


def main(example: Example, description: str, argv: Sequence[str] | None = None) -> None:
    """Run the script of an example."""
    run_script(lambda options: _main(example, options), parse(example, description, argv))


def _main(example: Example, options: argparse.Namespace) -> None:
    mesh = example.mesh(options.ranks or launcher_size() or 4)
    first = mesh.rank == 0
    initial = start(example, mesh, options.seed)
    if first:
        show_mesh(mesh)
        show_tape(example, mesh, initial, options.tape)
        show_communication(example, mesh.size, options.jit)
        print(f"\nTraining a network {' - '.join(map(str, example.layers))} for {options.steps} steps:\n", flush=True)
    began = time.perf_counter()
    chosen = {name: getattr(options, name) for name in ("steps", "seed", "checkpoint", "every", "jit")}
    run = train(example, mesh, **chosen, progress=first)
    right, seconds = accuracy(example, run), time.perf_counter() - began
    if first:
        print(f"\nfinal loss {run.losses[-1]:.6f}, held-out accuracy {right:.4f}, {seconds:.1f} s", flush=True)
        if mesh.backend == "mpi" and mesh.size > 1:
            show_one_rank(example, options.steps, options.jit)
