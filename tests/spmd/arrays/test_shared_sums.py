"""Gradients of a value that several operations on sharded arrays use: one sum over ranks, whatever its spec."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close

LINE, PLANE = mesh(2), mesh(2, 2)
X, W = np.linspace(-1.0, 1.0, 16).reshape(4, 4), np.linspace(0.5, 1.5, 16).reshape(4, 4)


@pytest.mark.parametrize("jit", [lambda f: f, md.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("entry", [P(), P(reduced={"i"})])
def test_two_shard_maps_sum_a_gradient_once(entry, jit):
    expert = mapped(lambda x, w: psum(np.sum(np.tanh(x @ w)), "i"), LINE, (entry, P(None, "i")), P())
    experts = lambda x: expert(x, W) + expert(x, 2 * W)  # noqa: E731
    on_ranks = md.grad(lambda x: experts(spmd.distribute(x, LINE, entry)))
    whole = md.grad(lambda x: np.sum(np.tanh(x @ W)) + np.sum(np.tanh(x @ (2 * W))))
    assert_trees_close(np.asarray(jit(on_ranks)(X)), whole(X))
    assert spmd.communication(on_ranks)(X).counts == {"psum": 3}  # two of the losses, and one


def test_two_weights_share_one_message():
    """A weight and a bias, each used in several steps, on one mesh of one axis and on two meshes."""

    def loss(w, b, x):
        for _ in range(3):
            x = np.tanh(x @ w + b)
        return np.sum(x)

    x, y = spmd.distribute(X, LINE, P("i")), spmd.distribute(X, PLANE, P(("i", "j")))
    gradient = md.grad(loss, argnums=(0, 1))
    LINE.reset_calls()
    assert_trees_close(gradient(W, W[0], x), gradient(W, W[0], X))
    assert LINE.calls["psum"] == 2  # of the loss, and of both cotangents
    both = md.grad(lambda w: loss(w, W[0], x) + loss(w, W[0], y) + np.sum(w * w))(W)
    assert_trees_close(both, 2 * gradient(W, W[0], X)[0] + 2 * W)
