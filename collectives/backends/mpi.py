"""The MPI backend: this process is one rank, and a value is its local block.

This is the only module that imports mpi4py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mpi4py
import numpy

from collectives.axes import Groups, longest_block
from collectives.backends import pairs, persistent
from collectives.backends.base import (
    CASTS,
    GROUP,
    Axes,
    Backend,
    LauncherError,
    OneRank,
    are_swapped,
    coordinates_of,
    ignore_interrupts,
    split_dimension,
    unsplit_dimension,
)
from collectives.backends.persistent import PersistentRequests
from collectives.backends.simulated import Simulated
from collectives.guards.deadlock import Watchdog, Watched, abandoned
from collectives.guards.mismatch import (
    DisagreementError,
    Kind,
    group_reports,
    note_calls,
    report,
    unfinished_call,
)
from collectives.guards.notebook import Communicator, Session, is_interactive
from minidiff.core.types import ShapedArray
from minidiff.values.dtypes import accumulator_dtype, check_dtype, is_bfloat16, is_real_float


def _mpi4py() -> Any:
    """Initialize MPI as mpi4py.rc says, unless MPI would kill this process.

    MPICH built without PMIx ends the process, without a useful message, under a launcher that uses PMIx (Open MPI's;
    `srun --mpi=pmix`). Raises LauncherError instead.
    """
    rc = mpi4py.rc
    starts, rc.initialize = rc.initialize, False
    rc.finalize = starts if rc.finalize is None else rc.finalize
    from mpi4py import MPI

    rc.initialize = starts
    if starts and not MPI.Is_initialized():
        version = MPI.Get_library_version()
        if "PMIX_NAMESPACE" in os.environ and version.startswith("MPICH") and "pmix" not in version:
            raise LauncherError(_name(version))
        with warnings.catch_warnings():  # make_mesh reports a launcher of another MPI, with advice
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}") if rc.threads else MPI.THREAD_SINGLE)
    return MPI


def _name(version: str) -> str:
    """The name and number at the beginning of an MPI library's version text."""
    return " ".join(version.split("\n")[0].split(",")[0].replace("\0", "").replace(" Version:", "").split())


Run = Callable[..., Any]  # what runs a collective on blocks of known types

_mpi = _mpi4py()
BYTE = _mpi.BYTE
WORLD = _mpi.COMM_WORLD
ROUND_TRIPS = 20  # messages by which two ranks compare their clocks
POSTED = 31996  # message tag
PAUSE = 1e-4  # seconds between two looks for a posted message


class MPIRanks(OneRank):
    """The ranks of an MPI communicator; this process is one of them."""

    name = "mpi"

    def __init__(self, sizes: dict[str, int], comm: Any = None):
        super().__init__(sizes)
        self._started: list[Started] = []
        self._posted: list = []  # requests of messages that may not have arrived
        self._given = WORLD if comm is None else comm
        self._lease = _communicators(self._given, sizes)
        self._lease.users.add(self)
        self._along = {tuple(sizes): self._lease.comms[(tuple(range(len(sizes))),)]}  # by the names of this mesh
        self.comm = self._along[tuple(sizes)]
        self.rank = self.comm.Get_rank()
        self.coordinates = coordinates_of(self.rank, sizes)

    @functools.cached_property
    def _places(self) -> list[int]:
        """The ranks of these processes in COMM_WORLD."""
        return list(self._given.Get_group().Translate_ranks(None, WORLD.Get_group()))

    def same_ranks(self, other: Backend) -> bool:
        return isinstance(other, MPIRanks) and self._places == other._places

    def along(self, axes: Axes) -> Any:
        """The communicator of the ranks that differ only along `axes`, in their order."""
        found = self._along.get(axes)
        if found is None:
            rest = tuple(a for a in self.sizes if a not in axes)
            found = self._along[axes] = self._split({"axes": axes}, self.index(rest), self.index(axes))
        return found

    def _towards(self, axes: Axes, reverse: bool) -> Any:
        """The communicator along `axes`; with `reverse`, its ranks are counted from the last."""
        along = self.along(axes)
        if not reverse:
            return along
        rest, order = tuple(a for a in self.sizes if a not in axes), tuple(range(self.size(axes)))[::-1]
        return self._split({"axes": axes, "groups": (order,)}, self.index(rest), order[self.index(axes)])

    def _split(self, which: dict, color: int, key: int) -> Any:
        """Split the mesh's communicator, once for all meshes of this shape: axes are known by position."""
        names = list(self.sizes)
        place = (tuple(names.index(a) for a in which["axes"]), *which.get("groups", ()))
        comms = self._lease.comms
        if place not in comms:
            self.comm.mismatch_check.note(_FIRST, which)
            comms[place] = self.comm.Split(color, key)
        return comms[place]

    def connect(self, params: Mapping[str, Any]) -> None:
        """Make the communicators of a collective, which takes all ranks of the mesh."""
        self._towards(params["axes"], params.get("reverse", False))
        if "groups" in params:
            self.group(params["axes"], params["groups"])

    def compare_once(self, name: str, lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe a call: see `MismatchCheck.compare_once`."""
        return self.comm.mismatch_check.compare_once(name, self.sizes, lines)

    def compare_values(self, lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe values: see `MismatchCheck.compare_values`."""
        return self.comm.mismatch_check.compare_values(self.sizes, lines)

    def is_due(self, key: int) -> bool:
        """Whether ranks compare the values of this call: see `MismatchCheck.is_due`."""
        return self.comm.mismatch_check.is_due(key)

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks, in their order; every rank must call it."""
        check = self.comm.mismatch_check
        check.note("comparison of values", {"axes": tuple(self.sizes)})
        return check.texts(text)

    def post(self, message: Any, rank: int) -> None:
        """Send a message to a rank, which takes it with `next_message`, and do not wait."""
        request = self.comm.isend(message, rank, POSTED)  # raises for what cannot be pickled
        self._posted = [*(r for r in self._posted if not r.Test()), request]

    def next_message(self) -> Any:
        """Wait for a message that any rank has posted to this one, and return it: the first that comes."""
        while (found := self.comm.improbe(_mpi.ANY_SOURCE, POSTED)) is None:
            time.sleep(PAUSE)  # others may share the processor
        return found.recv()

    def clock_offset(self) -> float:
        """The seconds by which rank 0's clock is ahead; from the fastest of some messages to it and back."""
        self.comm.mismatch_check.note("comparison of clocks", {"axes": tuple(self.sizes)})
        theirs, found = numpy.zeros(1), []
        with self.comm.mismatch_check.whole():
            for other, _ in itertools.product(range(1, self.comm.Get_size()), range(ROUND_TRIPS)):
                if self.rank == 0:
                    self.comm.Recv(theirs, other)
                    self.comm.Send(numpy.array([time.perf_counter()]), other)
                elif self.rank == other:
                    sent = time.perf_counter()
                    self.comm.Send(theirs, 0)
                    self.comm.Recv(theirs, 0)
                    received = time.perf_counter()
                    found.append((received - sent, theirs[0] - (sent + received) / 2))
        return float(min(found)[1]) if found else 0.0

    def group(self, axes: Axes, groups: Sequence[tuple[int, ...]]) -> MPIRanks:
        """The ranks of this rank's group, where `groups` list indices along `axes`; makes a communicator once."""
        here = self.index(axes)
        number = next(k for k, members in enumerate(groups) if here in members)
        rest = tuple(a for a in self.sizes if a not in axes)
        color, key = self.index(rest) * len(groups) + number, groups[number].index(here)
        comm = self._split({"axes": axes, "groups": tuple(groups)}, color, key)
        return MPIRanks({GROUP: len(groups[number])}, comm)

    # ------------------------------------------------ operations

    def collective(self, name: str, x: numpy.ndarray, varying: Axes, communicates: bool, params: dict):
        key = (name, communicates, *params.values(), varying, x.shape, x.dtype)
        run, after = self.decided.get(key) or self._keep(key, name, [(x, varying)], communicates, params, several=False)
        return run(x), after[0]

    def variadic(
        self, name: str, operands: Sequence[tuple[numpy.ndarray, Axes]], communicates: bool, params: dict
    ) -> list[tuple[numpy.ndarray, Axes]]:
        key = (name, communicates, *params.values(), *[(varying, x.shape, x.dtype) for x, varying in operands])
        run, after = self.decided.get(key) or self._keep(key, name, operands, communicates, params, several=True)
        return [*zip(run(*[x for x, _ in operands]), after)]

    def _keep(
        self, key: tuple, name: str, operands: Sequence[tuple], communicates: bool, params: dict, several: bool
    ) -> tuple[Run, list[Axes]]:
        """Keep what runs a collective on operands of these types, and the axes that its results vary along."""
        for x, _ in operands:
            check_dtype(x.dtype)  # Python objects cannot be sent to other ranks
        run = _operand if name in CASTS else self.prepare(name, operands, communicates, params, several)
        return self.keep(key, (run, [self.varying_after(name, varying, params) for _, varying in operands]))

    def moves_nothing(self, name: str, x: Any, varying: Axes, params: Mapping[str, Any]) -> bool:
        return name in CASTS or (params["size"] == 1 and _of_one_rank(name, x, params) is _operand)

    def prepare(
        self,
        name: str,
        operands: Sequence[tuple[Any, Axes]],
        communicates: bool,
        params: dict,
        several: bool,
        in_place: bool = False,
    ) -> Run:
        types = [ShapedArray(x.shape, x.dtype.newbyteorder("=")) for x, _ in operands]
        if not all(x.dtype.isnative for x, _ in operands):
            run = self.prepare(name, [(x, ()) for x in types], communicates, params, several, in_place)
            return lambda *xs: run(*map(_sendable, xs))
        if several and not communicates:
            each = [self._decide(name, x, params) for x in types]
            return lambda *xs: [run(x) for run, x in zip(each, xs)]
        if several or in_place:
            run = (self._decide_sums if several else self._sum_in_place)(types, **params)
        else:
            run = self._decide(name, types[0], params)
        return self._note_calls(run, name, types, params) if communicates else run

    def _decide(self, name: str, x: ShapedArray, params: dict) -> Run:
        """What runs a collective on blocks of this type, by the method of its name."""
        if params["size"] == 1:
            return _of_one_rank(name, x, params)
        if "groups" not in params:
            return getattr(self, f"_{name}")(x, **params)
        ranks = self.group(params["axes"], params["groups"])
        others = {k: v for k, v in params.items() if k != "groups"}
        return ranks._decide(name, x, {**others, "axes": (GROUP,), "size": ranks.size((GROUP,))})

    def _note_calls(self, run: Callable, name: str, types: Sequence[ShapedArray], params: dict) -> Callable:
        """`run`, with each call counted and noted, so that ranks can compare what they call."""
        return note_calls(run, self.along(params["axes"]), name, params, types, self.tallies[name])

    # ------------------------------------------------ started now, waited for later

    def prepare_start(self, name: str, operands: Sequence[tuple[Any, Axes]], params: dict) -> Callable[..., Started]:
        types = [ShapedArray(x.shape, x.dtype.newbyteorder("=")) for x, _ in operands]
        comm, begin = getattr(self, f"_start_{name}")(types, **params)
        under_way = self._started

        def start(*xs):
            started = Started(comm, xs)
            under_way.append(started)  # first: `finish` must know of it even if an exception comes next
            return _begin(begin, started)

        return self._note_calls(start, name, types, params)

    def _start_psum(self, types: Sequence[ShapedArray], **params: Any) -> tuple[Any, Callable[[Started], None]]:
        comm, packing = self._communicator(**params), Packing(types)

        def begin(started):
            started.given, buffer = (), packing.pack(started.given)  # the operands are free now
            started.results = lambda: packing.unpack(buffer)
            started.requests = [comm.Iallreduce(_mpi.IN_PLACE, buffer, _mpi.SUM)]

        return comm, begin

    def _start_ppermute(
        self, types: Sequence[ShapedArray], axes: Axes, size: int, perm: Sequence[tuple[int, int]], again: bool = True
    ):
        """What starts the messages; short ones by the same requests `again`."""
        comm, route = self.along(axes), self._route(axes, perm)
        if again and _is_short(comm, types[0]):
            spares = persistent.swap(comm, perm, types[0], route.requests)

            def begin(started):
                messages = spares.unused()
                started.results = lambda: [messages.take()]
                started.requests.extend(messages.start(*started.given))
        else:

            def begin(started):
                x = started.given = _sendable(*started.given)
                out = route.result(x)
                started.results = lambda: [out]
                started.requests.extend(route.messages(x, out))

        return comm, begin

    def progress(self, started: Started) -> list[numpy.ndarray]:
        """Let MPI go on with what has been started, this and all else."""
        for request in started.requests:
            request.Test()
        return []

    def wait(self, started: Started) -> list[numpy.ndarray]:
        started.comm.wait_for(started.requests)
        self._started.remove(started)  # last: so long MPI may write into its buffers
        return started.results()

    def finish(self, error: BaseException | None = None) -> None:
        if error is not None:
            for comm in self._lease.comms.values():
                if isinstance(comm, Watched):  # in a session, ranks compare all calls
                    comm.mismatch_check.compare_next(error)
        while self._started:
            started = self._started.pop(0)
            if isinstance(error, KeyboardInterrupt):  # do not make the user wait
                WATCHDOG.unfinished.append(unfinished_call(error, "a collective that started", None))
            if WATCHDOG.unfinished:
                abandoned.append(started)
            else:
                started.comm.wait_for(started.requests)
                started.results()

    def barrier(self) -> None:
        self.comm.mismatch_check.note("barrier", {"axes": tuple(self.sizes)})
        self.comm.Barrier()

    # ------------------------------------------------ collectives
    #
    # Each method takes the type of this rank's block. What it does itself is decided once; the function that it returns
    # runs each time.

    def _all_reduce(self, x, axes, op, ufunc):
        comm, wide = self.along(axes), ShapedArray(x.shape, _reducible_dtype(x.dtype))

        def run(x):
            out = numpy.empty(wide.shape, wide.dtype)
            comm.Allreduce(_sendable(x), out, op)
            if _raised_in_reductions:
                raise _raised_in_reductions.pop()
            return out

        return _as_reducible(_reduction(comm, wide, ufunc) or run, x.dtype)

    def _psum(self, x, axes, size):
        return self._all_reduce(x, axes, _mpi.SUM, numpy.add)

    def _sum_in_place(self, types, axes, size):
        return _sum_within(self.along(axes), types[0])

    def _pprod(self, x, axes, size):
        return self._all_reduce(x, axes, _mpi.PROD, numpy.multiply)

    def _pmax(self, x, axes, size):
        return self._all_reduce(x, axes, _MAXIMUM if is_real_float(x.dtype) else _mpi.MAX, numpy.maximum)

    def _pmin(self, x, axes, size):
        return self._all_reduce(x, axes, _MINIMUM if is_real_float(x.dtype) else _mpi.MIN, numpy.minimum)

    def _decide_sums(self, types, **params):
        comm, packing = self._communicator(**params), Packing(types)
        total = _sum_within(comm, ShapedArray((packing.size,), packing.wide))
        return lambda *xs: packing.unpack(total(packing.pack(xs)))

    def _communicator(self, axes: Axes, size: int, groups: Groups | None = None) -> Any:
        """The communicator of the ranks that this rank sums with."""
        return self.along(axes) if groups is None else self.group(axes, groups).comm

    def _pbroadcast(self, x, axes, size):
        return _operand

    _reduced = _unreduced = _pbroadcast

    def _all_gather(self, x, axes, size, axis, tiled):
        comm, shape = self.along(axes), (size, *x.shape)
        join = _joining(shape, axis, tiled)
        if _is_short(comm, x, to_all=True):
            return persistent.exchange(comm, "Allgather", x.shape, x, False, lambda came: join(came.out.copy()))

        def run(x):
            blocks = numpy.empty(shape, x.dtype)
            comm.Allgather(_bytes(_sendable(x)), _bytes(blocks))
            return join(blocks)

        return run

    _all_gather_invariant = _all_gather_reduced = _all_gather

    def _psum_scatter(self, x, axes, size, axis, tiled):
        comm, (split, parts) = self.along(axes), _splitting(x, size, axis, tiled)
        parts = ShapedArray(parts.shape, _reducible_dtype(x.dtype))
        part = ShapedArray(parts.shape[1:], parts.dtype)

        def run(x):
            out = numpy.empty(part.shape, part.dtype)
            comm.Reduce_scatter_block(numpy.ascontiguousarray(split(x)), out, _mpi.SUM)
            return out

        if _is_short(comm, parts, to_all=True):
            run = _exchange_parts(comm, "Reduce_scatter_block", x.shape, parts, axis, split, _sum_rows)
        return _as_reducible(run, x.dtype)

    def _pscatter(self, x, axes, size, axis, tiled):
        me, (split, _) = self.index(axes), _splitting(x, size, axis, tiled)
        return lambda x: split(x)[me]

    def _all_to_all(self, x, axes, size, split_axis, concat_axis, tiled):
        comm, (split, parts) = self.along(axes), _splitting(x, size, split_axis, tiled)
        join = _joining(parts.shape, concat_axis, tiled)
        if _is_short(comm, parts, to_all=True):
            me = comm.Get_rank()

            def finish(came):
                came.out[me] = came.rows[me]
                return join(came.out.copy())

            return _exchange_parts(comm, "Alltoall", x.shape, parts, split_axis, split, finish)

        def run(x):
            parts = numpy.ascontiguousarray(split(x))
            out = numpy.empty_like(parts)
            comm.Alltoall(_bytes(parts), _bytes(out))
            return join(out)

        return run

    def _ragged_all_to_all(self, x, axes, size, axis, splits):
        me, comm, longest = self.index(axes), self.along(axes), longest_block(zip(*splits))

        def run(x):
            rows = numpy.ascontiguousarray(numpy.moveaxis(x, axis, 0))
            out = numpy.zeros((longest, *rows.shape[1:]), x.dtype)
            row = math.prod(rows.shape[1:]) * x.itemsize
            sent, got = [n * row for n in splits[me]], [arriving[me] * row for arriving in splits]
            comm.Alltoallv(_parts(rows, sent), _parts(out, got))
            return numpy.moveaxis(out, 0, axis)

        return run

    def _broadcast(self, x, axes, size, root):
        comm, at_root = self.along(axes), self.index(axes) == root

        def run(x):
            x = _sendable(x) if at_root else numpy.empty(x.shape, x.dtype)
            out = x if x.flags.writeable else x.copy()  # mpi4py wants a writable buffer, also on the root
            comm.Bcast(_bytes(out), root)
            return out

        return run

    _broadcast_varying = _broadcast

    def _at_root(self, x, axes, size, root):
        return _operand if self.index(axes) == root else numpy.zeros_like

    def _reduce(self, x, axes, size, root):
        comm, at_root = self.along(axes), self.index(axes) == root

        def run(x):
            out = numpy.zeros(x.shape, x.dtype)
            comm.Reduce(_sendable(x), out if at_root else None, _mpi.SUM, root)
            return out

        return _as_reducible(run, x.dtype)

    def _gather(self, x, axes, size, root, axis, tiled):
        comm, at_root, shape = self.along(axes), self.index(axes) == root, (size, *x.shape)

        def run(x):
            blocks = numpy.zeros(shape, x.dtype)
            comm.Gather(_bytes(_sendable(x)), _bytes(blocks) if at_root else None, root)
            return unsplit_dimension(blocks, axis, tiled)

        return run

    def _scatter(self, x, axes, size, root, axis, tiled):
        comm, at_root = self.along(axes), self.index(axes) == root

        def run(x):
            parts = split_dimension(x, size, axis, tiled)
            out = numpy.empty(parts.shape[1:], x.dtype)
            comm.Scatter(_bytes(numpy.ascontiguousarray(parts)) if at_root else None, _bytes(out), root)
            return out

        return run

    def _pscan(self, x, axes, size, reverse, exclusive):
        comm = self._towards(axes, reverse)
        scan, first = (comm.Exscan, comm.Get_rank() == 0) if exclusive else (comm.Scan, False)

        def run(x):
            out = numpy.zeros(x.shape, x.dtype)
            scan(_sendable(x), out, _mpi.SUM)
            if first:
                out[...] = 0  # MPI leaves it undefined
            return out

        return _as_reducible(run, x.dtype)

    def _ppermute(self, x, axes, size, perm):
        comm, route = self.along(axes), self._route(axes, perm)
        if _is_short(comm, x):
            spares = persistent.swap(comm, perm, x, route.requests)
            return persistent.sender(comm, "Waitall", spares, PersistentRequests.take)

        def run(x):
            out = route.result(x)
            comm.wait_for(route.messages(_sendable(x), out))
            return out

        return run

    def _ppermute_start(self, x, axes, size, perm):
        comm, begin = self._start_ppermute([x], axes, size, perm, again=False)

        def run(x):
            started = Started(comm, [x])
            self._started.append(started)
            # MPI writes into the result, by whose identity `_ppermute_wait` knows the message.
            return _begin(begin, started).results()[0]

        return run

    def _ppermute_wait(self, x, axes, size, perm):
        def run(x):
            for started in [s for s in self._started if s.results()[0] is x]:
                self.wait(started)
            return x

        return run

    def _route(self, axes: Axes, perm: Sequence[tuple[int, int]]) -> Route:
        me = self.index(axes)
        sources = [source for source, destination in perm if destination == me]
        return Route(self.along(axes), sources, [destination for source, destination in perm if source == me])

    def gather(self, x: numpy.ndarray, varying: Axes) -> numpy.ndarray:
        if not varying:
            return x
        if self.is_here(varying):
            return x[None]
        self.along(varying).mismatch_check.note("all_gather", {"axes": varying}, x)
        self.count("all_gather", x.nbytes)
        params = {"axes": varying, "size": self.size(varying), "axis": 0, "tiled": False}
        return self.collective("all_gather", x, varying, False, params)[0]


class Started:
    """A started collective: MPI reads `given` and writes into what `results` returns, until it is waited for."""

    results: Callable[[], list[numpy.ndarray]]

    def __init__(self, comm: Any, given: Any):
        self.comm = comm
        self.given = given
        self.requests: list = []


def _begin(begin: Callable[[Started], None], started: Started) -> Started:
    """Begin what is to be waited for later; if an exception leaves it half begun, there are no further calls."""
    started.comm.mismatch_check.check_finished()
    try:
        begin(started)
    except BaseException as error:
        WATCHDOG.unfinished.append(unfinished_call(error, "a collective that started", None))
        raise
    return started


class Route(NamedTuple):
    """The ranks from which a rank receives an array, at most one, and those to which it sends its own."""

    comm: Any
    sources: Sequence[int]
    destinations: Sequence[int]

    def result(self, x: numpy.ndarray) -> numpy.ndarray:
        """A place for what comes instead of `x`; zeros if no message comes."""
        return (numpy.empty if self.sources else numpy.zeros)(x.shape, x.dtype)

    def messages(self, x: numpy.ndarray, out: numpy.ndarray) -> Iterator[Any]:
        """Start the messages, one by one."""
        return self._each(_view_for_mpi(x), _view_for_mpi(out), self.comm.Irecv, self.comm.Isend)

    def requests(self, sent: numpy.ndarray, room: numpy.ndarray) -> list:
        """The messages as persistent requests, not started, of what is sent and comes as bytes."""
        return [*self._each(sent, room, self.comm.Recv_init, self.comm.Send_init)]

    def _each(self, x: Any, out: Any, receive: Callable, send: Callable) -> Iterator[Any]:
        for source in self.sources:
            yield receive([out, BYTE], source, 0)
        for destination in self.destinations:
            yield send([x, BYTE], destination)


class Packing:
    """How values of one dtype are put into one buffer, in which they are summed: so a bucket takes its bytes once."""

    def __init__(self, types: Sequence[ShapedArray]):
        self.dtype = types[0].dtype
        self.wide = accumulator_dtype(self.dtype)
        ends = [0, *itertools.accumulate(x.size for x in types)]
        self.places = [(slice(*ends[k : k + 2]), x.shape) for k, x in enumerate(types)]
        self.size = ends[-1]

    def pack(self, xs: Sequence[numpy.ndarray]) -> numpy.ndarray:
        """The buffer, with the values."""
        buffer = numpy.empty(self.size, self.wide)
        for (place, shape), x in zip(self.places, xs):
            buffer[place].reshape(shape)[...] = x
        return buffer

    def unpack(self, buffer: numpy.ndarray) -> list[numpy.ndarray]:
        """The sums, as views of the buffer."""
        buffer = buffer.astype(self.dtype, copy=False)
        return [buffer[place].reshape(shape) for place, shape in self.places]


def _is_short(comm: Any, t: ShapedArray, to_all: bool = False) -> bool:
    """Whether operands of this type go by persistent requests; with `to_all`, all ranks send messages to all others."""
    few = not to_all or comm.Get_size() <= persistent.FEW
    return few and 0 < t.nbytes <= persistent.SHORT and isinstance(comm, Watched)


def _reduction(comm: Any, t: ShapedArray, ufunc: numpy.ufunc) -> Run | None:
    """What combines values of this type over ranks by messages; None if MPI's own all-reduce does."""
    if isinstance(comm, Watched) and are_swapped(t, comm.Get_size()):
        return pairs.all_reduce(comm, t, ufunc)
    return _short_reduction(comm, t, ufunc)


def _short_reduction(comm: Any, t: ShapedArray, ufunc: numpy.ufunc) -> Run | None:
    return persistent.all_reduce(comm, t, ufunc) if _is_short(comm, t) else None


def _splitting(x: ShapedArray, size: int, axis: int, tiled: bool) -> tuple[Run, ShapedArray]:
    """What does `split_dimension` to arrays of a type, and the type of what it makes."""
    parts = ShapedArray(split_dimension(_of_shape(x.shape), size, axis, tiled).shape, x.dtype)
    return _reshape_to(parts.shape) if axis == 0 else lambda x: split_dimension(x, size, axis, tiled), parts


def _exchange_parts(
    comm: Watched, method: str, shape: tuple[int, ...], parts: ShapedArray, axis: int, split: Run, finish: Callable
) -> Run:
    """What sends each rank its part of an array of this shape, which `split` makes `parts` of."""
    part, in_order = ShapedArray(parts.shape[1:], parts.dtype), axis == 0  # it is its parts, one after another
    exchange = persistent.exchange(comm, method, shape if in_order else parts.shape, part, True, finish)
    return exchange if in_order else lambda x: exchange(split(x))


def _joining(parts: Sequence[int], axis: int, tiled: bool) -> Run:
    """What does `unsplit_dimension` to arrays of a shape."""
    shape = unsplit_dimension(_of_shape(parts), axis, tiled).shape
    return _reshape_to(shape) if axis == 0 else lambda parts: unsplit_dimension(parts, axis, tiled)


def _of_shape(shape: Sequence[int]) -> numpy.ndarray:
    return numpy.broadcast_to(numpy.zeros(()), shape)


def _reshape_to(shape: Sequence[int]) -> Run:
    return lambda x: x.reshape(shape)


def _sum_rows(came: PersistentRequests) -> numpy.ndarray:
    return numpy.asarray(functools.reduce(numpy.add, came.rows))


def _sum_within(comm: Any, t: ShapedArray) -> Run:
    """What sums arrays of this type over ranks, and may write into them."""

    def run(x):
        x = _sendable(x)
        comm.Allreduce(_mpi.IN_PLACE, x, _mpi.SUM)
        return x

    return _short_reduction(comm, t, numpy.add) or run


def _operand(x: numpy.ndarray) -> numpy.ndarray:
    """What runs a collective that moves nothing."""
    return x


def _of_one_rank(name: str, x: Any, params: Mapping[str, Any]) -> Run:
    """What runs a collective of a single rank: the result is the operand, in another shape if need be, or zeros.

    Simulated, on ones, it says which.
    """
    alone = {k: v for k, v in params.items() if k != "groups"}
    ones = numpy.ones(x.shape, bool)
    out, varies = Simulated(dict.fromkeys(params["axes"], 1)).collective(name, ones, (), False, alone)
    shape = out.shape[1:] if varies else out.shape
    if not out.all():
        return lambda x: numpy.zeros(shape, x.dtype)
    return _operand if shape == x.shape else lambda x: x.reshape(shape)


# ---------------------------------------------------------------- communicators


class Lease:
    """The communicators of a mesh, by positions of axes and by groups.

    `users` are the backends that use them. Another mesh of this shape reuses them if it has the same axis names, or
    once no rank uses them any longer.
    """

    def __init__(self, comm: Any, sizes: dict[str, int]):
        self.names = tuple(sizes)
        self.comms: dict[tuple, Any] = {(tuple(range(len(sizes))),): comm}
        self.users: weakref.WeakSet = weakref.WeakSet()


def _communicators(parent: Any, sizes: dict[str, int]) -> Lease:
    """Find or make the communicators of a mesh on `parent`, and cache them on it.

    MPI allows about two thousand. Freeing one is a collective call, but ranks drop their meshes at different times; so
    unused communicators are reused when a new mesh is made.
    """
    made = parent.Get_attr(_MADE)
    if made is None:
        made = {}
        parent.Set_attr(_MADE, made)
    names, shape = tuple(sizes), tuple(sizes.values())
    leases = made.setdefault(shape, [])
    for lease in leases:
        if lease.names == names:
            return lease
    if is_interactive():
        comm = _in_session(parent, tuple(sizes.items()))
        _compare_sizes(comm, sizes)
        leases.append(Lease(comm, sizes))
        return leases[-1]
    root = made[None] = made.get(None) or _watch(parent)
    _compare_sizes(root, sizes)
    found = _find_unused(root, leases)
    if found is None:
        found = Lease(root.Dup(), sizes)
        leases.append(found)
    found.names = names
    return found


def _compare_sizes(comm: Any, sizes: dict[str, int]) -> None:
    """Raise DisagreementError on all ranks unless they all make the same mesh."""
    axes = ", ".join(f"{a}: {n}" for a, n in sizes.items())
    if said := comm.mismatch_check.compare_once("make_mesh", sizes, [f"axes ({axes})"]):
        advice = (
            "All ranks make one mesh: give make_mesh the same sizes and names on all of them. Compute sizes from the "
            "number of ranks, not from this process's rank or environment"
        )
        raise DisagreementError(report("ranks make different meshes", said, advice))


def _find_unused(comm: Watched, leases: list[Lease]) -> Lease | None:
    """The first lease that no rank uses, or None."""
    for often in (1, 64):  # if all are in use, look again after a garbage collection, at every 64th lease
        if not leases or len(leases) % often:
            return None
        if often > 1:
            gc.collect()
        mine = numpy.array([not lease.users for lease in leases], numpy.uint8)
        everywhere = numpy.empty_like(mine)
        comm.Allreduce(mine, everywhere, _mpi.MIN)
        if everywhere.any():
            return leases[everywhere.argmax()]
    return None


def _free_unused(parent: Any, key: int, made: dict) -> None:
    """Free the unused communicators cached on a communicator whose owner frees it."""
    if is_interactive():
        return
    WATCHDOG.forget(made.pop(None, None))
    for lease in itertools.chain.from_iterable(made.values()):
        if not lease.users:
            for comm in lease.comms.values():
                comm.free()


_MADE = _mpi.Comm.Create_keyval(delete_fn=_free_unused)
_FIRST = "the first collective"


_LOBBIES: dict[tuple, Watched] = {}  # by ranks: the communicator on which they agree on names of new ones
_NUMBERS = itertools.count(1)


def _watch(parent: Any) -> Watched:
    """Wrap a communicator for the deadlock watchdog; all its ranks call this, and agree on its name."""
    if isinstance(parent, Watched):
        return parent
    everyone = WORLD.Get_size()
    ranks = tuple(parent.Get_group().Translate_ranks(None, WORLD.Get_group()))
    lobby = _LOBBIES.get(ranks)
    if lobby is None:
        lobby = _LOBBIES[ranks] = Watched(parent, WATCHDOG, ("make_mesh", *ranks), ranks)
        lobby.mismatch_check.latest = Kind("make_mesh", "", 1)
    threads = _threads()
    first = parent.Get_rank() == 0
    mine = numpy.array([next(_NUMBERS) if first else 0, threads and not WATCHDOG.reaches(ranks, everyone)])
    agreed = numpy.empty_like(mine)
    lobby.watching("Allreduce", parent.Iallreduce)(mine, agreed, _mpi.MAX)
    if agreed[1] and threads and len(ranks) > 1:
        with lobby.mismatch_check.whole():
            WATCHDOG.open(parent.Dup(), ranks)
    return Watched(parent, WATCHDOG, (*ranks[:1], int(agreed[0])), ranks)


def _at_the_end(*_: Any) -> None:
    leave()
    for comm in WATCHDOG.communicators:
        comm.free_requests()


@functools.cache
def _threads() -> bool:
    """Whether the watchdog's thread may call MPI."""
    _mpi.COMM_SELF.Set_attr(_mpi.Comm.Create_keyval(delete_fn=_at_the_end), None)  # runs at MPI_Finalize
    threads = _mpi.Query_thread() >= _mpi.THREAD_MULTIPLE
    if not threads and WORLD.Get_size() > 1 and WORLD.Get_rank() == 0:
        warnings.warn(
            "the deadlock watchdog is off, since MPI was started without MPI_THREAD_MULTIPLE (as by "
            "mpi4py.rc.threads = False): it will not find ranks that wait for each other forever",
            RuntimeWarning,
            stacklevel=2,
        )
    return threads


_SESSION: list[Session] = []  # the session, if this process is interactive and has a mesh


def _in_session(parent: Any, name: tuple) -> Communicator:
    """A duplicate of `parent` for an interactive session."""
    if not _SESSION:
        _SESSION.append(Session(WORLD))
    ranks = parent.Get_group().Translate_ranks(None, WORLD.Get_group())
    return Communicator(_SESSION[0], list(ranks), name, parent.Dup)


def _sendable(x: numpy.ndarray) -> numpy.ndarray:
    """Return x contiguous, aligned and in native byte order, as MPI requires; copy only if needed."""
    if type(x) is numpy.ndarray and x.flags.num & _SENDABLE == _SENDABLE and x.dtype.isnative:
        return x
    x = numpy.asarray(x, None if x.dtype.isnative else x.dtype.newbyteorder("="), order="C")
    return x if x.flags.aligned else x.copy()


_SENDABLE = 0x1 | 0x100  # numpy's flags C_CONTIGUOUS and ALIGNED


def _bytes(x: numpy.ndarray) -> list:
    """A buffer specification for moving data, as bytes: MPI need not know the dtype."""
    return [_view_for_mpi(x), BYTE]


def _view_for_mpi(x: numpy.ndarray) -> numpy.ndarray:
    """View x as a dtype whose memory mpi4py can read: it does not know bfloat16."""
    return x.view(numpy.uint16) if x.dtype.kind == "V" and is_bfloat16(x.dtype) else x


def _parts(x: numpy.ndarray, counts: Sequence[int]) -> list:
    """A buffer specification as `_bytes`, in consecutive parts of `counts` bytes."""
    return [_view_for_mpi(x), (counts, [0, *itertools.accumulate(counts)][:-1]), BYTE]


def _reducible_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """The dtype as which MPI reduces values of a dtype."""
    return numpy.dtype(numpy.uint8) if dtype.kind == "b" else accumulator_dtype(dtype)


def _as_reducible(run: Run, dtype: numpy.dtype) -> Run:
    """What reduces values of a dtype, where `run` reduces those of its `_reducible_dtype`."""
    wide = _reducible_dtype(dtype)
    if wide == dtype:
        return run
    if dtype.kind == "b":  # MPI has no order for booleans; as bytes they are 0 and 1
        return lambda x: run(x.view(wide)).view(dtype)
    return lambda x: run(x.astype(wide)).astype(dtype)  # it has no 16-bit floats


_raised_in_reductions: list[BaseException] = []  # on this rank, to be raised once the call is complete


def _as_numpy(ufunc: numpy.ufunc) -> Any:
    """An MPI reduction operation that applies a ufunc of two floating-point arrays."""

    def combine(one, two, datatype):
        try:
            one, two = (numpy.frombuffer(x, datatype.typestr) for x in (one, two))
            ufunc(one, two, out=two)
        except BaseException as error:  # MPI would end the job: finish, and raise it later
            _raised_in_reductions.append(error)
            with numpy.errstate(all="ignore"):
                combine(one, two, datatype)

    return _mpi.Op.Create(combine, commute=True)


# MPI's own MAX and MIN treat a NaN depending on the order of operands, so ranks could get different results.
_MAXIMUM, _MINIMUM = _as_numpy(numpy.maximum), _as_numpy(numpy.minimum)


# ---------------------------------------------------------------- the MPI library


def library() -> str:
    """The MPI library's name and version, and its version of the standard."""
    return f"{_name(_mpi.Get_library_version())}, of MPI {'.'.join(map(str, _mpi.Get_version()))}"


# ---------------------------------------------------------------- ranks that fail


def abort(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End the whole job because of an exception: other ranks would wait forever.

    The traceback is printed once, with the rank's number. If several ranks fail at once, as they do from a mistake in
    the program they all run, the lowest rank prints it, and then which of the others failed with the same error, or
    with which other one.
    """
    text = "".join(traceback.format_exception(kind, error, trace))
    last = "".join(traceback.format_exception_only(kind, error))
    end(f"{text}rank {WORLD.Get_rank()} of {WORLD.Get_size()} failed; the job ends.", 1, error=last)


def _say(text: str) -> None:
    """Print with this rank's number, in one write: lines of ranks must not mix."""
    os.write(2, "".join(f"[rank {WORLD.Get_rank()}] {line}\n" for line in text.splitlines()).encode())


def _stop_capturing() -> None:
    """Let pytest show what comes next, which it would keep for the end of the test, and what the test has printed."""
    capture: Any = sys.modules.get("_pytest.capture")
    with contextlib.suppress(Exception):  # its classes may change, and the job must end
        for manager in [x for x in (gc.get_objects() if capture else ()) if type(x) is capture.CaptureManager]:
            manager.suspend_fixture()
            manager.stop_global_capturing()


ERROR = 31997  # message tag: the error of a rank that ends the job
FEW = 16  # the lowest ranks, which the others tell their errors, and which tell theirs


def end(text: str, code: int, patience: float = 1.0, error: str = "") -> None:
    """End the whole job with an exit code; the lowest rank that does prints `text`.

    Higher ranks wait `patience` seconds and a little more, so that the lowest comes first: a rank inside an MPI call
    does not react to signals. They tell it their `error`, which it groups with its own.
    """
    ignore_interrupts()
    rank = WORLD.Get_rank()
    errors: dict[int, Any] = {}
    if error:
        others = [r for r in range(WORLD.Get_size()) if r != rank and min(r, rank) < FEW]
        abandoned.append([WORLD.isend(error[:1000], r, ERROR) for r in others])
    if rank:
        _hear(errors, min(patience + 0.05 * rank, 3.0))
        if min(errors, default=rank) < rank:  # that rank is ending the job
            _hear(errors, 3.0)
    sys.stdout.flush()
    sys.stderr.flush()
    _stop_capturing()
    _say(text)
    _hear(errors, 0.5)  # launchers drop output that they have not read yet when the job is aborted
    if errors:
        same = "failed with the same error"
        said = {r: same if e == error[:1000] else f"failed: {e.splitlines()[0]}" for r, e in errors.items()}
        _say("\n".join(line.replace(": ", " ", 1) for line in group_reports(said)))
        time.sleep(0.2)
    WORLD.Abort(code)
    os._exit(code)  # Abort returns if a scheduler is already ending the job


def _hear(errors: dict[int, str], seconds: float) -> None:
    """Wait, and receive the errors of other ranks that end the job."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        status = _mpi.Status()
        while WORLD.iprobe(tag=ERROR, status=status):
            errors[status.Get_source()] = WORLD.recv(source=status.Get_source(), tag=ERROR)
        time.sleep(min(left, 0.02))


WATCHDOG = Watchdog(end)
leave = WATCHDOG.leave
