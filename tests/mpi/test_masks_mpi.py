"""Padded arrays and masks on MPI ranks."""

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P, parallel
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close

RANKS = MPI.COMM_WORLD.size
MESH = spmd.make_mesh((RANKS,), ("i",), backend="mpi")
everywhere = pytest.mark.parallel([2, 3, 4])


@everywhere
@each("columns", [(), (3,)])
def test_padding(columns):
    x = numpy.arange(1.0, 8.0).repeat(numpy.prod(columns, dtype=int)).reshape(7, *columns)
    calls = MESH.calls
    padded, mask = spmd.pad(x, MESH, P("i"))
    assert MESH.calls == calls
    rows = -(-7 // RANKS)
    first = MESH.rank * rows
    numpy.testing.assert_array_equal(padded.local[: 7 - first], x[first : first + rows])
    assert mask.local.ravel().tolist() == [row < 7 for row in range(first, first + rows)]
    assert float(np.mean(padded, where=mask)) == 4.0


@everywhere
def test_a_padded_vocabulary():
    config = parallel.Config(vocabulary=13, features=2 * RANKS, heads=RANKS, layers=1, hidden=RANKS)
    params = parallel.init_transformer(numpy.random.default_rng(0), config)
    text = numpy.arange(20).reshape(4, 5) * 5 % 13
    batch = text[:, :-1], text[:, 1:]
    loss = parallel.tensor_parallel_transformer(spmd.make_mesh((RANKS,), ("feats",), backend="mpi"), config)
    expected = md.value_and_grad(lambda params: parallel.next_token_loss(config, params, *batch))(params)
    assert_trees_close(spmd.gather(md.value_and_grad(loss)(params, batch)), expected)
    split = md.grad(loss)(parallel.pad_vocabulary(params, RANKS), batch)["embedding"]
    assert split.local.shape == (-(-13 // RANKS), 2 * RANKS)
    numpy.testing.assert_allclose(split.gather()[:13], expected[1]["embedding"], atol=1e-12)
