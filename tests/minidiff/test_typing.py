"""Information for type checkers and editors: the packages are typed, and list their names."""

import ast
import configparser
import importlib
import inspect
import itertools
from pathlib import Path

import numpy

import minidiff
from minidiff.core import tracer as tracers
from minidiff.core.tracer import Tracer
from minidiff.values import operators
from tests.checks.samples import each

ROOT = Path(__file__).parents[2]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
PACKAGES = ["minidiff", "collectives", "spmd"]
PUBLIC = [*PACKAGES, *("collectives.algorithms", "minidiff.nn", "minidiff.optim", "minidiff.random", "minidiff.tree")]
PUBLIC += ["spmd.parallel"]


@each("package", PACKAGES)
def test_the_marker_is_installed(package):
    assert (ROOT / package / "py.typed").read_text() == ""
    assert "py.typed" in SETTINGS["options.package_data"][package].split()


def test_type_checkers_know_numpys_names_by_its_own_types():
    """All that `minidiff.numpy` is to them: NumPy, and what it has besides. So nothing there can be out of date."""
    path = Path(minidiff.numpy.__file__).with_suffix(".pyi")
    everything, local = ast.parse(path.read_text()).body
    assert (everything.module, [name.name for name in everything.names]) == ("numpy", ["*"])
    assert local.module == "minidiff.numpy.replaced"
    assert all(name.name == name.asname for name in local.names)
    assert {*numpy.__all__, *(name.name for name in local.names)} == set(minidiff.numpy.__all__)
    assert "numpy/*.pyi" in SETTINGS["options.package_data"]["minidiff"]


def test_type_checkers_know_the_operators_of_traced_values():
    """They are attached when the package is imported, which type checkers do not see."""
    (declared,) = [x for x in ast.parse(Path(operators.__file__).read_text()).body if isinstance(x, ast.ClassDef)]
    text = next(x for x in declared.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")
    names = {name.id for x in text.body if isinstance(x, ast.Assign) for name in x.targets}
    classes = [x for x in ast.parse(Path(tracers.__file__).read_text()).body if isinstance(x, ast.ClassDef)]
    tracer = next(x for x in classes if x.name == "Tracer")
    local = {x.name for x in tracer.body if isinstance(x, ast.FunctionDef)}
    attached = {name for name, value in vars(Tracer).items() if name.startswith("__") and callable(value)}
    assert names == attached - local - {"__eq__", "__ne__", "__hash__", "__format__", "__getattr__"}


@each("package", PACKAGES)
def test_type_checkers_are_not_told_that_there_is_every_name(package):
    """A module's `__getattr__` tells them that: it stands where they do not look."""
    text = ast.parse((ROOT / package / "__init__.py").read_text()).body
    for block in text:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "_typing.TYPE_CHECKING":
            text = [*text, *block.body]
    assert [f.name for f in text if isinstance(f, ast.FunctionDef) and f.name == "__getattr__"] == []


@each("package", PACKAGES)
def test_names_that_are_imported_late_are_there_for_type_checkers(package):
    module = importlib.import_module(package)
    body = ast.parse(Path(module.__file__).read_text()).body
    blocks = [block for block in body if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)]
    text = {}
    for statement in itertools.chain(*(block.body for block in blocks)):
        for alias in statement.names:
            module_of = getattr(statement, "module", None)
            path = f"{package}.{alias.name}" if module_of == package else module_of or alias.name
            text[alias.asname or alias.name] = (path, module_of not in (None, package))
    later = {name: (path, False) for name, path in module._LATER.items()}
    assert text == {**later, **{name: (path, True) for name, path in getattr(module, "_NAMES", {}).items()}}


MODULES = [f"minidiff.{name}" for name in ("numpy", "tree", "optim", "random", "nn", "precision", "debug")]


@each("package", [*PACKAGES, *MODULES])
def test_dir_lists_the_public_names(package):
    """Completion in editors and notebooks lists no submodule, and nothing that a module imports for itself."""
    module = importlib.import_module(package)
    assert dir(module) == sorted({*module.__all__, *getattr(module, "_LATER", ())})
    assert all(getattr(module, name).__doc__ for name in dir(module) if package in MODULES[1:])


def public():
    for module in map(importlib.import_module, PUBLIC):
        for name in getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")]):
            value = getattr(module, name)
            if getattr(value, "__module__", "").startswith(tuple(PACKAGES)) and callable(value):
                yield f"{module.__name__}.{name}", value
                for attribute, method in vars(value).items() if inspect.isclass(value) else ():
                    if inspect.isfunction(method) and not attribute.startswith("_"):
                        yield f"{module.__name__}.{name}.{attribute}", method


def test_signatures_are_typed_and_described():
    actual = list(public())
    assert len(actual) > 150
    for name, value in actual:
        assert inspect.getdoc(value), name
        result = next((vars(value)[k] for k in ("__new__", "__init__") if k in vars(value)), None)
        if not inspect.isclass(value):
            assert inspect.signature(value).return_annotation is not inspect.Signature.empty, name
        elif result is None:
            continue
        parameters = inspect.signature(result if inspect.isclass(value) else value).parameters.values()
        local = [p for p in parameters if p.name not in ("self", "cls", "_cls") and p.kind is not p.VAR_KEYWORD]
        assert [p.name for p in local if p.annotation is p.empty] == [], name
