"""The page on topics: its commands select tests, and its programs and pages print what it says."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \| `python -m (.+?)` \| (.+?) \| (.+) \|$", (ROOT / "docs/topics.md").read_text(), re.M)
TESTS = [shlex.split(command)[1:] for _, command, _, _ in ROWS if command.startswith("pytest ")]
QUOTES = {(command, quote) for _, command, prints, _ in ROWS for quote in re.findall(r"`(.+?)`", prints)}
EXAMPLES = sorted({command for command, _ in QUOTES if command.startswith("spmd.examples.")})


def test_every_row_has_four_columns():
    lines = [line for line in (ROOT / "docs/topics.md").read_text().splitlines() if re.match(r"\|(?!---| topic)", line)]
    assert len(ROWS) == len(lines) > 40


def test_commands_select_tests():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *{path for path, *_ in TESTS}]
    actual = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout.splitlines()
    for path, *options in TESTS:
        tests = [line for line in actual if line.startswith(path)]
        names = options[1].split(" or ") if options else [""]
        assert all(any(name in line for line in tests) for name in names), (path, names)
    assert len(TESTS) > 25


def test_files_have_what_they_print():
    for command, quote in QUOTES:
        name, path = (*shlex.split(command), "")[:2]
        if name == "pytest" and path.startswith("docs/"):
            assert quote in (ROOT / path).read_text(), (path, quote)
        assert importlib.util.find_spec(name)


@pytest.mark.parametrize("command", EXAMPLES)
def test_programs_print_what_the_page_says(command, capsys):
    """And nothing that they compare differs: neither with another program, nor with one rank."""
    module, *options = shlex.split(command)
    importlib.import_module(module).main(options)
    shown = capsys.readouterr().out
    for quote in (quote for row, quote in QUOTES if row == command):
        assert quote in shown
    assert "NO" not in shown.split()
    alone = [line.rpartition(": ")[2].split() for line in shown.splitlines() if "(one rank)" in line]
    assert all(value == whole for value, whole, *_ in alone)
