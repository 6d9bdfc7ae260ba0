"""Every module of `spmd.examples` is tested: studies by what `docs/topics.md` quotes, and in files of their names."""

import pkgutil
import re
from pathlib import Path

from spmd import examples
from tests.programs.examples import STUDIES

MODULES = {info.name for info in pkgutil.iter_modules(examples.__path__)}
ROOT = Path(__file__).parents[3]
#: Modules that are tested elsewhere.
ELSEWHERE = {
    **dict.fromkeys(("loop", "study"), "tests/mpi/test_examples_mpi.py"),
    "plan": "docs/guide/plan.md",
    "restarts": "tests/spmd/test_supervisor.py",
    "same_bits": "tests/mpi/test_exact_mpi.py",
}


def test_every_study_is_in_the_package_s_list_and_on_the_page_of_topics():
    rows = {line.split(" ")[0] for line in examples.__doc__.splitlines()}
    page = re.findall(r"^\| .* \| `python -m spmd\.examples\.(\w+)`", (ROOT / "docs/topics.md").read_text(), re.M)
    assert {*STUDIES} <= MODULES & rows & {*page}


def test_every_module_has_a_file_of_tests():
    """One of its name, or one whose first line names it; a page may be the file."""
    files = [*Path(__file__).parent.glob("test_*.py"), *Path(__file__).parent.glob("*.md")]
    names = {path.stem.removeprefix("test_") for path in files} | {*STUDIES, *ELSEWHERE}
    names |= {name for path in files for name in re.findall(r"`(\w+)`", path.read_text().splitlines()[0])}
    assert MODULES - names == {"__main__"}
    for name, path in ELSEWHERE.items():
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text())
