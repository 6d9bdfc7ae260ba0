"""Train a decoder on characters of Paradise Lost, split along any axes of a mesh.

The axes are data, shards (fully sharded), experts, stages (pipeline), tokens (sequence) and feats (tensor). All
combinations compute the same numbers; `spmd/parallel/decoder.py` says what each splits.

    mpirun -n 8 python -m spmd.examples.gpt --mesh data=2,stages=2,feats=2
    python -m spmd.examples.gpt --mesh shards=2,tokens=2 --report
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import minidiff as md
import spmd
from minidiff import optim
from minidiff.core.types import typeof
from minidiff.precision import LossScale, Policy, all_finite, select
from spmd.examples.loop import parser_of, positive_integer, run_script, show_mesh, train_loop
from spmd.examples.text import Text, load_text, ngram_loss
from spmd.mesh.launch import end_job, launcher_size, silence_other_ranks
from spmd.mesh.specs import block_type
from spmd.parallel.decoder import (
    AXES,
    DecoderConfig,
    check_batch,
    check_decoder,
    decoder_loss,
    decoder_mesh,
    decoder_specs,
    init_decoder,
)
from spmd.parallel.generate import generate
from spmd.show import Table, sparkline

VOCABULARY = 72  # of 65 characters: as many as 2, 3, 4, 6 and 8 ranks divide


@dataclass
class GPTRun:
    """The state of training: parameters and the optimizer's state are sharded, the rest is the same on all ranks."""

    params: Any
    state: Any
    scale: LossScale
    scales: list[float] = field(default_factory=list)  # since this process began
    losses: list[float] = field(default_factory=list)

    def tree_to_save(self) -> dict[str, Any]:
        """The tree to save. Batches follow from the seed and the number of steps."""
        return {"params": self.params, "state": self.state, "scale": self.scale}

    def restore(self, saved: dict[str, Any], losses: list[float]) -> None:
        self.losses, self.params, self.state, self.scale = losses, saved["params"], saved["state"], saved["scale"]


def config_of(options: argparse.Namespace) -> DecoderConfig:
    """The sizes that the options ask for."""
    names = "features", "heads", "layers", "hidden", "experts"
    return DecoderConfig(VOCABULARY, **{name: getattr(options, name) for name in names})


def optimizer(options: argparse.Namespace) -> optim.GradientTransformation:
    """AdamW, with a warm-up and a cosine decay of the learning rate; the norm of gradients is at most 1."""
    peak, warmup = options.learning_rate, max(1, options.steps // 20)
    rate = optim.warmup_cosine_decay_schedule(0.0, peak, warmup, max(options.steps, warmup + 1), 0.1 * peak)
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.99, weight_decay=0.01))


def train(mesh: spmd.Mesh, config: DecoderConfig, text: Text, options: argparse.Namespace, progress: bool) -> GPTRun:
    """Train for `options.steps` steps in all."""
    initial = spmd.initialize(lambda key: init_decoder(key, config), mesh, decoder_specs(config))
    params = Policy(options.precision).cast_to_params(initial(md.random.key(options.seed)))
    optimize, scaled = optimizer(options), options.precision == "float16"
    scale = LossScale() if scaled else LossScale(np.float32(1.0))  # a step would make NumPy's number of a Python one
    run = GPTRun(params, optimize.init(params), scale)
    loss = decoder_loss(mesh, config, options.microbatches, Policy(options.precision))

    def step(params, state, scale, batch):
        loss_now, gradients = scale.value_and_grad(loss)(params, batch)
        updates, after = optimize.update(gradients, state, params)
        updated = optim.apply_updates(params, updates), after
        if not scaled:
            return loss_now, *updated, scale
        finite = all_finite(gradients)
        return loss_now, *select(finite, updated, (params, state)), scale.adjust(finite)

    compiled = md.jit(step)

    def advance():
        batch = text.batch(options.seed, len(run.losses), options.batch, options.context)
        with np.errstate(over="ignore", invalid="ignore"):  # of float16, where the scale is too large
            loss_now, run.params, run.state, run.scale = compiled(run.params, run.state, run.scale, batch)
        run.losses.append(float(loss_now))
        run.scales.append(float(run.scale.scale))

    same = ("steps", "seed", "batch", "context", "learning_rate", "precision")
    settings = {**vars(config), **{name: getattr(options, name) for name in same}}
    if options.report and progress:
        report(mesh, run, step, text.batch(options.seed, 0, options.batch, options.context))
    tokens = options.batch * options.context
    train_loop(run, advance, mesh, options.steps, settings, options.checkpoint, options.every, progress, tokens)
    return run


def held_out_loss(loss: Any, text: Text, run: GPTRun, options: argparse.Namespace) -> float:
    """The mean cross entropy of the held-out text, in nats a character. Under MPI this is a collective."""
    batches = text.held_out_batches(options.batch, options.context)
    return float(np.mean([loss(run.params, batch) for batch in batches]))


def sample(config: DecoderConfig, text: Text, params: Any, options: argparse.Namespace) -> str:
    """Characters that follow the prompt, and how many were written a second."""
    key, prompt = md.random.key(options.seed), text.encode(options.prompt)
    drawn = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    sizes = options.sample, options.context
    began = time.perf_counter()
    tokens = generate(config, params, prompt, *sizes, key, vocabulary=len(text.characters), **drawn)
    speed = options.sample / (time.perf_counter() - began)
    return f"{options.prompt}{text.decode(tokens)}\n\n{speed:,.0f} characters a second, compilation included"


# ---------------------------------------------------------------- what is held and communicated


def report(mesh: spmd.Mesh, run: GPTRun, step: Any, batch: tuple) -> None:
    """Print what a rank holds, and what a step communicates along each axis."""
    print("\nWhat a rank holds:\n")
    print(holdings(mesh, {"params": run.params, "state": run.state}))
    print("\nWhat a step communicates:\n")
    communication = spmd.communication(step, optimized=True)(run.params, run.state, run.scale, batch)
    used = lambda row: ", ".join(axis for axis in row.axes if mesh.shape[axis] > 1)  # noqa: E731
    sums = communication.sums(lambda row: (used(row), row.direction, row.collective))
    lines = [[*key, f"{count:,}", f"{nbytes:,}"] for key, (count, nbytes) in sorted(sums.items())]
    total = ["total", "", "", f"{sum(row.count for row in communication.rows):,}", f"{communication.bytes:,}"]
    print(Table(["axes", "direction", "collective", "count", "bytes per rank"], lines, total), flush=True)


def holdings(mesh: spmd.Mesh, tree: Any) -> str:
    """A table of the sharded arrays of a tree: their shapes, partition specs, and bytes on each rank."""
    lines, all_bytes = [], [0, 0]
    for path, x in md.tree.flatten_with_paths(tree)[0]:
        t = typeof(x)
        sharded = isinstance(x, spmd.ShardedArray)
        block = block_type(t, x.spec, mesh.shape) if sharded else t
        lines.append([path, str(list(t.shape)), str(x.spec) if sharded else "", f"{t.nbytes:,}", f"{block.nbytes:,}"])
        all_bytes = [all_bytes[0] + t.nbytes, all_bytes[1] + block.nbytes]
    total = ["total", "", "", *(f"{n:,}" for n in all_bytes)]
    return str(Table(["array", "shape", "spec", "bytes", "bytes on a rank"], lines, total))


# ---------------------------------------------------------------- the script


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes of a mesh's axes, written as in `--mesh`.

    >>> mesh_sizes('data=2,feats=4')
    {'data': 2, 'feats': 4}
    """
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r}: write axis=size, as in data=2,feats=4, once for each axis; the axes are "
                f"{', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return sizes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("gpt", __doc__, 400, "parameters, batches and the sample")
    add = parser.add_argument
    default = " (default: %(default)s)"
    add("--mesh", type=mesh_sizes, metavar="AXIS=SIZE,…", help="sizes of the axes (default: data=all ranks)")
    add("--batch", type=positive_integer, default=16, help="examples in a batch" + default)
    add("--context", type=positive_integer, default=64, help="characters of an example" + default)
    add("--microbatches", type=positive_integer, default=1, help="microbatches of each stage of a pipeline" + default)
    add("--features", type=positive_integer, default=64, help="of the residual stream" + default)
    add("--heads", type=positive_integer, default=4, help="of attention" + default)
    add("--layers", type=positive_integer, default=4, help=default.strip())
    add("--hidden", type=positive_integer, default=128, help="features in a perceptron" + default)
    add("--experts", type=int, default=0, help="perceptrons of a layer, of which a character takes 2; 0: one for all")
    add("--learning-rate", type=float, default=0.006, help="the largest one" + default)
    precisions = "float64", "float32", "bfloat16", "float16"
    add("--precision", choices=precisions, default="float64", help="of what layers compute" + default)
    add("--report", action="store_true", help="print what each rank holds, and what each axis communicates")
    add("--sample", type=int, default=400, metavar="N", help="characters to write at the end" + default)
    add("--prompt", default="Of Man's first disobedience", help="how the sample begins" + default)
    add("--temperature", type=float, default=0.8, help="of the sample; 0: the most probable character" + default)
    add("--top-k", type=positive_integer, default=10, help="draw from the K most probable characters" + default)
    add("--top-p", type=float, default=1.0, help="and from the fewest that have this probability together" + default)
    with silence_other_ranks():
        return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    run_script(_main, parse(argv))


def check_options(options: argparse.Namespace) -> tuple[spmd.Mesh, DecoderConfig]:
    """The mesh and the sizes that the options ask for; end the script if they do not fit."""
    started = launcher_size()
    sizes = options.mesh or {"data": started or 1}
    ranks = math.prod(sizes.values())
    if started not in (None, ranks):
        end_job(f"the axes of --mesh have {ranks} ranks in all, but the launcher started {started}", 2)
    try:
        config = config_of(options)
        mesh = decoder_mesh(**sizes)
        check_decoder(mesh, config)
        check_batch(mesh, options.batch, options.context, options.microbatches)
    except ValueError as error:
        end_job(str(error), 2)
    return mesh, config


def _main(options: argparse.Namespace) -> None:
    mesh, config = check_options(options)
    first, text = mesh.rank == 0, load_text()
    if first:
        show_mesh(mesh)
        shapes = md.eval_shape(lambda key: init_decoder(key, config), md.random.key(0))
        count = sum(x.size for x in md.tree.leaves(shapes))
        print(f"\nTraining a decoder of {count:,} parameters for {options.steps} steps:\n", flush=True)
    began = time.perf_counter()
    run = train(mesh, config, text, options, progress=first)
    seconds = time.perf_counter() - began
    loss = md.jit(decoder_loss(mesh, config, options.microbatches, Policy(options.precision)))
    error = held_out_loss(loss, text, run, options)
    params = spmd.gather(run.params)
    if first:
        print(f"\nfinal loss {run.losses[-1]:.6f}, {seconds:.1f} s")
        if options.precision == "float16":
            print(f"loss scale {run.scales[-1]:g}: {sparkline(np.log2(run.scales).tolist())}")
        print(f"held-out loss {error:.4f}, a trigram model's {ngram_loss(text, 3):.4f} nats per character")
        print(f"\n{sample(config, text, params, options)}", flush=True)


if __name__ == "__main__":
    main()
