"""The 45 minutes of a lecture: its sections, and the cells that a lecturer skips, which have the tag "more".

`python -m notebooks.lectures` writes what follows from the tags: a line at the top of each lecture, and the minutes in
`teaching.md`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from notebooks.execute import tagged

HERE = Path(__file__).parent
LECTURES = sorted(HERE.glob("[0-9]*.ipynb"))
MORE = "more"
LENGTH = 45  # minutes, and at most so many cells
_WORDS = 130  # spoken in a minute
_CELL = 1.4  # minutes to look at a cell and what it shows
_HEADING = re.compile(r"^(##?) (.*)$", re.M)
_SKIP = re.compile(r"\n\n\*For 45 minutes, [^*]*\*")
_BEGIN, _END = "<!-- python -m notebooks.lectures writes what follows -->", "<!-- end -->"


@dataclass
class Section:
    """A section of a lecture: its heading, and its cells. The first one has the title."""

    title: str
    cells: list[NotebookNode] = field(default_factory=list)

    @property
    def number(self) -> str:
        """The number in the heading, or "" if there is none."""
        return self.title.partition(". ")[0] if re.match(r"\d+\. ", self.title) else ""

    @property
    def path(self) -> list[NotebookNode]:
        """The cells that a lecture of 45 minutes has time for."""
        return [cell for cell in self.cells if not tagged(cell, MORE)]

    @property
    def is_exercises(self) -> bool:
        return self.title == "Exercises"

    def minutes(self) -> float:
        """Estimate how long the section takes: its words spoken, and time to look at code and to predict a number."""
        words = sum(len(cell.source.split()) for cell in self.path if cell.cell_type == "markdown")
        shown = sum(cell.cell_type == "code" and not tagged(cell, "check") for cell in self.path)
        predicted = sum(tagged(cell, "exercise") for cell in self.path)
        return words / _WORDS + _CELL * shown + predicted


def sections(notebook: NotebookNode) -> list[Section]:
    """Split a lecture at its headings. A cell that has two, such as a summary before the exercises, begins with one."""
    result: list[Section] = []
    for cell in notebook.cells:
        headings = _HEADING.findall(cell.source) if cell.cell_type == "markdown" else []
        for _, title in headings:
            result.append(Section(title))
        result[-1].cells.append(cell)
    return [section for section in result if section.cells]


def numbered(notebook: NotebookNode) -> list[Section]:
    """Return the sections that have a number, with those of the exercises and the summary left out."""
    return [section for section in sections(notebook) if section.number]


def exercises(notebook: NotebookNode) -> dict[str, list[NotebookNode]]:
    """Return the cells of each exercise at the end of a lecture, by its number."""
    numbers: dict[str, list[NotebookNode]] = {}
    number = "1"
    for section in sections(notebook):
        for cell in section.cells if section.is_exercises else ():
            if cell.cell_type == "markdown" and (match := re.match(r"\*\*(\d+)\.", cell.source)):
                number = match[1]
            numbers.setdefault(number, []).append(cell)
    return numbers


def skipped(notebook: NotebookNode) -> str:
    """Say which sections and exercises a lecture of 45 minutes skips, or return "" if it has time for all."""
    whole = [s.number for s in numbered(notebook) if not s.path]
    parts = [s.number for s in numbered(notebook) if s.path and len(s.path) < len(s.cells)]
    left_out = [n for n, cells in exercises(notebook).items() if all(tagged(cell, MORE) for cell in cells)]
    phrases = [
        _counted("section", whole),
        _counted("part of section", parts, "parts of sections"),
        _counted("exercise", left_out),
    ]
    phrases = [phrase for phrase in phrases if phrase]
    return f"*For 45 minutes, skip {_listed(phrases, ', and ')}.*" if phrases else ""


def _counted(one: str, numbers: Sequence[str], several: str = "") -> str:
    return f"{one if len(numbers) == 1 else several or one + 's'} {_listed(numbers)}" if numbers else ""


def _listed(items: Sequence[str], last: str = " and ") -> str:
    return last.join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def with_skipped(notebook: NotebookNode) -> str:
    """Return the text of a lecture's first cell with the line that says what to skip: below what it teaches."""
    paragraphs = without_skipped(notebook.cells[0].source).split("\n\n")
    at = next((i for i, text in enumerate(paragraphs) if text.startswith("- ")), 1)
    line = "\n".join(textwrap.wrap(skipped(notebook), 118))
    return "\n\n".join([*paragraphs[: at + 1], *([line] if line else []), *paragraphs[at + 1 :]])


def without_skipped(text: str) -> str:
    """Return the text of a lecture's first cell without the line that says what to skip."""
    return _SKIP.sub("", text)


def schedule(notebook: NotebookNode) -> list[tuple[str, int]]:
    """Return the minutes of each section on the path, the title's included: one at least, and 45 in all at most."""
    spoken = [s for s in sections(notebook) if s.path and not s.is_exercises]
    estimates = [s.minutes() for s in spoken]
    scale = min(1.0, LENGTH / sum(estimates))
    minutes = [max(1, round(scale * estimate)) for estimate in estimates]
    while sum(minutes) > LENGTH:
        minutes[minutes.index(max(minutes))] -= 1
    return [(s.title, n) for s, n in zip(spoken, minutes)]


def minutes_table() -> Iterator[str]:
    """The lines of `teaching.md` that have each lecture's minutes, section by section."""
    yield from ("| lecture | minutes of its sections | in all |", "|---|---|---|")
    for path in LECTURES:
        notebook = nbformat.read(path, as_version=4)
        planned = schedule(notebook)
        named = [f"{_short(title)} {minutes}" for title, minutes in planned[1:]]
        total = sum(minutes for _, minutes in planned)
        yield f"| [{path.stem[:2]}]({path.name}) | start {planned[0][1]} · {' · '.join(named)} | {total} |"


def _short(title: str) -> str:
    match = re.match(r"(\d+)\. ", title)
    return f"**{match[1]}:**" if match else {"What to remember": "**summary:**"}.get(title, title)


def write() -> None:
    """Write what follows from the tags, into the lectures and into `teaching.md`."""
    for path in LECTURES:
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = with_skipped(notebook)
        nbformat.write(notebook, path)
    page = HERE / "teaching.md"
    page.write_text(with_minutes(page.read_text()))


def with_minutes(text: str) -> str:
    """Return the text of `teaching.md` with today's table of minutes."""
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return "\n".join([before + _BEGIN, "", *minutes_table(), "", _END + after])


if __name__ == "__main__":
    write()
