"""Reference semantics of collectives, on lists of blocks: no types, no messages.

A reference function takes the list of all ranks' blocks, in rank order, and returns the list of their results. This
defines what an SPMD program means: between collectives, apply the same function to each block; at a collective, apply
its reference function to the list of the ranks' current values.

>>> psum_ref([3, 1, 4, 1])
[9, 9, 9, 9]

Blocks may be plain arrays or tracers, so references can be differentiated. `collective_ref` looks up a reference by the
collective's name and takes the options of its call.

Source: shard_map tutorial, "Collectives" (there each is called `collective_ref`).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

__all__ = [
    *("all_gather_ref", "all_to_all_ref", "at_root_ref", "axis_index_ref", "broadcast_ref", "collective_ref"),
    *("gather_ref", "pall_ref", "pany_ref", "pbroadcast_ref", "pmax_ref", "pmean_ref", "pmin_ref", "ppermute_ref"),
    *("pprod_ref", "preduce_ref", "pscan_ref", "pscatter_ref", "psum_ref", "psum_scatter_ref", "reduce_ref"),
    "scatter_ref",
]

Blocks = Sequence[Any]

# ---------------------------------------------------------------- reductions, pbroadcast, axis_index


def psum_ref(blocks: Blocks) -> list:
    """Return the sum, in the blocks' own dtype, on every rank. Booleans are counted.

    >>> psum_ref([numpy.array([3, 1]), numpy.array([4, 1])])
    [array([7, 2]), array([7, 2])]
    """
    return [sum(blocks)] * len(blocks)


def pmean_ref(blocks: Blocks) -> list:
    """Return the mean, on every rank; of integers, in float64.

    >>> pmean_ref([3, 1, 4, 2])
    [2.5, 2.5, 2.5, 2.5]
    """
    wide = [b.astype(float) if getattr(b, "dtype", numpy.dtype(float)).kind in "biu" else b for b in blocks]
    return [sum(wide) / len(blocks)] * len(blocks)


def pmax_ref(blocks: Blocks) -> list:
    """Return the elementwise maximum, on every rank.

    >>> pmax_ref([numpy.array([3, 1]), numpy.array([2, 4])])
    [array([3, 4]), array([3, 4])]
    """
    return [functools.reduce(numpy.maximum, blocks)] * len(blocks)


def pmin_ref(blocks: Blocks) -> list:
    """Return the elementwise minimum, on every rank.

    >>> pmin_ref([numpy.array([3, 1]), numpy.array([2, 4])])
    [array([2, 1]), array([2, 1])]
    """
    return [functools.reduce(numpy.minimum, blocks)] * len(blocks)


def pprod_ref(blocks: Blocks) -> list:
    """Return the elementwise product, in the blocks' own dtype, on every rank. Booleans are counted, as integers.

    >>> pprod_ref([numpy.array([3, 1]), numpy.array([2, 4])])
    [array([6, 4]), array([6, 4])]
    """
    return preduce_ref([block * 1 for block in blocks], operator.mul)


def pany_ref(blocks: Blocks) -> list:
    """Whether an element is not zero in any block, on every rank.

    >>> pany_ref([numpy.array([3, 0]), numpy.array([0, 0])])
    [array([ True, False]), array([ True, False])]
    """
    return [functools.reduce(numpy.logical_or, [block != 0 for block in blocks])] * len(blocks)


def pall_ref(blocks: Blocks) -> list:
    """Whether an element is not zero in all blocks, on every rank.

    >>> pall_ref([numpy.array([3, 0]), numpy.array([1, 1])])
    [array([ True, False]), array([ True, False])]
    """
    return [functools.reduce(numpy.logical_and, [block != 0 for block in blocks])] * len(blocks)


def preduce_ref(blocks: Blocks, combine: Callable[[Any, Any], Any]) -> list:
    """Return the blocks combined from the first to the last, on every rank.

    >>> preduce_ref(['a', 'b', 'c'], operator.add)
    ['abc', 'abc', 'abc']
    """
    return [functools.reduce(combine, blocks)] * len(blocks)


def pscan_ref(blocks: Blocks, reverse: bool = False, exclusive: bool = False) -> list:
    """On each rank, the sum of the blocks up to its own; with `exclusive`, of those before it.

    With `reverse`, up to its own from the last rank down.

    >>> print(*pscan_ref([3, 1, 4, 1]))
    3 4 8 9
    >>> print(*pscan_ref([3, 1, 4, 1], reverse=True, exclusive=True))
    6 5 1 0
    """
    order = blocks[::-1] if reverse else blocks
    nothing = 0 + numpy.zeros_like(order[0])  # of booleans, an integer
    sums = list(itertools.accumulate(order, initial=nothing))
    sums = sums[:-1] if exclusive else sums[1:]
    return sums[::-1] if reverse else sums


def pbroadcast_ref(blocks: Blocks) -> list:
    """Return the blocks: `pbroadcast` changes the type only.

    >>> pbroadcast_ref([5, 5])
    [5, 5]
    """
    return list(blocks)


def axis_index_ref(blocks: Blocks) -> list:
    """Return each rank's index.

    >>> axis_index_ref(['a', 'b', 'c'])
    [0, 1, 2]
    """
    return list(range(len(blocks)))


# ---------------------------------------------------------------- gather, scatter, permute


def all_gather_ref(blocks: Blocks, axis: int = 0, tiled: bool = False) -> list:
    """Return all blocks, on every rank: stacked, or with `tiled` concatenated, along `axis`.

    The reference of `all_gather_invariant` too.

    >>> all_gather_ref([numpy.array([3]), numpy.array([9])], tiled=True)
    [array([3, 9]), array([3, 9])]
    """
    return [_join(blocks, axis, tiled)] * len(blocks)


def psum_scatter_ref(blocks: Blocks, scatter_dimension: int = 0, tiled: bool = False) -> list:
    """Return the sum, scattered: each rank gets its part.

    >>> psum_scatter_ref([numpy.array([3, 1]), numpy.array([4, 1])], tiled=True)
    [array([7]), array([2])]
    """
    return _cut(sum(blocks), len(blocks), scatter_dimension, tiled)


def pscatter_ref(blocks: Blocks, axis: int = 0, tiled: bool = False) -> list:
    """Return each rank's slice of its block (all blocks are equal).

    >>> pscatter_ref([numpy.array([3, 1]), numpy.array([3, 1])], tiled=True)
    [array([3]), array([1])]
    """
    return [_cut(block, len(blocks), axis, tiled)[i] for i, block in enumerate(blocks)]


def all_to_all_ref(
    blocks: Blocks,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    splits: Sequence[Sequence[int]] | None = None,
    capacity: int | None = None,
) -> list:
    """Send part k of each block to rank k.

    With `splits`, send `splits[s][d]` rows from rank s to rank d, and pad results with zeros to the longest, or to
    `capacity` rows.

    >>> all_to_all_ref([numpy.array([1, 2]), numpy.array([3, 4])], 0, 0, tiled=True)
    [array([1, 3]), array([2, 4])]
    >>> all_to_all_ref([numpy.array([1, 2, 3]), numpy.array([4, 5, 6])], 0, 0, splits=[[1, 2], [2, 0]])
    [array([1, 4, 5]), array([2, 3, 0])]
    """
    if splits is None:
        parts = [_cut(block, len(blocks), split_axis, tiled) for block in blocks]
        return [_join(arrived, concat_axis, tiled) for arrived in zip(*parts)]
    room, results = max(map(sum, zip(*splits))) if capacity is None else capacity, []
    for d in range(len(blocks)):
        ranges = [range(sum(row[:d]), sum(row[: d + 1])) for row in splits]
        arrived = [numpy.take(block, rows, split_axis) for block, rows in zip(blocks, ranges)]
        nothing = numpy.zeros_like(numpy.take(blocks[0], [0] * (room - sum(map(len, ranges))), split_axis))
        results.append(numpy.concatenate([*arrived, nothing], concat_axis))
    return results


def ppermute_ref(blocks: Blocks, perm: Sequence[tuple[int, int]]) -> list:
    """Send blocks for each (source, destination); zeros on ranks that receive none.

    >>> ppermute_ref([3, 1, 4], [(0, 1), (1, 2)])
    [array(0), 3, 1]
    """
    results = [numpy.zeros_like(block) for block in blocks]
    for source, destination in perm:
        results[destination] = blocks[source]
    return results


# ---------------------------------------------------------------- with a root


def broadcast_ref(blocks: Blocks, root: int = 0) -> list:
    """Return the root's block, on every rank. The reference of `broadcast_varying` too.

    >>> broadcast_ref([3, 1, 4], root=2)
    [4, 4, 4]
    """
    return [blocks[root]] * len(blocks)


def at_root_ref(blocks: Blocks, root: int = 0) -> list:
    """Return the root's block on the root, zeros elsewhere.

    >>> at_root_ref([4, 4, 4], root=1)
    [array(0), 4, array(0)]
    """
    return [block if i == root else numpy.zeros_like(block) for i, block in enumerate(blocks)]


def reduce_ref(blocks: Blocks, root: int = 0) -> list:
    """Return the sum, on the root; zeros elsewhere.

    >>> reduce_ref([3, 1, 4], root=1)
    [array(0), 8, array(0)]
    """
    return at_root_ref(psum_ref(blocks), root)


def gather_ref(blocks: Blocks, root: int = 0, axis: int = 0, tiled: bool = False) -> list:
    """Return all blocks on the root, stacked or with `tiled` concatenated; zeros elsewhere.

    >>> gather_ref([numpy.array([3]), numpy.array([9])], tiled=True)
    [array([3, 9]), array([0, 0])]
    """
    return at_root_ref(all_gather_ref(blocks, axis, tiled), root)


def scatter_ref(blocks: Blocks, root: int = 0, axis: int = 0, tiled: bool = False) -> list:
    """Return the root's block, split over the ranks.

    >>> scatter_ref([numpy.array([3, 1]), numpy.array([4, 1])], root=1, tiled=True)
    [array([4]), array([1])]
    """
    return _cut(blocks[root], len(blocks), axis, tiled)


# ---------------------------------------------------------------- look-up by name


def collective_ref(
    name: str, blocks: Blocks, axis_index_groups: Sequence[Sequence[int]] | None = None, **options: Any
) -> list:
    """Apply the reference of the collective `name`; with groups, in each group.

    >>> collective_ref('psum', [3, 1, 4, 1])
    [9, 9, 9, 9]
    >>> collective_ref('psum', [3, 1, 4, 1], axis_index_groups=[[0, 2], [1, 3]])
    [7, 2, 7, 2]
    """
    results: dict[int, Any] = {}
    for group in [range(len(blocks))] if axis_index_groups is None else axis_index_groups:
        results.update(zip(group, REFERENCES[name]([blocks[rank] for rank in group], **options)))
    return [results[rank] for rank in sorted(results)]


def _join(blocks: Blocks, axis: int, tiled: bool) -> Any:
    return numpy.concatenate(blocks, axis) if tiled else numpy.stack(blocks, axis)


def _cut(block: Any, n: int, axis: int, tiled: bool) -> list:
    return numpy.split(block, n, axis) if tiled else [numpy.take(block, k, axis) for k in range(n)]


_FUNCTIONS: list[Callable[..., list]] = [
    *(psum_ref, pprod_ref, pmean_ref, pmax_ref, pmin_ref, pany_ref, pall_ref, preduce_ref, pscan_ref),
    *(pbroadcast_ref, axis_index_ref),
    *(all_gather_ref, psum_scatter_ref, pscatter_ref, all_to_all_ref, ppermute_ref),
    *(broadcast_ref, at_root_ref, reduce_ref, gather_ref, scatter_ref),
]
#: The reference function of each collective, by name.
REFERENCES = {f.__name__.removesuffix("_ref"): f for f in _FUNCTIONS}
REFERENCES |= {
    "all_gather_invariant": all_gather_ref,
    "broadcast_varying": broadcast_ref,
    "ppermute_start": ppermute_ref,
}
