"""The search for partition specs: what it finds, and that its prices are those of the program."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.parallel import Config, init_transformer, next_token_loss, search, transformer_specs
from spmd.parallel.megatron import SPLIT
from spmd.parallel.transformer import dimensions
from tests.search_programs import NAMES, PARAMS, X, block

HALF = sum(x.nbytes for x in PARAMS.values()) / 2


def test_it_finds_megatron_s_layout():
    mesh = spmd.make_mesh((4,), ("feats",), backend="simulated")
    found = search(block, PARAMS, tuple(X), mesh, NAMES, memory=HALF)
    assert found.best.axes == {"heads": "feats", "hidden": "feats"}
    params, _ = found.best.specs
    assert [params[name] for name in ("q", "o", "up", "down")] == [
        spmd.P(None, "feats"),
        spmd.P("feats"),
        spmd.P(None, "feats"),
        spmd.P("feats"),
    ]
    assert "hidden along feats, heads along feats" in str(found) and "choices need more than" in str(found)


def test_on_the_transformer_it_finds_what_tensor_parallelism_splits():
    config = Config(vocabulary=64, features=32, heads=4, layers=1, hidden=64)
    params, text = init_transformer(numpy.random.default_rng(0), config), numpy.arange(18).reshape(2, 9)
    memory = 0.3 * sum(x.nbytes for x in md.tree.leaves(params))
    mesh = spmd.make_mesh((4,), ("feats",), backend="simulated")
    loss = lambda params, batch: next_token_loss(config, params, *batch)  # noqa: E731
    names = dimensions(config), "batch tokens"
    found = search(loss, params, (text[:, :-1], text[:, 1:]), mesh, names, memory=memory)
    assert found.best.axes == dict.fromkeys(SPLIT, "feats")
    assert md.tree.structure(found.best.specs[0]) == md.tree.structure(transformer_specs(config, "feats"))
    for spec, expected in zip(*map(md.tree.leaves, (found.best.specs[0], transformer_specs(config, "feats")))):
        assert spec == expected


@pytest.mark.parametrize("slow", ["i", "j"])
def test_a_sum_is_over_the_fast_axis(slow):
    """Splitting an array costs a sum over the axis: here it is too slow along one of them."""
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    alpha = dict.fromkeys("ij", 1e-9) | {slow: 1e-3}
    model = spmd.CostModel(alpha, beta=1e-12)
    loss = lambda w, x: np.sum((x @ w) ** 2)  # noqa: E731
    found = search(loss, np.ones((8, 8)), np.ones((64, 8)), mesh, ("k n", "batch k"), model=model, flops_per_second=1e9)
    assert slow not in found.best.axes.values()
    assert found.best.axes


def test_bad_input():
    mesh = spmd.make_mesh((3,), ("i",), backend="simulated")
    loss, w, x = lambda w, x: np.sum(x @ w), np.ones((4, 4)), np.ones((8, 4))
    with pytest.raises(ValueError, match=r"has type f64\[4,4\], but its dimensions have 1 names: \['k'\]"):
        search(loss, w, x, mesh, ("k", "batch k"))
    with pytest.raises(ValueError, match=r"of 8 assignments .* 1 need more than 10 bytes on a rank"):
        search(loss, w, x, mesh, ("k n", "batch k"), memory=10)
