"""Notebooks: each runs from clean to what is committed, and its checker tells right answers from wrong ones.

Answers are in `notebooks/answers/<notebook>.py`: `EXERCISES`, a list of {"right": source, "wrong": [source, …]}.
"""

import ast
import importlib.util
import itertools
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import KernelManager

from notebooks import lectures

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BUILD = sorted((ROOT / "notebooks" / "build").glob("*.ipynb"))
ANSWERS = Path(__file__).parents[2] / "notebooks" / "answers"

_spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
notebook_execution = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebook_execution)
tagged = notebook_execution.tagged


def text(outputs):
    """Return the text of a cell's outputs; a picture counts only as present, since fonts are the machine's."""
    results = []
    for output in outputs:
        shown = {output.name: output.text} if output.output_type == "stream" else output.data
        results.append({kind: "" if kind.startswith("image/") else data for kind, data in shown.items()})
    return results


def texts(outputs):
    """Return the checker's verdict, after any output of the answer itself."""
    return [output for output in outputs if output.output_type == "display_data"][-1].data["text/plain"]


def exercises(notebook):
    """The exercises as pairs of cells: what is to be answered, and the check below it."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    results = [(a, b) for a, b in itertools.pairwise(cells) if tagged(a, "exercise")]
    assert all(tagged(b, "check") for _, b in results)
    assert len(results) == sum(tagged(cell, "check") for cell in cells)
    return results


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    committed, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    answers = runpy.run_path(str(ANSWERS / f"{path.stem}.py"))["EXERCISES"]
    with notebook_execution.executed(notebook) as client:
        for old, new in zip(committed.cells, notebook.cells):
            if new.cell_type == "code" and not tagged(new, "varies"):
                assert text(new.outputs) == text(old.outputs), (
                    f"`make notebooks` changes what this shows:\n{new.source}"
                )
        checks = [check for _, check in exercises(notebook)]
        assert len(checks) == len(answers) >= 3

        def answered(source, check):
            """Return the checker's verdict on an answer."""
            for cell in (nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell(check.source)):
                notebook.cells.append(cell)
                client.execute_cell(cell, len(notebook.cells) - 1)
            return texts(cell.outputs)

        for check, answer in zip(checks, answers):
            assert texts(check.outputs) == "your turn"
            assert len(set(answer["wrong"])) >= 2
            for source in answer["wrong"]:
                assert answered(source, check).startswith("not yet: "), source
            assert answered(answer["right"], check) == "right", answer["right"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_imports_of_the_library(path):
    """A name that moves is noticed without running the notebooks, which takes minutes."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    source = re.sub(r"^[%!].*", "", "\n".join(cells), flags=re.M)
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = [ast.unparse(node) for node in imports if re.search(r"\b(minidiff|spmd|collectives)\b", ast.unparse(node))]
    assert ours
    for statement in ours:
        exec(statement, {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook == notebook_execution.plain(nbformat.read(path, as_version=4)), "write it by `make notebooks`"
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run it from clean: `make notebooks`"
    )
    for cell in code:
        for shown in itertools.chain(*(output.values() for output in text(cell.outputs))):
            assert not re.search(r"hsl\(|rgb\(", shown), "a color that JupyterLab's sanitizer drops: write it in hex"
            assert not re.search(r"/(home|root|tmp|usr|work|Users)/|ipykernel_", shown), f"a path:\n{shown}"


def jupyter_settings():
    """Return the settings of `notebooks/jupyter_server_config.py`."""
    inputs = SimpleNamespace(**{name: SimpleNamespace() for name in ("FileContentsManager", "LabApp", "ServerApp")})
    return runpy.run_path(str(ROOT / "notebooks" / "jupyter_server_config.py"), {"get_config": lambda: inputs})["c"]


def test_jupyter_asks_nothing():
    server = jupyter_settings().ServerApp
    page = server.tornado_settings["page_config_hook"](None, {"disabledExtensions": ["other"], "token": "t"})
    assert server.allow_root and page["token"] == "t"
    assert page["disabledExtensions"] == ["other", "@jupyterlab/apputils-extension:announcements"]


def test_the_lab_opens_a_start_page_and_renders_it():
    lab = jupyter_settings().LabApp
    page = ROOT / "notebooks" / re.sub(r"^/lab/tree/([^?]*)$", r"\1", lab.default_url)  # a query would hide the token
    assert page.read_text().startswith("# The course")
    assert list(Path(lab.workspaces_dir).iterdir()) == []  # no tabs from another time
    settings = json.loads((Path(lab.app_settings_dir) / "overrides.json").read_text())
    assert settings["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"] == {"markdown": "Markdown Preview"}


def test_what_jupyter_adds_to_a_notebook_is_there_when_it_is_read():
    committed, read = (nbformat.read(NOTEBOOKS[0], as_version=4) for _ in range(2))
    notebook_execution.add_kernels_metadata(read)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=600)
        results = client.kernel_info(reply=True, timeout=600)["content"]["language_info"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert read.metadata["language_info"] == results  # the editor compares them
    assert read.metadata["kernelspec"]["display_name"] == manager.kernel_spec.display_name
    assert notebook_execution.plain(read) == committed


def test_saving_in_jupyter_leaves_the_committed_form():
    committed = nbformat.read(NOTEBOOKS[0], as_version=4)
    edited = nbformat.read(NOTEBOOKS[0], as_version=4)
    edited.metadata["language_info"] = {"name": "python", "version": "3.99"}
    edited.cells[0].metadata.update(trusted=True, collapsed=True)
    model = {"type": "notebook", "content": dict(edited)}
    jupyter_settings().FileContentsManager.pre_save_hook(model, path="", contents_manager=None)
    assert model["content"].cells[0].metadata.pop("trusted")  # Jupyter signs by it, and leaves it out of the file
    assert model["content"] == committed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sections_count_up_without_gaps(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    numbers = [int(n) for cell in cells for n in re.findall(r"^## (\d+)\.", cell.source, re.M)]
    assert numbers == list(range(1, len(numbers) + 1)) != []


# ---------------------------------------------------------------- forty-five minutes


LECTURES = pytest.mark.parametrize("path", lectures.LECTURES, ids=lambda path: path.stem)


def parsed(cell):
    """Return the tree of a code cell without its magics; that of a cell for engines is empty."""
    source = "" if cell.source.startswith("%%") else re.sub(r"^[%!].*", "", cell.source, flags=re.M)
    return ast.parse(source)


def defined_names(tree):
    """Return the names that a cell binds anywhere: a local one of one cell may be a global of another."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


@LECTURES
def test_a_lecture_fits_into_45_minutes(path):
    notebook = nbformat.read(path, as_version=4)
    on_path = [cell for cell in notebook.cells if not tagged(cell, lectures.MORE)]
    assert 15 <= len(on_path) <= lectures.LENGTH
    assert max(len(re.findall(r"^## ", cell.source, re.M)) for cell in notebook.cells) == 1, "a cell has two headings"
    planned = lectures.schedule(notebook)
    assert sum(minutes for _, minutes in planned) <= lectures.LENGTH and len(planned) >= 5
    assert notebook.cells[0].source == lectures.with_skipped(notebook), "run `python -m notebooks.lectures`"


@LECTURES
def test_the_path_needs_no_cell_outside_of_it(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    names = {True: set(), False: set()}
    for cell in code:
        names[tagged(cell, lectures.MORE)] |= defined_names(parsed(cell))
    beyond = names[True] - names[False]
    for cell in (cell for cell in code if not tagged(cell, lectures.MORE)):
        used = {node.id for node in ast.walk(parsed(cell)) if isinstance(node, ast.Name)}
        assert not used & beyond, f"defined in a cell with the tag `more` alone:\n{cell.source}"


def test_the_minutes_for_lecturers_are_those_of_the_lectures():
    """A few words more or less change a minute, which does not matter; what is on the path does."""
    page = (ROOT / "notebooks" / "teaching.md").read_text()
    planned = [line for line in page.splitlines() if re.match(r"\| \[\d\d\]", line)]
    today = [line for line in lectures.minutes_table() if re.match(r"\| \[\d\d\]", line)]
    assert len(planned) == len(today) == len(lectures.LECTURES)
    for before, after in zip(planned, today):
        numbers = [[int(n) for n in re.findall(r" (\d+)(?= )", line)] for line in (before, after)]
        assert re.sub(r" \d+(?= )", "", before) == re.sub(r" \d+(?= )", "", after), "run `python -m notebooks.lectures`"
        assert all(abs(a - b) <= 2 for a, b in zip(*numbers, strict=True)), "run `python -m notebooks.lectures`"
        assert numbers[1][-1] <= lectures.LENGTH


def test_what_a_lecture_skips():
    more = {"tags": ["more"]}
    texts = [("# A\n\nText.\n\n- this", {}), ("## 1. One", {}), ("More.", more), ("## 2. Two\n\nText.", more)]
    texts += [("## What to remember\n\n## Exercises\n\n**1. Do.**", {}), ("**2. Do more.**", more)]
    cells = [nbformat.v4.new_markdown_cell(source, metadata=metadata) for source, metadata in texts]
    notebook = nbformat.v4.new_notebook(cells=cells)
    line = "*For 45 minutes, skip section 2, part of section 1, and exercise 2.*"
    assert lectures.skipped(notebook) == line
    assert lectures.with_skipped(notebook) == f"# A\n\nText.\n\n- this\n\n{line}"
    assert lectures.without_skipped(lectures.with_skipped(notebook)) == cells[0].source
    assert [title for title, _ in lectures.schedule(notebook)] == ["A", "1. One"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cells_import_in_six_lines(path):
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    imports = [node for node in parsed(first).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert 1 <= sum(node.end_lineno - node.lineno + 1 for node in imports) <= 6


@pytest.mark.parametrize("path", [*NOTEBOOKS, *BUILD], ids=lambda path: path.stem)
def test_cells_are_plain_and_print_little(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        assert not re.search(r"# *(noqa|fmt:|type: *ignore)", cell.source), cell.source
        shown = [o for o in text(cell.outputs) if not any("image" in kind or "html" in kind for kind in o)]
        lines = "\n".join(value.rstrip("\n") for o in shown for value in o.values()).count("\n") + 1
        assert lines <= 30, f"{lines} lines:\n{cell.source}"


def test_the_page_of_the_course_is_one_screen():
    page = (ROOT / "notebooks" / "README.md").read_text()
    assert len(page.splitlines()) <= 45
    assert all(f"]({path.name})" in page for path in lectures.LECTURES)


def test_drawings_stay_while_their_text_does(tmp_path):
    path = tmp_path / "drawing.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(metadata={"tags": ["varies"], "editor": {}}) for _ in range(2)]
    )

    def shown(*drawings, redraw=False):
        for cell, (picture, text) in zip(notebook.cells, drawings, strict=True):
            cell.source = f"""
class Drawing:
    def _repr_mimebundle_(self, **kwargs):
        return {{"image/svg+xml": "{picture}", "text/plain": "{text}"}}
Drawing()"""
        nbformat.write(notebook, path)
        notebook_execution.rewrite(path, redraw)
        written = nbformat.read(path, as_version=4).cells
        assert all(cell.metadata == {"tags": ["varies"]} for cell in written)
        for cell, new in zip(notebook.cells, written):
            cell.outputs = new.outputs
        return [(cell.outputs[0].data["image/svg+xml"], cell.outputs[0].data["text/plain"]) for cell in written]

    assert shown(("wide", "a -> b"), ("wide", "a -> b")) == [("wide", "a -> b"), ("wide", "a -> b")]
    assert shown(("narrow", "a -> b"), ("narrow", "a -> c")) == [("wide", "a -> b"), ("narrow", "a -> c")]
    assert shown(("thin", "a -> b"), ("thin", "a -> c"), redraw=True) == [("thin", "a -> b"), ("thin", "a -> c")]
