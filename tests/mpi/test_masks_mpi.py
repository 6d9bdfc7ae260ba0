"""Padded arrays and masks on MPI ranks."""

import numpy
import pytest
from mpi4py import MPI

import minidiff.numpy as np
import spmd
from spmd import P
from tests.masked_programs import BODIES, FUNCTIONS, check_in_body, check_on_ranks
from tests.samples import each

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
@pytest.mark.filterwarnings("ignore:invalid value|Mean of empty|Degrees of freedom")
@each("name", ["mean, axis=0", "var, axis=None", "softmax of columns", "cross entropy of labels", "batch_norm"])
def test_masked_functions_of_sharded_arrays(name):
    assert name in FUNCTIONS
    check_on_ranks(name, MESH, "rows")


@everywhere
@each("name", sorted(BODIES))
def test_masked_functions_in_bodies(name):
    check_in_body(*BODIES[name], P(), MESH, "rows")
