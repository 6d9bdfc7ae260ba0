"""Pipelines that follow a schedule, on MPI ranks: each rank runs its own step of a tick, and none that others do."""

import pytest
from mpi4py import MPI

import spmd
from tests import networks


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("name", networks.SCHEDULES)
def test_loss_and_gradients_are_those_of_the_whole_network(name):
    networks.check_schedule(name, 4, spmd.make_mesh((MPI.COMM_WORLD.size,), ("stages",)))
