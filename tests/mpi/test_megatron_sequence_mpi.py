"""Transformers whose tokens are split between half layers, on MPI ranks."""

import pytest
from mpi4py import MPI

import spmd
from tests.sequence_transformers import check_numbers_and_communication
from tests.transformers import AXIS, WIDE


@pytest.mark.parallel([2, 4, 8])
def test_numbers_and_communication():
    check_numbers_and_communication(WIDE, spmd.make_mesh((MPI.COMM_WORLD.size,), (AXIS,)))
