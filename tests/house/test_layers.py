"""The layers, `numpy` <- `minidiff` <- `collectives` <- `spmd`: what each imports, in its files and as it loads."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("minidiff", "collectives", "spmd")

#: Packages besides numpy, and the only modules, or folders, that import each.
ELSEWHERE = {
    "mpi4py": "collectives/backends/mpi/",
    "graphviz": "minidiff/show/graph.py",
    "llvmlite": "minidiff/compiler/native.py",
    "matplotlib": "spmd/show.py",
    "scipy": ("minidiff/scipy/", "minidiff/sparse/jacobians.py"),
    "threadpoolctl": "spmd/mesh/launch.py",
    "tqdm": "spmd/examples/loop.py",
}
#: Modules that most programs do without: they load when something needs them.
LATER = {
    "minidiff": (
        "collectives",
        "minidiff.compiler",
        "minidiff.debug",
        "minidiff.control_flow",
        "minidiff.ops.fft",
        "numpy.fft",
        "spmd",
        *ELSEWHERE,
    ),
    "collectives": ("collectives.algorithms", "collectives.cost", "collectives.reference", "spmd", *ELSEWHERE),
    "spmd": (
        "collectives.algorithms",
        "collectives.reference",
        "spmd.checkpoint",
        "spmd.data",
        "spmd.parallel",
        "spmd.pipeline",
        *ELSEWHERE,
    ),
}


#: Imports inside functions: of optional packages, and of what few programs need.
INSIDE = {"collectives.backends.mpi", "minidiff.compiler.codegen", "minidiff.compiler.program", *ELSEWHERE}


@functools.cache
def modules():
    """All modules: name -> path."""
    actual = {}
    for path in (p for layer in LAYERS for p in (ROOT / layer).rglob("*.py")):
        actual[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return actual


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path):
    """Return the imports of a file."""
    return [*imports(tree_of(path), modules())]


def imports(node, known, inside=False):
    """Pairs of a module that the node imports, and whether a function does so; not those for type checkers."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        node = ast.Module(node.orelse, [])
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield (name if name in known else node.module), inside
    elif isinstance(node, ast.Import):
        yield from ((alias.name, inside) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, known, inside or isinstance(node, ast.FunctionDef))


def folder_of(module):
    """The folder of a module in its package, or the module itself at the top."""
    return ".".join(module.split(".")[:2])


def graph_of(part):
    """Return the imports of each module, or each folder, from others: `part` says what a module belongs to."""
    known, graph = modules(), {}
    for name, path in known.items():
        graph.setdefault(part(name), set()).update(part(x) for x, _ in imports_of(path) if x in known)
    return {name: beneath - {name} for name, beneath in graph.items()}


@pytest.mark.parametrize("part", [str, folder_of])
def test_nothing_imports_itself_round_a_corner(part):
    try:
        graphlib.TopologicalSorter(graph_of(part)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_minidiff_has_ten_floors_at_most():
    beneath = graph_of(folder_of)
    floor = functools.cache(lambda folder: 1 + max(map(floor, beneath[folder]), default=0))
    floors = {folder: floor(folder) for folder in beneath if folder.startswith("minidiff")}
    assert max(floors.values()) <= 10, floors


def test_the_heart_stands_on_what_knows_nothing_of_it():
    known = modules()
    files = {name: path for name, path in known.items() if name.startswith("minidiff.core")}
    actual = {folder_of(x) for path in files.values() for x, _ in imports_of(path)}
    assert actual & {folder_of(x) for x in known} <= {"minidiff.core", "minidiff.values", "minidiff.errors"}
    lines = [len(path.read_text().splitlines()) for path in files.values()]
    assert max(lines) <= 250
    assert sum(lines) <= 1700


def test_functions_import_optional_packages_alone():
    known = modules()
    for name, path in known.items():
        inside = {module for module, flag in imports_of(path) if flag}
        assert {x for x in inside if x.partition(".")[0] in LAYERS} <= INSIDE, name


def imported(path):
    """The packages that a file names in its imports, those inside functions as well."""
    for node in ast.walk(tree_of(path)):
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
        allowed = {package for package, place in ELSEWHERE.items() if name.startswith(place)}
        assert {package for package in allowed if ELSEWHERE[package] == name} <= others <= allowed, name


@pytest.mark.parametrize("layer", LAYERS)
def test_what_few_programs_need_loads_later(layer):
    code = f"import sys, {layer}; print([m for m in {LATER[layer]} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_two_classes_have_one_name():
    places = {}
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: actual for name, actual in places.items() if len(actual) > 1} == {}
