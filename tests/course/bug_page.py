"""The programs of `spmd.examples.bugs`: what they print, and what the page `docs/bugs.md` says that they print."""

import contextlib
import io
import re
import runpy
import warnings
from pathlib import Path

from spmd.examples import bugs

FOLDER = Path(bugs.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
PAGE = Path(__file__).parents[2] / "docs" / "bugs.md"


def blocks(name: str) -> list[str]:
    """The code of a program's section on the page: the program, what it prints, and what there is besides."""
    section = re.search(rf"`spmd/examples/bugs/{name}\.py`(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)[1]
    return re.findall(r"^```(?:python|text)\n(.*?)^```$", section, re.M | re.S)


def run(name: str) -> str:
    """Run a program; return what it prints, then its warnings, then the error that ends it."""
    shown = io.StringIO()
    with warnings.catch_warnings(record=True) as actual, contextlib.redirect_stdout(shown):
        warnings.simplefilter("always")
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"))
            end = ""
        except Exception as error:
            end = f"{type(error).__name__}: {error}\n"
    return shown.getvalue() + "".join(f"{w.category.__name__}: {w.message}\n" for w in actual) + end
