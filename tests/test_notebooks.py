"""Notebooks: each runs from clean to what is committed, and its checker tells right answers from wrong ones.

Answers are in `notebook_answers/<notebook>.py`: `EXERCISES`, a list of {"right": source, "wrong": [source, …]}.
"""

import ast
import importlib.util
import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ANSWERS = Path(__file__).parent / "notebook_answers"

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
    inputs = SimpleNamespace(FileContentsManager=SimpleNamespace(), ServerApp=SimpleNamespace())
    return runpy.run_path(str(ROOT / "notebooks" / "jupyter_server_config.py"), {"get_config": lambda: inputs})["c"]


def test_jupyter_asks_nothing():
    server = jupyter_settings().ServerApp
    page = server.tornado_settings["page_config_hook"](None, {"disabledExtensions": ["other"], "token": "t"})
    assert server.allow_root and page["token"] == "t"
    assert page["disabledExtensions"] == ["other", "@jupyterlab/apputils-extension:announcements"]


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


def test_drawings_stay_while_their_text_does(tmp_path):
    path = tmp_path / "drawing.ipynb"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(metadata={"tags": ["varies"], "editor": {}}) for _ in range(2)]
    )

    def shown(*drawings):
        for cell, (picture, text) in zip(notebook.cells, drawings, strict=True):
            cell.source = f"""
class Drawing:
    def _repr_mimebundle_(self, **kwargs):
        return {{"image/svg+xml": "{picture}", "text/plain": "{text}"}}
Drawing()"""
        nbformat.write(notebook, path)
        notebook_execution.rewrite(path)
        written = nbformat.read(path, as_version=4).cells
        assert all(cell.metadata == {"tags": ["varies"]} for cell in written)
        for cell, new in zip(notebook.cells, written):
            cell.outputs = new.outputs
        return [(cell.outputs[0].data["image/svg+xml"], cell.outputs[0].data["text/plain"]) for cell in written]

    assert shown(("wide", "a -> b"), ("wide", "a -> b")) == [("wide", "a -> b"), ("wide", "a -> b")]
    assert shown(("narrow", "a -> b"), ("narrow", "a -> c")) == [("wide", "a -> b"), ("narrow", "a -> c")]
