"""Faster ways than MPI's own for short collectives, and for all-reduces of two ranks.

Short collectives are messages between pairs of ranks, sent by persistent requests. MPI takes less time for these than
for new requests or its own nonblocking collectives. The requests read and write buffers of their own, so operands and
results are copied. A communicator caches a pool of requests for each kind of call.

(MPI's own collectives with persistent requests would be as fast. But two that ranks mismatch never complete, while
messages do, so that the mismatch check can raise an error.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from collectives.backends.base import split_dimension, unsplit_dimension
from collectives.backends.functions import FUNCTIONS, all_gather, all_to_all, ppermute, psum_scatter, start_messages
from collectives.backends.mpi.buffers import Packing, as_reducible, reducible_dtype
from collectives.backends.mpi.ranks import Execute, MPIRanks
from collectives.backends.one_rank import exchanges_operands
from collectives.guards.deadlock import WatchedComm, abandoned, wait_for
from collectives.tags import Tag
from minidiff.core.types import ShapedArray

if TYPE_CHECKING:
    from collectives.collective import Collective

SHORT = 4096  # the most bytes of an operand; copying more costs more than it saves
BUFFERED = 2**18  # the most bytes of a bucket that two ranks swap, which is packed into the buffer of requests
FEW = 4  # the most ranks of which each sends messages to all others
#: The least bytes of a buffer for a message: if ranks mismatch calls, another message comes than the expected one.
MIN_BUFFER = SHORT + 1
MAX_POOLS = 256  # kinds of calls for which a communicator caches requests

Make = Callable[[numpy.ndarray, numpy.ndarray], list]  # persistent requests for rows of bytes, outgoing and incoming
Finish = Callable[["PersistentRequests"], numpy.ndarray]

#: The all-reduces that ranks compute by themselves.
UFUNCS = {"psum": numpy.add, "pprod": numpy.multiply, "pmax": numpy.maximum, "pmin": numpy.minimum}


class ShortMessages(MPIRanks):
    """`MPIRanks` with faster plans for short operands."""

    def plan_one(self, primitive: Collective, t: ShapedArray, params: Mapping[str, Any]) -> Execute:
        if params["size"] > 1 and primitive.cost is not None:
            comm = self.communicator(**params)
            if isinstance(comm, WatchedComm) and (execute := _plan_short(comm, primitive.name, t, params)):
                return execute
        return super().plan_one(primitive, t, params)

    def plan_sum_in_place(self, comm: Any, t: ShapedArray) -> Execute:
        short = all_reduce(comm, t, numpy.add) if _is_short(comm, t) else None
        return short or super().plan_sum_in_place(comm, t)

    def plan_sums(self, comm: Any, packing: Packing) -> Execute:
        if comm.Get_size() != 2 or packing.type.nbytes > BUFFERED or not isinstance(comm, WatchedComm):
            return super().plan_sums(comm, packing)

        def start(messages, xs):
            packing.pack(xs, messages.outgoing)
            messages.in_use = True
            for request in messages.requests:
                request.Start()
            return messages.requests

        total = all_reduce(comm, packing.type, numpy.add, start)
        return lambda *xs: packing.unpack(total(xs))

    def plan_permutation_start(self, comm: Any, t: ShapedArray, perm: Sequence[tuple[int, int]]) -> Execute:
        if not _is_short(comm, t):
            return super().plan_permutation_start(comm, t, perm)
        pool = message_pool(comm, perm, t, _permutation(comm, perm))

        def begin(request):
            messages = pool.acquire()
            request.results = lambda: [messages.take()]
            request.requests.extend(messages.start(*request.operands))

        return self.starting(comm, begin)


def _is_short(comm: Any, t: ShapedArray, to_all: bool = False) -> bool:
    """Whether operands of this type go by persistent requests; with `to_all`, all ranks send messages to all others."""
    few = not to_all or comm.Get_size() <= FEW
    return few and 0 < t.nbytes <= SHORT and isinstance(comm, WatchedComm)


def _plan_short(comm: WatchedComm, name: str, t: ShapedArray, params: Mapping[str, Any]) -> Execute | None:
    """Plan a collective by messages; None if MPI's own is as fast."""
    function, wide = FUNCTIONS.get(name), ShapedArray(t.shape, reducible_dtype(t.dtype))
    if name in UFUNCS:
        if exchanges_operands(wide, comm.Get_size()):
            execute: Execute | None = swap(comm, wide, UFUNCS[name])
        else:
            execute = all_reduce(comm, wide, UFUNCS[name]) if _is_short(comm, wide) else None
        return execute and as_reducible(execute, t.dtype)
    if function is ppermute and _is_short(comm, t):
        pool = message_pool(comm, params["perm"], t, _permutation(comm, params["perm"]))
        return sender(comm, "Waitall", pool, PersistentRequests.take)
    if function is all_gather and _is_short(comm, t, to_all=True):
        join = _joining((comm.Get_size(), *t.shape), params["axis"], params["tiled"])
        return exchange(comm, "Allgather", t.shape, t, False, lambda messages: join(messages.incoming.copy()))
    if function is psum_scatter and _is_short(comm, wide, to_all=True):
        execute = _exchange_parts(comm, "Reduce_scatter_block", wide, params["axis"], params["tiled"], _sum_rows)
        return as_reducible(execute, t.dtype)
    if function is all_to_all and _is_short(comm, t, to_all=True):
        rank, axis, tiled = comm.Get_rank(), params["split_axis"], params["tiled"]
        parts = split_dimension(_of_shape(t.shape), comm.Get_size(), axis, tiled).shape
        join = _joining(parts, params["concat_axis"], tiled)

        def finish(messages):
            messages.incoming[rank] = messages.rows[rank]
            return join(messages.incoming.copy())

        return _exchange_parts(comm, "Alltoall", t, axis, tiled, finish)
    return None


def _permutation(comm: WatchedComm, perm: Sequence[tuple[int, int]]) -> Make:
    return lambda outgoing, incoming: [*start_messages(comm, outgoing, incoming, perm, persistent=True)]


def _exchange_parts(comm: WatchedComm, method: str, t: ShapedArray, axis: int, tiled: bool, finish: Finish) -> Execute:
    """Plan that each rank sends each other its part of an array of type `t`, split along `axis`."""
    size = comm.Get_size()
    parts = split_dimension(_of_shape(t.shape), size, axis, tiled).shape
    in_order = axis == 0  # the array is its parts, one after another
    send = exchange(comm, method, t.shape if in_order else parts, ShapedArray(parts[1:], t.dtype), True, finish)
    return send if in_order else lambda x: send(split_dimension(x, size, axis, tiled))


def _sum_rows(messages: PersistentRequests) -> numpy.ndarray:
    return numpy.asarray(functools.reduce(numpy.add, messages.rows))


def _joining(parts: tuple[int, ...], axis: int, tiled: bool) -> Execute:
    """Return `unsplit_dimension` for parts of this shape: often a reshape to a shape that is computed once."""
    shape = unsplit_dimension(_of_shape(parts), axis, tiled).shape
    return (lambda x: x.reshape(shape)) if axis == 0 else lambda x: unsplit_dimension(x, axis, tiled)


def _of_shape(shape: tuple[int, ...]) -> numpy.ndarray:
    return numpy.broadcast_to(numpy.zeros(()), shape)


# ---------------------------------------------------------------- persistent requests


class PersistentRequests:
    """The requests of one kind of call, and the buffers that they read and write: a number of equal messages.

    They are `in_use` until the result is taken; and for good if an exception left the wait for it. `rows` are views of
    what comes from each rank. In an all-reduce, `failure_sent` and `failure_received` are a byte of the messages, which
    is not 0 if arithmetic has failed: see `ERRORS`; `error` is this rank's own.
    """

    in_use = False
    error: Exception | None = None
    failure_sent: memoryview
    failure_received: memoryview

    def __init__(
        self, outgoing: numpy.ndarray, incoming: numpy.ndarray, requests: list, rows: Sequence[numpy.ndarray] = ()
    ):
        self.outgoing = outgoing
        self.incoming = incoming
        self.requests = requests
        self.rows = rows

    def start(self, x: numpy.ndarray) -> list:
        """Send `x`, and return the requests."""
        self.outgoing[...] = x
        self.in_use = True
        for request in self.requests:
            request.Start()
        return self.requests

    def take(self) -> numpy.ndarray:
        """Return a copy of what came."""
        self.in_use = False
        return self.incoming.copy()

    def free(self) -> None:
        """Free the requests, as MPI wants before it ends."""
        if self.in_use:
            abandoned.append(self)
        else:
            self.in_use = True
            for request in self.requests:
                request.Free()


_NONE = PersistentRequests(numpy.zeros(0), numpy.zeros(0), [])
_NONE.in_use = True


class RequestPool:
    """The sets of requests that a communicator caches for one kind of call; the `latest` is used again once free."""

    def __init__(self, comm: WatchedComm, kind: tuple, make: Callable[[], PersistentRequests]):
        self.comm = comm
        self.kind = kind
        self.make = make
        self.latest = _NONE

    def acquire(self) -> PersistentRequests:
        """Return a set that is not in use, from now on the latest."""
        if not self.latest.in_use:
            return self.latest
        pools = self.comm.persistent
        if self.kind not in pools and len(pools) == MAX_POOLS:
            self.comm.free_oldest()
        pool = pools.setdefault(self.kind, [])
        unused = next((messages for messages in pool if not messages.in_use), None)
        if unused is None:
            unused = self.make()
            pool.append(unused)
        self.latest = unused
        return unused


def sender(
    comm: WatchedComm, method: str, pool: RequestPool, finish: Finish, start: Callable = PersistentRequests.start
) -> Execute:
    """Return a function that sends its operand by requests of a pool, and returns `finish(messages)`.

    Received data is in buffers that are used again: `finish` must copy it. `method` is MPI's name of the call.
    """
    wait = comm.watched(method, start)

    def execute(x):
        messages = pool.latest
        if messages.in_use:  # the check is faster than an unnecessary call
            messages = pool.acquire()
        wait(messages, x)
        messages.in_use = False
        return finish(messages)

    return execute


def message_pool(comm: WatchedComm, kind: Hashable, t: ShapedArray, make: Make, more: int = 0) -> RequestPool:
    """Return a pool of requests that send an array of type `t`, and `more` bytes, and receive as much.

    `make` makes the requests for the bytes of both.
    """

    def make_messages():
        (sent, outgoing), (received, incoming) = (
            _buffer(1, t, t.nbytes + more),
            _buffer(1, t, max(MIN_BUFFER, t.nbytes + more)),
        )
        messages = PersistentRequests(outgoing.reshape(t.shape), incoming.reshape(t.shape), make(sent, received))
        flags = (memoryview(rows[0, t.nbytes :]) for rows in (sent, received))
        messages.failure_sent, messages.failure_received = flags
        return messages

    return RequestPool(comm, (kind, t.shape, t.dtype), make_messages)


def _buffer(count: int, row: ShapedArray, nbytes: int = MIN_BUFFER) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return rows of at least `nbytes` bytes, and an array of type `row` for each: a view of its first bytes."""
    rows = numpy.zeros((count, max(row.nbytes, nbytes)), numpy.uint8)
    return rows, rows[:, : row.nbytes].view(row.dtype).reshape(count, *row.shape)


def exchange(
    comm: WatchedComm, method: str, shape: tuple[int, ...], row: ShapedArray, to_each: bool, finish: Finish
) -> Execute:
    """Plan that each rank sends each other an array of type `row`: the operand, or `to_each` its own row of it.

    Operands have this `shape`. `finish` gets `incoming`, which lacks this rank's row `to_each`, and `rows`, which have
    it.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    others = [*range(rank), *range(rank + 1, size)]

    def make():
        received, incoming = _buffer(size, row)
        rows = [incoming[k, ...] for k in range(size)]
        if to_each:
            sent, outgoing = _buffer(size, row, row.nbytes)
            rows[rank], outgoing = outgoing[rank, ...], outgoing.reshape(shape)
        else:  # what this rank sends is its row of the result
            sent, outgoing = numpy.broadcast_to(received[rank, : row.nbytes], (size, row.nbytes)), rows[rank]
        requests = [comm.Recv_init(received[k], k, Tag.SHORT) for k in others]
        requests += [comm.Send_init(sent[k], k, Tag.SHORT) for k in others]
        return PersistentRequests(outgoing, incoming, requests, rows)

    return sender(comm, method, RequestPool(comm, (method, to_each, shape, row.shape, row.dtype), make), finish)


# ---------------------------------------------------------------- all-reduces

#: The errors of arithmetic, under `numpy.errstate(all="raise")` or where warnings are errors.
ERRORS = (FloatingPointError, RuntimeWarning)


def all_reduce(comm: Any, t: ShapedArray, combine: numpy.ufunc, start_swap: Any = PersistentRequests.start) -> Any:
    """Plan to combine the values of 2, 4, 8, … ranks, of type `t`; None for other numbers. Two ranks `start_swap`.

    In step k, ranks whose numbers differ in bit k exchange what they have so far. The lower rank's comes first, so
    that all ranks get the same bits. If the arithmetic of a step raises an error, the messages are sent all the same,
    and say so: then all ranks raise it at the end, and stay synchronized.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    bits = [1 << k for k in range(size.bit_length() - 1)]
    if size == 1 or 1 << len(bits) != size:
        return None
    *earlier, last = [message_pool(comm, ("all_reduce", bit), t, _with_partner(comm, rank ^ bit, t), 1) for bit in bits]
    uppers = [bool(rank & bit) for bit in bits]
    is_upper, shape, dtype, empty = uppers[-1], t.shape, t.dtype, numpy.empty

    def start(messages, x):
        failed, error = 0, None
        for pool, is_upper in zip(earlier, uppers):
            step = pool.acquire()
            if failed:
                step.failure_sent[0] = failed
            wait_for(step.start(x))
            operands = (step.incoming, step.outgoing) if is_upper else (step.outgoing, step.incoming)
            try:
                x = combine(*operands)
            except ERRORS as raised:
                with numpy.errstate(all="ignore"):
                    x = combine(*operands)
                error, failed = raised, 1 + isinstance(raised, ERRORS[1])
            failed |= step.failure_received[0]
            if failed:
                step.failure_sent[0] = 0
            step.in_use = False
        if failed:
            messages.failure_sent[0], messages.error = failed, error
        return messages.start(x)

    def finish(messages):
        one, two = (messages.incoming, messages.outgoing) if is_upper else (messages.outgoing, messages.incoming)
        return combine(one, two) if shape else combine(one, two, out=empty(shape, dtype))  # not a NumPy scalar

    def finish_or_raise(messages):
        if failed := messages.failure_sent[0] | messages.failure_received[0]:
            error, messages.error, messages.failure_sent[0] = messages.error, None, 0
            raise error or ERRORS[failed >> 1]("in the arithmetic of other ranks, which add up a part of the operands")
        return finish(messages)

    if not earlier:  # both ranks compute the same, and raise the same
        return sender(comm, "Allreduce", last, finish, start_swap)
    return sender(comm, "Allreduce", last, finish_or_raise, start)


def _with_partner(comm: WatchedComm, partner: int, t: ShapedArray) -> Make:
    tag = Tag.SHORT if t.nbytes <= SHORT else Tag.SWAP
    return lambda sent, received: [comm.Recv_init(received, partner, tag), comm.Send_init(sent, partner, tag)]


def swap(comm: WatchedComm, t: ShapedArray, combine: numpy.ufunc) -> Execute:
    """Plan a long all-reduce of two ranks: each sends the other its array, and combines both in the ranks' order.

    MPI's own takes up to 1.4 times as long, since it copies operands once more.
    """
    rank, shape, dtype = comm.Get_rank(), t.shape, t.dtype

    def start(x, out):
        received, sent = out.view(numpy.uint8), x.view(numpy.uint8)
        return [comm.Irecv(received, 1 - rank, Tag.SWAP), comm.Isend(sent, 1 - rank, Tag.SWAP)]

    wait = comm.watched("Allreduce", start)

    def execute(x):
        x, out = numpy.ascontiguousarray(x), numpy.empty(shape, dtype)
        wait(x, out)
        return combine(out, x, out=out) if rank else combine(x, out, out=out)

    return execute
