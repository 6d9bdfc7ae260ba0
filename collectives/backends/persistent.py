"""Messages of few bytes by persistent requests, which take MPI less time than new ones.

The requests read and write buffers of their own, so operands and results are copied. A communicator keeps one set for
each kind of call. (Persistent all-reduces would be faster, too. But two that ranks mismatch never complete, while
others do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy

from collectives.guards.deadlock import Watched, abandoned
from minidiff.core.types import ShapedArray

SMALL = 4096  # the most bytes of an operand; copying more costs more than it saves
MANY = 256  # of these that a communicator keeps

Make = Callable[[numpy.ndarray, numpy.ndarray], list]


class Persistent:
    """The requests of one kind of call, and the buffers that they read and write.

    It is `in_use` until its messages have arrived and the result was taken; also if Ctrl-C interrupted the wait.
    """

    def __init__(self, comm: Watched, t: ShapedArray, make: Make):
        self.given, self.out = (numpy.zeros(t.shape, t.dtype) for _ in range(2))
        self.requests: list | None = make(self.given, self.out)
        self.starts = [request.Start for request in self.requests]
        self.in_use = False
        self.start_and_wait = comm.watching("Waitall", self.start)

    def start(self, x: numpy.ndarray) -> list:
        assert self.requests is not None
        self.given[...] = x
        self.in_use = True
        for start in self.starts:
            start()
        return self.requests

    def take(self) -> numpy.ndarray:
        """The result, once the requests are complete; they can be started again."""
        self.in_use = False
        return self.out.copy()

    def free(self) -> None:
        """Free the requests, as MPI wants before it ends."""
        requests, self.requests, self.starts = self.requests or [], None, []
        if self.in_use:
            abandoned.append((self, requests))
        else:
            for request in requests:
                request.Free()


def find_persistent(comm: Watched, kind: Hashable, t: ShapedArray, make: Make) -> Callable[[], Persistent | None]:
    """What finds the requests for an operand of type `t` that `make(given, out)` makes; `kind` says to whom they send.

    It returns None while they are in use: then other requests send the operand.
    """
    key, known = (t.shape, t.dtype, kind), comm.persistent
    mine: Any = None

    def find():
        nonlocal mine
        if mine is None or mine.requests is None:
            mine = known.get(key)
            if mine is None:
                if len(known) == MANY:
                    known.pop(next(iter(known))).free()
                mine = known[key] = Persistent(comm, t, make)
        return None if mine.in_use else mine

    return find
