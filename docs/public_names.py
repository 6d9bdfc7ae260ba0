"""The public names of the packages, and those that the reference lists."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

REFERENCE = Path(__file__).parent / "reference"

#: The directive that lists names: of the module that it names those in its body, or if that is empty all of them.
LISTED = re.compile(r"^```\{reference\} (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def public_names(module: ModuleType) -> list[str]:
    """The names that users may import from a module, without those of modules."""
    return sorted(name for name in module.__all__ if not inspect.ismodule(getattr(module, name)))


def public_modules() -> list[str]:
    """The packages, and the modules in them that users may import: `minidiff.testing` is `minidiff.checks.testing`."""
    packages = {name: importlib.import_module(name) for name in ("minidiff", "collectives", "spmd")}
    inside = [f"{path}.{name}" for path, x in packages.items() for name in dir(x) if inspect.ismodule(getattr(x, name))]
    of_scipy = [f"minidiff.scipy.{name}" for name in packages["minidiff"].scipy.__all__]
    return [*packages, *inside, *of_scipy, "minidiff.scipy.sparse.linalg"]


def find_module(path: str) -> ModuleType:
    """The module that users write as `path`."""
    package, _, rest = path.partition(".")
    module = importlib.import_module(package)
    for name in filter(None, rest.split(".")):
        module = getattr(module, name)
    return module


def listed_names(text: str) -> Iterator[tuple[str, str]]:
    """The public names in the directives of a page: pairs of a module's path and a name in it."""
    for path, body in LISTED.findall(text):
        for name in body.split() or public_names(find_module(path)):
            yield path, name


def names_in_reference() -> set[tuple[str, str]]:
    """The public names on all pages of the reference."""
    return {pair for page in sorted(REFERENCE.glob("*.md")) for pair in listed_names(page.read_text())}
