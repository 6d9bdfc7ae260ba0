"""Lectures on the site: cells outside of the 45 minutes are folded, headings are not; slides have the path alone."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from notebooks import lectures

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("lecture_pages", ROOT / "docs" / "lecture_pages.py")
lecture_pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lecture_pages)


def read(path, slides):
    """Return the cells that Sphinx gets of a lecture."""
    env = SimpleNamespace(doc2path=lambda name: ROOT / f"{name}.ipynb")
    app = SimpleNamespace(env=env, config=SimpleNamespace(slides=slides))
    source = [path.read_text()]
    lecture_pages.read_lecture(app, f"notebooks/{path.stem}", source)
    return nbformat.reads(source[0], as_version=4).cells


@pytest.mark.parametrize("path", lectures.LECTURES, ids=lambda path: path.stem)
def test_what_is_outside_of_the_path_is_folded(path):
    notebook = nbformat.read(path, as_version=4)
    is_open, hidden, shown = False, [], []
    for cell in read(path, slides=False):
        if cell.source.startswith("<details"):
            assert not is_open and re.search(r"<summary>Beyond the 45 minutes: \d+ cells?</summary>$", cell.source)
            is_open = True
        elif cell.source == "</details>":
            assert is_open
            is_open = False
        else:
            (hidden if is_open else shown).append(cell.source)
            assert not (is_open and cell.cell_type == "markdown" and cell.source.startswith("#")), "a folded heading"
    assert not is_open
    more = [cell for cell in notebook.cells if "more" in cell.metadata.get("tags", [])]
    assert [cell.source for cell in more if cell.cell_type == "code"] == [
        source for source in hidden if source in {cell.source for cell in more if cell.cell_type == "code"}
    ]
    for cell in (cell for cell in notebook.cells if cell not in more):
        assert cell.source in shown
    words = "".join("".join(cell.source.split()) for cell in notebook.cells)
    assert sorted("".join("".join(text.split()) for text in hidden + shown)) == sorted(words), "nothing is lost"


@pytest.mark.parametrize("path", lectures.LECTURES, ids=lambda path: path.stem)
def test_slides_have_the_path_alone(path):
    notebook = nbformat.read(path, as_version=4)
    cells = read(path, slides=True)
    assert not any(lectures.tagged(cell, lectures.MORE) for cell in cells)
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert "## Exercises" not in text and "For 45 minutes" not in text
    minutes = [int(n) for n in re.findall(r'<p class="minutes">(\d+) min</p>', text)]
    planned = lectures.schedule(notebook)
    assert sum(minutes) == sum(n for _, n in planned[1:]) and len(minutes) >= 4


def test_slides_need_no_network():
    for path in (ROOT / "docs" / "slides").iterdir():
        if path.suffix in (".js", ".css", ".md"):
            assert not re.search(r"https?://", path.read_text()), path
