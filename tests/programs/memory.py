"""The memory report beside what is measured, for the networks, layers and products of `spmd.parallel`."""

from __future__ import annotations

import gc
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
from spmd.examples import scheduled_network, tensor_2d
from spmd.examples.cannon import summa
from spmd.pipeline import gpipe

N, EXAMPLES = 384, 384

Program = tuple[Callable, tuple]  # a function and its arguments


def line(ranks: int, backend: str | None, axis: str = "i") -> spmd.Mesh:
    return spmd.make_mesh((ranks,), (axis,), backend=backend)


def network(rng: Any, layers: int) -> tuple:
    return par.init_params(rng, (N,) * (layers + 1)), (rng.normal(size=(EXAMPLES, N)), rng.normal(size=(EXAMPLES, N)))


def gradient_on_blocks(mesh: spmd.Mesh, loss: Callable, *args: Any) -> Program:
    """The gradient of a loss, whose arguments are sharded along the mesh's axis if a spec is given with them."""
    return md.grad(loss), tuple(x if spec is None else spmd.distribute(x, mesh, spec) for x, spec in args)


def data_parallel(ranks, backend, rng):
    params, batch = network(rng, 4)
    mesh = line(ranks, backend)
    return gradient_on_blocks(mesh, par.data_parallel(mesh), (params, None), (batch, P("i")))


def tensor_parallel(ranks, backend, rng):
    params, batch = network(rng, 4)
    return md.grad(par.tensor_parallel(line(ranks, backend))), (params, batch)


def scheduled(ranks, backend, rng):
    mesh, schedule = line(ranks, backend), gpipe(ranks, 8)
    params, batch = network(rng, 6)
    params = scheduled_network.blocked_layers(params, schedule)
    return scheduled_network.scheduled_value_and_grad(mesh, schedule), (params, batch)


def zero(ranks, backend, rng):
    params, batch = network(rng, 6)
    init, step = par.zero(par.loss, md.optim.adam(0.01), line(ranks, backend), stage=3)
    return step, (*init(params), batch)


def grid(ranks, backend, rng):
    mesh = spmd.make_mesh((2, 2), ("rows", "columns"), backend=backend)
    return md.grad(tensor_2d.tensor_parallel_2d(mesh)), network(rng, 4)


def square(ranks, backend, rng):
    mesh, spec = spmd.make_mesh((2, 2), ("rows", "columns"), backend=backend), P("rows", "columns")
    product = spmd.shard_map(summa, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    args = spmd.distribute([rng.normal(size=(2 * N, 2 * N))] * 2, mesh, spec)
    return md.grad(lambda a, b: np.sum(product(a, b) ** 2), (0, 1)), tuple(args)


def matmul(ranks, backend, rng):
    mesh = line(ranks, backend)
    body = partial(par.matmul_all_gather, axis_name="i", directions=0)
    product = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
    return product, tuple(spmd.distribute(rng.normal(size=(2 * N, 2 * N)), mesh, P("i")) for _ in range(2))


def sequence(ranks, backend, rng):
    mesh = line(ranks, backend)
    body = partial(par.ring_attention, axis="i")
    attend = spmd.shard_map(body, mesh, in_specs=P("i"), out_specs=P("i"))
    args = spmd.distribute([rng.normal(size=(512, 4, 64)) for _ in range(3)], mesh, P("i"))
    return md.grad(lambda *qkv: np.sum(attend(*qkv) ** 2), (0, 1, 2)), tuple(args)


def transformer(ranks, backend, rng):
    config = par.Config(vocabulary=512, features=128, heads=4, layers=2, hidden=512)
    loss = par.tensor_parallel_transformer(line(ranks, backend), config, sequence_parallel=True)
    tokens = rng.integers(0, config.vocabulary, size=(8, 65))
    return md.grad(loss), (par.init_transformer(rng, config), (tokens[:, :-1], tokens[:, 1:]))


def dlrm(ranks, backend, rng):
    params = dlrm_study.init_dlrm(rng, (8, 2000, 32), bottom=(64, 128), top=(256,))
    batch = rng.normal(size=(512, 64)), rng.integers(2000, size=(512, 8)), rng.integers(2, size=512).astype(float)
    return md.grad(dlrm_study.dlrm(line(ranks, backend), "rows")), (params, batch)


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


def convolution(ranks, backend, rng):
    mesh = line(ranks, backend)

    def body(x, kernel):
        return pmean(np.mean(np.tanh(par.conv(x, kernel, (None, "i", None))) ** 2), "i")

    loss = spmd.shard_map(body, mesh=mesh, in_specs=(P(None, "i"), P()), out_specs=P())
    x = spmd.distribute(rng.normal(size=(4, 64, 64, 16)), mesh, P(None, "i"))
    return md.grad(loss, (0, 1)), (x, rng.normal(size=(3, 3, 16, 16)))


SCHEDULES = {"plain": None, "revolve": md.revolve(5), "multistage": md.multistage(2, 4), "online": md.online(5)}
STEPS: dict[str, Callable] = {  # by the number of carries; the second of two is one that a step passes on
    "1": lambda u: (u + 0.1 * np.sin(u),),
    "2": lambda u, v: (2 * u - v + 0.1 * np.sin(u), u),
    "3": lambda u, v, w: (u + 0.1 * np.sin(w), 0.9 * v + 0.1 * u, w + 0.1 * np.sin(v)),
}
LENGTH = 20


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


def reported_and_measured(name: str, ranks: int, backend: str | None, optimized: bool) -> tuple[int, int]:
    """Return the memory of a function above, `"its name and options"`, as reported and as measured."""
    make, *options = name.split()
    f, args = globals()[make](ranks, backend, np.random.default_rng(0), *options)
    use = spmd.memory(f, optimized=optimized, every_rank=backend == "simulated")(*args)
    run = md.jit(f) if optimized else f
    run(*args)
    return max(moment.dynamic for moment in use.moments), peak_of(run, *args)
