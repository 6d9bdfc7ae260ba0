"""Stages that stash residuals, some of which depend on constants alone, or on a rank's place along another axis."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, axis_index, pbroadcast, pmean
from spmd import P
from spmd.parallel.data import gathering_again
from spmd.pipeline import one_f_one_b
from spmd.pipeline.run import scheduled

TABLE = np.array([[0.5, 1.0], [2.0, -1.0]])


def by_place(w, x):
    """Multiply by numbers of a table: those of this rank along tokens."""
    a, b = np.take(TABLE, axis_index("tokens"), axis=0)
    return np.sin(x * w) * a + x * b


def by_order(w, x):
    """Add tokens of all ranks in an order of its own."""
    order = np.take(np.array([[0, 3, 1], [2, 2, 3]]), axis_index("tokens"), axis=0)
    tokens = all_gather(x, "tokens", axis=1, tiled=True)
    return md.scan(lambda sums, i: (sums + np.sin(w * np.take(tokens, i, axis=1)[:, None]), None), x, order)[0]


@gathering_again
def by_constants(w, x):
    """Multiply by functions of constants, which the policy of the checkpoint keeps."""
    return x * np.sin(np.cos(np.arange(4.0)) * w)


def loss_and_gradients(layer, stages):
    mesh = spmd.make_mesh((stages, 2), ("stages", "tokens"), backend="simulated")
    stage = lambda ws, x: md.scan(lambda x, w: (layer(w, x), None), x, ws)[0]  # noqa: E731
    layers = (lambda v, x: v * x, stage, lambda u, x, y: np.mean((u * x - y) ** 2))

    def body(params, x, y):
        params = pbroadcast(params, "tokens")
        loss, gradients = scheduled(one_f_one_b(stages, 4), layers, params, x, y, "stages", recompute=False)
        return pmean(loss, "tokens"), md.tree.map(lambda g: pmean(g, "tokens"), gradients)

    specs = P(), P(None, "stages"), P()
    tokens = P(None, None, "tokens")
    run = spmd.shard_map(body, mesh, in_specs=(specs, tokens, tokens), out_specs=(P(), specs))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 1, 4, 4)), rng.normal(size=(1, 2, 4))
    loss, gradients = run((1.5, w, 2.0), x, np.cos(x))
    return [np.asarray(leaf) for leaf in (loss, *md.tree.leaves(gradients))]


@pytest.mark.parametrize("layer", [by_place, by_order, by_constants])
def test_two_stages_give_the_gradients_of_one(layer):
    for one, two in zip(loss_and_gradients(layer, 1), loss_and_gradients(layer, 2)):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12)
