"""Recommendation models on MPI ranks: whole ones' values and gradients, and the communication documented."""

import pytest
from mpi4py import MPI

from spmd.parallel.embedding import SPLITS
from tests.dlrm_programs import check_dlrm


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("split", SPLITS)
def test_values_gradients_and_communication(split):
    check_dlrm(split, MPI.COMM_WORLD.size)
