"""Under mpiexec, every rank runs pytest: rank 0 speaks, another only if one of its tests failed."""

import io
import sys

import pytest
from mpi4py import MPI


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if MPI.COMM_WORLD.rank:
        config.pluginmanager.getplugin("terminalreporter")._tw._file = io.StringIO()


def pytest_unconfigure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if MPI.COMM_WORLD.rank and reporter.stats.keys() & {"failed", "error"}:
        sys.stderr.write(f"on rank {MPI.COMM_WORLD.rank}:\n{reporter._tw._file.getvalue()}\n")
