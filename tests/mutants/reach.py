"""The tests that reach a line, by coverage.py's database, whose contexts are the names of test functions."""

import collections
import functools
import pathlib
import re
import sqlite3
import subprocess
import sys

from tests.mutants.kinds import Place
from tests.mutants.table import PACKAGES, ROOT

DATABASE = ROOT / "build" / "coverage.sqlite"
BITS = """select context, numbits from line_bits join context on context.id = context_id join file on file.id = file_id
where path like ? and context != ''"""
#: Tests on MPI ranks, of which no coverage is measured, and the modules that they are for.
ON_RANKS = {
    "agreement": ("spmd/checks",),
    "calls": ("collectives/backends", "collectives/in_flight", "spmd/ranks"),
    "checkpoint_files": ("spmd/checkpoint",),
    "data": ("spmd/data",),
    "exact": ("collectives/exact",),
    "faults": ("collectives/guards/deadlock", "spmd/mesh/supervised", "spmd/supervisor"),
    "mismatch": ("collectives/guards/mismatch",),
    "rank_tables": ("collectives/backends",),
    "reports": ("spmd/report",),
    "shard_map": ("collectives/backends", "spmd/mesh"),
    "sharded_array": ("spmd/arrays", "spmd/sharding"),
}


def measure(tests: list[str]) -> None:
    """Run tests under coverage.py, by the settings of setup.cfg, and write the database (10 minutes for all)."""
    DATABASE.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "coverage", "run", f"--data-file={DATABASE}", "-m", "pytest", "-q", "--fast"]
    subprocess.run([*command, "-p", "no:xdist", *(tests or [f"tests/{package}" for package in PACKAGES])], cwd=ROOT)


class Reach:
    """A database of coverage, asked which tests of a checkout reach places."""

    def __init__(self, database: pathlib.Path):
        self.rows = sqlite3.connect(database, check_same_thread=False)
        self.sizes: dict[str, int] = {}  # how many lines each test runs
        for context, bits in self.rows.execute(BITS, ("%",)):
            self.sizes[context] = self.sizes.get(context, 0) + int.from_bytes(bits, "little").bit_count()

    def tests(self, file: str, place: Place) -> list[str]:
        """Return the ids of the tests that run a place, those that run the fewest lines first.

        If there are none, they are those that run its statement, its function, or at last its module.
        """
        ran = {context: int.from_bytes(bits, "little") for context, bits in self.rows.execute(BITS, (f"%/{file}",))}
        for lines in (*place.enclosing, range(place.enclosing[-1].stop + 10**4)):
            bits = sum(1 << line for line in lines)
            if names := [name for name in ran if ran[name] & bits]:
                pairs = [name.rpartition(".") for name in sorted(names, key=self.sizes.get)]
                ids = (test_id(module.replace(".", "/") + ".py", name) for module, _, name in pairs)
                return [test for test in ids if test]
        return []


@functools.cache
def files_by_test() -> dict[str, list[str]]:
    """Return the files that have a test of each name."""
    files = collections.defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
            files[name].append(str(path.relative_to(ROOT)))
    return files


def test_id(file: str, name: str) -> str | None:
    """Return pytest's id of a test, also if its file has another name now; None if there is none, or several."""
    files = files_by_test().get(name, [])
    file = file if file in files or len(files) != 1 else files[0]
    return f"{file}::{name}" if file in files else None


def on_ranks(file: str) -> list[str]:
    """Return the files of tests on MPI ranks of a module."""
    paths = [f"tests/mpi/test_{name}_mpi.py" for name, modules in ON_RANKS.items() if file.startswith(modules)]
    return [path for path in paths if (ROOT / path).exists()]
