"""Messages of few bytes by persistent requests, which take MPI less time than new ones.

The requests read and write buffers of their own, so operands and results are copied. A communicator keeps one set for
each kind of call. (Persistent all-reduces would be faster, too. But two that ranks mismatch never complete, while
others do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy

from collectives.guards.deadlock import Watched, abandoned
from minidiff.core.types import ShapedArray

SMALL = 4096  # the most bytes of an operand; copying more costs more than it saves
MANY = 256  # of these that a communicator keeps

Make = Callable[[numpy.ndarray, numpy.ndarray], list]
Send = Callable[[numpy.ndarray], tuple[Iterator[Any], Callable[[], list[numpy.ndarray]]]]


class Persistent:
    """The requests of one kind of call, and the buffers that they read and write.

    They are `in_use` until the result is taken; and for good if Ctrl-C interrupted the wait for it.
    """

    def __init__(self, t: ShapedArray, make: Make):
        self.given, self.out = (numpy.zeros(t.shape, t.dtype) for _ in range(2))
        self.requests: list | None = make(self.given, self.out)
        self.in_use = False

    def start(self, x: numpy.ndarray) -> Iterator[Any]:
        self.given[...] = x
        self.in_use = True
        for request in self.requests or ():
            request.Start()
            yield request

    def take(self) -> list[numpy.ndarray]:
        """The result, once the requests are complete."""
        self.in_use = False
        return [self.out.copy()]

    def free(self) -> None:
        """Free the requests, as MPI wants before it ends."""
        requests, self.requests = self.requests or [], None
        if self.in_use:
            abandoned.append((self, requests))
        else:
            for request in requests:
                request.Free()


def by_persistent_requests(comm: Watched, kind: Hashable, t: ShapedArray, make: Make, otherwise: Send) -> Send:
    """What sends an operand of type `t` by the requests that `make(given, out)` makes; `kind` says to whom.

    While these are in use, it is sent `otherwise`.
    """
    key, known = (t.shape, t.dtype, kind), comm.persistent
    mine: Any = None

    def send(x):
        nonlocal mine
        if mine is None or mine.requests is None:
            mine = known.get(key)
            if mine is None:
                if len(known) == MANY:
                    known.pop(next(iter(known))).free()
                mine = known[key] = Persistent(t, make)
        return otherwise(x) if mine.in_use else (mine.start(x), mine.take)

    return send
