"""Functions whose results are partial sums, on two mesh axes of 2: on blocks, and what they are of whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

X, W = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(4.0))


def halves(x: Any, axis: int) -> list:
    return np.split(x, 2, axis)


#: name: (in_specs, out_specs, f on blocks of x [4, 4] and w [4], the same of whole arrays).
PROGRAMS: dict[str, tuple] = {
    "over one axis": (
        (P("i"), P()),
        P(sum="i"),
        lambda x, w: np.sin(x * w),
        lambda x, w: sum(np.sin(b * w) for b in halves(x, 0)),
    ),
    "over both": (
        (P(("i", "j")), P()),
        P(sum=("i", "j")),
        lambda x, w: np.tanh(x) @ w,
        lambda x, w: np.tanh(x).sum(0, keepdims=True) @ w,
    ),
    "beside a mapped axis": (
        (P("i", "j"), P("j")),
        P("i", sum="j"),
        lambda x, w: x @ w,
        lambda x, w: x @ w,
    ),
    "of a second dimension": (
        (P("i", "j"), P()),
        P(None, "j", sum="i"),
        lambda x, w: x * np.sum(np.sin(w)),
        lambda x, w: sum(halves(x, 0)) * np.sum(np.sin(w)),
    ),
    "of what is the same on all ranks": ((P(), P()), P(sum="j"), lambda x, w: x * w, lambda x, w: 2 * x * w),
    "of what is the same along one": (
        (P("j"), P()),
        P(sum=("i", "j")),
        lambda x, w: x * w,
        lambda x, w: 2 * sum(b * w for b in halves(x, 0)),
    ),
    "of a scalar, after a sum": (
        (P("i", "j"), P("j")),
        P(sum=("j",)),
        lambda x, w: np.sum(np.cos(psum(x * w, "i"))),
        lambda x, w: np.sum(np.cos(sum(b * w for b in halves(x, 0)))),
    ),
}


def sharded(name: str, mesh: spmd.Mesh, **options: Any) -> Callable:
    in_specs, out_specs, f, _ = PROGRAMS[name]
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
