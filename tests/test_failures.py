"""Ranks that fail: the job ends, soon, with one traceback that says which rank it was."""

import os
import shutil
import subprocess
import sys
import time

import pytest

SETUP = """
import numpy as np
import spmd
from collectives import psum
from spmd import P
"""
RUN = """
mesh = spmd.make_mesh((4,), ("i",))
total = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
total(np.ones(4))
"""

FAILURES = {
    # what goes wrong: (program, rank that speaks, last line of its traceback)
    "on one rank, while the others wait in a psum": (
        SETUP + RUN + "if mesh.rank == 2: raise RuntimeError('no such file')\n" + "total(np.ones(4))",
        2,
        "RuntimeError: no such file",
    ),
    "on one rank, in a body": (
        SETUP
        + RUN
        + "f = lambda x: psum(x / (1 if mesh.rank != 3 else 'three'), 'i')\n"
        + "spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.ones(4))",
        3,
        "TypeError: ",
    ),
    "on one rank, before there is a mesh": (
        SETUP + "import os\nif os.environ['PMI_RANK'] == '1': raise KeyError('data')\n" + RUN,
        1,
        "KeyError: 'data'",
    ),
    "on all ranks": (SETUP + RUN + "total(np.ones(5))", 0, "ValueError: args[0] has shape (5,)"),
    "a mesh of another size than there are ranks": (
        SETUP + "spmd.make_mesh((4, 2), ('x', 'y'))",
        0,
        "ValueError: make_mesh: a mesh of 4 x 2 needs 8 ranks, but MPI has 4. Start the program with `mpirun -n 8`",
    ),
}


def launching(ranks, *command):
    """A process that runs a Python command on ranks, as a user does: outside of what this process knows of MPI.

    The launcher is that of this Python's own MPI, if it has one. With None for ranks there is no launcher.
    """
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI", "HYDRA"))}
    launched = [launcher, "-n", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*launched, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def mpiexec(ranks, *command, timeout=60):
    """What came of a command on ranks."""
    with launching(ranks, *command) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


@pytest.mark.parametrize("what", FAILURES)
def test_the_job_ends(what):
    program, rank, message = FAILURES[what]
    start = time.monotonic()
    run = mpiexec(4, "-c", program)
    assert run.returncode != 0
    assert time.monotonic() - start < 10
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert f"[rank {rank}] {message}" in run.stderr
    assert f"[rank {rank}] rank {rank} of 4 failed; the job ends." in run.stderr


def test_a_job_that_succeeds_exits_with_zero():
    run = mpiexec(4, "-c", SETUP + RUN + "if mesh.rank == 3: print(mesh.backend, mesh.calls)")
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "mpi {'psum': 1}\n")


def test_asarray_of_what_is_elsewhere():
    program = (
        SETUP
        + RUN
        + (
            "y = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.arange(4.0))\n"
            "assert 'rank %d at mesh coordinates (i,) = (%d,) has' % (mesh.rank, mesh.rank) in repr(y)\n"
            "assert y.gather().tolist() == [0.0, 1.0, 2.0, 3.0]\n"
            "np.asarray(y)\n"
        )
    )
    run = mpiexec(4, "-c", program)
    assert run.returncode != 0
    assert "is split over the ranks of Mesh(i: 4; 4 ranks, mpi) as P('i')" in run.stderr
    assert "Call .gather() on every rank" in run.stderr
