"""Every module has a test file of its name, or a row in `tests/README.md` that says which files test it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (`.*`.*) \| (.*) \|$", (ROOT / "tests" / "README.md").read_text(), re.M)


def named(cell):
    """The files of a cell. Those after the first may be named from its folder, or from one above."""
    first, *others = re.findall(r"`([\w/]+\.(?:py|md))`", cell)
    folders = [Path(first).parent, *Path(first).parents]
    return {first, *(next(f"{f / name}" for f in folders if (ROOT / f / name).exists()) for name in others)}


def test_every_module_has_tests_of_its_name_or_a_row():
    modules = [
        p.relative_to(ROOT) for package in ("minidiff", "collectives", "spmd") for p in (ROOT / package).rglob("*.py")
    ]
    modules = [p for p in modules if not p.name.startswith("_") and "examples" not in p.parts]
    without = {f"{p}" for p in modules if not (ROOT / "tests" / p.parent / f"test_{p.name}").exists()}
    rows = [path for modules, _ in ROWS for path in named(modules)]
    assert len(rows) == len({*rows}) and {*rows} == without


def test_the_tests_of_rows_exist():
    for _, tests in ROWS:
        assert [path for path in re.findall(r"`([\w/]+\.\w+)`", tests) if not (ROOT / "tests" / path).exists()] == []
