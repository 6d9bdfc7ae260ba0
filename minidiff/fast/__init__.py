"""What is here for speed alone: with this folder deleted everything works, and takes longer.

`install` sets the two functions of the core's `engine`; the first gradient loads what they are. `steps.py` records
derivatives quickly, `arrays.py` walks a linear tape of plain arrays, `cotangents.py` compiles derivative rules for it.
"""

import importlib
from typing import Any

from minidiff.core.reverse import engine
from minidiff.values.allocation import keep_by_default


def install() -> None:
    """Compute derivatives by the functions of this folder."""
    engine.linearize_flat = _linearize_first
    engine.backward_pass = _walk_first


def _load() -> None:
    keep_by_default()
    engine.linearize_flat = importlib.import_module("minidiff.fast.steps").linearize_flat
    engine.backward_pass = importlib.import_module("minidiff.fast.arrays").backward_pass


def _linearize_first(*args: Any) -> Any:
    _load()
    return engine.linearize_flat(*args)


def _walk_first(*args: Any) -> Any:
    _load()
    return engine.backward_pass(*args)
