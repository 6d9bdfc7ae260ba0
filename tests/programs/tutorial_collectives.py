"""The tutorial's examples of collectives, and collectives written with others.

What they print is what the tutorial prints, in `tests/golden/tutorial_collectives.txt`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import collectives as lax
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.programs.rank import ring


class Example(NamedTuple):
    sizes: tuple[int, ...]  # of the mesh's axes, i and perhaps j
    in_spec: P
    out_spec: P
    collective: Callable
    x: np.ndarray

    def mapped(self, seen: Callable = lambda when, block: None) -> Callable:
        """The example as a function of whole arrays; `seen` is told of each block, before and after."""

        def example(block):
            seen("BEFORE", block)
            actual = self.collective(block)
            seen("AFTER", actual)
            return actual

        return mapped(example, mesh(*self.sizes), self.in_spec, self.out_spec)


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
FOUR, EIGHT, SQUARE = np.array([3, 9, 5, 2]), np.arange(8), np.arange(16).reshape(4, 4)


def on_row(collective: Callable, x: np.ndarray, out: P = P("i")) -> Example:
    return Example((4,), P("i"), out, collective, x)


def on_plane(collective: Callable, out: P) -> Example:
    return Example((2, 2), P("i", "j"), out, collective, SQUARE)


EXAMPLES = {
    "psum": on_row(lambda x: lax.psum(x, "i"), SIXTEEN, P(None)),
    "psum along one axis of two": on_plane(lambda x: lax.psum(x, "i"), P(None, "j")),
    "psum along both axes": on_plane(lambda x: lax.psum(x, ("i", "j")), P(None, None)),
    "psum along one axis, then the other": on_plane(lambda x: lax.psum(lax.psum(x, "i"), "j"), P(None, None)),
    "psum in two halves": on_row(lambda x: psum_in_two_halves(x, "i"), SIXTEEN, P(None)),
    "all_gather, tiled": on_row(lambda x: lax.all_gather(x, "i", tiled=True), FOUR),
    "all_gather": on_row(lambda x: lax.all_gather(x, "i", tiled=False), FOUR),
    "all_gather by steps": on_row(lambda x: all_gather_by_steps(x, "i"), FOUR),
    "psum_scatter": on_row(lambda x: lax.psum_scatter(x, "i", tiled=True), SIXTEEN),
    "psum_scatter by steps": on_row(lambda x: psum_scatter_by_steps(x, "i"), SIXTEEN),
    "ppermute": on_row(lambda x: lax.ppermute(x, "i", ring(lax.psum(1, "i"), 1)), EIGHT),
    "ppermute to some": on_row(lambda x: lax.ppermute(x, "i", [(0, 2), (3, 1)]), EIGHT),
    "all_to_all": on_row(lambda x: lax.all_to_all(x, "i", split_axis=0, concat_axis=0, tiled=True), SIXTEEN),
}
#: Of which some are others, written in another way.
WRITTEN = {
    "psum along one axis, then the other": "psum along both axes",
    "psum in two halves": "psum",
    "all_gather by steps": "all_gather, tiled",
    "psum_scatter by steps": "psum_scatter",
}
