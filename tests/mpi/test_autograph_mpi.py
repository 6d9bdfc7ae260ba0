"""Python's own statements in bodies on MPI ranks: each rank takes its branch, and its number of steps."""

import pytest
from mpi4py import MPI

import spmd
from tests.programs.syntax import check_body


@pytest.mark.parallel([2, 3, 4])
def test_bodies_on_ranks():
    check_body(spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi"))
