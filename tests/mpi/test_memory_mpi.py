"""The memory report beside what is measured on a rank: the memory that NumPy allocates, by tracemalloc."""

import gc
import tracemalloc

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P
from spmd.parallel import (
    Config,
    data_parallel,
    fully_sharded,
    init_params,
    init_transformer,
    loss,
    pipeline_parallel,
    ring_attention,
    sequence_parallel_transformer,
    stacked_layers,
    zero,
)

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


def ring(mesh, rng):
    attend = spmd.shard_map(lambda q, k, v: ring_attention(q, k, v, "i"), mesh, in_specs=P("i"), out_specs=P("i"))
    return lambda *qkv: np.sum(attend(*qkv) ** 2), *split([rng.normal(size=(512, 4, 64)) for _ in range(3)], mesh)


def transformer(mesh, rng):
    config = Config(vocabulary=256, features=128, heads=4, layers=2, hidden=512)
    tokens = rng.integers(0, 256, size=(8, 65))
    labeled = tokens[:, :-1], tokens[:, 1:]
    return sequence_parallel_transformer(mesh, config), init_transformer(rng, config), labeled


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("make", [data, sharded, stages, checkpointed_scan, ring, transformer])
def test_the_peak_is_the_one_measured(make, optimized):
    """The arguments are there before: what is compared is what the program allocates, a few MB on each rank."""
    f, *args = make(spmd.make_mesh((2,), ("i",)), np.random.default_rng(0))
    gradient = md.grad(f)
    expected = max(moment.dynamic for moment in spmd.memory(gradient, optimized=optimized)(*args).moments)
    run = md.jit(gradient) if optimized else gradient
    run(*args)
    measured = peak_of(run, *args)
    assert expected == pytest.approx(measured, rel=0.05 if optimized else 0.1) and measured > 4e6


def peak_of(run, *args):
    """The most bytes that a call allocates on this rank."""
    gc.collect()
    tracemalloc.start()
    run(*args)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def bytes_of(tree):
    return sum(getattr(x, "local", x).nbytes for x in md.tree.leaves(tree))


WIDTH, LAYERS, EXAMPLES = 256, 16, 32  # of each rank
MASTERS = md.precision.with_masters(md.optim.adam(0.01))
#: The bytes of a parameter, of its gradient and of its optimizer's state, and the optimizer.
TRAINING = {"f4": ((4, 4, 8), md.optim.adam(0.01)), "f2": ((2, 2, 12), MASTERS)}


@pytest.mark.parametrize("dtype", TRAINING)
def test_zero_takes_what_its_paper_says(dtype):
    """What a rank holds, with the peak of a compiled step that writes over its arguments, at each stage.

    The activations are the layers' results. Buckets, and what updates one parameter, are within the tolerance.
    """
    mesh, rng, (sizes, optimizer) = spmd.make_mesh((2,), ("i",)), np.random.default_rng(0), TRAINING[dtype]
    whole = md.tree.map(lambda x: x.astype(dtype), init_params(rng, (WIDTH,) * (LAYERS + 1)))
    count, activations = sum(x.size for x in md.tree.leaves(whole)), LAYERS * EXAMPLES * WIDTH * sizes[0]
    batch = split([rng.normal(size=(2 * EXAMPLES, WIDTH)).astype(dtype) for _ in range(2)], mesh)
    for stage in (1, 2, 3):
        init, step = zero(loss, optimizer, mesh, stage)
        run = md.jit(step, donate_argnums=(0, 1))
        params, state = init(whole)
        reported = spmd.memory(run)(params, state, batch).peak.total
        for _ in range(2):
            _, params, state = run(params, state, batch)
        taken = bytes_of((params, state, batch)) + peak_of(run, params, state, batch)
        formula = sum(size / (2 if split_from <= stage else 1) for size, split_from in zip(sizes, (3, 2, 1))) * count
        assert formula < taken < 1.1 * (formula + activations)
        assert reported == pytest.approx(taken, rel=0.05)
