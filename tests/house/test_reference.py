"""The reference lists every public name, and a page or a notebook explains each."""

import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("public_names", ROOT / "docs" / "public_names.py")
names = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(names)

#: Modules that are not in the reference: NumPy and SciPy document their names, and examples are programs to run.
ELSEWHERE = {"minidiff.numpy", "minidiff.scipy.special", "minidiff.scipy.stats", "spmd.examples"}
MODULES = [path for path in names.public_modules() if path not in ELSEWHERE]
PUBLIC = {(path, name) for path in MODULES for name in names.public_names(names.find_module(path))}

CODE = re.compile(r"^```.*?^```|`[^`]+`", re.MULTILINE | re.DOTALL)


def code_in(path):
    """The code on a page or in a notebook: blocks, and what is in backquotes."""
    if path.suffix != ".ipynb":
        return CODE.findall(path.read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return [code for kind, text in cells for code in ([text] if kind == "code" else CODE.findall(text))]


def words_of(codes):
    return {word for code in codes for word in re.findall(r"[A-Za-z_]\w*", code)}


def test_the_reference_lists_every_public_name_and_no_other():
    assert len(PUBLIC) > 300
    assert names.names_in_reference() ^ PUBLIC == set()


def test_no_name_is_listed_twice():
    pages = [page.read_text() for page in names.REFERENCE.glob("*.md")]
    listed = [pair for page in pages for pair in names.listed_names(page)]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("path", MODULES)
def test_a_page_or_a_notebook_explains_every_public_name(path):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md")]
    explained = words_of(code for page in (*pages, *(ROOT / "notebooks").glob("*.ipynb")) for code in code_in(page))
    assert [name for module, name in sorted(PUBLIC) if module == path and name not in explained] == []


@functools.cache
def docstrings_with_examples(module):
    """The docstrings of a module whose examples run as tests."""
    actual = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    return {test.docstring for test in actual if test.examples}


@pytest.mark.parametrize("path", MODULES)
def test_every_public_callable_has_an_example_that_runs(path):
    public = {name: getattr(names.find_module(path), name) for module, name in sorted(PUBLIC) if module == path}
    modules = {name: inspect.unwrap(x).__module__ for name, x in public.items() if callable(x)}
    assert [name for name, m in modules.items() if public[name].__doc__ not in docstrings_with_examples(m)] == []


def test_every_page_of_the_reference_is_in_its_table_of_contents():
    table = (ROOT / "docs" / "reference.md").read_text()
    assert all(f"(reference/{page.name})" in table for page in names.REFERENCE.glob("*.md"))
    assert all(f"\nreference/{page.stem}\n" in table for page in names.REFERENCE.glob("*.md"))
