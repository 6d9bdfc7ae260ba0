"""A transformer's block whose specs are searched for, and checks of the prices on any backend."""

import math

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import softmax
from spmd.parallel import search

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


def block(params, batch):
    """A transformer's block, attention and MLP, on whole arrays."""
    x, y = batch
    q, k, v = (np.einsum("btf,fhd->bthd", x, params[name]) for name in "qkv")
    attended = np.einsum("bhqt,bthd->bqhd", softmax(np.einsum("bqhd,bthd->bhqt", q, k) / 8.0), v)
    x = x + np.einsum("bqhd,hdf->bqf", attended, params["o"])
    return np.sum((x + np.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def check_prices(mesh):
    """Bytes are those counted when it runs; memory, of the blocks; products, where nothing is split, those by hand."""
    found = search(block, PARAMS, tuple(X), mesh, NAMES, count=1000)
    whole = md.value_and_grad(block)(PARAMS, tuple(X))
    for choice in (*found.choices[:3], found.choices[-1]):
        args = spmd.distribute((PARAMS, tuple(X)), mesh, choice.specs)
        mesh.reset_calls()
        value, gradient = md.value_and_grad(block)(*args)
        assert sum(mesh.bytes.values()) == choice.bytes
        ranks = [math.prod(mesh.shape[axis] for axis in spmd.spec_of(x).axes) for x in md.tree.leaves(args)]
        assert choice.memory == sum(8 * x.size // n for x, n in zip(md.tree.leaves(args), ranks))
        numpy.testing.assert_allclose(value, whole[0])
        numpy.testing.assert_allclose(spmd.gather(gradient)["up"], whole[1]["up"])
    unsplit = next(choice for choice in found.choices if not choice.axes)
    dense = BATCH * TOKENS * (4 * FEATURES * HEADS * D + 2 * FEATURES * HIDDEN)
    attended = 2 * BATCH * HEADS * TOKENS * TOKENS * D
    assert unsplit.flops == 2 * (
        3 * (dense + attended) - 3 * BATCH * TOKENS * FEATURES * HEADS * D
    )  # no cotangent of x
    assert unsplit.bytes == 0
