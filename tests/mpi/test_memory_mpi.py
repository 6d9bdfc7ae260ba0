"""The memory report beside what is measured on a rank: the memory that NumPy allocates, by tracemalloc."""

import gc
import tracemalloc

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P
from spmd.parallel import data_parallel, fully_sharded, init_params, pipeline_parallel, stacked_layers

pytestmark = pytest.mark.parallel(2)
N = 384


def split(args, mesh):
    return spmd.distribute(args, mesh, P("i"))


def network(rng, layers):
    return init_params(rng, (N,) * (layers + 1)), (rng.normal(size=(N, N)), rng.normal(size=(N, N)))


def data(mesh, rng):
    params, batch = network(rng, 4)
    return data_parallel(mesh), params, split(batch, mesh)


def sharded(mesh, rng):
    params, batch = network(rng, 4)
    return fully_sharded(mesh), split(params, mesh), split(batch, mesh)


def stages(mesh, rng):
    params, batch = network(rng, 6)
    first, inner, last = stacked_layers(params)
    return pipeline_parallel(mesh, microbatch=48), (first, split(inner, mesh), last), split(batch, mesh)


def checkpointed_scan(mesh, rng):
    step = md.checkpoint(lambda x, w: (np.tanh(np.sin(x @ w)), None))

    def loss(ws, x):
        return pmean(np.mean(md.scan(step, x, ws)[0] ** 2), "i")

    on_ranks = spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    return on_ranks, rng.normal(size=(6, 128, 128)), split(rng.normal(size=(4096, 128)), mesh)


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("make", [data, sharded, stages, checkpointed_scan])
def test_the_peak_is_the_one_measured(make, optimized):
    """The arguments are there before: what is compared is what the program allocates, a few MB on each rank."""
    f, *args = make(spmd.make_mesh((2,), ("i",)), np.random.default_rng(0))
    gradient = md.grad(f)
    expected = max(moment.dynamic for moment in spmd.memory(gradient, optimized=optimized)(*args).moments)
    run = md.jit(gradient) if optimized else gradient
    run(*args)
    gc.collect()
    tracemalloc.start()
    run(*args)
    measured = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected == pytest.approx(measured, rel=0.1) and measured > 4e6
