"""Fixtures of the tests on MPI ranks.

Each test runs on the numbers of ranks that show something new. Parallelisms run on two and four, and on eight those
of several axes and those that take little time; what they compute on all meshes and with all options is checked on
simulated ranks.
"""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def path():
    """A directory that all ranks have, and nobody else."""
    from mpi4py.MPI import COMM_WORLD as WORLD

    actual = tempfile.TemporaryDirectory() if WORLD.rank == 0 else None
    yield Path(WORLD.bcast(actual and actual.name))
    WORLD.barrier()
    if actual:
        actual.cleanup()
