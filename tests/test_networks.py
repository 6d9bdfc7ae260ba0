"""A network under several parallelisms: losses and gradients of the unsharded one, collectives where they belong."""

from itertools import pairwise

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, pmean, psum, psum_scatter
from spmd import P
from tests.programs import assert_trees_close

RNG = np.random.default_rng(0)
SIZES = (16, 8, 8, 8)
PARAMS = [(RNG.normal(size=(n, m)) / np.sqrt(n), RNG.normal(size=m)) for n, m in pairwise(SIZES)]
BATCH = (RNG.normal(size=(16, 16)), RNG.normal(size=(16, 8)))


def relu(x):
    return np.maximum(x, 0)


def loss(params, batch):
    x, targets = batch
    for W, b in params:
        x = relu(x @ W + b)
    return np.mean(np.sum((x - targets) ** 2, axis=-1))


def fully_sharded(**options):
    """Parameters are split over the ranks, and gathered where they are needed."""
    mesh = spmd.make_mesh((8,), ("batch",), backend="simulated")

    def on_blocks(params, batch):
        return pmean(
            loss([tuple(all_gather(p, "batch", tiled=True) for p in layer) for layer in params], batch), "batch"
        )

    return spmd.shard_map(on_blocks, mesh=mesh, in_specs=P("batch"), out_specs=P(), **options)


def tensor_parallel(**options):
    """Features are split over the ranks; each layer is a shard_map of its own, the loss is taken outside."""
    mesh = spmd.make_mesh((8,), ("feats",), backend="simulated")

    def product(x, W, b):
        return psum_scatter(x @ W, "feats", scatter_dimension=1, tiled=True) + b

    specs = (P(None, "feats"), P("feats", None), P("feats"))
    layer = spmd.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P(None, "feats"), **options)

    def sharded_loss(params, batch):
        x, targets = batch
        for W, b in params:
            x = relu(layer(x, W, b))
        return np.mean(np.sum((x - targets) ** 2, axis=-1))

    return sharded_loss


def fully_sharded_and_tensor_parallel(**options):
    """Both: the batch and the features are split, parameters over all ranks, gathered along the batch axis alone."""
    mesh = spmd.make_mesh((4, 2), ("batch", "feats"), backend="simulated")

    def on_blocks(params, batch):
        x, targets = batch
        for W, b in params:
            W, b = (all_gather(p, "batch", tiled=True) for p in (W, b))
            x = relu(psum_scatter(x @ W, "feats", scatter_dimension=1, tiled=True) + b)
        squares = psum(np.sum((x - targets) ** 2, axis=-1), "feats")
        return pmean(np.mean(squares), "batch")

    specs = (P(("feats", "batch")), P("batch", "feats"))
    return spmd.shard_map(on_blocks, mesh=mesh, in_specs=specs, out_specs=P(), **options)


LAYERS = len(PARAMS)
NETWORKS = {
    # name: (loss, what the gradient communicates)
    "fully sharded": (fully_sharded, {"all_gather": 2 * LAYERS, "psum": 1, "psum_scatter": 2 * LAYERS}),
    "tensor parallel": (tensor_parallel, {"psum_scatter": LAYERS, "all_gather": LAYERS, "psum": 1}),  # the loss itself
    "both": (
        fully_sharded_and_tensor_parallel,
        {"all_gather": 3 * LAYERS, "psum_scatter": 3 * LAYERS, "psum": 2},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_unsharded_network(name):
    make, _ = NETWORKS[name]
    expected = md.value_and_grad(loss)(PARAMS, BATCH)
    assert_trees_close(md.value_and_grad(make())(PARAMS, BATCH), expected)
    assert_trees_close(md.value_and_grad(make(check_rep=False))(PARAMS, BATCH), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_collectives_are_where_they_belong(name):
    make, expected = NETWORKS[name]
    assert spmd.communication(md.grad(make()))(PARAMS, BATCH).counts == expected
    untyped = spmd.communication(md.grad(make(check_rep=False)))(PARAMS, BATCH).counts
    assert sum(untyped.values()) >= sum(expected.values())
