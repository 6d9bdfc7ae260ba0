"""`python -m spmd`: what it finds alone, on ranks, and where something is off."""

import os
import pkgutil
import re
import subprocess
import sys

import numpy
import pytest

import minidiff as md
import spmd
from spmd.__main__ import OTHER_PROJECT, Process, _by_host, _sharing_problems
from spmd.mesh import launch
from tests import PATIENCE
from tests.checks.launch import mpiexec

HERE = [0, "here", {0, 1, 2, 3}, "1", ("3.11", "2.0", "0.1")]


def run(*before, **variables):
    """`python -m spmd` as a process that no launcher started, unless the variables say that one did."""
    outside = {k: v for k, v in os.environ.items() if k not in {*launch.LAUNCHERS, *launch.LAUNCHERS.values()}}
    command = [sys.executable, *before] if before else [sys.executable, "-m", "spmd"]
    return subprocess.run(command, env=outside | variables, capture_output=True, text=True, timeout=PATIENCE)


def test_alone():
    done = run()
    assert done.returncode == 0 and not done.stderr
    for name, text in [
        ("minidiff", re.escape(md.__version__)),
        ("NumPy", re.escape(numpy.__version__)),
        ("launcher", "none: "),
        ("ranks", "1, on 1 machine"),
        ("backend", "simulated, since no MPI launcher .* mpirun -n 4 python -m spmd"),
        ("an all-reduce", "over 4 simulated ranks: right"),
    ]:
        assert re.search(rf"^{name} +{text}", done.stdout, re.M), (name, done.stdout)
    assert "Problems:" not in done.stdout


def test_another_project_of_the_same_name(tmp_path):
    (tmp_path / "collectives-0.0.1.dist-info").mkdir()
    (tmp_path / "collectives-0.0.1.dist-info" / "METADATA").write_text("Name: collectives\nVersion: 0.0.1\n")
    done = run(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 0 and f"Problems:\n- {OTHER_PROJECT}\n" in done.stdout


def test_on_ranks_it_speaks_once():
    done = mpiexec(3, "-m", "spmd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("minidiff ") == 1
    assert re.search(r"^ranks +3, on 1 machine$", done.stdout, re.M)
    assert re.search(r"^backend +mpi, since an MPI launcher", done.stdout, re.M)
    assert re.search(r"^an all-reduce +over 3 mpi ranks: right", done.stdout, re.M)
    assert re.search(r"^\S+ +0-2 +\d+ ", done.stdout, re.M)


def test_a_launcher_of_another_mpi():
    """Each process then is alone in its world: the first of them says so."""
    pytest.importorskip("mpi4py")
    variables = {"OMPI_COMM_WORLD_SIZE": "5"}
    first, other = (run(**variables, OMPI_COMM_WORLD_RANK=rank) for rank in "03")
    assert first.returncode == other.returncode == 1 and other.stdout == other.stderr == ""
    assert "- the launcher started 5 processes, but mpi4py sees 1: mpi4py is built on another MPI" in first.stdout
    assert "an all-reduce" not in first.stdout
    assert re.search(r"It is on .*: start the program with its own .*mpiexec\. Or .* MPI4PY_LIBMPI", first.stdout)


@pytest.mark.parametrize("library, how", [("MPICH 5.0.2, of MPI 5.0", "pmi2"), ("Open MPI v4.1.4, of MPI 3.1", "pmix")])
def test_another_interface_than_that_of_srun(monkeypatch, library, how):
    for name in launch.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    text = launch.other_launcher_message(library)
    assert f"sees 1: mpi4py is built on another MPI than the launcher's. It is on {library.split(',')[0]}: " in text
    assert f"write `srun --mpi={how}`" in text and "LIBMPI" not in text


PMIX = {"OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "job", "PMIX_RANK": "0"}


def without_pmix():
    """Whether the MPI here is an MPICH that ends each process that a launcher with PMIx started."""
    version = pytest.importorskip("mpi4py.MPI").Get_library_version()
    return version.startswith("MPICH") and "pmix" not in version


@pytest.mark.parametrize("command", [("-m", "spmd"), ("-c", "import spmd; spmd.make_mesh((3,), ('i',))")])
def test_an_mpi_that_would_end_the_process(command):
    """One that its launcher speaks to in a way that it does not know."""
    if not without_pmix():
        pytest.skip("this MPI starts, whoever the launcher is")
    first, other = (run(*command, **PMIX, OMPI_COMM_WORLD_RANK=rank) for rank in "02")
    assert first.returncode == other.returncode == 1 and other.stdout == other.stderr == ""
    assert "the launcher started 3 processes, but mpi4py sees 1: " in first.stdout + first.stderr
    assert re.search(r"It is on MPICH [\d.]+\S*: start the program with its own .*mpiexec", first.stdout + first.stderr)


def test_mpi_starts_as_mpi4py_was_told():
    """Whatever mpi4py.rc says holds, as if mpi4py.MPI had been imported itself."""
    pytest.importorskip("mpi4py")
    program = "import mpi4py; {}; from collectives.backends import mpi; from mpi4py import MPI; print({})"
    for message, asked, expected in [
        ("0", "MPI.Query_thread() == MPI.THREAD_MULTIPLE, mpi4py.rc.initialize", "True True"),
        ("mpi4py.rc.thread_level = 'serialized'", "MPI.Query_thread() == MPI.THREAD_SERIALIZED", "True"),
        ("from mpi4py import MPI", "MPI.Is_initialized()", "True"),
    ]:
        done = run("-c", program.format(message, asked))
        assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_processors_that_ranks_are_bound_to():
    """Each to its own: between them, they have all of these."""
    bound = [("here", {0}), ("here", {1}), ("here", {1}), ("there", {0, 1, 2})]
    ranks = [Process(*HERE)._replace(rank=r, host=host, usable=usable) for r, (host, usable) in enumerate(bound)]
    assert [(host, n) for host, _, n in _by_host(ranks)] == [("here", 2), ("there", 3)]


@pytest.mark.parametrize("why", ["ImportError('no module mpi4py')", "RuntimeError('cannot load MPI library')"])
def test_without_mpi(why):
    """mpi4py is not there, or finds no MPI: an error of ranks, a remark for one who has none."""
    program = f"""
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mpi4py":
            raise {why}
sys.meta_path.insert(0, Missing())
from spmd.__main__ import main
sys.exit(main([]))
"""
    alone, ranks = run("-c", program), run("-c", program, PMI_SIZE="2", PMI_RANK="0")
    assert alone.returncode == 0 and "Problems:" not in alone.stdout
    assert re.search(r"^MPI library +none can be loaded", alone.stdout, re.M)
    assert ranks.returncode == 1
    assert "- an MPI launcher started this process as one of 2, but mpi4py cannot be imported" in ranks.stdout
    assert "`pip install mpi4py mpich`" in ranks.stdout


@pytest.mark.parametrize(
    "others, expected",
    [
        ([], []),
        ([{"rank": 1}], []),
        ([{"rank": 1, "host": "there"}], []),
        ([{"rank": r} for r in range(1, 5)], ["5 ranks share 4 processors of here"]),
        ([{"rank": 1, "versions": ("3.10", "2.0", "0.1")}], ["not all ranks .* rank 1: Python 3.10, NumPy 2.0"]),
    ],
)
def test_what_is_off_about_ranks(others, expected):
    first = Process(*HERE)
    actual = list(_sharing_problems([first, *[first._replace(**changes) for changes in others]]))
    assert len(actual) == len(expected)
    assert all(map(re.search, expected, actual))


def test_threads_that_are_not_limited():
    processes = [Process(*HERE)._replace(rank=r, threads="") for r in range(2)]
    assert re.search(
        "2 ranks on here may each start threads for all 4 processors: `pip install", *_sharing_problems(processes)
    )


@pytest.mark.parametrize("program", ["spmd", "spmd.examples.pipeline"])
def test_help_is_shown_once(program):
    first, other = (run("-m", program, "--help", PMI_SIZE="2", PMI_RANK=rank) for rank in "01")
    assert first.returncode == other.returncode == 0
    assert first.stdout.startswith("usage: ") and other.stdout == other.stderr == ""


def test_help():
    done = run("-m", "spmd", "--help")
    assert done.returncode == 0 and "which backend is chosen and why" in " ".join(done.stdout.split())


def test_version():
    assert run("-m", "spmd", "--version").stdout == f"minidiff {md.__version__}\n"


@pytest.mark.parametrize("program", [["nosuch.py"], ["-m", "nosuch"], ["-m", "no.such"], []])
def test_a_program_that_is_not_there(program):
    done = run("-m", "spmd", "run", *program)
    assert done.returncode == 2 and done.stderr.startswith("usage: python -m spmd run [options] script.py")
    assert "Traceback" not in done.stderr and (not program or f"'{program[-1]}' in " in done.stderr)


def test_a_program_gets_its_own_options(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)")
    assert run("-m", "spmd", "run", str(script), "--help", "-m", "3").stdout == "['--help', '-m', '3'] __main__\n"
    assert run("-m", "spmd", "run", "--help").stdout.startswith("usage: python -m spmd run [options] script.py")


def test_examples_are_listed():
    listed = run("-m", "spmd.examples").stdout
    shared = {"digits", "fields", "fitted_constants", "loop", "megatron_3d", "published", "ring_products", "study"}
    scripts = {f.name for f in pkgutil.iter_modules(spmd.examples.__path__)} - {"text", "three_ways", "__main__"}
    assert all(re.search(rf"^{name} +[0-9].* [0-9]+  ", listed, re.M) for name in scripts - shared)


def test_ranks_share_the_processors_for_the_threads_of_numpy():
    script = (
        "from spmd.mesh.launch import share_processors, usable_processors as u; print(share_processors(), len(u()))"
    )

    def shared(**variables):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | variables
        out = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return out.stdout.split()

    ours, processors = shared(OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    assert ours == str(max(1, int(processors) // 2))
    assert shared(PMI_SIZE="64")[0] == str(max(1, int(processors) // 64))
    assert shared(PMI_SIZE="64", OMP_NUM_THREADS="3")[0] == shared()[0] == "None"
