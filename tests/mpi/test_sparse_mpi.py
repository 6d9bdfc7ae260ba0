"""Sparse Jacobians on MPI ranks: each has its rows, and they send what the function sends."""

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P

RANKS = MPI.COMM_WORLD.size
pytest.importorskip("scipy.sparse")


def laplacian(u):
    p = np.pad(u, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - u**2


def on_block(u):
    p = spmd.halo(u, 1, ("i", None), "zeros")
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - u**2


@pytest.mark.parallel(3)
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
