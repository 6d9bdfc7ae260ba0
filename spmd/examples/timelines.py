"""What a machine is predicted to do during a step, beside what its ranks do: data parallelism, and a pipeline.

    mpirun -n 2 python -m spmd.examples.timelines                 lanes of text
    mpirun -n 2 python -m spmd.examples.timelines --plot NAME     and pictures, NAME-….svg

The machine is this one: `spmd.machines.this_machine` measures products, memory, functions and messages, and knows
nothing of the networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import minidiff as md
import spmd
from spmd.mesh.launch import silence_other_ranks
from spmd.parallel import data_parallel, init_params, pipeline_parallel, stacked_layers
from spmd.report.table import show_seconds

SIZES, EXAMPLES = (256, *[512] * 5, 256), 512


def steps() -> Iterator[tuple[str, Callable, tuple]]:
    """A name, a step of gradient descent, and its arguments, for each network."""
    rng = np.random.default_rng(0)
    params = init_params(rng, SIZES)
    batch = rng.normal(size=(EXAMPLES, SIZES[0])), rng.normal(size=(EXAMPLES, SIZES[-1]))
    yield "data_parallel", descent(data_parallel(spmd.make_mesh((-1,), ("batch",)))), (params, batch)
    loss = pipeline_parallel(spmd.make_mesh((-1,), ("stages",)), microbatch=EXAMPLES // 8)
    yield "pipeline_parallel", descent(loss), (stacked_layers(params), batch)


def descent(loss: Callable) -> Callable:
    """A step down the gradient of a loss."""

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, gradient = md.value_and_grad(loss)(params, batch)
        return value, md.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script."""
    parser = argparse.ArgumentParser("python -m spmd.examples.timelines", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--plot", metavar="NAME", help="draw the lanes into NAME-….svg")
    args = parser.parse_args(argv)
    for name, step, arguments in steps():
        machine = spmd.machines.this_machine(spmd.make_mesh((-1,), ("i",)))
        run: Any = spmd.timeline(step, machine, measured=True)
        lanes = run(*arguments)
        ends: dict[bool, float] = {}
        for x in lanes.operations:
            ours = lanes.names[x.lane].startswith("predicted")
            ends[ours] = max(ends.get(ours, 0.0), x.end)
        print(f"{name}: predicted {show_seconds(ends[True])}, measured {show_seconds(ends[False])}\n{lanes}\n")
        if args.plot:
            lanes.plot().figure.savefig(f"{args.plot}-{name}.svg", bbox_inches="tight")


if __name__ == "__main__":
    with silence_other_ranks():
        main()
