"""Predicted steps beside measured ones, for the networks of `spmd.parallel` and the examples, on a launcher's ranks.

    mpiexec -n 2 python -m tests.benchmarks.predictions [--rounds N] [--only NAME …]
    mpiexec -n 2 python -m tests.benchmarks.predictions --only data_parallel pipeline --lanes [--plot NAME]

`spmd.machines.this_machine` measures the machine first: products, memory, functions and messages. It knows nothing of
the programs, and measures again before each kind of them, since the speed of shared machines drifts. A measured time is
the median of some rounds, of the slowest rank. With `--lanes` it also shows when a rank is predicted to compute and to
send, beside when each does; `--plot` draws these lanes into NAME-….svg.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as mnp
import spmd
from spmd import P
from spmd import parallel as par
from spmd.examples import heat, shallow_water
from spmd.examples.fields import AXES, FIELD, bumps
from spmd.examples.tensor_2d import tensor_parallel_2d
from tests.programs.networks import PARALLELISMS

from .measure import chosen, options, times
from .ranks import slowest

Row = tuple[str, Callable, tuple]  # a name, a step that is compiled, and its arguments
SIZES, EXAMPLES = (256, *[512] * 5, 256), 512
TEXT, CONFIG = (16, 64), {"vocabulary": 512, "features": 256, "heads": 8, "layers": 4, "hidden": 1024}


def mesh_of(*axes: str, shape: tuple[int, ...] = ()) -> spmd.Mesh:
    rest = (1,) * (len(axes) - 1)
    return spmd.make_mesh(shape or (*rest, MPI.COMM_WORLD.size), axes, backend="mpi")


def networks() -> Iterator[Row]:
    """The step of gradient descent of each network."""
    rng = np.random.default_rng(0)
    params = par.init_params(rng, SIZES)
    batch = rng.normal(size=(EXAMPLES, SIZES[0])), rng.normal(size=(EXAMPLES, SIZES[-1]))
    for name, network in PARALLELISMS.items():
        options = {"microbatch": EXAMPLES // 8} if name == "pipeline_parallel" else {}
        loss = network.loss(mesh_of(*network.axes), **options)
        yield name, descent(loss), (network.arranged(params), batch)
    for stage in (1, 2, 3):
        init, step = par.zero(par.loss, md.optim.adam(1e-3), mesh_of("batch"), stage=stage)
        yield f"zero, stage {stage}", step, (*init(params), batch)
    if MPI.COMM_WORLD.size == 4:
        loss = tensor_parallel_2d(mesh_of("rows", "columns", shape=(2, 2)))
        yield "tensor_parallel_2d", descent(loss), (params, batch)


def transformers() -> Iterator[Row]:
    rng, config = np.random.default_rng(0), par.Config(**CONFIG)
    tokens = rng.integers(config.vocabulary, size=(TEXT[0], TEXT[1] + 1))
    params = par.init_transformer(rng, config)
    for name in ("tensor_parallel_transformer", "sequence_parallel_transformer"):
        loss = par.tensor_parallel_transformer(mesh_of("feats"), config, name.startswith("sequence"))
        yield name, descent(loss), (params, (tokens[:, :-1], tokens[:, 1:]))
    config, text = par.DecoderConfig(**CONFIG), (tokens[:, :-1], tokens[:, 1:])
    params = par.init_decoder(md.random.key(0), config)
    for axis in ("data", "shards", "stages", "tokens", "feats"):
        mesh = par.decoder_mesh(**{axis: MPI.COMM_WORLD.size}, backend="mpi")
        yield f"decoder along {axis}", descent(par.decoder_loss(mesh, config)), (params, text)


def attention() -> Iterator[Row]:
    rng, mesh = np.random.default_rng(0), mesh_of("i")
    q, k, v = (spmd.distribute(rng.normal(size=(1024, 8, 32)), mesh, P("i")) for _ in range(3))
    for name in ("ring_attention", "attention_by_heads"):
        attend = functools.partial(getattr(par, name), axis="i")
        f = spmd.shard_map(attend, mesh=mesh, in_specs=(P("i"),) * 3, out_specs=P("i"))
        yield name, md.value_and_grad(lambda q, k, v, f=f: mnp.sum(f(q, k, v) ** 2), (0, 1, 2)), (q, k, v)


def products() -> Iterator[Row]:
    rng, n = np.random.default_rng(0), MPI.COMM_WORLD.size
    mesh, a = mesh_of("i"), rng.normal(size=(512 * n, 512 * n))
    for name, specs in (("matmul_all_gather", (P("i"), P("i"))), ("matmul_psum_scatter", (P(None, "i"), P("i")))):
        arrays = [spmd.distribute(a, mesh, spec) for spec in specs]
        for form in (name, f"{name}_overlapped"):
            body = functools.partial(getattr(par, name), axis_name="i", directions=int(form != name))
            yield form, spmd.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("i")), tuple(arrays)


def fields() -> Iterator[Row]:
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size, 1), AXES, backend="mpi")
    yield "heat", heat.plate(mesh, 50), (spmd.distribute(bumps((512, 512)), mesh, FIELD),)
    state = spmd.distribute(shallow_water.jet((180, 360)), mesh, shallow_water.STATE)
    yield "shallow water", shallow_water.ocean(mesh, 20), (state,)


def descent(loss: Callable) -> Callable:
    def step(params, batch):
        value, gradient = md.value_and_grad(loss)(params, batch)
        return value, md.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    return step


def main(arguments: list[str] | None = None) -> None:
    asked = options(__doc__, arguments, rounds=7, only=(), lanes=False, plot="")
    say: Any = print if MPI.COMM_WORLD.rank == 0 else lambda *_, **__: None
    say(f"{MPI.COMM_WORLD.size} ranks; milliseconds\n{'':34}{'measured':>10}{'predicted':>11}{'ratio':>7}")
    off = []
    for rows in (networks, transformers, attention, products, fields):
        machine = spmd.machines.this_machine(mesh_of("i"))
        say(f"{machine.flops['float64']:.3g} operations and {machine.bandwidth:.3g} bytes a second")
        for name, step, args in rows():
            if not chosen([name], asked.only):
                continue
            f = md.jit(step)
            seconds = spmd.predict(step, machine)(*args).seconds
            runs = {name: lambda f=f, args=args: f(*args)}
            measured = statistics.median(times(runs, asked.rounds, 0.05, slowest)[name])
            off.append(abs(seconds / measured - 1))
            say(f"{name:34}{1e3 * measured:10.2f}{1e3 * seconds:11.2f}{seconds / measured:7.2f}", flush=True)
            if asked.lanes or asked.plot:
                lanes = spmd.timeline(step, machine, measured=True)(*args)
                say(f"\n{lanes}\n", flush=True)
                if asked.plot and MPI.COMM_WORLD.rank == 0:
                    lanes.plot().figure.savefig(f"{asked.plot}-{name}.svg", bbox_inches="tight")
    say(f"median error {statistics.median(off):.0%}, mean {statistics.mean(off):.0%}, at most {max(off):.0%}")


if __name__ == "__main__":
    main()
