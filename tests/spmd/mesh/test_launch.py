"""The start of a process by a launcher: of this MPI, of another one, or without mpi4py."""

import os
import re
import subprocess
import sys

import pytest

import spmd
from collectives.backends.one_rank import LauncherError
from spmd.mesh import launch
from tests import PATIENCE


def run(*command, **variables):
    """A Python program, as a process that no launcher started, unless the variables say that one did."""
    outside = {k: v for k, v in os.environ.items() if k not in {*launch.LAUNCHERS, *launch.LAUNCHERS.values()}}
    env = {k: v for k, v in (outside | variables).items() if v is not None}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=PATIENCE)


def of_ranks(*command, ranks="02", **variables):
    """The first and another process of a job, in which each is alone: both fail."""
    name = "PMI_RANK" if "PMI_SIZE" in variables else "OMPI_COMM_WORLD_RANK"
    first, other = (run(*command, **variables, **{name: rank}) for rank in ranks)
    assert first.returncode == other.returncode == 1
    return first, other


@pytest.mark.parametrize(
    "variable, value, expected",
    [("PMI_SIZE", "4", 4), ("OMPI_COMM_WORLD_SIZE", "1", 1), ("SLURM_STEP_NUM_TASKS", "1", None)],
)
def test_launchers_are_recognized(monkeypatch, variable, value, expected):
    for name in launch.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert launch.launcher_size() == expected


def test_a_launcher_of_another_mpi_is_an_error_of_all_that_asks_for_ranks(monkeypatch):
    assert (spmd.process_index(), spmd.process_count(), spmd.barrier()) == (0, 1, None)
    monkeypatch.setenv("PMI_SIZE", "4")
    make = lambda: spmd.make_mesh((4,), ("i",))  # noqa: E731
    for f in (spmd.process_index, spmd.process_count, spmd.barrier, make):
        with pytest.raises(LauncherError, match="the launcher started 4 processes, but mpi4py sees 1"):
            f()


def test_a_launcher_of_another_mpi():
    """Each process then is alone in its world: the first of them says so."""
    pytest.importorskip("mpi4py")
    first, other = of_ranks("-m", "spmd", OMPI_COMM_WORLD_SIZE="5")
    assert other.stdout == other.stderr == "" and "an all-reduce" not in first.stdout
    assert "- the launcher started 5 processes, but mpi4py sees 1: mpi4py is built on another MPI" in first.stdout
    assert re.search(r"It is on .*: start the program with its own .*mpiexec\. Or .* MPI4PY_LIBMPI", first.stdout)


@pytest.mark.parametrize("library, how", [("MPICH 5.0.2, of MPI 5.0", "pmi2"), ("Open MPI v4.1.4, of MPI 3.1", "pmix")])
def test_another_interface_than_that_of_srun(monkeypatch, library, how):
    for name in launch.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    text = launch.other_launcher_message(library)
    assert (
        f"It is on {library.split(',')[0]}: " in text and f"write `srun --mpi={how}`" in text and "LIBMPI" not in text
    )


@pytest.mark.parametrize("command", [("-m", "spmd"), ("-c", "import spmd; spmd.make_mesh((3,), ('i',))")])
def test_an_mpi_that_would_end_the_process(command):
    """One that its launcher speaks to in a way that it does not know."""
    version = pytest.importorskip("mpi4py.MPI").Get_library_version()
    if not version.startswith("MPICH") or "pmix" in version:
        pytest.skip("this MPI starts, whoever the launcher is")
    pmix = {"OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "job", "PMIX_RANK": "0"}
    first, other = of_ranks(*command, **pmix)
    text = first.stdout + first.stderr
    assert other.stdout == other.stderr == "" and "the launcher started 3 processes, but mpi4py sees 1: " in text
    assert re.search(r"It is on MPICH [\d.]+\S*: start the program with its own .*mpiexec", text)


@pytest.mark.parametrize(
    "setting, asked, expected",
    [
        ("0", "MPI.Query_thread() == MPI.THREAD_MULTIPLE, mpi4py.rc.initialize", "True True"),
        ("mpi4py.rc.thread_level = 'serialized'", "MPI.Query_thread() == MPI.THREAD_SERIALIZED", "True"),
        ("from mpi4py import MPI", "MPI.Is_initialized()", "True"),
    ],
)
def test_mpi_starts_as_mpi4py_was_told(setting, asked, expected):
    """Whatever mpi4py.rc says holds, as if mpi4py.MPI had been imported itself."""
    pytest.importorskip("mpi4py")
    done = run(
        "-c", f"import mpi4py; {setting}; from collectives.backends import mpi; from mpi4py import MPI; print({asked})"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


WITHOUT_MPI = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mpi4py":
            raise {}
sys.meta_path.insert(0, Missing())
{}
"""


@pytest.mark.parametrize("why", ["ImportError('no module mpi4py')", "RuntimeError('cannot load MPI library')"])
def test_without_mpi(why):
    """mpi4py is not there, or finds no MPI: an error of ranks, a remark for one who has none."""
    program = WITHOUT_MPI.format(why, "from spmd.__main__ import main; sys.exit(main([]))")
    alone, ranks = run("-c", program), run("-c", program, PMI_SIZE="2", PMI_RANK="0")
    assert alone.returncode == 0 and "Problems:" not in alone.stdout
    assert re.search(r"^MPI library +none can be loaded", alone.stdout, re.M)
    assert ranks.returncode == 1 and "`pip install mpi4py mpich`" in ranks.stdout
    assert "- an MPI launcher started this process as one of 2, but mpi4py cannot be imported" in ranks.stdout


def test_the_first_process_without_mpi4py_shows_where():
    program = WITHOUT_MPI.format("ImportError('no module mpi4py')", "import spmd; spmd.make_mesh((4,), ('i',))")
    first, other = of_ranks("-c", program, PMI_SIZE="4")
    assert "Traceback" in first.stderr and "`pip install mpi4py mpich`" in first.stderr
    assert other.stderr.startswith("[rank 2] ImportError: an MPI launcher started this process as one of 4, but mpi4py")
    assert other.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["spmd", "spmd.examples.pipeline"])
def test_help_is_shown_once(program):
    first, other = (run("-m", program, "--help", PMI_SIZE="2", PMI_RANK=rank) for rank in "01")
    assert first.returncode == other.returncode == 0
    assert first.stdout.startswith("usage: ") and other.stdout == other.stderr == ""


def test_ranks_share_the_processors_for_the_threads_of_numpy():
    program = (
        "from spmd.mesh.launch import share_processors, usable_processors as u; print(share_processors(), len(u()))"
    )
    shared = lambda **variables: run("-c", program, **{"OMP_NUM_THREADS": None, **variables}).stdout.split()  # noqa: E731
    ours, processors = shared(OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert ours == str(max(1, int(processors) // 2))
    assert shared(PMI_SIZE="64")[0] == str(max(1, int(processors) // 64))
    assert shared(PMI_SIZE="64", OMP_NUM_THREADS="3")[0] == shared()[0] == "None"
