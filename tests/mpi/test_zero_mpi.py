"""ZeRO's stages on MPI ranks: the whole network's training, communication and memory as documented."""

import pytest
from mpi4py import MPI

from tests.zero_programs import STAGES, check_communication, check_memory, check_training

everywhere = pytest.mark.parallel([2, 4, 8])


@everywhere
@pytest.mark.parametrize("stage", STAGES)
def test_training_communication_and_memory(stage):
    ranks = MPI.COMM_WORLD.size
    for microbatches, optimizer in ((1, "clipped"), (2, "adam"))[ranks > 2 :]:
        check_training(stage, microbatches, ranks, optimizer=optimizer)
    check_communication(stage, 2, ranks)
    check_memory(stage, ranks)
