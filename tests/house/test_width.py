"""Code on pages and in notebooks has short lines: a projector and a page of 1,400 pixels show them whole."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 88


def cells():
    for path in sorted(ROOT.glob("notebooks/**/*.ipynb")):
        for k, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.name}, cell {k}", cell


def wide(lines):
    return [line for line in lines if len(line) > WIDTH]


def test_code_of_cells():
    too_wide = {where: lines for where, cell in cells() if (lines := wide("".join(cell["source"]).split("\n")))}
    assert too_wide == {}


def code_of(page):
    """The lines of a page's programs and commands: not what these print, nor sources that a page shows as they are."""
    fences = re.findall(r"^```(?:python|pycon|console)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [line for block in fences for line in block.split("\n") if line.startswith((">>> ", "... ", "$ "))]


def test_code_of_pages():
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    too_wide = {page.name: lines for page in pages if (lines := wide(code_of(page)))}
    assert too_wide == {}


def test_wide_code_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{'text ' * 30}\n```python\n>>> {'x' * 84}\n{'9' * 100}\n>>> {'x' * 85}\n```\n")
    assert wide(code_of(page)) == [f">>> {'x' * 85}"]
