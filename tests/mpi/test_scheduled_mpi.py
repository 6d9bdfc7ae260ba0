"""Pipelines that follow a schedule, on MPI ranks: each rank runs its own step of a tick, and none that others do."""

import pytest

import spmd
from tests import networks


@pytest.mark.parallel([2, 4, 8])
@pytest.mark.parametrize("name", networks.SCHEDULES)
def test_loss_and_gradients_are_those_of_the_whole_network(name):
    stages = spmd.make_mesh((-1,), ("stages",))
    microbatches = stages.size if name == "interleaved" else 4  # which needs groups of as many as there are stages
    networks.check_schedule(name, max(4, microbatches), stages)
