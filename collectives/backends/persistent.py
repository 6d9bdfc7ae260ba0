"""Messages of few bytes by persistent requests, which take MPI less time than new ones.

The requests read and write buffers of their own, so operands and results are copied. A communicator keeps one set for
each kind of call. (Persistent all-reduces would be faster, too. But two that ranks mismatch never complete, while
others do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy

from collectives.guards.deadlock import Watched, abandoned, wait_for
from minidiff.core.types import ShapedArray

SMALL = 4096  # the most bytes of an operand; copying more costs more than it saves
MANY = 256  # of these that a communicator keeps

Run = Callable[[numpy.ndarray], numpy.ndarray]
Make = Callable[[numpy.ndarray, numpy.ndarray], list]


class Persistent:
    """The requests of one kind of call, and the buffers that they read and write."""

    def __init__(self, t: ShapedArray, make: Make):
        self.given, self.out = (numpy.zeros(t.shape, t.dtype) for _ in range(2))
        self.requests: list | None = make(self.given, self.out)
        self.started = False

    def start(self, x: numpy.ndarray) -> list:
        assert self.requests is not None
        if self.started:  # Ctrl-C interrupted the wait for an earlier call
            wait_for(self.requests)
        self.given[...] = x
        self.started = True
        for request in self.requests:
            request.Start()
        return self.requests

    def free(self) -> None:
        """Free the requests, as MPI wants before it ends."""
        requests, self.requests = self.requests or [], None
        if self.started:
            abandoned.append((self, requests))
        else:
            for request in requests:
                request.Free()


def by_persistent_requests(comm: Watched, kind: Hashable, t: ShapedArray, make: Make) -> Run:
    """What sends an operand of type `t` by the requests that `make(given, out)` makes; `kind` says to whom."""
    key, known = (t.shape, t.dtype, kind), comm.persistent
    mine: Any = None

    def start(x):
        nonlocal mine
        if mine is None or mine.requests is None:
            mine = known.get(key)
            if mine is None:
                if len(known) == MANY:
                    known.pop(next(iter(known))).free()
                mine = known[key] = Persistent(t, make)
        return mine.start(x)

    def run(x):
        comm.wait("Waitall", start, x)
        mine.started = False
        return mine.out.copy()

    return run
