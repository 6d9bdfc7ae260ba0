"""Tapes whose operations are placed on MPI ranks."""

import pytest
from mpi4py import MPI

import spmd
from tests.placement_programs import check_placement, random_placement


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("seed", range(2))
def test_any_placement(seed):
    ranks = MPI.COMM_WORLD.size
    check_placement(spmd.make_mesh((ranks,), ("i",), backend="mpi"), random_placement(seed, ranks))
