"""`tiled_layer`, `low_rank_adaptation`: gradients by hand, and memory as NumPy allocates it."""

import tracemalloc

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import pmean
from spmd import P
from spmd.examples import low_rank_adaptation as lora
from spmd.examples import tiled_layer as tiled

SPECS = P(None, None, "batch"), P(None, "batch"), P(None, "batch")


def tiled_loss(ranks, tiles, units=48, rows=8):
    """Return a loss of the layer in tiles, its arguments on ranks, and the whole parameters and inputs."""
    rng, mesh = np.random.default_rng(0), spmd.make_mesh((ranks,), ("batch",), backend="simulated")
    params, x = tuple(rng.normal(size=s) for s in ((6, units), (units,), (units, 6))), rng.normal(size=(rows, 6))
    loss = lambda p, x: pmean(((tiled.tiled_layer(p, x, "batch") - x) ** 2).mean(), "batch")  # noqa: E731
    mapped = spmd.shard_map(loss, mesh=mesh, in_specs=(SPECS, P("batch")), out_specs=P())
    args = spmd.distribute((tiled.in_tiles(params, tiles), x), mesh, (SPECS, P("batch")))
    return mapped, args, params, x


@pytest.mark.parametrize("tiles", [1, 3])
def test_gradients_of_tiles_are_those_by_hand(tiles):
    mapped, args, (w1, b, w2), x = tiled_loss(2, tiles)
    hidden = np.maximum(x @ w1 + b, 0)
    error = 2 * (hidden @ w2 - x) / x.size
    below = (error @ w2.T) * (hidden > 0)
    expected = tiled.in_tiles((x.T @ below, below.sum(0), hidden.T @ error), tiles)
    value, actual = md.value_and_grad(mapped)(*args)
    np.testing.assert_allclose(value, (error**2).sum() * x.size / 4, rtol=1e-12)
    for a, e in zip(actual, expected):
        np.testing.assert_allclose(spmd.gather(a), e, rtol=1e-10, atol=1e-12)


def test_tiles_allocate_as_much_as_the_report_says():
    peaks = []
    for tiles in (1, 8):
        mapped, args, _, _ = tiled_loss(1, tiles, units=8192, rows=32)
        program = md.grad(mapped)
        use = spmd.memory(program)(*args)
        program(*args)
        tracemalloc.start()
        program(*args)
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        arguments = sum(x.data.nbytes for x in md.tree.leaves(args))
        assert allocated == pytest.approx(use.peak.total - arguments, rel=0.1), tiles
        peaks.append(allocated)
    assert peaks[1] < 0.7 * peaks[0]


def test_gradients_of_adapters_are_those_by_hand():
    w, _, (x, y) = lora.problem()
    params = lora.adapters(3)
    params["b"] += np.random.default_rng(1).normal(size=params["b"].shape)
    actual = md.grad(lora.squared_error)(params, {"w": w}, (x, y))
    error = 2 * (x @ (w + params["a"] @ params["b"]) - y)
    np.testing.assert_allclose(actual["a"], x.T @ error @ params["b"].T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(actual["b"], params["a"].T @ x.T @ error, rtol=1e-9, atol=1e-9)
