"""Short collectives as messages between pairs of ranks, sent by persistent requests.

MPI takes less time for these than for new requests or its own nonblocking collectives. The requests read and write
buffers of their own, so operands and results are copied. A communicator keeps one set for each kind of call.

(MPI's own collectives with persistent requests would be as fast. But two that ranks mismatch never complete, while
messages do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy

from collectives.guards.deadlock import Watched, abandoned, wait_for
from minidiff.core.types import ShapedArray

SHORT = 4096  # the most bytes of an operand; copying more costs more than it saves
FEW = 4  # the most ranks of which each sends messages to all others
#: Bytes for a message that comes, at least: if ranks mismatch calls, another one comes than the one expected.
ROOM = SHORT + 1
MANY = 256  # kinds of calls that a communicator keeps
TAG = 3  # message tag

Make = Callable[[numpy.ndarray, numpy.ndarray], list]  # persistent requests for rows of bytes, given and coming
Run = Callable[[numpy.ndarray], numpy.ndarray]
Finish = Callable[["PersistentRequests"], numpy.ndarray]


class PersistentRequests:
    """The requests of one kind of call, and the buffers that they read and write: a number of equal messages.

    They are `in_use` until the result is taken; and for good if an exception left the wait for it. `rows` are views of
    what comes from each rank. In an all-reduce, `sends` and `comes` are a byte of the messages, which is not 0 if
    arithmetic has failed: see `ERRORS`; `error` is this rank's own.
    """

    in_use = False
    error: Exception | None = None
    sends: memoryview
    comes: memoryview

    def __init__(self, given: numpy.ndarray, out: numpy.ndarray, requests: list, rows: Sequence[numpy.ndarray] = ()):
        self.given = given
        self.out = out
        self.requests = requests
        self.rows = rows

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
        if self.in_use:
            abandoned.append(self)
        else:
            self.in_use = True
            for request in self.requests:
                request.Free()


class Spares:
    """The sets of requests that a communicator keeps for one kind of call: `latest` is the one to use if it is free."""

    def __init__(self, comm: Watched, kind: tuple, make: Callable[[], PersistentRequests]):
        self.comm = comm
        self.kind = kind
        self.make = make
        self.latest = _NONE

    def unused(self) -> PersistentRequests:
        """A set that is not in use, from now on the latest."""
        if not self.latest.in_use:
            return self.latest
        known = self.comm.persistent
        if self.kind not in known and len(known) == MANY:
            self.comm.free_oldest()
        made = known.setdefault(self.kind, [])
        found = next((m for m in made if not m.in_use), None)
        if found is None:
            found = self.make()
            made.append(found)
        self.latest = found
        return found


_NONE = PersistentRequests(numpy.zeros(0), numpy.zeros(0), [])
_NONE.in_use = True


def sender(
    comm: Watched, method: str, spares: Spares, finish: Finish, start: Callable = PersistentRequests.start
) -> Run:
    """What sends its operand by spare requests, and returns what `finish` makes of what came.

    That is in buffers: `finish` must copy. `method` is what MPI calls it.
    """
    wait = comm.watching(method, start)

    def run(x):
        messages = spares.latest
        if messages.in_use:  # a call that is not needed takes longer than to look here
            messages = spares.unused()
        wait(messages, x)
        messages.in_use = False
        return finish(messages)

    return run


def swap(comm: Watched, kind: Hashable, t: ShapedArray, make: Make, more: int = 0) -> Spares:
    """A pool of requests that send an array of type `t`, and `more` bytes, and take as much.

    `make` makes the requests for the bytes of both.
    """

    def make_one():
        (sent, given), (room, out) = _buffer(1, t, t.nbytes + more), _buffer(1, t)
        messages = PersistentRequests(given.reshape(t.shape), out.reshape(t.shape), make(sent, room))
        messages.sends, messages.comes = (memoryview(rows[0, t.nbytes :]) for rows in (sent, room))
        return messages

    return Spares(comm, (kind, t.shape, t.dtype), make_one)


def _buffer(count: int, row: ShapedArray, room: int = ROOM) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Rows of bytes, `room` or more of them, and an array of type `row` for each, which consists of the first ones."""
    rows = numpy.zeros((count, max(row.nbytes, room)), numpy.uint8)
    return rows, rows[:, : row.nbytes].view(row.dtype).reshape(count, *row.shape)


def exchange(
    comm: Watched, method: str, shape: tuple[int, ...], row: ShapedArray, to_each: bool, finish: Finish
) -> Run:
    """What sends an array of type `row` to each rank: the operand, or `to_each` its own row of it.

    Operands have this `shape`. `finish` gets `out`, which lacks this rank's row `to_each`, and `rows`, which have it.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [*range(rank), *range(rank + 1, size)]

    def make():
        room, out = _buffer(size, row)
        rows = [out[k, ...] for k in range(size)]
        if to_each:
            sent, given = _buffer(size, row, row.nbytes)
            rows[rank], given = given[rank, ...], given.reshape(shape)
        else:  # what this rank sends is its row of the result
            sent, given = numpy.broadcast_to(room[rank, : row.nbytes], (size, row.nbytes)), rows[rank]
        coming = [comm.Recv_init(room[k], k, TAG) for k in others]
        return PersistentRequests(given, out, coming + [comm.Send_init(sent[k], k, TAG) for k in others], rows)

    return sender(comm, method, Spares(comm, (method, to_each, shape, row.shape, row.dtype), make), finish)


#: The errors of arithmetic, under `numpy.errstate(all="raise")` or where warnings are errors.
ERRORS = (FloatingPointError, RuntimeWarning)


def all_reduce(comm: Watched, t: ShapedArray, combine: numpy.ufunc) -> Run | None:
    """What combines the values of 2, 4, 8, … ranks, of type `t`; None if there are not so many.

    In step k, ranks whose numbers differ in bit k exchange what they have so far. The lower rank's comes first, so
    that all ranks get the same bits. If the arithmetic of a step raises an error, the messages are sent all the same,
    and say so: then all ranks raise it at the end, and stay in step.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    bits = [1 << k for k in range(size.bit_length() - 1)]
    if 1 << len(bits) != size:
        return None
    *earlier, last = [swap(comm, ("all_reduce", bit), t, _with_partner(comm, rank ^ bit), 1) for bit in bits]
    uppers = [bool(rank & bit) for bit in bits]
    is_upper, shape, dtype, empty = uppers[-1], t.shape, t.dtype, numpy.empty

    def start(messages, x):
        failed, error = 0, None
        for spares, is_upper in zip(earlier, uppers):
            step = spares.unused()
            if failed:
                step.sends[0] = failed
            wait_for(step.start(x))
            try:
                x = combine(step.out, step.given) if is_upper else combine(step.given, step.out)
            except ERRORS as raised:
                with numpy.errstate(all="ignore"):
                    x = combine(step.out, step.given) if is_upper else combine(step.given, step.out)
                error, failed = raised, 1 + isinstance(raised, ERRORS[1])
            failed |= step.comes[0]
            if failed:
                step.sends[0] = 0
            step.in_use = False
        if failed:
            messages.sends[0], messages.error = failed, error
        return messages.start(x)

    def finish(messages):
        one, two = (messages.out, messages.given) if is_upper else (messages.given, messages.out)
        return combine(one, two) if shape else combine(one, two, out=empty(shape, dtype))  # not a NumPy scalar

    def finish_or_raise(messages):
        if failed := messages.sends[0] | messages.comes[0]:
            error, messages.error, messages.sends[0] = messages.error, None, 0
            raise error or ERRORS[failed >> 1]("in the arithmetic of other ranks, which add up a part of the operands")
        return finish(messages)

    if not earlier:  # both ranks compute the same, and raise the same
        return sender(comm, "Allreduce", last, finish)
    return sender(comm, "Allreduce", last, finish_or_raise, start)


def _with_partner(comm: Watched, partner: int) -> Make:
    return lambda sent, room: [comm.Recv_init(room, partner, TAG), comm.Send_init(sent, partner, TAG)]
