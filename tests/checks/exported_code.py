"""Exported programs: the files that they are written into, imported, and compared to the bit."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy

import minidiff as md

_numbers = itertools.count()


def read(path: Path) -> Any:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(exported: Any, folder: Path) -> Any:
    """Save an exported program in a folder, and import it."""
    path = folder / f"program{next(_numbers)}.py"
    exported.save(path)
    return read(path)


def same(actual: Any, expected: Any) -> None:
    """Check that trees have the same types and bits."""
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        numpy.testing.assert_array_equal(a, e)
        for part in (numpy.real, numpy.imag) if md.typeof(a).dtype.kind == "c" else (numpy.real,):
            numpy.testing.assert_array_equal(numpy.signbit(part(a)), numpy.signbit(part(e)))
