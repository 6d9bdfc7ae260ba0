"""Functions whose results are partial sums, on blocks; and the meaning of such functions of any blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

X, W = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(4.0))


#: name: (in_specs, out_specs, f on blocks of x [4, 4] and w [4]).
PROGRAMS: dict[str, tuple] = {
    "over one axis": ((P("i"), P()), P(sum="i"), lambda x, w: np.sin(x * w)),
    "over both": ((P(("i", "j")), P()), P(sum=("i", "j")), lambda x, w: np.tanh(x) @ w),
    "beside a mapped axis": ((P("i", "j"), P("j")), P("i", sum="j"), lambda x, w: x @ w),
    "of a second dimension": ((P("i", "j"), P()), P(None, "j", sum="i"), lambda x, w: x * np.sum(np.sin(w))),
    "of what is the same on all ranks": ((P(), P()), P(sum="j"), lambda x, w: x * w),
    "of what is the same along one": ((P("j"), P()), P(sum=("i", "j")), lambda x, w: x * w),
    "of a scalar, after a sum": (
        (P("i", "j"), P("j")), P(sum=("j",)), lambda x, w: np.sum(np.cos(psum(x * w, "i"))),
    ),
}  # fmt: skip


def sharded(name: str, mesh: spmd.Mesh, **options: Any) -> Callable:
    in_specs, out_specs, f = PROGRAMS[name]
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes that it is split along


def of_whole(f: Callable, ins: Dims, outs: Dims, summed: tuple[str, ...], sizes: Mapping[str, int]) -> Callable:
    """Return the reference for a shard_map of `f`: `f` of each rank's block, the results concatenated and summed."""

    def block(x: Any, at: Mapping[str, int]) -> Any:
        for d, axes in enumerate(ins):
            for a in axes:
                x = np.split(x, sizes[a], d)[at[a]]
        return x

    def result(x: Any, at: dict[str, int], d: int = 0) -> Any:
        if d == len(outs):
            rest = [range(sizes[a]) for a in summed]
            return sum(f(block(x, {**at, **dict(zip(summed, ranks))})) for ranks in itertools.product(*rest))
        ranks = itertools.product(*[range(sizes[a]) for a in outs[d]])
        parts = [result(x, {**at, **dict(zip(outs[d], r))}, d + 1) for r in ranks]
        return np.concatenate(parts, d)

    return lambda x: result(x, dict.fromkeys(sizes, 0))
