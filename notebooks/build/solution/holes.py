"""The solution's files with holes. `python -m notebooks.build.solution.holes` puts them into the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGES = HERE.parent
MAGIC = "%%writefile mine/"
_HOLE = re.compile(
    r"^(?P<indent> *)# HOLE (?P<number>\d+\.\d+) \[(?P<points>\d+) points?\]\n"
    r"(?P<hint>(?: *#(?! END)[^\n]*\n)*)(?P<answer>.*?)^ *# END$",
    re.M | re.S,
)


class Hole(NamedTuple):
    """A hole: its number, where it is, and what it is worth."""

    number: str
    file: str
    points: int


def solution(name: str) -> str:
    """The source of a file of the solution."""
    return (HERE / f"{name}.py").read_text()


def names() -> list[str]:
    """The files that the pages write."""
    return [p.stem for p in sorted(HERE.glob("*.py")) if p.stem not in ("__init__", "holes", "checks")]


def holes() -> dict[str, Hole]:
    """All holes, by number, in order."""
    numbered = [Hole(m["number"], name, int(m["points"])) for name in names() for m in _HOLE.finditer(solution(name))]
    return {hole.number: hole for hole in sorted(numbered, key=lambda h: [*map(int, h.number.split("."))])}


def with_holes(source: str) -> str:
    """A file as a student gets it."""
    for match in list(_HOLE.finditer(source)):
        source = fill(source, match["number"], None)
    return source


def fill(source: str, number: str, answer: str | None) -> str:
    """A file with this answer in one hole, or, if it is None, with nothing in it yet."""
    (match,) = (m for m in _HOLE.finditer(source) if m["number"] == number)
    indent = match["indent"]
    if answer is not None:
        return _put(
            source, match, "".join(f"{indent}{line}".rstrip() + "\n" for line in answer.strip("\n").split("\n"))
        )
    raises = _put(source, match, f'{indent}raise NotImplementedError("hole {number}")\n')
    try:
        compile(raises, number, "exec")
    except SyntaxError:
        return _put(source, match, "")  # in a table
    return raises if indent else _put(source, match, "")


def _put(source: str, match: re.Match, answer: str) -> str:
    return source[: match.start("answer")] + answer + source[match.end("answer") :]


def put_into_pages() -> None:
    """Write the files with holes into the cells of the pages that write them."""
    import nbformat

    for path in sorted(PAGES.glob("*.ipynb")):
        page = nbformat.read(path, as_version=4)
        for cell in page.cells:
            if cell.source.startswith(MAGIC):
                name = cell.source.split("\n")[0][len(MAGIC) :].removesuffix(".py")
                cell.source = f"{MAGIC}{name}.py\n{with_holes(solution(name))}".rstrip("\n")
        nbformat.write(page, path)


if __name__ == "__main__":
    put_into_pages()
