"""Functions and files are short: one is read at a sitting, and a file's name says the subject of all of it."""

import ast
from pathlib import Path

import pytest

from tests.house.code_lines import code_lines, lines_with_code

ROOT = Path(__file__).parents[2]
FILE, FUNCTION = 400, 40  # lines of code


def too_long(path):
    """The functions of a file that are too long, and the file if it is."""
    text = path.read_text()
    if text.count("\n") <= FUNCTION:
        return {}
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    spans = {path.name: (FILE, 1, text.count("\n"))} | {f.name: (FUNCTION, f.lineno, f.end_lineno) for f in functions}
    written = [line.strip() != "" and line.lstrip()[0] != "#" for line in text.splitlines()]
    spans = {name: span for name, span in spans.items() if sum(written[span[1] - 1 : span[2]]) > span[0]}
    lines = lines_with_code(path) if spans else set()
    sizes = {name: (limit, len(lines & {*range(a, b + 1)})) for name, (limit, a, b) in spans.items()}
    return {name: size for name, (limit, size) in sizes.items() if size > limit}


@pytest.mark.parametrize("root", ["minidiff", "collectives", "spmd", "tests"])
def test_functions_and_files_are_short(root):
    paths = (ROOT / root).rglob("*.py")
    assert {str(path.relative_to(ROOT)): long for path in sorted(paths) if (long := too_long(path))} == {}


def test_the_core_is_read_in_an_afternoon():
    assert sum(path.read_text().count("\n") for path in (ROOT / "minidiff" / "core").glob("*.py")) <= 1600


def test_long_ones_are_found(tmp_path):
    path = tmp_path / "long.py"
    path.write_text('def f():\n    """Do."""\n' + "    f()\n\n" * 40 + "x = 1\n" * 359)
    assert too_long(path) == {"f": 41} and code_lines(path) == 400
    path.write_text("x = 1\n" * 401)
    assert too_long(path) == {"long.py": 401}
