"""Sparse Jacobians on MPI ranks: each has its rows, and they send what the function sends."""

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.sparse import Triplets
from spmd import P

RANKS = MPI.COMM_WORLD.size
pytest.importorskip("scipy.sparse")


def laplacian(u):
    p = np.pad(u, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - u**2


def on_block(u):
    p = spmd.halo(u, 1, ("i", None), "zeros")
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - u**2


@pytest.mark.parallel([2, 3, 4])
def test_each_rank_has_its_rows():
    mesh = spmd.make_mesh((RANKS,), ("i",))
    field = numpy.linspace(0, 1, 2 * RANKS * 3).reshape(2 * RANKS, 3)
    u = spmd.distribute(field, mesh, P("i"))
    f = spmd.shard_map(on_block, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    jacobian = md.sparse_jacobian(f)
    mesh.reset_calls()
    coloring = jacobian.coloring(u)
    assert not mesh.calls  # each rank colors by itself
    rows = jacobian(u)
    assert mesh.calls == {"ppermute": 4}  # up and down, for the function and for all of its products
    whole = md.sparse_jacobian(laplacian)(field)
    here = numpy.arange(whole.shape[0]) // 6 == mesh.rank
    numpy.testing.assert_allclose(rows.toarray(), whole.toarray() * here[:, None], atol=1e-14)
    assert coloring.count <= 7


@pytest.mark.parallel([2, 3, 4])
def test_products_of_rows_on_ranks():
    """Each rank has some rows of a matrix: results and gradients, also of values, are those of the whole matrix."""
    mesh = spmd.make_mesh((RANKS,), ("i",))
    rows, columns = numpy.arange(4 * RANKS) // 2, numpy.arange(4 * RANKS) * 3 % 5
    values, x = numpy.linspace(-1, 1, 4 * RANKS), numpy.linspace(1, 2, 5)
    whole = md.scipy.sparse.coo_array((values, (rows, columns)), shape=(2 * RANKS, 5))

    def body(rows, columns, values, x):
        return Triplets(rows, columns, values, (2, 5)) @ x

    f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i"), P("i"), P()), out_specs=P("i"))
    gradient = md.grad(lambda v, x: np.sum(np.sin(f(rows % 2, columns, v, x))), argnums=(0, 1))
    expected = md.grad(lambda v, x: np.sum(np.sin(whole._replace(values=v) @ x)), argnums=(0, 1))(values, x)
    numpy.testing.assert_allclose(f(rows % 2, columns, values, x).gather(), whole @ x, rtol=1e-12)
    mesh.reset_calls()
    of_values, of_x = gradient(values, x)
    assert mesh.calls["psum"] >= 1  # the parts of the gradient in x
    numpy.testing.assert_allclose(of_values.gather(), expected[0], rtol=1e-12)
    numpy.testing.assert_allclose(of_x, expected[1], rtol=1e-12)
