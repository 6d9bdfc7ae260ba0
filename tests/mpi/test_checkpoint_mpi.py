"""checkpoint in bodies on MPI ranks: what is gathered is gathered again, and not kept."""

import pytest
from mpi4py import MPI

import spmd
from tests import sharded_network


@pytest.mark.parallel([2, 3])
def test_gathered_weights_are_gathered_again():
    sharded_network.check(spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi"))
