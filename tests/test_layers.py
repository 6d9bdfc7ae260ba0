"""The layers, `numpy` <- `minidiff` <- `collectives` <- `spmd`: what each imports, in its files and as it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("minidiff", "collectives", "spmd")

#: Packages besides numpy, and the only module that imports each.
ELSEWHERE = {
    "mpi4py": "collectives/backends/mpi.py",
    "graphviz": "minidiff/show/graph.py",
    "matplotlib": "spmd/report/forecast.py",
    "tqdm": "spmd/examples/training.py",
}
#: Modules that most programs do without: they load when something needs them.
LATER = {
    "minidiff": ("collectives", "spmd", *ELSEWHERE),
    "collectives": ("collectives.algorithms", "collectives.cost", "collectives.reference", "spmd", *ELSEWHERE),
    "spmd": ("collectives.algorithms", "collectives.reference", "spmd.environment", "spmd.parallel", *ELSEWHERE),
}


def imported(path):
    """The packages that a file names in its imports, those inside functions as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_imports_those_beneath_it(layer):
    beneath = {"numpy", *LAYERS[: LAYERS.index(layer) + 1]}
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        others = set(imported(path)) - beneath - set(sys.stdlib_module_names)
        assert others == {package for package, place in ELSEWHERE.items() if place == name}, name


@pytest.mark.parametrize("layer", LAYERS)
def test_what_few_programs_need_loads_later(layer):
    code = f"import sys, {layer}; print([m for m in {LATER[layer]} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
