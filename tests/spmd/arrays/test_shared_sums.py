"""Gradients of a value that several operations on sharded arrays use: one sum over ranks, whatever its spec."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.programs.on_blocks import assert_trees_close

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
X, W = np.linspace(-1.0, 1.0, 15).reshape(5, 3), np.linspace(0.5, 1.5, 12).reshape(3, 4)


@pytest.mark.parametrize("jit", [lambda f: f, md.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("entry", [P(), P(reduced={"i"})])
def test_two_shard_maps_sum_a_gradient_once(entry, jit):
    expert = spmd.shard_map(
        lambda x, w: psum(np.sum(np.tanh(x @ w)), "i"), MESH, in_specs=(entry, P(None, "i")), out_specs=P()
    )

    def experts(x):
        x = spmd.distribute(x, MESH, entry)
        return expert(x, W) + expert(x, 2 * W)

    whole = md.grad(lambda x: np.sum(np.tanh(x @ W)) + np.sum(np.tanh(x @ (2 * W))))(X)
    assert_trees_close(np.asarray(jit(md.grad(experts))(X)), whole)
    assert spmd.communication(md.grad(experts))(X).counts == {"psum": 3}  # two of the losses, and one
