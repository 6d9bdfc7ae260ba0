"""Messages of few bytes by persistent requests, which take MPI less time than new ones; and sums that consist of them.

The requests read and write buffers of their own, so operands and results are copied. A communicator keeps one set for
each kind of message. (Persistent all-reduces of MPI's would be as fast. But two that ranks mismatch never complete,
while messages do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import numpy

from collectives.guards.deadlock import Watched, abandoned, wait_for
from minidiff.core.types import ShapedArray

SMALL = 4096  # the most bytes of an operand; copying more costs more than it saves
MANY = 256  # kinds of messages that a communicator keeps
TAG = 3  # message tag of all-reduces

Make = Callable[[numpy.ndarray, numpy.ndarray], list]
Run = Callable[[numpy.ndarray], numpy.ndarray]


class Messages:
    """The requests of one kind of message, and the buffers that they read and write.

    They are `in_use` until the result is taken; and for good if Ctrl-C interrupted the wait for it.
    """

    def __init__(self, t: ShapedArray, make: Make):
        self.given, self.out = (_in_room(t) for _ in range(2))
        self.requests = make(self.given, self.out)
        self.in_use = self.freed = False

    def start(self, x: numpy.ndarray) -> list:
        """Send `x`, and return the requests."""
        self.given[...] = x
        self.in_use = True
        for request in self.requests:
            request.Start()
        return self.requests

    def take(self) -> numpy.ndarray:
        """The result, once the requests are complete."""
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


def repeatable(comm: Watched, kind: Hashable, t: ShapedArray, make: Make) -> Callable[[], Messages]:
    """A function that finds messages of this kind and type that are not in use; `make(given, out)` makes requests."""
    key, known = (t.shape, t.dtype, kind), comm.persistent
    mine: Any = None

    def unused() -> Messages:
        nonlocal mine
        if mine is None or mine.in_use or mine.freed:
            if key not in known and len(known) == MANY:
                comm.free_oldest()
            made = known.setdefault(key, [])
            mine = next((m for m in made if not m.in_use), None)
            if mine is None:
                mine = Messages(t, make)
                made.append(mine)
        return mine

    return unused


def exchange(comm: Watched, kind: Hashable, t: ShapedArray, make: Make) -> Run:
    """What sends and receives values of type `t`, and waits."""
    unused, wait = repeatable(comm, kind, t, make), comm.watching("Waitall", Messages.start)

    def run(x):
        messages = unused()
        wait(messages, x)
        return messages.take()

    return run


def all_reduce(comm: Watched, t: ShapedArray, combine: numpy.ufunc) -> Run | None:
    """What combines the values of 2, 4, 8, … ranks, of type `t`; None if there are not so many.

    In step k, ranks whose numbers differ in bit k exchange what they have so far. The lower rank's comes first, so
    that all ranks get the same bits.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    bits = [1 << k for k in range(size.bit_length() - 1)]
    if 1 << len(bits) != size:
        return None
    *earlier, last = [repeatable(comm, ("all_reduce", bit), t, _exchanging(comm, rank ^ bit)) for bit in bits]
    orders = [_upper_first if rank & bit else _lower_first for bit in bits]
    order, shape, dtype, empty = orders[-1], t.shape, t.dtype, numpy.empty

    def start(messages, x):
        for unused, order in zip(earlier, orders):
            step = unused()
            wait_for(step.start(x))
            x = combine(*order(step))
            step.in_use = False
        return messages.start(x)

    wait = comm.watching("Allreduce", start if earlier else Messages.start)

    def run(x):
        messages = last()
        wait(messages, x)
        messages.in_use = False
        return combine(*order(messages), out=empty(shape, dtype))

    return run


_lower_first, _upper_first = operator.attrgetter("given", "out"), operator.attrgetter("out", "given")


def _exchanging(comm: Watched, partner: int) -> Make:
    return lambda given, out: [comm.Recv_init(out.base, partner, TAG), comm.Send_init(given, partner, TAG)]


def _in_room(t: ShapedArray) -> numpy.ndarray:
    """An array in a buffer of SMALL bytes, its base: in which any other message has room, if ranks mismatch calls."""
    return numpy.zeros(SMALL, numpy.uint8)[: t.nbytes].view(t.dtype).reshape(t.shape)
