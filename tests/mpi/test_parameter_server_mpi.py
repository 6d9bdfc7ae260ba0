"""A parameter server on MPI ranks: the steps of data parallelism, with the documented communication."""

import pytest
from mpi4py import MPI

from tests import server_programs as programs


@pytest.mark.parallel([2, 4, 8])
def test_a_server_on_ranks_is_data_parallelism():
    ranks = MPI.COMM_WORLD.size
    for root in (0, ranks - 1):
        programs.check_steps(ranks, root)
