"""Names of other libraries (JAX, PyTorch, mpi4py, SciPy) that users try, and what to write instead: `suggestions.json`.

>>> import minidiff as md
>>> md.Jaxpr
Traceback (most recent call last):
AttributeError: minidiff has no attribute 'Jaxpr': write md.Tape
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any

import numpy

from minidiff.errors import did_you_mean
from minidiff.errors.tracebacks import hide_frames_of, hide_own_frames


@functools.cache
def suggestions(kind: str) -> dict[str, dict[str, str]]:
    """Return advice of a kind in `suggestions.json`: owner -> a name that it lacks -> what to write instead.

    The kinds are "names" of modules and classes, "keywords" of functions, functions of "scipy" and "options of scipy",
    and functions of "numpy" that refuse traced values. The file has texts of advice, and the names that each is for; in
    advice, `{}` is the name, and `{lower}` the name in lower case.
    """
    import json  # only errors need it

    with open(os.path.join(os.path.dirname(__file__), "suggestions.json"), encoding="utf-8") as file:
        tables = json.load(file)[kind]
    by_name: dict[str, dict[str, str]] = {}
    for owners, rows in tables.items():
        for owner, (advice, names) in itertools.product(owners.split(), rows.items()):
            for name in names.split():
                text = advice.replace("{}", name).replace("{lower}", name.lower())
                by_name.setdefault(owner, {})[name] = text
    return by_name


def missing_attribute_error(owner: str, name: str, known: Iterable[str] = ()) -> AttributeError:
    """Return the error for a missing attribute: it names what to write instead, or a similar known name."""
    message = f"{owner} has no attribute {name!r}"
    if name.startswith("_"):  # Python asks for some of these when it imports
        return AttributeError(message)
    advice = suggestions("names").get(owner, {}).get(name)
    if advice is None and owner == "minidiff" and name in numpy.__all__:
        advice = f"write np.{name}, after import minidiff.numpy as np"
    return AttributeError(f"{message}: {advice}" if advice else message + did_you_mean(name, known))


_NONE: Mapping[str, str] = MappingProxyType({})


def imports_at_first_use(module: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the imports that a module has under `if TYPE_CHECKING`: paths of modules, and of the modules of names.

    So they are written once, for type checkers and for `module_getattr`.
    """
    loader: Any = sys.modules[module].__loader__
    body: list[Any] = ast.parse(loader.get_source(module)).body
    (block,) = [x for x in body if type(x) is ast.If and getattr(x.test, "attr", "") == "TYPE_CHECKING"]
    statements: list[Any] = block.body
    modules: dict[str, str] = {}
    names: dict[str, str] = {}
    for statement in statements:
        for alias in statement.names:
            if type(statement) is ast.Import:
                modules[alias.asname or alias.name] = alias.name
            elif statement.module == module:
                modules[alias.name] = f"{module}.{alias.name}"
            else:
                names[alias.name] = statement.module
    return modules, names


def module_getattr(
    module: str,
    modules: Mapping[str, str] = _NONE,
    names: Mapping[str, str] = _NONE,
    moved: Mapping[str, str] = _NONE,
    wrap: Callable[[Any], Any] | None = None,
) -> Callable:
    """Return the `__getattr__` of a module, which imports on first use and has no other names.

    `modules` has the paths of modules that are attributes of it, `names` those of the modules that define the others.
    (A module must not have the same name as a function in it, since importing it would shadow that.) `moved` has the
    new paths of names, whose use warns with a DeprecationWarning; a function that is another one with options now has a
    call, "package.function(option=1)". `wrap` makes the values of `names` the module's own.
    """

    @hide_own_frames
    def find(name: str) -> Any:
        namespace = vars(sys.modules[module])
        if name in modules:
            namespace[name] = importlib.import_module(modules[name])
        elif name in names:
            value: Any = getattr(importlib.import_module(names[name]), name)
            namespace[name] = value if wrap is None else wrap(value)
            hide_frames_of(namespace, [name] if wrap is None else [])
        elif name in moved:
            warnings.warn(f"{module}.{name} is now {moved[name]}", DeprecationWarning, stacklevel=3)
            path, _, options = moved[name].partition("(")
            parent, _, last = path.rpartition(".")
            new: Any = getattr(importlib.import_module(parent), last, None) or importlib.import_module(path)
            namespace[name] = functools.partial(new, **eval(f"dict({options}")) if options else new
        else:
            raise missing_attribute_error(module, name, dir(sys.modules[module]))
        return namespace[name]

    return find


def finish_module(namespace: dict[str, Any]) -> None:
    """Finish a module that users import: hide the library's frames, list its names, explain those that it lacks."""
    names = namespace["__all__"]
    hide_frames_of(namespace, names)
    namespace["__dir__"] = functools.partial(sorted, names)
    namespace.setdefault("__getattr__", module_getattr(namespace["__name__"]))


# ---------------------------------------------------------------- SciPy

#: Frames of these call the functions of users, whose traced values no function of SciPy around them has.
_TRANSFORMATIONS = ("minidiff.api.", "minidiff.compiler.", "minidiff.control_flow.")


def scipy_function() -> tuple[str, str] | None:
    """Return the function of SciPy that runs on traced values, and what to write instead; None outside SciPy."""
    frame: FrameType | None = sys._getframe(1)
    calls: list[tuple[str, str]] = []  # a module and a name, the innermost first
    while frame is not None and not (module := frame.f_globals.get("__name__", "")).startswith(_TRANSFORMATIONS):
        if module.startswith("scipy."):
            calls.append((module, _name_of_method(module, frame)))
            # A decorator's wrapper has the function in a variable.
            calls += [
                (f.__module__, f.__name__)
                for f in frame.f_locals.values()
                if callable(f) and str(getattr(f, "__module__", "")).startswith("scipy.") and hasattr(f, "__name__")
            ]
        frame = frame.f_back
    for module, name in reversed(calls):  # the user called the outermost
        if instead := _advice_for_scipy(module.split(".")[1], name):
            return _public_path(module, name), instead
    paths = [_public_path(*call) for call in reversed(calls)]
    path = next((p for p in paths if p.rpartition(".")[2] in _public_names(p)), paths[0] if paths else None)
    return None if path is None else (path, "write it in NumPy's functions")


def _advice_for_scipy(family: str, name: str) -> str | None:
    """Return the advice for a function of a module of SciPy, or a distribution's method: the text to write instead."""
    libraries = importlib.import_module("minidiff.scipy").__all__
    library = importlib.import_module(f"minidiff.scipy.{family}") if family in libraries else None
    first, _, method = name.partition(".")
    if library and first in library.__all__:
        methods = [m for m in dir(getattr(library, first)) if m.endswith(("df", "mf", "sf", "ppf"))]
        if method in ("", "entropy", *methods) and hasattr(getattr(library, first), method or "__call__"):
            return f"write md.scipy.{family}.{name}"
        return f"md.scipy.{family}.{first} has {', '.join(methods)}"
    if name in (substitutes := suggestions("scipy")["scipy"]):
        return f"write {substitutes[name]}"
    numpys = next((f for f in ("linalg", "fft") if name in getattr(numpy, f).__all__), None)
    return f"write np.{numpys}.{name}" if numpys else None


def _name_of_method(module: str, frame: FrameType) -> str:
    """Return the name of the function of a frame: for a distribution's method, also frozen, `norm.logpdf`."""
    owner = frame.f_locals.get("self")
    owner = getattr(owner, "dist", getattr(owner, "_dist", owner))
    distribution = getattr(owner, "name", None) or type(owner).__name__.removesuffix("_gen")
    known = module.startswith("scipy.stats.") and distribution in vars(sys.modules["scipy.stats"])
    return f"{distribution}.{frame.f_code.co_name}" if known else frame.f_code.co_name


def _public_names(path: str) -> Sequence[str]:
    """Return the public names of a path's module of SciPy: for `scipy.optimize.root`, those of scipy.optimize."""
    return getattr(sys.modules.get(".".join(path.split(".")[:2])), "__all__", ())


def _public_path(module: str, name: str) -> str:
    """Return the import path of a function of SciPy, whose private modules users do not import."""
    family = ".".join(module.split(".")[:2])
    if name.split(".")[0] in _public_names(family):
        return f"{family}.{name}"
    return ".".join([*(part for part in module.split(".") if not part.startswith("_")), name])
