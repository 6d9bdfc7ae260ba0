"""The start of a process by a launcher: of this MPI, of another one, or without mpi4py; the page `../launches.md`."""

from pathlib import Path

import pytest

import spmd
from collectives.backends.one_rank import LauncherError
from spmd.mesh import launch
from tests.checks.samples import each
from tests.checks.sessions import check_session, read_sessions

SESSIONS = read_sessions(Path(__file__).parents[1] / "launches.md")


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions(name, tmp_path):
    version = pytest.importorskip("mpi4py.MPI").Get_library_version()
    if "MPICH" in name and (not version.startswith("MPICH") or "pmix" in version):
        pytest.skip("this MPI starts, whoever the launcher is")
    check_session(SESSIONS[name], tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """Set variables of a launcher, and no others."""

    def launched(**variables):
        for name in launch.LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launched


@each(
    "variable, value, expected",
    [("PMI_SIZE", "4", 4), ("OMPI_COMM_WORLD_SIZE", "1", 1), ("SLURM_STEP_NUM_TASKS", "1", None)],
)
def test_launchers_are_recognized(launched, variable, value, expected):
    launched(**{variable: value})
    assert launch.launcher_size() == expected


def test_a_launcher_of_another_mpi_is_an_error_of_all_that_asks_for_ranks(launched):
    assert (spmd.process_index(), spmd.process_count(), spmd.barrier()) == (0, 1, None)
    launched(PMI_SIZE="4")
    for f in (spmd.process_index, spmd.process_count, spmd.barrier, lambda: spmd.make_mesh((4,), ("i",))):
        with pytest.raises(LauncherError):
            f()


@each("library, how", [("MPICH 5.0.2, of MPI 5.0", "pmi2"), ("Open MPI v4.1.4, of MPI 3.1", "pmix")])
def test_another_interface_than_that_of_srun(launched, library, how):
    launched(SLURM_STEP_NUM_TASKS="4")
    text = launch.other_launcher_message(library)
    assert f"It is on {library.split(',')[0]}: " in text and f"`srun --mpi={how}`" in text and "LIBMPI" not in text


def test_ranks_share_the_processors_for_the_threads_of_numpy(launched, monkeypatch):
    share, limits, count = launch.share_processors.__wrapped__, [], len(launch.usable_processors())
    monkeypatch.setattr(pytest.importorskip("threadpoolctl"), "threadpool_limits", limits.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert share() is None
    launched(OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert share() == max(1, count // 2)
    launched(PMI_SIZE="64")
    assert share() == max(1, count // 64) and len(limits) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share() is None
