"""Tensor, pipeline and data parallelism at once: numbers of one device, and what Megatron keeps and communicates."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.parallel import interleaved, one_f_one_b
from spmd.parallel.megatron_3d import (
    AXES,
    MegatronConfig,
    init_megatron,
    loss_and_gradients,
    megatron_specs,
)
from tests.programs import assert_trees_close

GPT = MegatronConfig(
    vocabulary=8, features=8, heads=4, layers=4, hidden=16, layer_norm=True, swiglu=False, tied=True, positions=4
)
LLAMA = MegatronConfig(vocabulary=8, features=16, heads=4, kv_heads=2, layers=4, hidden=12)


def mesh_of(*sizes):
    return spmd.make_mesh(sizes, AXES, backend="simulated")


def computed(config, sizes, schedule, *options):
    """Of float64 parameters that do not depend on the number of chunks."""
    whole = md.tree.map(lambda x: x.astype("float64") * 10, init_megatron(md.random.key(0), config))
    layers = md.tree.map(lambda x: in_chunks(x, schedule), whole["layers"])
    text = np.random.default_rng(0).integers(0, 8, (8, 5))
    run = loss_and_gradients(mesh := mesh_of(*sizes), config, schedule, *options)
    specs = megatron_specs(config)
    run = spmd.shard_map(run, mesh, in_specs=(specs, P("data"), P("data"), P()), out_specs=(P(), specs))
    loss, gradients = run({**whole, "layers": layers}, text[:, :-1], text[:, 1:], None)
    return loss, {**gradients, "layers": md.tree.map(lambda x: in_order(np.asarray(x), schedule), gradients["layers"])}


def in_chunks(x, schedule):
    """Layers in the order of the network -> [chunks, stages * layers of a block]."""
    return x.reshape(schedule.chunks, -1, *x.shape[2:])


def in_order(x, schedule):
    return x.reshape(1, -1, *x.shape[2:])


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_all_meshes_compute_the_same(config, sequence, recompute):
    one = computed(config, (1, 1, 1), one_f_one_b(1, 2), None)
    schedule = interleaved(2, 2, 2) if recompute else one_f_one_b(2, 2)
    many = computed(config, (2, 2, 2), schedule, recompute, sequence)
    assert_trees_close(md.tree.map(np.asarray, many), md.tree.map(np.asarray, one))
