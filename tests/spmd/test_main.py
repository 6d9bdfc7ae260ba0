"""`python -m spmd`: its options, and where something is off; `launches.md` shows what it prints."""

import pkgutil
import re
import runpy
import sys

import pytest

import minidiff as md
import spmd
from spmd.__main__ import OTHER_PROJECT, Process, _sharing_problems, main
from tests.checks.samples import each


@pytest.fixture
def shown(monkeypatch, capsys):
    """Call `main` with arguments and variables; return its exit code, and what it prints."""

    def call(*argv, **variables):
        monkeypatch.setattr(sys, "path", [*sys.path])
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                code = main([*map(str, argv)])
            except SystemExit as end:
                code = end.code
        return code, "".join(capsys.readouterr())

    return call


def test_another_project_of_the_same_name(tmp_path, shown, monkeypatch):
    (tmp_path / "collectives-0.0.1.dist-info").mkdir()
    (tmp_path / "collectives-0.0.1.dist-info" / "METADATA").write_text("Name: collectives\nVersion: 0.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, text = shown()
    assert code == 0 and f"Problems:\n- {OTHER_PROJECT}\n" in text


def test_help_and_version(shown):
    assert shown("--version") == (0, f"minidiff {md.__version__}\n")
    assert "which backend is chosen and why" in " ".join(shown("--help")[1].split())


MPI, SRUN = {"PMI_SIZE": "2", "PMI_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}

#: Arguments of `run` and variables; what is said. None stands for a script that is there.
REFUSED = [
    (["nosuch.py"], {}, "there is no script 'nosuch.py' in "),
    (["-m", "nosuch"], {}, "there is no module 'nosuch' in "),
    (["-m", "no.such"], {}, "there is no module 'no.such' in "),
    ([], {}, "arguments are required: program"),
    (["-n", 0, None], {}, "-n must be at least 1, and --restarts at least 0"),
    (["-n", 2, "--restarts", 3, None], MPI, "the launcher has started ranks. Without the launcher: .* -n 2 "),
    (["--restarts", 3, None], MPI | {"MPI_LOCALNRANKS": "1"}, "on several machines, none can. .* run -n 2 "),
    (["--restarts", 3, None], SRUN, "under srun, or on several machines, none can. "),
    (["-n", 2, None], {"PATH": ""}, "there is no mpiexec, .*`pip install mpi4py"),
]


@each("argv, variables, message", REFUSED)
def test_programs_and_options_that_cannot_be(argv, variables, message, shown, tmp_path, monkeypatch):
    (tmp_path / "script.py").touch()
    if "PATH" in variables:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, text = shown("run", *[tmp_path / "script.py" if x is None else x for x in argv], **variables)
    assert code == 2 and text.startswith("usage: python -m spmd run [options] script.py"), text
    assert re.search(message, " ".join(text.split())), text


def test_examples_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["spmd.examples"])
    runpy.run_module("spmd.examples", run_name="__main__", alter_sys=True)
    listed = capsys.readouterr().out
    shared = {"digits", "fields", "fitted_constants", "loop", "megatron_3d", "published", "ring_products", "study"}
    scripts = {f.name for f in pkgutil.iter_modules(spmd.examples.__path__)} - {"text", "three_ways", "__main__"}
    assert all(re.search(rf"^{name} +[0-9].* [0-9]+  ", listed, re.M) for name in scripts - shared)


HERE = Process(0, "here", {0, 1, 2, 3}, "1", ("3.11", "2.0", "0.1"))

#: What is different about the other ranks, and what is said of it.
PROBLEMS = [
    ([], []),
    ([{}], []),
    ([{"host": "there"}], []),
    ([{}] * 4, ["5 ranks share 4 processors of here"]),
    ([{"usable": {4}}] * 4, []),
    ([{"versions": ("3.10", "2.0", "0.1")}], ["not all ranks .* rank 1: Python 3.10, NumPy 2.0"]),
    ([{"threads": ""}], ["ranks on here may each start threads for all 4 processors: `pip install"]),
]


@each("changes, expected", PROBLEMS)
def test_what_is_off_about_ranks(changes, expected):
    others = [HERE._replace(rank=rank, **change) for rank, change in enumerate(changes, 1)]
    first = HERE._replace(threads="") if any("threads" in c for c in changes) else HERE
    actual = list(_sharing_problems([first, *others]))
    assert len(actual) == len(expected) and all(map(re.search, expected, actual)), actual
