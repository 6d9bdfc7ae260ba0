"""Slices of a split dimension: which blocks have the places, and where."""

from __future__ import annotations

import bisect


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
