"""The programs of `spmd.examples.bugs` are those on the page `docs/bugs.md`, and print what it says."""

import contextlib
import re
import runpy
import sys

import pytest

from spmd.examples import bugs
from tests.checks.launch import mpiexec
from tests.course.bug_page import FOLDER, NAMES, PAGE, blocks, run


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_program_and_what_it_prints(name):
    program, printed, *_ = blocks(name)
    assert program == (FOLDER / f"{name}.py").read_text()
    assert printed == run(name)


def test_the_page_and_the_docstring_have_all_programs():
    assert len(NAMES) == 10
    assert sorted(re.findall(r"`spmd/examples/bugs/(\w+)\.py`", PAGE.read_text())) == NAMES
    assert sorted(re.findall(r"^(\w+)  +\w", bugs.__doc__, re.M)) == sorted([*NAMES, "program"])


def test_a_deadlock_ends_the_job():
    """Where one rank alone has a new shape to compile, both ranks would wait forever; else one prints for all."""
    *_, printed = blocks("recompilation")
    job = mpiexec(2, "-m", "spmd.examples.bugs", "recompilation")
    message = "".join(line + "\n" for line in job.stderr.splitlines() if line.startswith("[rank 0]   "))
    assert job.returncode and job.stdout + message == printed


def test_the_list(capsys, monkeypatch):
    for arguments, end in (
        ((), None),
        (("--help",), None),
        (("no_such_bug",), "no_such_bug: there is no such program"),
    ):
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        with pytest.raises(SystemExit, match=end) if end else contextlib.nullcontext():
            runpy.run_module("spmd.examples.bugs", run_name="__main__")
        assert capsys.readouterr().out.startswith(bugs.__doc__)
