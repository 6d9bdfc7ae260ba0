"""Faster derivatives of plain arrays: with this folder deleted everything works, and takes longer.

`install` sets the two functions of the core's `engine`; the first gradient loads their modules. `steps.py` records
derivatives quickly, `arrays.py` runs the backward pass over plain arrays, with compiled rules.
"""

import importlib
from collections.abc import Callable
from typing import Any

from minidiff.core.reverse import engine
from minidiff.values.allocation import keep_by_default


def install() -> None:
    """Compute derivatives by the functions of this folder."""
    engine.linearize_flat, engine.backward_pass = _load_first("linearize_flat"), _load_first("backward_pass")


def _load_first(name: str) -> Callable:
    """Return a function that loads the modules, and calls the engine's function of this name."""

    def load(*args: Any) -> Any:
        keep_by_default()
        engine.linearize_flat = importlib.import_module("minidiff.fast.steps").linearize_flat
        engine.backward_pass = importlib.import_module("minidiff.fast.arrays").backward_pass
        return getattr(engine, name)(*args)

    return load
