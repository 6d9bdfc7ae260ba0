"""Code of a student's own, graded like answers in notebooks: adapter files say where it is. See `grading.md`.

For a lecture it is a file with the notebook's name, as `06_shard_map.py`: it defines or imports what the exercises ask
for. For "Build it yourself" it is `build/adapter.py`: it defines or imports a module, or a namespace, for each file of
the pages that it takes the place of. The grader reads their names without running them.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Collection
from pathlib import Path

ADAPTER = "adapter.py"
#: What stands in `mine/` for a module of the student's own.
_STAND_IN = "import sys\n\nfrom adapter import {name}\n\nsys.modules[__name__] = {name}\n"


def names_in(source: str) -> set[str]:
    """Return the names that a file defines, assigns or imports outside of functions; none if it does not parse.

    >>> sorted(names_in("from ada import tape as records\\nimport ring.steps\\nx, y = 1, 2\\ndef f(): z = 3"))
    ['f', 'records', 'ring', 'x', 'y']
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    names: set[str] = set()
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += [] if isinstance(node, (ast.Lambda, ast.comprehension)) else ast.iter_child_nodes(node)
    return names


def answer_of(path: Path, question: str) -> str | None:
    """Return a cell that takes the names of a question from a student's file, or None if one is not in it.

    The file runs anew for each question. It may import what is beside it.
    """
    asked = names_in(question)
    if not asked <= names_in(path.read_text()):
        return None
    folder, file = str(path.resolve().parent), str(path.resolve())
    return (
        f"import runpy, sys\nsys.path.append({folder!r})\n"
        f"globals().update({{k: v for k, v in runpy.run_path({file!r}).items() if k in {sorted(asked)}}})"
    )


def stand_ins(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the source of the files in `mine/` that a folder's `adapter.py` takes the place of, by name."""
    path = folder / ADAPTER
    defined = names_in(path.read_text()) if path.exists() else set()
    return {name: _STAND_IN.format(name=name) for name in names if name in defined}


def copy_own_code(folder: Path, target: Path, course: Path) -> None:
    """Copy a student's Python files and packages, other than the course's and `mine`, to where they are graded."""
    for path in sorted(folder.iterdir()):
        if path.name == "mine" or path.name.startswith((".", "__")) or (course / path.name).exists():
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"))
        elif path.suffix == ".py":
            shutil.copy(path, target)
