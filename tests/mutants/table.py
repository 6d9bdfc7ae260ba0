"""The tables `mutants.txt` and `results.txt`: rows of columns with a tab between, which one can read and edit."""

import collections
import itertools
import pathlib
import random
from typing import NamedTuple

from tests.house.code_lines import code_lines
from tests.mutants.kinds import Change, Place, places

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = pathlib.Path(__file__).parent
PACKAGES = ("minidiff", "collectives", "spmd")


class Mutant(NamedTuple):
    """A row of `mutants.txt`: a file, and a change of it; `equivalent` says why it computes the same, if it does."""

    id: str
    file: str
    function: str
    kind: str
    occurrence: str
    change: str
    equivalent: str = ""

    def place(self, tree: pathlib.Path) -> Place | None:
        """Return where the mutant is in a checkout; None if it is gone."""
        path = tree / self.file
        return places(path.read_text()).get(Change(*self[2:6])) if path.exists() else None


class Result(NamedTuple):
    """A row of `results.txt`: killed, survived, timeout (which is a kill) or gone; how many tests ran; which failed."""

    id: str
    status: str
    asked: str = "0"
    killer: str = ""

    @property
    def is_kill(self) -> bool:
        return self.status in ("killed", "timeout")


def read(row_class) -> dict:
    """Return the rows of a table, by their ids."""
    path = FOLDER / f"{row_class.__name__.lower()}s.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row.id: row for row in (row_class(*line.split("\t")) for line in lines)}


def write(rows) -> None:
    """Write a table, sorted by ids."""
    lines = ["\t".join(row).rstrip("\t") + "\n" for row in sorted(rows)]
    (FOLDER / f"{type(rows[0]).__name__.lower()}s.txt").write_text("".join(lines))


def modules() -> dict[str, list[pathlib.Path]]:
    """All modules of the packages but the examples and the scripts that write modules, by their folders."""
    folders = collections.defaultdict(list)
    for path in (p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).parts
        if parts[:2] != ("spmd", "examples") and not path.name.startswith("make_"):
            folders["/".join(parts[:-1][:2])].append(path)
    return folders


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants, as many for a folder as it has lines of code, of each kind equally, one in a function at most."""
    rng = random.Random(seed)
    folders = modules()
    totals = [*itertools.accumulate(sum(map(code_lines, paths)) for paths in folders.values())]
    mutants: list[Mutant] = []
    for paths, total in zip(folders.values(), totals):
        pool = [(str(p.relative_to(ROOT)), change) for p in paths for change in places(p.read_text())]
        while len(mutants) < round(count * total / totals[-1]):
            kind = rng.choice(sorted({change.kind for _, change in pool}))
            file, change = rng.choice([row for row in pool if row[1].kind == kind])
            mutants.append(Mutant(f"{len(mutants):03}", file, *change))
            pool = [row for row in pool if (row[0], row[1].function) != (file, change.function)]
    return mutants
