"""`python -m spmd`: what it finds alone, on ranks, and where something is off."""

import os
import pkgutil
import re

import numpy
import pytest

import minidiff as md
import spmd
from spmd.__main__ import OTHER_PROJECT, Process, _sharing_problems
from tests.checks.launch import mpiexec
from tests.spmd.mesh.test_launch import run


def check_rows(done, **expected):
    assert done.returncode == 0, done.stderr
    for name, text in expected.items():
        assert re.search(rf"^{name.replace('_', ' ')} +{text}", done.stdout, re.M), (name, done.stdout)


def test_alone():
    done = run("-m", "spmd")
    versions = {"minidiff": re.escape(md.__version__), "NumPy": re.escape(numpy.__version__), "launcher": "none: "}
    backend = "simulated, since no MPI launcher .* mpirun -n 4 python -m spmd"
    check_rows(done, **versions, ranks="1, on 1 machine", backend=backend)
    assert re.search("^an all-reduce +over 4 simulated ranks: right", done.stdout, re.M)
    assert not done.stderr and "Problems:" not in done.stdout


def test_on_ranks_it_speaks_once():
    """Each is bound to processors, or shares them; and may start threads for all, which is a problem."""
    done = mpiexec(3, "-m", "spmd")
    check_rows(done, ranks="3, on 1 machine$", backend="mpi, since an MPI launcher")
    assert re.search(r"^an all-reduce +over 3 mpi ranks: right", done.stdout, re.M)
    assert done.stdout.count("minidiff ") == 1 and re.search(r"^\S+ +0-2 +\d+ ", done.stdout, re.M)


def test_another_project_of_the_same_name(tmp_path):
    (tmp_path / "collectives-0.0.1.dist-info").mkdir()
    (tmp_path / "collectives-0.0.1.dist-info" / "METADATA").write_text("Name: collectives\nVersion: 0.0.1\n")
    done = run("-m", "spmd", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 0 and f"Problems:\n- {OTHER_PROJECT}\n" in done.stdout


def test_help_and_version():
    assert "which backend is chosen and why" in " ".join(run("-m", "spmd", "--help").stdout.split())
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


HERE = Process(0, "here", {0, 1, 2, 3}, "1", ("3.11", "2.0", "0.1"))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ([], []),
        ([{}], []),
        ([{"host": "there"}], []),
        ([{}] * 4, ["5 ranks share 4 processors of here"]),
        ([{"usable": {4}}] * 4, []),
        ([{"versions": ("3.10", "2.0", "0.1")}], ["not all ranks .* rank 1: Python 3.10, NumPy 2.0"]),
        ([{"threads": ""}], ["ranks on here may each start threads for all 4 processors: `pip install"]),
    ],
)
def test_what_is_off_about_ranks(changes, expected):
    others = [HERE._replace(rank=rank, **change) for rank, change in enumerate(changes, 1)]
    first = HERE._replace(threads="") if any("threads" in c for c in changes) else HERE
    actual = list(_sharing_problems([first, *others]))
    assert len(actual) == len(expected) and all(map(re.search, expected, actual)), actual
