"""Figures that notebooks store have twice the pixels that they are shown in: they are sharp on a projector."""

import base64
import json
import struct
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
BEGINNING = 32  # characters that encode a PNG's first 24 bytes: its signature, and its width and height


def figures(notebook):
    """For each PNG of a notebook the number of its cell, its size, and the size in which it is shown."""
    for k, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                shown = output["metadata"].get("image/png", {})
                start = base64.b64decode("".join(output["data"]["image/png"])[:BEGINNING])
                yield k, struct.unpack(">II", start[16:24]), (shown.get("width"), shown.get("height"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_are_stored_at_twice_their_size(notebook):
    for cell, size, shown in figures(notebook):
        assert None not in shown, f"cell {cell} shows {size} pixels one by one"
        assert all(abs(n - 2 * m) <= 1 for n, m in zip(size, shown)), f"cell {cell} shows {size} pixels as {shown}"


def test_there_are_figures():
    assert sum(1 for notebook in NOTEBOOKS for _ in figures(notebook)) > 100
