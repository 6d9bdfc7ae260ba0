"""Names that pages of messages share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from tests.checks.meshes import mapped, mesh


def warned(f: Callable[[], Any]) -> None:
    """Call a function, and print each of its warnings as a line, in place of its result.

    >>> warned(lambda: warnings.warn("too small", UserWarning))
    UserWarning: too small
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f()
    for warning in caught:
        print(f"{warning.category.__name__}: {warning.message}")


def names() -> dict[str, Any]:
    """Return the names of a page: the packages, meshes, every collective, and some arrays."""
    return {
        **{name: getattr(collectives, name) for name in collectives.__all__},
        **{"numpy": numpy, "md": md, "np": np, "spmd": spmd, "collectives": collectives, "P": spmd.P},
        **{"mesh": mesh, "mapped": mapped, "warned": warned},
        **{"line": mesh(4), "plane": mesh(2, 2), "x": numpy.array([1.0, 2.0, 3.0]), "ints": numpy.array([1, 2, 3])},
    }
