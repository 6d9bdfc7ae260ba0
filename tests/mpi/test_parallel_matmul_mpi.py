"""Matrix products on MPI ranks: values, gradients and calls; blocks that are on their way meanwhile."""

from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import ppermute
from spmd import P
from tests.matmul_programs import PRODUCTS, operands, plain_loss, sharded, sharded_loss

few = pytest.mark.parallel([2, 4])


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_gradients_and_calls(name):
    mesh, theory = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",)), PRODUCTS[name]
    product, args = sharded(name, mesh), operands(mesh.size)
    before = Counter(mesh.calls)
    out = product(*args)
    assert Counter(mesh.calls) - before == {theory.collective: theory.calls(mesh.size)}
    np.testing.assert_allclose(out.gather(), args[0] @ args[1], rtol=1e-12)

    gradient = md.value_and_grad(sharded_loss(name, mesh), (0, 1))
    value, expected = md.value_and_grad(plain_loss, (0, 1))(*args)
    wanted = Counter(psum=1)
    for collective in (theory.collective, theory.backward):
        wanted[collective] += theory.calls(mesh.size)
    for g in (gradient, md.jit(gradient)):
        before = Counter(mesh.calls)
        loss, found = g(*args)
        assert Counter(mesh.calls) - before == wanted
        np.testing.assert_allclose(loss, value, rtol=1e-10)
        for a, e in zip(found, expected):
            np.testing.assert_allclose(a.gather(), e, rtol=1e-10)


@few
@pytest.mark.parametrize("dtype", ["float16", "float64", "complex128", "int8", "bool"])
def test_what_is_sent_on_is_not_written_into(dtype):
    """A large array, whose memory later results could take, is MPI's until what it is part of is waited for."""
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",))
    ring = [(k, (k + 1) % mesh.size) for k in range(mesh.size)]

    def body(x):
        y = x.astype(dtype)
        there, one, back = ppermute(y, "i", ring), ppermute(y[0, 0], "i", ring[:1]), ppermute(y * y, "i", ring[:-1])
        z = np.cos(np.exp(np.tanh(x) * 2) + 1)
        return there, one[None], back, z

    f = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    compiled = md.jit(f)
    x = np.arange(400 * 100 * mesh.size).reshape(-1, 100) % 7
    expected = [out.gather() for out in f(x)]
    for _ in range(3):
        for actual, e in zip(compiled(x), expected):
            assert actual.dtype == e.dtype
            np.testing.assert_array_equal(actual.gather(), e)
        assert not mesh.ranks._started


@few
def test_an_error_while_blocks_are_on_their_way():
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",))
    ring = [(k, (k + 1) % mesh.size) for k in range(mesh.size)]

    def body(x):
        there = ppermute(x, "i", ring)
        return np.linalg.inv(x), there

    f = md.jit(spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    x = np.concatenate([np.eye(3) * (k + 1) for k in range(mesh.size)])
    for _ in range(3):
        with pytest.raises(np.linalg.LinAlgError):
            f(np.zeros_like(x))
        assert not mesh.ranks._started
        np.testing.assert_array_equal(f(x)[1].gather(), np.roll(x, 3, axis=0))
