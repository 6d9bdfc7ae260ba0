"""Random straight-line programs of collectives, in which much is done that need not be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
)
from minidiff import typeof
from spmd import P

SIDE = 12  # divided by the numbers of ranks along any axes; every value is a matrix [SIDE, 2]


def _copies(x: Any, axes: tuple) -> Any:
    missing = tuple(a for a in axes if a not in typeof(x).variance)
    return pbroadcast(x, missing) if missing else x


def _entries(x: Any, size: int) -> Any:
    """[SIDE, 2] -> [size, SIDE, 2]."""
    return np.stack([x * (k + 1) for k in range(size)])


def _halves(size: int) -> list:
    """Two groups of ranks, or one; not of one size where that cannot be."""
    return [group for group in ([*range(0, size, 2)], [*range(1, size, 2)]) if group]


#: An instruction takes two values, some axes, and how many ranks there are along them.
INSTRUCTIONS: dict[str, Callable] = {
    "sine": lambda x, y, axes, size: np.sin(x),
    "add": lambda x, y, axes, size: x + y,
    "subtract": lambda x, y, axes, size: x - y,
    "negative": lambda x, y, axes, size: -x,
    "multiply": lambda x, y, axes, size: np.sin(x) * np.cos(y),
    "psum": lambda x, y, axes, size: psum(x, axes) / 8,
    "psum again": lambda x, y, axes, size: psum(x, axes) - psum(np.cos(x), axes) / 8,
    "psum both": lambda x, y, axes, size: psum(x, axes) + psum(y, axes),
    "psum of a sum": lambda x, y, axes, size: x * np.sin(psum(np.sum(x), axes)),
    "pmean": lambda x, y, axes, size: pmean(x, axes),
    "pmax": lambda x, y, axes, size: pmax(x, axes),
    "pmin": lambda x, y, axes, size: pmin(x, axes),
    "pbroadcast": lambda x, y, axes, size: _copies(x, axes) + y,
    "ppermute": lambda x, y, axes, size: ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)]),
    "all_to_all": lambda x, y, axes, size: all_to_all(x, axes, 0, 0, tiled=True),
    "scatter the sum and gather": lambda x, y, axes, size: all_gather(
        psum_scatter(x, axes, tiled=True), axes, tiled=True
    ),
    "scatter the sum and gather invariantly": lambda x, y, axes, size: all_gather_invariant(
        psum_scatter(x, axes, tiled=True), axes, tiled=True
    ),
    "local slice of the sum": lambda x, y, axes, size: all_gather(
        np.sin(pscatter(psum(_copies(x, axes), axes), axes, tiled=True)), axes, tiled=True
    ),
    "gather and own": lambda x, y, axes, size: pscatter(all_gather_invariant(x, axes, tiled=True), axes, tiled=True),
    "gather entries and own": lambda x, y, axes, size: all_gather(x, axes)[axis_index(axes)],
    "own rows of the sum": lambda x, y, axes, size: all_gather(
        md.dynamic_slice_in_dim(psum(x, axes), axis_index(axes) * (SIDE // size), SIDE // size), axes, tiled=True
    ),
    "gather a multiple of the sum's parts": lambda x, y, axes, size: all_gather(
        psum_scatter(x, axes, tiled=True) / size, axes
    ).reshape(SIDE, 2),
    "scatter in steps, gather at once": lambda x, y, axes, size: all_gather(
        functools.reduce(lambda part, a: psum_scatter(part, a, tiled=True), axes, x), axes, tiled=True
    ),
    "gather in steps": lambda x, y, axes, size: np.sum(
        functools.reduce(lambda part, a: all_gather(part, a, tiled=True), axes, np.sin(x)).reshape(size, SIDE, 2), 0
    ),
    "terms sent alike": lambda x, y, axes, size: (
        psum_scatter(_entries(x, size), axes) - psum_scatter(_entries(np.sin(y), size), axes)
    ),
    "send on": lambda x, y, axes, size: ppermute(
        ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)]), axes, [(i, size - 1 - i) for i in range(1, size)]
    ),
    "exchange, and back": lambda x, y, axes, size: all_to_all(
        all_to_all(x, axes, 0, 1, tiled=True), axes, 1, 0, tiled=True
    ),
    "psum in groups": lambda x, y, axes, size: (
        psum(x, axes, axis_index_groups=_halves(size)) - psum(np.cos(y), axes, axis_index_groups=_halves(size))
    ),
    "own entry of the sum": lambda x, y, axes, size: psum(_entries(x, size), axes)[axis_index(axes)],
}


class RandomProgram:
    """Instructions: `(name, operand, operand, axes)`; operands are earlier values, counted from the last one."""

    def __init__(self, steps: list, sizes: dict[str, int]):
        self.steps = steps
        self.sizes = sizes

    def __repr__(self) -> str:
        return f"RandomProgram({self.steps}, {self.sizes})"

    def mapped(self, **options: Any) -> tuple[spmd.Mesh, Callable]:
        """Its mesh, and the function of x [SIDE * ranks, 2], mapped over all axes, and of w [SIDE, 2], the same."""
        mesh = spmd.make_mesh(tuple(self.sizes.values()), tuple(self.sizes), backend="simulated")

        def body(block, w):
            values = [w, block]
            for name, i, j, axes in self.steps:
                size = math.prod(self.sizes[a] for a in axes)
                values.append(
                    INSTRUCTIONS[name](values[-1 - i % len(values)], values[-1 - j % len(values)], axes, size)
                )
            return values[-1], values[len(values) // 2]

        every = P(tuple(self.sizes))
        return mesh, spmd.shard_map(body, mesh=mesh, in_specs=(every, P()), out_specs=every, **options)


MESHES = [{"i": 2}, {"i": 3}, {"i": 2, "j": 2}, {"i": 1, "j": 3}, {"i": 2, "j": 3}, {"i": 2, "j": 1, "k": 2}]


@st.composite
def random_programs(draw: Any) -> RandomProgram:
    sizes = draw(st.sampled_from(MESHES))
    axes = st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=2, unique=True).map(tuple)
    step = st.tuples(st.sampled_from(sorted(INSTRUCTIONS)), st.integers(0, 5), st.integers(0, 5), axes)
    return RandomProgram(draw(st.lists(step, min_size=1, max_size=6)), sizes)
