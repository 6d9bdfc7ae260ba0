"""Lectures on the site and as slides: what is outside of their 45 minutes is folded, or left out.

`make slides` builds the notebooks with `slides = True`: the sections of a lecture are pages, which `slides.js` turns.
"""

import itertools
import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parent.parent))

from notebooks import lectures
from notebooks.execute import tagged


def read_lecture(app, docname, source):
    """Fold the cells with the tag "more", or on slides leave them and the exercises out."""
    if not docname.startswith("notebooks/") or Path(app.env.doc2path(docname)).suffix != ".ipynb":
        return
    notebook = nbformat.reads(source[0], as_version=4)
    notebook.cells = on_slides(notebook) if app.config.slides else folded(notebook.cells)
    source[0] = nbformat.writes(notebook)


def folded(cells):
    """Return the cells with each run of those outside of the path in an element that opens and closes."""
    result = []
    for is_more, run in itertools.groupby(split_headings(cells), key=_fold_key(itertools.count())):
        run = list(run)
        if is_more[0]:
            number = sum(not _is_heading(cell) for cell in run)
            summary = f"Beyond the 45 minutes: {number} cell{'s' * (number > 1)}"
            start = _markdown(f'<details class="more">\n<summary>{summary}</summary>')
            result += [start, *run, _markdown("</details>")]
        else:
            result += run
    return result


def _fold_key(counter):
    """Group cells that are folded together: a heading stays outside, and ends a run."""
    state = {"run": 0}

    def key(cell):
        if _is_heading(cell):
            state["run"] = next(counter) + 1
            return False, state["run"]
        return tagged(cell, lectures.MORE), state["run"]

    return key


def split_headings(cells):
    """Put the headings of a cell outside of the path into cells of their own, which are not folded."""
    for cell in cells:
        text = cell.source
        if cell.cell_type == "markdown" and tagged(cell, lectures.MORE):
            while text.startswith("#"):
                heading, _, text = text.partition("\n\n")
                yield _markdown(heading)
        if text or not cell.source:
            yield nbformat.from_dict({**cell, "source": text})


def _is_heading(cell):
    return cell.cell_type == "markdown" and cell.source.startswith("#") and "\n\n" not in cell.source


def _markdown(text):
    return nbformat.v4.new_markdown_cell(text)


def on_slides(notebook):
    """Return the cells of the path, without exercises, and the minutes of each section below its heading."""
    minutes = dict(lectures.schedule(notebook))
    cells = []
    for section in lectures.sections(notebook):
        if section.is_exercises:
            continue
        for cell in section.path:
            if cell.cell_type == "markdown":
                text = cell.source.partition("\n## Exercises")[0]
                cell = nbformat.from_dict({**cell, "source": lectures.without_skipped(text)})
                if cell.source.startswith("## "):
                    heading, _, text = cell.source.partition("\n")
                    note = f'<p class="minutes">{minutes.get(section.title, 0)} min</p>'
                    cell.source = f"{heading}\n\n{note}\n{text}"
            cells.append(cell)
    return cells


def setup(app):
    app.add_config_value("slides", False, "env")
    app.connect("source-read", read_lecture)
    return {"parallel_read_safe": True}
