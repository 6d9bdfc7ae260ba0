"""The studies: what their programs print; and where each module of `spmd.examples` is tested."""

import pkgutil
import re
from pathlib import Path

import pytest

from spmd import examples
from tests.programs.examples import PRINTED, print_study

MODULES = {info.name for info in pkgutil.iter_modules(examples.__path__)}


@pytest.mark.parametrize("name", PRINTED)
def test_what_the_program_prints(name, capsys):
    out = print_study(name, ["--ranks", "4"], capsys)
    assert PRINTED[name] in out and "NO" not in out
    lines = [line.rpartition(": ")[2].split() for line in out.splitlines() if "(one rank)" in line]
    assert all(value == whole for value, whole, *_ in lines)


def test_every_study_is_a_row_of_the_page():
    rows = {line.split(" ")[0] for line in examples.__doc__.splitlines()}
    assert {*PRINTED} <= MODULES & rows


#: Modules that are tested elsewhere.
ELSEWHERE = {
    **dict.fromkeys(("loop", "study"), "tests/mpi/test_examples_mpi.py"),
    "plan": "docs/guide/plan.md",
    "restarts": "tests/spmd/test_supervisor.py",
    "same_bits": "tests/mpi/test_exact_mpi.py",
}


def test_every_module_has_a_file_of_tests():
    """One of its name, or one whose first line names it."""
    files = [*Path(__file__).parent.glob("test_*.py")]
    names = {path.stem.removeprefix("test_") for path in files} | {*PRINTED, *ELSEWHERE}
    names |= {name for path in files for name in re.findall(r"`(\w+)`", path.read_text().splitlines()[0])}
    assert MODULES - names == {"__main__"}
    for name, path in ELSEWHERE.items():
        assert re.search(rf"\b{name}\b", (Path(__file__).parents[3] / path).read_text())
