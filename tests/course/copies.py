"""Copies of the build that students get: answers on their pages, and the verdicts of the checks there."""

import os
import subprocess
import sys

import nbformat

from notebooks import grade
from notebooks.answers.build import predicted
from notebooks.build.solution import holes

RUN_PAGES = """
import sys
from pathlib import Path
import nbformat

sys.path.insert(0, ".")
for path in sorted(Path(".").glob("*.ipynb")):
    names = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.source.startswith("%%writefile "):
            first, _, source = cell.source.partition("\\n")
            Path(first.split()[1]).write_text(source)
        elif cell.cell_type == "code":
            exec(cell.source, names)
"""


def answer_pages(folder, changed=None):
    """Answer the pages of a students' copy: the solution's answers in the holes, but for those that are changed."""
    for path in sorted(folder.glob("*.ipynb")):
        page = nbformat.read(path, as_version=4)
        for cell in page.cells:
            if cell.source.startswith(holes.MAGIC):
                name = cell.source.split("\n")[0][len(holes.MAGIC) :].removesuffix(".py")
                source = holes.solution(name)
                for number, answer in (changed or {}).items():
                    if holes.holes()[number].file == name:
                        source = holes.fill(source, number, answer)
                cell.source = f"{holes.MAGIC}{name}.py\n{source}"
            elif "exercise" in cell.metadata.get("tags", []):
                cell.source = predicted(cell.source)
        nbformat.write(page, path)


def run_pages(folder):
    """Return the verdicts of the pages' checks, in order."""
    environment = {**os.environ, "PYTHONPATH": str(grade.HERE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGES], cwd=folder, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [
        line for line in done.stdout.splitlines() if line.startswith(("right", "your turn", "not yet"))
    ], done.stdout
