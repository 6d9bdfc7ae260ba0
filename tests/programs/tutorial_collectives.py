"""The tutorial's examples of collectives: what each rank begins with and ends with, and what becomes of it.

Each as plain data, so that simulated ranks and MPI ranks can be held against it: all numbers are those that the
tutorial prints. The references beside them say what a collective means, on the list of all ranks' blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import collectives as lax
import spmd
from spmd import P
from tests.programs.on_blocks import ring


class Example(NamedTuple):
    sizes: tuple[int, ...]  # of the mesh's axes, i and perhaps j
    in_spec: P
    out_spec: P
    collective: Callable
    x: np.ndarray
    before: list  # each rank's block, as nested lists
    after: list
    result: list

    @property
    def axes(self) -> tuple[str, ...]:
        return ("i", "j")[: len(self.sizes)]

    def mesh(self, **options: Any) -> spmd.Mesh:
        return spmd.make_mesh(self.sizes, self.axes, **options)

    def mapped(self, mesh: spmd.Mesh, seen: Callable = lambda when, block: None) -> Callable:
        """The example as a function of whole arrays; `seen` is told of each block, before and after."""

        @partial(spmd.shard_map, mesh=mesh, in_specs=self.in_spec, out_specs=self.out_spec)
        def example(block):
            seen("BEFORE", block)
            actual = self.collective(block)
            seen("AFTER", actual)
            return actual

        return example


# ---------------------------------------------------------------- written with ppermute


def psum_scatter_by_steps(x: Any, axis: str) -> Any:
    """Parts of the sum go down the ring; each rank adds its own to what comes, and the last to come is its own."""
    n, here = lax.axis_size(axis), lax.axis_index(axis)
    parts = x.reshape(n, x.shape[0] // n, *x.shape[1:])
    for step in range(1, n):
        came = lax.ppermute(parts[(here + step) % n], axis, ring(n, -1))
        parts = parts.at[(here + step + 1) % n].add(came)
    return parts[here]


def all_gather_by_steps(x: Any, axis: str) -> Any:
    """The reverse: each rank's block goes up the ring, and is kept by all that it comes by."""
    n, here = lax.axis_size(axis), lax.axis_index(axis)
    blocks = (x * 0)[None].repeat(n, axis=0).at[here].set(x)
    for step in range(1, n):
        x = lax.ppermute(x, axis, ring(n, 1))
        blocks = blocks.at[(here - step) % n].set(x)
    return blocks.reshape(n * x.shape[0], *x.shape[1:])


def psum_in_two_halves(x: Any, axis: str) -> Any:
    """A reduce-scatter, and an all-gather of what that gives."""
    return lax.all_gather_invariant(lax.psum_scatter(x, axis, tiled=True), axis, tiled=True)


# ---------------------------------------------------------------- the examples

SIXTEEN = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 1, 2])
OF_SIXTEEN = [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 1, 2]]
SUM = [22, 20, 12, 17]
FOUR = np.array([3, 9, 5, 2])
OF_FOUR = [[3], [9], [5], [2]]
SQUARE = np.arange(16).reshape(4, 4)
OF_SQUARE = [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[8, 9], [12, 13]], [[10, 11], [14, 15]]]
LEFT, RIGHT = [[8, 10], [16, 18]], [[12, 14], [20, 22]]  # of SQUARE, summed along i
BOTH = [[20, 24], [36, 40]]


def on_row(collective: Callable, x: np.ndarray, before: list, after: list, result: list, out: P = P("i")) -> Example:
    return Example((4,), P("i"), out, collective, x, before, after, result)


def on_plane(collective: Callable, after: list, result: list, out: P) -> Example:
    return Example((2, 2), P("i", "j"), out, collective, SQUARE, OF_SQUARE, after, result)


EXAMPLES = {
    "psum": on_row(lambda x: lax.psum(x, "i"), SIXTEEN, OF_SIXTEEN, [SUM] * 4, SUM, P(None)),
    "psum along one axis of two": on_plane(
        lambda x: lax.psum(x, "i"), [LEFT, RIGHT] * 2, [[8, 10, 12, 14], [16, 18, 20, 22]], P(None, "j")
    ),
    "psum along both axes": on_plane(lambda x: lax.psum(x, ("i", "j")), [BOTH] * 4, BOTH, P(None, None)),
    "psum along one axis, then the other": on_plane(
        lambda x: lax.psum(lax.psum(x, "i"), "j"), [BOTH] * 4, BOTH, P(None, None)
    ),
    "psum in two halves": on_row(lambda x: psum_in_two_halves(x, "i"), SIXTEEN, OF_SIXTEEN, [SUM] * 4, SUM, P(None)),
    "all_gather, tiled": on_row(
        lambda x: lax.all_gather(x, "i", tiled=True), FOUR, OF_FOUR, [[3, 9, 5, 2]] * 4, [3, 9, 5, 2] * 4
    ),
    "all_gather": on_row(lambda x: lax.all_gather(x, "i", tiled=False), FOUR, OF_FOUR, [OF_FOUR] * 4, OF_FOUR * 4),
    "all_gather by steps": on_row(
        lambda x: all_gather_by_steps(x, "i"), FOUR, OF_FOUR, [[3, 9, 5, 2]] * 4, [3, 9, 5, 2] * 4
    ),
    "psum_scatter": on_row(
        lambda x: lax.psum_scatter(x, "i", tiled=True), SIXTEEN, OF_SIXTEEN, [[s] for s in SUM], SUM
    ),
    "psum_scatter by steps": on_row(
        lambda x: psum_scatter_by_steps(x, "i"), SIXTEEN, OF_SIXTEEN, [[s] for s in SUM], SUM
    ),
    "ppermute": on_row(
        lambda x: lax.ppermute(x, "i", ring(lax.psum(1, "i"), 1)),
        np.arange(8),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[6, 7], [0, 1], [2, 3], [4, 5]],
        [6, 7, 0, 1, 2, 3, 4, 5],
    ),
    "ppermute to some": on_row(
        lambda x: lax.ppermute(x, "i", [(0, 2), (3, 1)]),
        np.arange(8),
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 0], [6, 7], [0, 1], [0, 0]],
        [0, 0, 6, 7, 0, 1, 0, 0],
    ),
    "all_to_all": on_row(
        lambda x: lax.all_to_all(x, "i", split_axis=0, concat_axis=0, tiled=True),
        SIXTEEN,
        OF_SIXTEEN,
        [[3, 5, 5, 9], [1, 9, 3, 7], [4, 2, 5, 1], [1, 6, 8, 2]],
        [3, 5, 5, 9, 1, 9, 3, 7, 4, 2, 5, 1, 1, 6, 8, 2],
    ),
}


def text_of(example: Example, blocks: list, ranks: Sequence[int] | None = None) -> str:
    """Return the printed form of a value in a body: each rank's block, under its mesh coordinates."""
    names = "(" + ", ".join(example.axes) + ("," if len(example.axes) == 1 else "") + ")"
    lines = []
    for rank in range(math.prod(example.sizes)) if ranks is None else ranks:
        at = tuple(map(int, np.unravel_index(rank, example.sizes)))
        lines.append(f"On rank {rank} at mesh coordinates {names} = {at}:\n{np.array(blocks[rank])}\n")
    return "\n".join(lines)
