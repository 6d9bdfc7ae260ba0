"""Code on pages and in notebooks has short lines: a projector and a page of 1,400 pixels show them whole."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
