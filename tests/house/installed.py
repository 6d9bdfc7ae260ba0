"""Check the packages as pip installs them, in an environment that has nothing else but NumPy.

    python -I installed.py README.md docs/description.md

`make test-dist` runs it with the Python of new environments, in a folder that has no checkout. `-I` leaves out
PYTHONPATH and the script's folder. It prints what it has checked, in one line, and needs no package for testing.
"""

import contextlib
import doctest
import importlib
import importlib.util
import io
import pkgutil
import platform
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import numpy as np

import collectives
import minidiff as md
import spmd
from collectives import algorithms

PACKAGES = md, collectives, spmd
#: Modules whose examples need an extra, and the package that it brings.
EXTRAS = {
    "minidiff.scipy": "scipy",
    "minidiff.show.graph": "graphviz",
    "minidiff.values.dtypes": "ml_dtypes",
    "collectives.backends.mpi": "mpi4py",
    "spmd.examples": "mpi4py",
}
#: Programs that end with an error, and modules whose docstrings are NumPy's.
NOT_IMPORTED = "spmd.examples.bugs.", "minidiff.numpy."
#: Modules whose examples are written for a mesh and names that they do not define.
NAMES = {"np": np, "md": md, "spmd": spmd, "P": spmd.P, "algorithms": algorithms}
ON_A_MESH = {f"collectives.{name}" for name in ("algorithms", "casts", "in_flight", "ops", "reductions", "rooted")}
#: Files beside the modules, which the packages read.
FILES = {
    "minidiff": ("py.typed", "numpy/__init__.pyi", "errors/suggestions.json"),
    "collectives": ("py.typed",),
    "spmd": ("py.typed", "report/page.css", "report/page.js", "examples/data/digits.npz"),
}


def check_origin():
    """Check that the packages are those that pip installed, whole and of one version."""
    for package in PACKAGES:
        assert Path(package.__file__).is_relative_to(Path(sys.prefix).resolve()), package.__file__
        assert package.__version__ == metadata.version("minidiff")
        for name in FILES[package.__name__]:
            assert resources.files(package.__name__).joinpath(name).is_file(), name


def modules():
    """Yield the modules whose examples run with what is installed."""
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            name = info.name
            missing = [x for x, needs in EXTRAS.items() if f"{name}.".startswith(f"{x}.") and not has(needs)]
            if not (missing or name.endswith("__main__") or f"{name}.".startswith(NOT_IMPORTED)):
                yield importlib.import_module(name)


def has(package):
    """Return whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def examples_of(module):
    """Run the examples of a module's docstrings; return how many there are."""
    names = {**NAMES, "mesh": spmd.make_mesh((2,), ("i",))} if module.__name__ in ON_A_MESH else None
    return checked(doctest.testmod, module, extraglobs=names, optionflags=doctest.ELLIPSIS)


def checked(test, *args, **options):
    """Return how many examples a function of `doctest` has tried; exit with what it printed if one fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        failed, attempted = test(*args, **options)
    if failed:
        sys.exit(printed.getvalue())
    return attempted


def output_of(*arguments):
    """Return what a program prints, in an interpreter of its own."""
    return subprocess.run([sys.executable, "-I", *arguments], check=True, capture_output=True, text=True).stdout


def main(pages):
    check_origin()
    lines = dict(line.split(None, 1) for line in output_of("-m", "spmd").splitlines() if "  " in line)
    assert lines["minidiff"] == md.__version__ and lines["NumPy"] == np.__version__, lines
    assert output_of("-m", "spmd", "--version") == f"minidiff {md.__version__}\n"
    assert "data_parallel" in output_of("-m", "spmd.examples")
    assert "held-out accuracy" in output_of("-m", "spmd.examples.block", "--steps", "3")
    on_pages = sum(checked(doctest.testfile, page, module_relative=False) for page in pages)
    counts = [examples_of(module) for module in modules()]
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, minidiff {md.__version__}"
    print(f"{versions}: {on_pages} examples of {len(pages)} pages and {sum(counts)} of {len(counts)} modules are right")


if __name__ == "__main__":
    main(sys.argv[1:])
