"""Fixtures of the tests on MPI ranks."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def path():
    """A directory that all ranks have, and nobody else."""
    from mpi4py.MPI import COMM_WORLD as WORLD

    found = tempfile.TemporaryDirectory() if WORLD.rank == 0 else None
    yield Path(WORLD.bcast(found and found.name))
    WORLD.barrier()
    if found:
        found.cleanup()
