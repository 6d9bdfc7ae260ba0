"""Slices of a split dimension: which blocks have the places, and where."""

from __future__ import annotations

import bisect


def in_step(i: slice, n: int) -> bool:
    """Whether a slice takes the same places of each block.

    That is the case if it takes every step-th of n places, to the end.

    >>> in_step(slice(1, None, 2), 6), in_step(slice(1, None), 6), in_step(slice(None, None, -1), 6)
    (True, False, False)
    """
    return _are_in_step(range(n)[i], n)


def in_step_backwards(i: slice, n: int) -> bool:
    """Whether a reversed slice takes the same places of each block.

    It then reverses the order of the blocks, too.
    """
    places = range(n)[i]
    return places.step < 0 and _are_in_step(places[::-1], n)


def _are_in_step(places: range, n: int) -> bool:
    return 0 <= places.start < places.step and len(places) * places.step == n


def of_block(i: slice, n: int) -> slice:
    """The slice of each block for a slice in step, forwards or backwards.

    It does not depend on the length of the blocks.

    >>> of_block(slice(1, 6, 2), 6), of_block(slice(4, None, -2), 6), of_block(slice(0, 6), 6)
    (slice(1, None, 2), slice(-2, None, -2), slice(None, None, None))
    """
    start, _, step = i.indices(n)
    first = start if step > 0 else start - n
    return slice(None if first in (0, -1) else first, None, _written(step))


def pieces(i: int | slice, n: int, length: int) -> list[tuple[int, int | slice]]:
    """The blocks that have places of `i`, and the index of these in each block.

    The dimension has n places, in blocks of this length. They are in the order of the places in the result. An empty
    slice is in the first block.

    >>> pieces(slice(1, 5), 8, 4), pieces(slice(5, 1, -2), 8, 4), pieces(-1, 8, 4)
    ([(0, slice(1, 4, None)), (1, slice(0, 1, None))], [(1, slice(1, None, -2)), (0, slice(3, 1, -2))], [(1, 3)])
    """
    if isinstance(i, int):
        return [divmod(i % n, length)]
    places = range(n)[i]
    if not places:
        return [(0, slice(0, 0))]
    rising = places if places.step > 0 else places[::-1]
    found = []
    for first in range(0, n, length):
        own = rising[bisect.bisect_left(rising, first) : bisect.bisect_left(rising, first + length)]
        if own:
            own = range(own.start - first, own.stop - first, own.step)
            found.append((first // length, _as_slice(own if rising is places else own[::-1])))
    return found if rising is places else found[::-1]


def _as_slice(places: range) -> slice:
    return slice(places.start, places.stop if places.stop >= 0 else None, _written(places.step))


def _written(step: int) -> int | None:
    return step if step != 1 else None
