"""Write the students' copy of the course: `python -m notebooks.handout FOLDER`. See `grading.md`.

Notebooks are without outputs, and nothing is there that answers a question: no solution, no tests, no grader.
A link to a page outside of the copy is the page's name instead.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import nbformat

from notebooks.build.page import unfilled
from notebooks.build.solution import holes
from notebooks.execute import plain, tagged

HERE = Path(__file__).parent
LEFT_OUT = ("adapters.py", "grade.py", "gradebooks.py", "handout.py", "grading.md", "teaching.md")
_LINK = re.compile(r"\[([^\]]+)\]\(([^):#]+)(?:#[^)]*)?\)")  # a relative one


def hand_out(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Write the notebooks whose names begin so, or all, and the files beside them, and return what was written."""
    written = []
    for path in sorted([*HERE.glob("*.ipynb"), *(HERE / "build").glob("*.ipynb")]):
        place = path.relative_to(HERE)
        if not names or place.as_posix().startswith(tuple(names)):
            written.append(folder / place)
            written[-1].parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(stripped(path), written[-1])
    beside = [*HERE.rglob("*.py"), *HERE.rglob("*.md"), *HERE.glob("lab_settings/*.json")]
    for path in [
        p for p in beside if p.name not in LEFT_OUT and not {"answers", "solution"} & {*p.relative_to(HERE).parts}
    ]:
        place = path.relative_to(HERE)
        if "mine" not in place.parts:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                (folder / place).write_text(with_pages_named(path.read_text(), path))
            else:
                shutil.copy(path, folder / place)
            written.append(folder / place)
    return written


def with_pages_named(text: str, path: Path) -> str:
    """The text of this file; where it links to what students do not get, it says where that is."""

    def named(link: re.Match) -> str:
        target = (path.parent / link[2]).resolve()
        if target.is_relative_to(HERE) and target.name not in LEFT_OUT:
            return link[0]
        return f"{link[1]} (`{target.relative_to(HERE.parent)}` in the course's repository)"

    return _LINK.sub(named, text)


def stripped(path: Path) -> nbformat.NotebookNode:
    """A notebook without outputs. Raises ValueError if one of its holes is filled."""
    notebook = plain(nbformat.read(path, as_version=4))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        elif cell.cell_type == "markdown":
            cell.source = with_pages_named(cell.source, path)
        if cell.source.startswith(holes.MAGIC):
            filled = cell.source.count("# HOLE ") - len(unfilled(cell.source))
            if filled:
                raise ValueError(
                    f"{path}: {filled} holes are filled. `python -m notebooks.build.solution.holes` empties them"
                )
        elif tagged(cell, "exercise") and not ("..." in cell.source or "NotImplementedError" in cell.source):
            raise ValueError(f"{path}: an exercise is answered:\n{cell.source}")
    return notebook


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks.handout", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the copy is written")
    parser.add_argument("names", nargs="*", help="how notebooks' names begin: 06 09 build/1; all, if there is none")
    options = parser.parse_args(arguments)
    for path in hand_out(options.folder, options.names):
        print(path)


if __name__ == "__main__":
    main()
