"""Comparisons of trees of arrays, and meshes, that properties share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy

import minidiff as md
import spmd
from spmd.mesh.launch import launcher_size


def agree(actual: object, expected: object, **tolerances: float) -> None:
    """Raise where trees of arrays differ; NaNs and infinities are to be the same."""
    actual, expected = md.tree.leaves(actual), md.tree.leaves(expected)
    assert len(actual) == len(expected), f"{len(actual)} results, not {len(expected)}"
    for x, y in zip(actual, expected):
        x, y = (v.gather() if hasattr(v, "gather") else numpy.asarray(v) for v in (x, y))
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{x.dtype}{x.shape}, not {y.dtype}{y.shape}"
        wide = numpy.float64 if x.dtype.kind in "fV" else x.dtype
        numpy.testing.assert_allclose(x.astype(wide), y.astype(wide), **{"rtol": 1e-9, "atol": 1e-12, **tolerances})


def not_jitted(f: Callable) -> Callable:
    return f


def with_gradients(f: Callable, ct: numpy.ndarray) -> Callable:
    """Return a function of values and of the cotangents of all arguments."""
    return lambda *args: (f(*args), md.vjp(f, *args)[1](ct))


@functools.cache
def line(n: int) -> spmd.Mesh:
    """Return a mesh along "i": of n simulated ranks, or of all ranks of a launch."""
    launched = launcher_size()
    return spmd.make_mesh((launched or n,), ("i",), backend=None if launched else "simulated")
