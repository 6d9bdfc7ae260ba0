"""Slices that no mesh divides, on MPI ranks: see `tests/programs/neighbors.py`."""

import pytest
from mpi4py import MPI

import spmd
from tests.programs.neighbors import PROGRAMS, check


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_exchange_edges(name):
    check(PROGRAMS[name], spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi"))
