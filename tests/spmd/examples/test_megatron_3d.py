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


def collectives_of(sizes, **options):
    """Return the counts of the collectives of a step, by name and axes."""
    init, step = megatron_3d.megatron_step(mesh_of(*sizes), GPT, one_f_one_b(1, 1), None, **options)
    text, key = md.ShapedArray((4, 8), "int32"), md.eval_shape(md.random.key, 0)
    report = spmd.communication(step)(md.eval_shape(init, key), text, text, key)
    return {(row.collective, row.axes): row.count for row in report.rows}


def test_collectives_of_overlapped_products():
    """A product takes three steps around a ring of four ranks, and in the backward pass one gather and one scatter."""
    plain, ring = (collectives_of((1, 1, 4), sequence=True, overlap=overlap) for overlap in (False, True))
    assert ("ppermute", ("feats",)) not in plain
    assert ring["ppermute", ("feats",)] == 3 * ring["all_gather", ("feats",)] > 0
    assert ring["psum_scatter", ("feats",)] == ring["all_gather", ("feats",)]


def test_sums_along_pods():
    """The gradient of a shard is summed along pods alone, and those of all parameters if they are whole."""
    whole, shards = (collectives_of((2, 2, 1, 1, 1), sharded=sharded) for sharded in (False, True))
    assert {axes for _, axes in whole} == {("pod", "data", "context")}
    assert shards["psum", ("pod", "context")] > shards["psum", ("pod", "data", "context")]
    assert shards["psum_scatter", ("data",)] > 0


def test_layers_that_do_not_make_equal_blocks():
    """The last stage skips one."""
    three = dataclasses.replace(GPT, layers=3)
    whole = megatron_3d.init_megatron(md.random.key(0), three, stages=2)
    text = np.random.default_rng(0).integers(0, 8, (4, 5))
    specs = megatron_3d.megatron_specs(three)

    def run(over, schedule, params):
        body = megatron_3d.loss_and_gradients(over, three, schedule, None)
        mapped = spmd.shard_map(body, over, in_specs=(specs, P("data"), P("data"), P()), out_specs=(P(), specs))
        return mapped(params, text[:, :-1], text[:, 1:], None)

    loss, gradients = run(mesh_of(1, 2, 1), one_f_one_b(2, 2), whole)
    unskipped = {**whole, "layers": md.tree.map(lambda x: x[:, :3], whole["layers"])}
    expected, _ = run(mesh_of(1, 1, 1), one_f_one_b(1, 2), unskipped)
    assert np.isclose(float(loss), float(expected), rtol=1e-5)
    assert all(not np.any(np.asarray(x)[:, 3]) for x in md.tree.leaves(gradients["layers"]))


def test_training_in_16_bits():
    """With dropout. The loss falls, and weights are the masters, rounded."""
    config = dataclasses.replace(GPT, dropout=0.1)
    init, step = megatron_3d.megatron_step(
        mesh_of(1, 2, 2), config, one_f_one_b(2, 2), "selective", True, optimizer=md.optim.adam(5e-2)
    )
    state, text = init(md.random.key(0)), np.arange(40).reshape(8, 5) % 8
    losses = []
    for k in range(4):
        loss, state = step(state, text[:, :-1], text[:, 1:], md.random.key(k))
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0]
    rounded = md.tree.map(lambda x: np.asarray(x).astype("float16"), state["masters"])
    assert_trees_close(md.tree.map(np.asarray, state["weights"]), rounded)


def test_parameters_are_counted():
    leaves = md.tree.leaves(megatron_3d.init_megatron(md.random.key(0), LLAMA))
    assert megatron_3d.parameters(LLAMA) == sum(leaf.size for leaf in leaves)
