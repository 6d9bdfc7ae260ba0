"""The programs that say where sums are taken, on MPI ranks: the calls are MPI's."""

import pytest
from mpi4py import MPI

import spmd
from spmd.examples.where_to_sum import AXIS
from tests.where_to_sum import CALLS, check_program


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_calls(name):
    check_program(spmd.make_mesh((MPI.COMM_WORLD.size,), (AXIS,), backend="mpi"), name)
