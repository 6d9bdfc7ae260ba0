"""Faster derivatives of plain arrays: with this folder deleted everything works, and takes longer.

`install` sets the two functions of the core's `engine`; the first gradient loads their modules. `steps.py` records
derivatives quickly, `arrays.py` runs the backward pass over plain arrays, with compiled rules.
"""

import importlib
from typing import Any

from minidiff.core.reverse import engine
from minidiff.values.allocation import keep_by_default


def install() -> None:
    """Compute derivatives by the functions of this folder."""
    engine.linearize_flat = _linearize_first
    engine.backward_pass = _backward_pass_first


def _load() -> None:
    keep_by_default()
    engine.linearize_flat = importlib.import_module("minidiff.fast.steps").linearize_flat
    engine.backward_pass = importlib.import_module("minidiff.fast.arrays").backward_pass


def _linearize_first(*args: Any) -> Any:
    _load()
    return engine.linearize_flat(*args)


def _backward_pass_first(*args: Any) -> Any:
    _load()
    return engine.backward_pass(*args)
