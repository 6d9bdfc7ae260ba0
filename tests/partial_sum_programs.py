"""Functions whose results are partial sums, on two mesh axes of 2: on blocks, and what they are of whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
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


Dims = tuple[tuple[str, ...], ...]  # for each dimension, the axes that it is split along


def of_whole(f: Callable, ins: Dims, outs: Dims, summed: tuple[str, ...], sizes: Mapping[str, int]) -> Callable:
    """What a shard_map of `f` means, without one: `f` of the block of each rank, the results joined and added up."""

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
