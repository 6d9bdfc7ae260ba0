"""The ranks of an MPI communicator."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from collectives.axes import Groups
from collectives.backends.base import Axes, Backend, CollectivePlan, coordinates_of, split_dimension
from collectives.backends.functions import FUNCTIONS, contiguous, start_messages
from collectives.backends.mpi.abort import WATCHDOG
from collectives.backends.mpi.buffers import MAXIMUM, MINIMUM, Packing, as_reducible, raised_in_reductions
from collectives.backends.mpi.communicators import CommunicatorPool
from collectives.backends.mpi.library import MPI, world
from collectives.backends.one_rank import OneRank
from collectives.guards.deadlock import WatchedComm, abandoned
from collectives.guards.mismatch import note_calls, unfinished_call
from minidiff.core.types import ShapedArray
from minidiff.values.dtypes import check_dtype, is_real_float

if TYPE_CHECKING:
    from collectives.collective import Collective

Execute = Callable[..., Any]  # a function of blocks of known types

ROUND_TRIPS = 20  # messages by which two ranks compare their clocks


class MPIRanks(OneRank):
    """The ranks of an MPI communicator; this process is one of them."""

    name = "mpi"

    def __init__(self, sizes: dict[str, int], comm: Any = None):
        super().__init__(sizes)
        self._in_flight: list[Request] = []
        self._parent = world() if comm is None else comm
        self._entry = CommunicatorPool.on(self._parent).acquire(sizes)
        self._entry.users.add(self)
        self._along = {tuple(sizes): self._entry.comms[(tuple(range(len(sizes))),)]}  # by the names of this mesh
        self.comm = self._along[tuple(sizes)]
        self.rank = self.comm.Get_rank()
        self.coordinates = coordinates_of(self.rank, sizes)

    @functools.cached_property
    def _world_ranks(self) -> list[int]:
        """The ranks of these processes among all."""
        return list(self._parent.Get_group().Translate_ranks(None, world().Get_group()))

    def same_ranks(self, other: Backend) -> bool:
        return isinstance(other, MPIRanks) and self._world_ranks == other._world_ranks

    # ------------------------------------------------ communicators

    def along(self, axes: Axes) -> Any:
        """Return the communicator of the ranks that differ only along `axes`, in their order."""
        comm = self._along.get(axes)
        if comm is None:
            others = tuple(a for a in self.sizes if a not in axes)
            comm = self._along[axes] = self._split({"axes": axes}, self.index(others), self.index(axes))
        return comm

    def communicator(
        self, axes: Axes, size: int, groups: Groups | None = None, reverse: bool = False, **params: Any
    ) -> Any:
        """Return the communicator of a collective with these parameters; with `reverse`, in reverse order."""
        if groups is None and not reverse:
            return self.along(axes)
        groups = groups or (tuple(range(size))[::-1],)
        index, others = self.index(axes), tuple(a for a in self.sizes if a not in axes)
        number = next(k for k, members in enumerate(groups) if index in members)
        color = self.index(others) * len(groups) + number
        return self._split({"axes": axes, "groups": groups}, color, groups[number].index(index))

    def _split(self, params: dict, color: int, key: int) -> Any:
        """Split the mesh's communicator, once for all meshes of this shape: axes are known by position."""
        names, comms = list(self.sizes), self._entry.comms
        position = (tuple(names.index(a) for a in params["axes"]), *params.get("groups", ()))
        if position not in comms:
            self.comm.mismatch_check.note("the first collective", params)
            comms[position] = self.comm.Split(color, key)
        return comms[position]

    def connect(self, params: Mapping[str, Any]) -> None:
        """Make the communicators of a collective, which takes all ranks of the mesh."""
        self.along(params["axes"])
        self.communicator(**params)

    # ------------------------------------------------ agreement, and clocks

    def compare_once(self, name: str, lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe a call: see `MismatchCheck.compare_once`."""
        return self.comm.mismatch_check.compare_once(name, self.sizes, lines)

    def compare_values(self, lines: Sequence[str]) -> dict[int, str]:
        """Compare the `lines` that describe values: see `MismatchCheck.compare_values`."""
        return self.comm.mismatch_check.compare_values(self.sizes, lines)

    def is_due(self, key: int) -> bool:
        """Whether ranks compare the values of this call: see `MismatchCheck.is_due`."""
        return self.comm.mismatch_check.is_due(key)

    def gather_texts(self, text: str) -> list[str]:
        check = self.comm.mismatch_check
        check.note("comparison of values", {"axes": tuple(self.sizes)})
        return check.gather_texts(text)

    def barrier(self) -> None:
        self.comm.mismatch_check.note("barrier", {"axes": tuple(self.sizes)})
        self.comm.Barrier()

    def clock_offset(self) -> float:
        """Return the seconds by which rank 0's clock is ahead; from the fastest of some messages to it and back."""
        self.comm.mismatch_check.note("comparison of clocks", {"axes": tuple(self.sizes)})
        theirs, offsets = numpy.zeros(1), []
        with self.comm.mismatch_check.critical_section():
            for other, _ in itertools.product(range(1, self.comm.Get_size()), range(ROUND_TRIPS)):
                if self.rank == 0:
                    self.comm.Recv(theirs, other)
                    self.comm.Send(numpy.array([time.perf_counter()]), other)
                elif self.rank == other:
                    sent = time.perf_counter()
                    self.comm.Send(theirs, 0)
                    self.comm.Recv(theirs, 0)
                    received = time.perf_counter()
                    offsets.append((received - sent, theirs[0] - (sent + received) / 2))
        return float(min(offsets)[1]) if offsets else 0.0

    # ------------------------------------------------ plans

    def moves_nothing(self, primitive: Collective, x: Any, varying: Axes, params: Mapping[str, Any]) -> bool:
        return primitive.is_view or (params["size"] == 1 and _on_one_rank(primitive, x, params) is _identity)

    def plan(
        self,
        primitive: Collective,
        operands: Sequence[tuple[Any, Axes]],
        params: dict,
        counted: bool = True,
        in_place: bool = False,
    ) -> CollectivePlan:
        for x, _ in operands:
            check_dtype(x.dtype)  # Python objects cannot be sent to other ranks
        types = _types(operands)
        sends = primitive.sends(params)
        if primitive.multiple_results and not sends:
            each = [self.plan_one(primitive.per_operand, t, params) for t in types]
            execute: Execute = lambda *xs: [run(x) for run, x in zip(each, xs)]  # noqa: E731
        elif primitive.multiple_results:
            execute = self.plan_sums(self.communicator(**params), Packing(types))
        elif in_place:
            execute = self.plan_sum_in_place(self.communicator(**params), types[0])
        else:
            execute = self.plan_one(primitive, types[0], params)
        if sends and counted:
            execute = self._note_calls(execute, primitive, types[: primitive.linear_operands], params)
        if not all(x.dtype.isnative for x, _ in operands):
            native = execute
            execute = lambda *xs: native(*map(contiguous, xs))  # noqa: E731
        return CollectivePlan(execute, [self.varying_after(primitive, varying, params) for _, varying in operands])

    def plan_one(self, primitive: Collective, t: ShapedArray, params: Mapping[str, Any]) -> Execute:
        """Plan a collective of one block of type `t`: by the method of its name, or a function over a communicator."""
        if primitive.is_view:
            return _identity
        if params["size"] == 1:
            return _on_one_rank(primitive, t, params)
        if primitive.cost is None:
            return getattr(self, f"_{primitive.name}")(**params)
        comm = self.communicator(**params)
        of_function = {k: v for k, v in params.items() if k not in ("axes", "size", "groups")}
        if method := getattr(self, f"_{primitive.name}", None):
            execute = method(comm, t, **of_function)
        else:
            execute = functools.partial(FUNCTIONS[primitive.name], comm, **of_function)
        return as_reducible(execute, t.dtype) if primitive.sums else execute

    def _note_calls(self, execute: Execute, primitive: Collective, types: Sequence[ShapedArray], params: dict):
        """Return `execute` with each call counted and noted, so that ranks can compare what they call."""
        return note_calls(execute, self.along(params["axes"]), primitive, params, types, self.counters[primitive.name])

    # ------------------------------------------------ collectives that are no functions over a communicator

    def plan_sum_in_place(self, comm: Any, t: ShapedArray) -> Execute:
        """Plan the sum of an array over ranks, which is written into it."""

        def execute(x):
            x = contiguous(x)
            comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
            return x

        return execute

    def plan_sums(self, comm: Any, packing: Packing) -> Execute:
        """Plan the sums of several arrays, in one call."""
        total = self.plan_sum_in_place(comm, packing.type)
        return lambda *xs: packing.unpack(total(packing.pack(xs)))

    def _pmax(self, comm, t):
        return self._reduce_by(comm, t, MAXIMUM if is_real_float(t.dtype) else MPI.MAX)

    def _pmin(self, comm, t):
        return self._reduce_by(comm, t, MINIMUM if is_real_float(t.dtype) else MPI.MIN)

    def _pprod(self, comm, t):
        return _all_reduce(comm, MPI.PROD)

    def _reduce_by(self, comm: Any, t: ShapedArray, op: Any) -> Execute:
        return as_reducible(_all_reduce(comm, op), t.dtype)

    def _reduce(self, comm, t, root):
        at_root = comm.Get_rank() == root

        def execute(x):
            out = numpy.zeros(x.shape, x.dtype)
            comm.Reduce(contiguous(x), out if at_root else None, MPI.SUM, root)
            return out

        return execute

    def _pscan(self, comm, t, reverse, exclusive):
        scan, is_first = (comm.Exscan, comm.Get_rank() == 0) if exclusive else (comm.Scan, False)

        def execute(x):
            out = numpy.zeros(x.shape, x.dtype)
            scan(contiguous(x), out, MPI.SUM)
            if is_first:
                out[...] = 0  # MPI leaves it undefined
            return out

        return execute

    def _pscatter(self, axes, size, axis, tiled):
        index = self.index(axes)
        return lambda x: split_dimension(x, size, axis, tiled)[index]

    def _at_root(self, axes, size, root):
        return _identity if self.index(axes) == root else numpy.zeros_like

    def gather(self, all_gather: Collective, x: numpy.ndarray, varying: Axes) -> numpy.ndarray:
        if not varying:
            return x
        if self.is_local(varying):
            return x[None]
        self.along(varying).mismatch_check.note("all_gather", {"axes": varying}, x)
        counter = self.counters["all_gather"]
        counter.calls, counter.bytes = counter.calls + 1, counter.bytes + x.nbytes
        params = {"axes": varying, "size": self.size(varying), "axis": 0, "tiled": False}
        return self.collective(all_gather, x, varying, params, counted=False)[0]

    # ------------------------------------------------ started now, waited for later

    def plan_start(self, primitive: Collective, operands: Sequence[tuple[Any, Axes]], params: dict) -> Execute:
        types, comm = _types(operands), self.communicator(**params)
        start = (
            self._start_sums(comm, types)
            if primitive.sums
            else self.plan_permutation_start(comm, types[0], params["perm"])
        )
        return self._note_calls(start, primitive, types, params)

    def _start_sums(self, comm: Any, types: Sequence[ShapedArray]) -> Execute:
        packing = Packing(types)

        def begin(request):
            request.operands, buffer = (), packing.pack(request.operands)  # the operands are free now
            request.results = lambda: packing.unpack(buffer)
            request.requests = [comm.Iallreduce(MPI.IN_PLACE, buffer, MPI.SUM)]

        return self.starting(comm, begin)

    def plan_permutation_start(self, comm: Any, t: ShapedArray, perm: Sequence[tuple[int, int]]) -> Execute:
        """Plan the start of a permutation: the function returns a request."""
        perm, new = self._messages_of(comm, perm)

        def begin(request):
            x = request.operands = contiguous(*request.operands)
            out = new(x.shape, x.dtype)
            request.results = lambda: [out]
            request.requests.extend(start_messages(comm, x, out, perm))

        return self.starting(comm, begin)

    @staticmethod
    def _messages_of(comm: Any, perm: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], Callable]:
        """Return the messages from and to this rank, and a function that makes an array for what comes, or zeros."""
        rank = comm.Get_rank()
        comes = any(destination == rank for _, destination in perm)
        return [pair for pair in perm if rank in pair], numpy.empty if comes else numpy.zeros

    def starting(self, comm: Any, begin: Callable[[Request], None]) -> Callable[..., Request]:
        """Return a function that starts a collective by `begin`, and returns its request."""
        in_flight = self._in_flight

        def start(*xs):
            comm.mismatch_check.check_finished()
            try:
                request = Request(comm, xs)
                in_flight.append(request)  # first: `finish` must know of it even if an exception comes next
                begin(request)
            except BaseException as error:  # it is half begun: there are no further calls
                WATCHDOG.unfinished.append(unfinished_call(error, "a collective that started", None))
                raise
            return request

        return start

    def _ppermute(self, comm, t, perm):
        perm, new = self._messages_of(comm, perm)

        def execute(x):
            x = contiguous(x)
            out = new(x.shape, x.dtype)
            comm.wait_for(start_messages(comm, x, out, perm), (x, out))
            return out

        return execute

    def _ppermute_start(self, comm, t, perm):
        return self.plan_permutation_start(comm, t, perm)

    def _ppermute_wait(self, **params):
        return lambda request: self.wait(request)[0]

    def progress(self, request: Request) -> list[numpy.ndarray]:
        """Let MPI make progress on this request and all others in flight."""
        for message in request.requests:
            message.Test()
        return []

    def wait(self, request: Request) -> list[numpy.ndarray]:
        request.comm.wait_for(request.requests)
        self._in_flight.remove(request)  # last: so long MPI may write into its buffers
        return request.results()

    def finish(self, error: BaseException | None = None) -> None:
        if error is not None:
            for comm in self._entry.comms.values():
                if isinstance(comm, WatchedComm):  # in a session, ranks compare all calls
                    comm.mismatch_check.compare_next(error)
        while self._in_flight:
            request = self._in_flight.pop(0)
            if isinstance(error, KeyboardInterrupt):  # do not make the user wait
                WATCHDOG.unfinished.append(unfinished_call(error, "a collective that started", None))
            if WATCHDOG.unfinished:
                abandoned.append(request)
            else:
                request.comm.wait_for(request.requests)
                request.results()


class Request:
    """A collective in flight: until it is waited for, MPI reads `operands` and writes into `results()`.

    As a value of a program it has the type of its first operand.
    """

    results: Callable[[], list[numpy.ndarray]]

    def __init__(self, comm: Any, operands: Any):
        self.comm = comm
        self.operands = operands
        self.requests: list = []  # MPI's
        self.shape, self.dtype = operands[0].shape, operands[0].dtype


def _types(operands: Sequence[tuple[Any, Axes]]) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype.newbyteorder("=")) for x, _ in operands]


def _all_reduce(comm: Any, op: Any) -> Execute:
    def execute(x):
        out = numpy.empty(x.shape, x.dtype)
        comm.Allreduce(contiguous(x), out, op)
        if raised_in_reductions:
            raise raised_in_reductions.pop()
        return out

    return execute


def _identity(x: Any) -> Any:
    return x


def _on_one_rank(primitive: Collective, t: Any, params: Mapping[str, Any]) -> Execute:
    """Plan a collective of a single rank: the result is the operand, in another shape if need be, or zeros."""
    if primitive.linear_operands:
        return functools.partial(FUNCTIONS[primitive.name], None, axis=params["axis"], rows=params["rows"])
    shape, _ = primitive.shape_rule(ShapedArray(t.shape, t.dtype), **params)
    if params.get("perm") == () or params.get("exclusive", False):
        return lambda x: numpy.zeros(shape, x.dtype)
    return _identity if shape == t.shape else lambda x: x.reshape(shape)
