"""The groups that `make test` runs, even after a failure, and its summary."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_all

PASSES, FAILS, FINDS_NONE = ([sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 1, 5))
WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


def run(commands, capfd, monkeypatch, *options):
    """The summary of these groups, by name, and the exit code."""
    monkeypatch.setattr(run_all, "groups", lambda *_: commands)
    monkeypatch.setattr(sys, "argv", ["", *options])
    with pytest.raises(SystemExit) as exit:
        run_all.main()
    shown = re.findall(r"^(\w+) +\d+\.\d s  (.+)$", capfd.readouterr().out, re.M)
    return dict(shown), int(exit.value.code)


def test_what_fails_hides_nothing(capfd, monkeypatch):
    actual = run({"one": PASSES, "two": FAILS, "three": PASSES}, capfd, monkeypatch)
    assert actual == ({"one": "passed", "two": "FAILED: exit code 1", "three": "passed"}, 1)
    assert run({"one": PASSES}, capfd, monkeypatch) == ({"one": "passed"}, 0)


def test_a_group_without_tests_fails_unless_some_were_asked_for(capfd, monkeypatch):
    assert run({"one": FINDS_NONE}, capfd, monkeypatch) == ({"one": "FAILED: no tests"}, 1)
    assert run({"one": FINDS_NONE}, capfd, monkeypatch, "-k", "sum") == ({"one": "no such tests"}, 0)


def test_a_group_that_hangs_is_ended(capfd, monkeypatch):
    actual = run({"one": WAITS, "two": WAITS}, capfd, monkeypatch, "--limit", "0.1")
    assert actual == (dict.fromkeys(("one", "two"), "FAILED: did not end in 0 s"), 1)


def test_ctrl_c_ends_all():
    """The terminal tells all processes of it: here, the group of the first one."""
    program = (
        "import sys; from tests import run_all\n"
        "ends = 'import os, signal; os.killpg(0, signal.SIGINT); signal.pause()'\n"
        "run_all.groups = lambda *_: {'one': [sys.executable, '-c', ends], 'two': ['echo', 'goes on']}\n"
        "run_all.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True)
    assert done.returncode == -signal.SIGINT and "goes on" not in done.stdout


def test_what_is_quick_exists():
    for path in (*run_all.QUICK, *run_all.QUICK_ON_RANKS):
        assert (Path(__file__).parents[2] / path).is_file(), path


def test_what_is_slow_exists():
    """Each line, in order, names a function of a file, a page, or a module whose docstrings have examples."""
    lines = (Path(__file__).parents[1] / "slow.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, test = line.partition("::")
        source = (Path(__file__).parents[2] / path).read_text()
        shown = test.startswith(path[:-3].replace("/", ".")) or test == Path(path).name
        assert shown or f"def {test.partition('[')[0]}(" in source, line


def test_slow_tests_are_left_out_or_run_alone():
    slow = "tests/house/test_names.py::test_functions_that_modules_share_are_verbs_or_nouns"
    path = slow.partition("::")[0]
    collect = f"for option in ['--co', '--fast', '--slow']: pytest.main([option, '-q', '--co', '{path}'])"
    shown = subprocess.run([sys.executable, "-c", f"import pytest\n{collect}"], capture_output=True, text=True).stdout
    everything, fast, only_slow = (set(re.findall(".*::.*", part)) for part in shown.split(" collected")[:3])
    assert slow in only_slow and fast and fast == everything - only_slow


def test_ci_runs_the_commands_of_the_first_screen():
    """The commands are those of README's first screen, as they are written there; CI runs the one that tests."""
    root = Path(__file__).parents[2]
    first_screen = "".join((root / "README.md").read_text().splitlines(True)[:40])
    commands = re.findall(r"^\$ (make \S+)", first_screen, re.M)
    assert commands[:2] == ["make demo", "make test"]
    assert "make test\n" in (root / ".ci" / "run").read_text()
