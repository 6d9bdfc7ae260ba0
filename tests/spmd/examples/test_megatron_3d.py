"""`megatron_3d` and its `ring_products`: the numbers of one device, in all orders and recomputations."""

import dataclasses
import functools
from functools import partial

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.examples import megatron_3d
from spmd.examples.ring_products import gather_product, scatter_product
from spmd.parallel.attention import zigzag
from spmd.pipeline import interleaved, one_f_one_b
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_values, gradient
from tests.checks.results import assert_trees_close

GPT = megatron_3d.MegatronConfig(
    vocabulary=8, features=8, heads=4, layers=4, hidden=16, layer_norm=True, swiglu=False, tied=True, positions=8
)
LLAMA = megatron_3d.MegatronConfig(vocabulary=8, features=16, heads=4, kv_heads=2, layers=4, hidden=12)
RELU2 = dataclasses.replace(LLAMA, swiglu=False, activation="squared relu")
TOKENS = 8


def mesh_of(*sizes):
    axes = {3: megatron_3d.AXES, 4: megatron_3d.WITH_CONTEXT, 5: megatron_3d.ALL_AXES}[len(sizes)]
    return spmd.make_mesh(sizes, axes, backend="simulated")


def computed(config, sizes, recompute=None, chunks=1, **options):
    """Return the loss and gradients of float64 parameters that do not depend on the number of chunks."""
    over = mesh_of(*sizes)
    stages = over.shape["stages"]
    schedule = interleaved(stages, 2, chunks) if chunks > 1 else one_f_one_b(stages, 2)
    in_chunks = lambda x: np.asarray(x).reshape(schedule.chunks, -1, *x.shape[2:])  # noqa: E731
    params = md.tree.map(lambda x: x.astype("float64") * 10, megatron_3d.init_megatron(md.random.key(0), config))
    text = np.random.default_rng(0).integers(0, 8, (8, TOKENS + 1))
    specs, split = megatron_3d.megatron_specs(config, options.get("sharded", False)), megatron_3d.text_spec(over)
    run = megatron_3d.loss_and_gradients(over, config, schedule, recompute, **options)
    run = spmd.shard_map(run, over, in_specs=(specs, split, split, P()), out_specs=(P(), specs))
    order = zigzag(TOKENS, over.shape.get("context", 1))
    params = {**params, "layers": md.tree.map(in_chunks, params["layers"])}
    loss, gradients = run(params, text[:, :-1][:, order], text[:, 1:][:, order], None)
    in_order = lambda x: np.asarray(x).reshape(1, -1, *x.shape[2:])  # noqa: E731
    return loss, {**gradients, "layers": md.tree.map(in_order, gradients["layers"])}


@functools.cache
def of_one_device(config):
    return computed(config, (1, 1, 1))


OVERLAP = {"sequence": True, "overlap": True}
#: Sizes of data, stages and feats; with context before feats; and with pods first. Each option, and each beside others.
MESHES = [
    (GPT, (2, 2, 2), {"recompute": "selective", "chunks": 2, "sequence": True}),
    (LLAMA, (2, 2, 2), {"recompute": "full", "chunks": 2}),
    (GPT, (2, 1, 2, 2), {"recompute": "full", "sequence": True}),
    (LLAMA, (2, 1, 4, 1), {"sharded": True}),
    (RELU2, (1, 2, 2), {"recompute": "full", "sequence": True, "flash": True}),
    (GPT, (1, 1, 4), OVERLAP),
    (LLAMA, (1, 2, 2, 2), {**OVERLAP, "recompute": "full"}),
    (GPT, (2, 1, 2, 1, 1), {}),
    (RELU2, (2, 2, 1, 1, 2), {**OVERLAP, "sharded": True}),
]


@pytest.mark.parametrize("config, sizes, options", MESHES)
def test_all_meshes_compute_the_same(config, sizes, options):
    assert_trees_close(computed(config, sizes, **options), of_one_device(config))


@pytest.mark.parametrize("ranks", [1, 3])
def test_products_around_a_ring(ranks):
    """The values and gradients of a collective and a product."""
    rng, over = np.random.default_rng(0), mesh(ranks, names=("feats",))
    x, columns, w = (rng.normal(size=size) / 4 for size in ((2, 12, 5), (2, 12, 12), (5, 12)))
    tokens, split, rows = P(None, "feats"), P(None, None, "feats"), P("feats")
    for ring, in_specs, out_specs, args in (
        (gather_product, (tokens, tokens), split, (x, w)),
        (scatter_product, (split, rows), tokens, (columns, w.T)),
    ):
        f = mapped(partial(ring, axis="feats"), over, in_specs, out_specs)
        for of in (lambda f: f, gradient):
            check_values(of(f), args, of(lambda x, w: x @ w))
