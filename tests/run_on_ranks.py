"""Run the tests on MPI ranks, those for several numbers of ranks in one launch.

    mpiexec -n 4 python -m tests.run_on_ranks 4 3 2 1 [options of pytest]

Tests for n ranks run on the first n of the launch, in a session of pytest in which these ranks are all that there are.
The others sleep meanwhile. So processes start, and import what they need, once for all of these sessions.
"""

import itertools
import os
import sys
import time
from collections.abc import Sequence

import pytest
from mpi4py import MPI

LAUNCHED = MPI.COMM_WORLD
PAUSE = 0.01  # seconds between two looks of a rank that sleeps


class Marks:
    """A plugin that declares the marks of mpi-pytest, which does so in the first session of a process alone."""

    @staticmethod
    def pytest_configure(config: pytest.Config) -> None:
        for ranks in range(1, LAUNCHED.size + 1):
            config.addinivalue_line("markers", f"parallel[{ranks}]: a test on this number of ranks")


def run(ranks: int, options: Sequence[str]) -> int:
    """Run the tests for this number of ranks, and return pytest's exit code; 0 on a rank that sleeps."""
    comm = LAUNCHED.Split(LAUNCHED.rank >= ranks)
    code = 0
    if LAUNCHED.rank < ranks:
        if ranks < LAUNCHED.size:
            make_world(comm)
        for name in [name for name in sys.modules if name.startswith("tests.mpi.")]:
            del sys.modules[name]  # when they are imported, they ask for the number of ranks
        ignored = "-Wignore::pytest.PytestAssertRewriteWarning"  # of what the session before has imported
        code = int(pytest.main(["-m", f"parallel[{ranks}]", ignored, *options], [Marks()]))
    over = LAUNCHED.Ibarrier()
    while not over.Test():
        time.sleep(PAUSE)
    return code


def make_world(comm: MPI.Comm) -> None:
    """Let `comm` be all ranks: for tests, for the library, and as far as the launcher says."""
    from spmd.mesh.launch import launcher_variable

    MPI.COMM_WORLD = comm
    if variable := launcher_variable():
        os.environ[variable] = str(comm.size)


def main() -> int:
    """Run all sessions, and return the exit code of the first that fails."""
    sizes = list(itertools.takewhile(str.isdigit, sys.argv[1:]))
    codes = [run(int(n), sys.argv[1 + len(sizes) :]) for n in sizes]
    passed = 0, pytest.ExitCode.NO_TESTS_COLLECTED
    return next((c for c in codes if c not in passed), min(codes))


if __name__ == "__main__":
    sys.exit(main())
