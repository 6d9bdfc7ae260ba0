"""Operations of a tape that are placed on MPI ranks: numbers of the tape, a send for each cut edge."""

import pytest
from mpi4py import MPI

from tests import placed_programs as programs


@pytest.mark.parallel([2, 4])
def test_placed_operations_are_those_of_the_tape():
    for name in programs.PROGRAMS:
        programs.check_placed(name, MPI.COMM_WORLD.size)
