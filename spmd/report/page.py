"""Interactive pages: tables whose rows are shown step by step, as HTML that needs no server and no network.

A page has tables, of which controls choose one. A row is a step. Without its script a page shows the first table whole.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class PageRow:
    """A row of a table: its cells as HTML, and marks, which are its CSS classes. The last cell spans missing ones."""

    cells: Sequence[str]
    marks: str = ""


@dataclass(frozen=True)
class Control:
    """A slider with named positions. `role` is "table" if it chooses one, or the name of a constant of a cost."""

    name: str
    options: Sequence[Any]
    role: str = "table"
    start: int = 0


@dataclass
class Page:
    """A page: its title, a text, the header of its columns, and tables by the options of its controls.

    `write` writes it to a file. Notebooks show it in the cell.

    >>> page = Page("Squares", "One after the other.", {(): (["n", "n²"], [PageRow(["1", "1"]), PageRow(["2", "4"])])})
    >>> "<td>4</td>" in page.html, "http" in page.html
    (True, False)
    """

    title: str
    text: str
    tables: Mapping[tuple, tuple[Sequence[str], Sequence[PageRow]]]
    controls: Sequence[Control] = field(default_factory=tuple)
    whole: bool = False  # whether it begins at the last step

    @property
    def html(self) -> str:
        """The whole page, its style and its script included."""
        style, script = ((HERE / f"page.{kind}").read_text() for kind in ("css", "js"))
        title, begins = html.escape(self.title), " data-whole" if self.whole else ""
        first = tuple(c.options[c.start] for c in self.controls if c.role == "table")
        tables = "".join(_table(key, *table, key == first) for key, table in self.tables.items())
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>\n<body{begins}>'
            f"<h1>{title}</h1><p>{html.escape(self.text)}</p>{_STEPPER}{''.join(map(_slider, self.controls))}"
            f'<div class="tables">{tables}</div><script>{script}</script></body></html>\n'
        )

    def write(self, filename: Any) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(filename)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        page, title = html.escape(self.html), html.escape(self.title)
        return f'<iframe srcdoc="{page}" style="width:100%;height:36em;border:0" title="{title}"></iframe>'

    def __repr__(self) -> str:
        steps = max(len(steps) for _, steps in self.tables.values())
        return f"<a page of {steps} steps: {self.title}; write it by .write('page.html')>"


_STEPPER = (
    '<div class="controls stepper" role="group" aria-label="steps">'
    '<button id="first" aria-label="first step">«</button>'
    '<button id="back" aria-label="step back">◀</button><button id="forth" aria-label="step forward">▶</button>'
    '<button id="last" aria-label="last step">»</button>'
    '<input type="range" id="step" min="0" value="0" aria-label="step"><output for="step"></output></div>'
)


def _slider(control: Control) -> str:
    name, last = html.escape(control.name), len(control.options) - 1
    options = html.escape(json.dumps(list(control.options)))
    return (
        f'<div class="controls"><label>{name} <input type="range" min="0" max="{last}" value="{control.start}" '
        f'data-role="{control.role}" data-options="{options}" aria-label="{name}"></label>'
        f"<output>{html.escape(str(control.options[control.start]))}</output></div>"
    )


def _table(key: tuple, header: Sequence[str], steps: Sequence[PageRow], shown: bool) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    rows = "".join(f'<tr class="{s.marks}">{_cells(s.cells, len(header))}</tr>' for s in steps)
    hidden = "" if shown else " hidden"
    name = html.escape(json.dumps(list(key)))
    return f'<table data-key="{name}"{hidden}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _cells(cells: Sequence[str], columns: int) -> str:
    missing = columns - len(cells)
    spans = ["<td>"] * (len(cells) - 1) + [f'<td colspan="{missing + 1}">' if missing else "<td>"]
    return "".join(f"{start}{cell}</td>" for start, cell in zip(spans, cells))
