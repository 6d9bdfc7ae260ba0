"""The search for partition specs: what it finds, and that its prices are those of the program."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import softmax
from spmd.parallel import Config, init_transformer, next_token_loss, search, transformer_specs
from spmd.parallel.megatron import SPLIT
from spmd.parallel.transformer import dimensions

BATCH, TOKENS, FEATURES, HEADS, D, HIDDEN = 2, 16, 64, 8, 8, 256
QKV = (FEATURES, HEADS, D)
PARAMS = {"q": QKV, "k": QKV, "v": QKV, "o": (HEADS, D, FEATURES), "up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}
PARAMS = {name: 0.1 * numpy.random.default_rng(0).normal(size=shape) for name, shape in PARAMS.items()}
X = numpy.random.default_rng(1).normal(size=(2, BATCH, TOKENS, FEATURES))
NAMES = (
    {
        **dict.fromkeys("qkv", "features heads _"),
        "o": "heads _ features",
        "up": "features hidden",
        "down": "hidden features",
    },
    "batch tokens features",
)
HALF = sum(x.nbytes for x in PARAMS.values()) / 2


def block(params, batch):
    """A transformer's block, attention and MLP, on whole arrays."""
    x, y = batch
    q, k, v = (np.einsum("btf,fhd->bthd", x, params[name]) for name in "qkv")
    attended = np.einsum("bhqt,bthd->bqhd", softmax(np.einsum("bqhd,bthd->bhqt", q, k) / 8.0), v)
    x = x + np.einsum("bqhd,hdf->bqf", attended, params["o"])
    return np.sum((x + np.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


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


def test_prices_are_those_of_the_program():
    """Bytes, counted when it runs; memory, of the blocks; products, of which nothing is split, by hand."""
    mesh = spmd.make_mesh((2, 2), ("data", "feats"), backend="simulated")
    found = search(block, PARAMS, tuple(X), mesh, NAMES, count=1000)
    whole = md.value_and_grad(block)(PARAMS, tuple(X))
    for choice in (*found.choices[:3], found.choices[-1]):
        args = spmd.distribute((PARAMS, tuple(X)), mesh, choice.specs)
        mesh.reset_calls()
        value, gradient = md.value_and_grad(block)(*args)
        assert sum(mesh.bytes.values()) == choice.bytes
        assert choice.memory == sum(
            (x.local[0] if hasattr(x, "local") else numpy.asarray(x)).nbytes for x in md.tree.leaves(args)
        )
        numpy.testing.assert_allclose(value, whole[0])
        numpy.testing.assert_allclose(spmd.gather(gradient)["up"], whole[1]["up"])
    unsplit = next(choice for choice in found.choices if not choice.axes)
    dense = BATCH * TOKENS * (4 * FEATURES * HEADS * D + 2 * FEATURES * HIDDEN)
    attended = 2 * BATCH * HEADS * TOKENS * TOKENS * D
    assert unsplit.flops == 2 * (
        3 * (dense + attended) - 3 * BATCH * TOKENS * FEATURES * HEADS * D
    )  # no cotangent of x
    assert unsplit.bytes == 0


def test_bad_input():
    mesh = spmd.make_mesh((3,), ("i",), backend="simulated")
    loss, w, x = lambda w, x: np.sum(x @ w), np.ones((4, 4)), np.ones((8, 4))
    with pytest.raises(ValueError, match=r"has type f64\[4,4\], but its dimensions have 1 names: \['k'\]"):
        search(loss, w, x, mesh, ("k", "batch k"))
    with pytest.raises(ValueError, match=r"of 8 assignments .* 1 need more than 10 bytes on a rank"):
        search(loss, w, x, mesh, ("k n", "batch k"), memory=10)
