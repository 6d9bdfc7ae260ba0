"""The memory report beside what is measured, for the networks, layers and products of `spmd.parallel`.

python -m tests.programs.memory                  simulated ranks, which are all in this process
mpiexec -n 2 python -m tests.programs.memory     a rank's own
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P
from spmd import parallel as par
from spmd.examples import dlrm as dlrm_study
from spmd.examples import scheduled_network, tensor_2d, tensor_3d
from spmd.examples.cannon import cannon, summa

N, EXAMPLES = 384, 384
TEXT = {"vocabulary": 512, "features": 128, "heads": 4, "layers": 2, "hidden": 512}

Program = tuple[Callable, tuple]  # a function and its arguments
PROGRAMS: dict[str, Callable[[int, str | None, Any], Program]] = {}


def program(*names: str) -> Callable:
    """Put a maker of programs, `make(ranks, backend, rng, *name)`, into the table."""

    def decorate(make: Callable) -> Callable:
        for name in names:
            PROGRAMS[f"{make.__name__} {name}".rstrip()] = lambda *inputs, name=name: make(*inputs, *name.split())
        return make

    return decorate


def line(ranks: int, backend: str | None, axis: str = "i") -> spmd.Mesh:
    return spmd.make_mesh((ranks,), (axis,), backend=backend)


def network(rng: Any, layers: int) -> tuple:
    return par.init_params(rng, (N,) * (layers + 1)), (rng.normal(size=(EXAMPLES, N)), rng.normal(size=(EXAMPLES, N)))


def gradient_on_blocks(mesh: spmd.Mesh, loss: Callable, *args: Any) -> Program:
    """The gradient of a loss, whose arguments are sharded along the mesh's axis if a spec is given with them."""
    return md.grad(loss), tuple(x if spec is None else spmd.distribute(x, mesh, spec) for x, spec in args)


@program("")
def data_parallel(ranks, backend, rng):
    params, batch = network(rng, 4)
    mesh = line(ranks, backend)
    return gradient_on_blocks(mesh, par.data_parallel(mesh), (params, None), (batch, P("i")))


@program("")
def fully_sharded(ranks, backend, rng):
    params, batch = network(rng, 4)
    mesh = line(ranks, backend)
    return gradient_on_blocks(mesh, par.fully_sharded(mesh), (params, P("i")), (batch, P("i")))


@program("")
def tensor_parallel(ranks, backend, rng):
    params, batch = network(rng, 4)
    return md.grad(par.tensor_parallel(line(ranks, backend))), (params, batch)


@program("")
def fully_sharded_tensor_parallel(ranks, backend, rng):
    mesh = spmd.make_mesh((ranks, 1) if ranks < 4 else (2, 2), ("batch", "feats"), backend=backend)
    return md.grad(par.fully_sharded_tensor_parallel(mesh)), network(rng, 4)


@program("")
def pipeline_parallel(ranks, backend, rng):
    params, batch = network(rng, 6)
    mesh, (first, inner, last) = line(ranks, backend), par.stacked_layers(params)
    loss = par.pipeline_parallel(mesh, microbatch=48)
    return md.grad(loss), ((first, spmd.distribute(inner, mesh, P("i")), last), spmd.distribute(batch, mesh, P("i")))


@program("gpipe", "one_f_one_b", "zero_bubble")
def scheduled(ranks, backend, rng, name):
    mesh, schedule = line(ranks, backend), getattr(par, name)(ranks, 8)
    params, batch = network(rng, 6)
    params = scheduled_network.blocked_layers(params, schedule)
    return scheduled_network.scheduled_value_and_grad(mesh, schedule), (params, batch)


@program("1", "2", "3")
def zero(ranks, backend, rng, stage):
    params, batch = network(rng, 6)
    init, step = par.zero(par.loss, md.optim.adam(0.01), line(ranks, backend), int(stage))
    return step, (*init(params), batch)


@program("2d", "3d")
def grid(ranks, backend, rng, name):
    shape, axes = ((2, 2), ("rows", "columns")) if name == "2d" else ((2, 2, 2), ("i", "j", "k"))
    if backend == "mpi" and ranks != 2 ** len(shape):
        return None
    loss = getattr({"2d": tensor_2d, "3d": tensor_3d}[name], f"tensor_parallel_{name}")(
        spmd.make_mesh(shape, axes, backend=backend)
    )
    return md.grad(loss), network(rng, 4)


@program("summa", "summa_nt", "cannon")
def square(ranks, backend, rng, name):
    if backend == "mpi" and ranks != 4:
        return None
    mesh = spmd.make_mesh((2, 2), ("rows", "columns"), backend=backend)
    spec = P("rows", "columns")
    forms = {"summa": summa, "summa_nt": partial(summa, transposed="b"), "cannon": cannon}
    product = spmd.shard_map(forms[name], mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    args = spmd.distribute([rng.normal(size=(2 * N, 2 * N))] * 2, mesh, spec)
    return md.grad(lambda a, b: np.sum(product(a, b) ** 2), (0, 1)), tuple(args)


@program("all_gather", "all_gather_overlapped", "psum_scatter", "psum_scatter_overlapped")
def matmul(ranks, backend, rng, name):
    mesh = line(ranks, backend)
    specs = (P("i"), P("i")) if "gather" in name else (P(None, "i"), P("i"))
    one = getattr(par, f"matmul_{name.removesuffix('_overlapped')}")
    body = partial(one, axis_name="i", directions=int(name.endswith("_overlapped")))
    product = spmd.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("i"))
    return product, tuple(spmd.distribute(rng.normal(size=(2 * N, 2 * N)), mesh, s) for s in specs)


@program("ring_attention", "attention_by_heads")
def sequence(ranks, backend, rng, name):
    mesh = line(ranks, backend)
    body = partial(getattr(par, name), axis="i")
    attend = spmd.shard_map(body, mesh, in_specs=P("i"), out_specs=P("i"))
    args = spmd.distribute([rng.normal(size=(512, 4, 64)) for _ in range(3)], mesh, P("i"))
    return md.grad(lambda *qkv: np.sum(attend(*qkv) ** 2), (0, 1, 2)), tuple(args)


def text(rng: Any, examples: int = 8) -> tuple:
    tokens = rng.integers(0, TEXT["vocabulary"], size=(examples, 65))
    return tokens[:, :-1], tokens[:, 1:]


@program("tensor", "sequence")
def transformer(ranks, backend, rng, name):
    config = par.Config(**TEXT)
    loss = par.tensor_parallel_transformer(line(ranks, backend), config, sequence_parallel=name == "sequence")
    return md.grad(loss), (par.init_transformer(rng, config), text(rng))


@program("data", "shards", "stages", "tokens", "feats", "experts")
def decoder(ranks, backend, rng, axis):
    config = par.DecoderConfig(**TEXT, **({"experts": 4} if axis == "experts" else {}))
    mesh = par.decoder_mesh(**{axis: ranks}, backend=backend)
    return md.grad(par.decoder_loss(mesh, config)), (par.init_decoder(md.random.key(0), config), text(rng))


@program("tables", "columns", "rows")
def dlrm(ranks, backend, rng, split):
    params = dlrm_study.init_dlrm(rng, (8, 2000, 32), bottom=(64, 128), top=(256,))
    batch = rng.normal(size=(512, 64)), rng.integers(2000, size=(512, 8)), rng.integers(2, size=512).astype(float)
    return md.grad(dlrm_study.dlrm(line(ranks, backend), split)), (params, batch)


@program("")
def experts(ranks, backend, rng):
    mesh, width = line(ranks, backend), 128
    shapes = (4, width, 512), (4, 512), (4, 512, width), (4, width)
    params = [rng.normal(size=shape) for shape in shapes]

    def body(params, router, x):
        out = par.mixture_of_experts(par.feed_forward, tuple(params), router, x, capacity=200, axis="i")
        return pmean(np.mean(out**2), "i")

    loss = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P(), P("i")), out_specs=P())
    return gradient_on_blocks(mesh, loss, (params, P("i")), (rng.normal(size=(width, 4)), None),
                              (rng.normal(size=(1024, width)), P("i")))  # fmt: skip


@program("")
def convolution(ranks, backend, rng):
    mesh = line(ranks, backend)

    def body(x, kernel):
        return pmean(np.mean(np.tanh(par.conv(x, kernel, (None, "i", None))) ** 2), "i")

    loss = spmd.shard_map(body, mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=P())
    x = spmd.distribute(rng.normal(size=(4, 64, 64, 16)), mesh, P(None, "i"))
    return md.grad(loss, (0, 1)), (x, rng.normal(size=(3, 3, 16, 16)))


@program("")
def checkpointed_scan(ranks, backend, rng):
    mesh = line(ranks, backend)
    step = md.checkpoint(lambda x, w: (np.tanh(np.sin(x @ w)), None))

    def loss(ws, x):
        return pmean(np.mean(md.scan(step, x, ws)[0] ** 2), "i")

    on_ranks = spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    return md.grad(on_ranks), (
        rng.normal(size=(6, 128, 128)),
        spmd.distribute(rng.normal(size=(4096, 128)), mesh, P("i")),
    )


SCHEDULES = {"plain": None, "revolve": md.revolve(5), "multistage": md.multistage(2, 4), "online": md.online(5)}
STEPS: dict[str, Callable] = {  # by the number of carries; the second of two is one that a step passes on
    "1": lambda u: (u + 0.1 * np.sin(u),),
    "2": lambda u, v: (2 * u - v + 0.1 * np.sin(u), u),
    "3": lambda u, v, w: (u + 0.1 * np.sin(w), 0.9 * v + 0.1 * u, w + 0.1 * np.sin(v)),
}
LENGTH = 20


@program(*map(" ".join, itertools.product(("scan", "while_loop"), SCHEDULES, STEPS)))
def loop(ranks, backend, rng, kind, schedule, carries):
    """The gradient of steps, without ranks of steps on whole arrays."""
    step, form, size = STEPS[carries], SCHEDULES[schedule], 100_000

    def steps(x):
        init = (x,) * int(carries)
        if kind == "scan":
            return md.scan(lambda c, _: (step(*c), None), init, length=LENGTH, schedule=form)[0][0]
        advance = lambda state: (state[0] + 1, step(*state[1]))  # noqa: E731
        return md.while_loop(lambda state: state[0] < LENGTH, advance, (0, init), LENGTH, form)[1][0]

    if not ranks:
        return md.grad(lambda x: np.sum(steps(x) ** 2)), (rng.normal(size=size),)
    mesh = line(ranks, backend)
    body = spmd.shard_map(lambda x: pmean(steps(x), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    return gradient_on_blocks(mesh, lambda x: np.sum(body(x) ** 2), (rng.normal(size=(ranks, size)), P("i")))


def peak_of(run: Callable, *args: Any) -> int:
    """The most bytes that a call allocates in this process."""
    gc.collect()
    tracemalloc.start()
    run(*args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def reported_and_measured(name: str, ranks: int, backend: str | None, optimized: bool) -> tuple[int, int] | None:
    """Return a program's memory, reported and measured; None if it does not run on so many ranks."""
    result = PROGRAMS[name](ranks, backend, np.random.default_rng(0))
    if result is None:
        return None
    f, args = result
    use = spmd.memory(f, optimized=optimized, every_rank=backend == "simulated")(*args)
    run = md.jit(f) if optimized else f
    run(*args)
    return max(moment.dynamic for moment in use.moments), peak_of(run, *args)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="simulated ones")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the programs' names")
    options = parser.parse_args()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ranks, backend = (world.size, "mpi") if world.size > 1 else (options.ranks, "simulated")
    say: Any = print if world.rank == 0 else lambda *_, **__: None
    say(
        f"{ranks} ranks, {backend}; MB\n"
        f"{'':34}{'eager':>8}{'report':>8}{'ratio':>7}{'compiled':>10}{'report':>8}{'ratio':>7}"
    )
    off: tuple[list, list] = [], []
    for name in (name for name in PROGRAMS if any(part in name for part in options.only)):
        cells = []
        for optimized in (False, True):
            actual = reported_and_measured(name, ranks, backend, optimized)
            if actual is not None:
                reported, measured = actual
                off[optimized].append(abs(reported / measured - 1))
                cells.append(f"{measured / 1e6:8.2f}{reported / 1e6:8.2f}{reported / measured:7.2f}")
        say(f"{name:34}{'  '.join(cells)}", flush=True)
    for kind, each in zip(("eager", "compiled"), off):
        within = sum(x <= 0.05 for x in each)
        say(
            f"{kind}: {within} of {len(each)} within 5 %, median {statistics.median(each):.1%}, at most {max(each):.1%}"
        )


if __name__ == "__main__":
    main()
