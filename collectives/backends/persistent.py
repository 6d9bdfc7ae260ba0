"""Short collectives as messages between pairs of ranks, sent by persistent requests.

MPI takes less time for these than for new requests or its own nonblocking collectives. The requests read and write
buffers of their own, so operands and results are copied. A communicator keeps one set for each kind of call.

(MPI's own collectives with persistent requests would be as fast. But two that ranks mismatch never complete, while
messages do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy

from collectives.guards.deadlock import Watched, abandoned, wait_for
from minidiff.core.types import ShapedArray

SHORT = 4096  # the most bytes of an operand; copying more costs more than it saves
FEW = 4  # the most ranks of which each sends messages to all others
ROOM = (
    4096  # bytes for a message that comes, at least: if ranks mismatch calls, another one comes than the one expected
)
MANY = 256  # kinds of calls that a communicator keeps
TAG = 3  # message tag

Make = Callable[[numpy.ndarray, numpy.ndarray], list]  # persistent requests for rows of bytes, given and coming
Run = Callable[[numpy.ndarray], numpy.ndarray]


class PersistentRequests:
    """The requests of one kind of call, and the buffers that they read and write: a number of equal messages.

    They are `in_use` until the result is taken; and for good if Ctrl-C interrupted the wait for it.
    """

    def __init__(self, given: ShapedArray, out: ShapedArray, nbytes: int, make: Make):
        sent, self.given = _buffer(given, nbytes, nbytes)
        room, self.out = _buffer(out, nbytes, max(nbytes, ROOM))
        self.requests = make(sent, room)
        self.in_use = self.freed = False

    def start(self, x: numpy.ndarray) -> list:
        """Send `x`, and return the requests."""
        self.given[...] = x
        self.in_use = True
        for request in self.requests:
            request.Start()
        return self.requests

    def take(self) -> numpy.ndarray:
        """A copy of what came."""
        self.in_use = False
        return self.out.copy()

    def free(self) -> None:
        """Free the requests, as MPI wants before it ends."""
        self.freed = True
        if self.in_use:
            abandoned.append(self)
        else:
            for request in self.requests:
                request.Free()


def _buffer(t: ShapedArray, nbytes: int, room: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Rows of `room` bytes, and an array of type `t` that consists of the first `nbytes` of each."""
    rows = numpy.zeros((t.nbytes // nbytes, room), numpy.uint8)
    return rows, rows[:, :nbytes].view(t.dtype).reshape(t.shape)


def repeatable(
    comm: Watched, kind: Hashable, given: ShapedArray, out: ShapedArray, nbytes: int, make: Make
) -> Callable[[], PersistentRequests]:
    """A function that finds messages of this kind and these types, each of `nbytes`, that are not in use."""
    key, known = (kind, given.shape, given.dtype, out.shape), comm.persistent
    mine: Any = None

    def unused() -> PersistentRequests:
        nonlocal mine
        if mine is None or mine.in_use or mine.freed:
            if key not in known and len(known) == MANY:
                comm.free_oldest()
            made = known.setdefault(key, [])
            mine = next((m for m in made if not m.in_use), None)
            if mine is None:
                mine = PersistentRequests(given, out, nbytes, make)
                made.append(mine)
        return mine

    return unused


def permute(comm: Watched, perm: Hashable, t: ShapedArray, make: Make) -> Callable[[], PersistentRequests]:
    """A function that finds messages, not in use, that `make` makes for a permutation of arrays of type `t`."""
    return repeatable(comm, perm, t, t, t.nbytes, make)


def exchange(
    comm: Watched, method: str, given: ShapedArray, row: ShapedArray, finish: Callable[[numpy.ndarray], numpy.ndarray]
) -> Run:
    """What sends an array of type `row` to each rank: the operand, or if that has a row for each rank, its row.

    `finish` makes the result of the array of all that came, by rank. That is a buffer: it must copy.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [*range(rank), *range(rank + 1, size)]
    in_rows = given.shape != row.shape

    def make(sent, room):
        coming = [comm.Recv_init(room[k], k, TAG) for k in others]
        return coming + [comm.Send_init(sent[k if in_rows else 0], k, TAG) for k in others]

    out = ShapedArray((size, *row.shape), row.dtype)
    unused = repeatable(comm, method, given, out, row.nbytes, make)
    wait = comm.watching(method, PersistentRequests.start)

    def run(x):
        messages = unused()
        wait(messages, x)
        came, own = messages.out, messages.given
        came[rank] = own[rank] if in_rows else own
        messages.in_use = False
        return finish(came)

    return run


def all_reduce(comm: Watched, t: ShapedArray, combine: numpy.ufunc) -> Run | None:
    """What combines the values of 2, 4, 8, … ranks, of type `t`; None if there are not so many.

    In step k, ranks whose numbers differ in bit k exchange what they have so far. The lower rank's comes first, so
    that all ranks get the same bits. A rank that Ctrl-C interrupts before the last step can make no further calls.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    bits = [1 << k for k in range(size.bit_length() - 1)]
    if 1 << len(bits) != size:
        return None
    *earlier, last = [repeatable(comm, ("all_reduce", bit), t, t, t.nbytes, _swap(comm, rank ^ bit)) for bit in bits]
    uppers = [bool(rank & bit) for bit in bits]
    is_upper, shape, dtype, empty = uppers[-1], t.shape, t.dtype, numpy.empty

    def start(messages, x):
        for unused, is_upper in zip(earlier, uppers):
            step = unused()
            wait_for(step.start(x))
            x = combine(step.out, step.given) if is_upper else combine(step.given, step.out)
            step.in_use = False
        return messages.start(x)

    wait = comm.watching("Allreduce", start if earlier else PersistentRequests.start)

    def run(x):
        messages = last()
        wait(messages, x)
        messages.in_use = False
        mine, other, out = messages.given, messages.out, empty(shape, dtype)
        return combine(other, mine, out=out) if is_upper else combine(mine, other, out=out)

    return run


def _swap(comm: Watched, partner: int) -> Make:
    return lambda sent, room: [comm.Recv_init(room, partner, TAG), comm.Send_init(sent, partner, TAG)]
