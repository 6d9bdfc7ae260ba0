"""Execute notebooks from clean, and write what comes out into them: python notebooks/execute.py [notebooks].

With `--redraw`, drawings are drawn anew even if their texts are as they were.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from ipykernel.ipkernel import IPythonKernel
from jupyter_client.kernelspec import get_kernel_spec
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
_PYTHON = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
_SVG = "image/svg+xml"


@contextmanager
def executed(notebook: NotebookNode, timeout: float = 600, folder: Path = HERE) -> Iterator[NotebookClient]:
    """The notebook run from clean, in place, in a kernel which stays for the block: further cells run in that too.

    Raises nbclient.exceptions.CellExecutionError where a cell does; a cell may take `timeout` seconds. Its working
    directory is `folder`.
    """
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=timeout,
        startup_timeout=timeout,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        yield client


def tagged(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def plain(notebook: NotebookNode) -> NotebookNode:
    """Without what a machine or an editor adds: metadata other than tags and the language.

    Jupyter's note that a cell is `trusted` stays, too: it signs what it saves by that, and never writes it.
    """
    notebook.metadata = nbformat.from_dict(_PYTHON)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in ("tags", "trusted")})
    return notebook


def add_kernels_metadata(notebook: NotebookNode) -> NotebookNode:
    """Add what an editor adds to a plain notebook when its kernel starts: the inverse of `plain`."""
    notebook["metadata"]["language_info"] = nbformat.from_dict(IPythonKernel.language_info)
    notebook["metadata"]["kernelspec"]["display_name"] = get_kernel_spec("python3").display_name
    return notebook


def _keep_drawings(old: list[NotebookNode], new: list[NotebookNode]) -> None:
    """A drawing follows from its text, but for the fonts of the machine: where its text is as it was, it stays."""
    for before, after in zip(old, new):
        before, after = before.get("data", {}), after.get("data", {})
        if _SVG in before and _SVG in after and before["text/plain"] == after["text/plain"]:
            after[_SVG] = before[_SVG]


def rewrite(path: Path, redraw: bool = False) -> None:
    """Execute the notebook of this file from clean, and put what comes out into the file."""
    notebook = nbformat.read(path, as_version=4)
    before = [cell.get("outputs", []) for cell in notebook.cells]
    with executed(notebook, folder=path.resolve().parent):
        pass
    for old, cell in zip([] if redraw else before, notebook.cells):
        _keep_drawings(old, cell.get("outputs", []))
    nbformat.write(plain(notebook), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    parser.add_argument("--redraw", action="store_true")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        print(path.name, flush=True)
        rewrite(path, arguments.redraw)
