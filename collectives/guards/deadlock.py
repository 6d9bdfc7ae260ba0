"""The deadlock watchdog: find ranks that wait forever, and end the job.

MPI does not detect deadlocks. So each process runs a watchdog thread, which checks twice a second whether all threads
of the program are waiting, and for which ranks. If they are, it reports so to the lowest rank of each group of ranks
that has a mesh. That rank combines the reports: a call completes once all its ranks reach it, and a rank can reach a
call if one of its threads is running, or is waiting in a call that can complete. The remaining ranks wait forever. A
slow program is not ended, because a thread that computes may reach any call.

Calls are started without blocking and then polled, so that they can be interrupted and watched. The mismatch check
(`mismatch.py`) compares what ranks call; when the program ends, the watchdog compares the calls that are still
uncompared.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

from collectives.guards.mismatch import (
    OFTEN,
    MismatchCheck,
    calls_agree,
    describe_ranks,
    displayed_call,
    mismatch_message,
    unfinished_call,
)
from collectives.tags import Tag
from minidiff.errors.location import describe_line

TICK = 0.5  # seconds between two checks
SNAPSHOT_AGES = 3, 6  # in ticks, of the moments examined: all reports have arrived by then; relayed ones take longer
HISTORY = 4 * OFTEN  # calls that a rank remembers; it cannot be further ahead of others, as comparisons hold it up
SPIN = 10  # tests of a request before yielding the processor
COMPARISON = "comparison of calls"

#: Blocking calls that wait for other ranks; each has a nonblocking form: Iallgather, …
WAITING = {"Allgather", "Allreduce", "Alltoall", "Alltoallv", "Barrier", "Bcast", "Gather", "Reduce", "Scatter"}
WAITING |= {"Exscan", "Reduce_scatter_block", "Scan"}

_offer_processor = getattr(os, "sched_yield", lambda: time.sleep(0))
#: Interrupted calls, kept alive because MPI may still write into their buffers.
abandoned: list = []


def wait_for(requests: Sequence[Any]) -> None:
    """Wait for all `requests`; Ctrl-C, or an exception of another signal's handler, interrupts at once."""
    # Poll without sleeping: some MPI libraries make progress on long messages only while they are called.
    try:
        for request in requests:
            test = request.Test
            for _ in range(SPIN):
                if test():
                    break
            else:
                while not test():
                    _offer_processor()
    except BaseException:
        abandoned.append(requests)
        raise


def _start_all(requests: Iterable[Any], buffers: Any = ()) -> list:
    """Return requests, which an iterator starts one by one: `buffers` are in use even if an exception stops it."""
    return list(requests)


# ---------------------------------------------------------------- the states of ranks


class PendingCall(NamedTuple):
    """A call that a thread waits in: number `number` on a communicator of `ranks`."""

    on: tuple  # the communicator's name
    number: int
    method: str  # MPI's name for it
    ranks: tuple[int, ...]
    collective: str = ""  # that makes the call
    line: str = ""  # of the program

    def same_as(self, method: str, collective: str) -> bool:
        """Whether another rank's call of this number is the same; compared calls may differ."""
        return self.method == method and (self.collective == collective or method == COMPARISON)

    def __str__(self) -> str:
        collective = displayed_call(self.collective) or "a call"
        if self.method == COMPARISON:
            return f"compares its next call, {collective}, with {describe_ranks(self.ranks)}; {self.line}"
        return f"waits in {collective} (MPI {self.method}) with {describe_ranks(self.ranks)}; {self.line}"


class State(NamedTuple):
    """A rank's report: the calls its threads wait in, or None once it has ended; () if it makes no further ones."""

    rank: int
    calls: tuple[PendingCall, ...] | None
    begun: Mapping[tuple, int]  # the number of calls it began on each communicator
    since: Mapping[tuple, list[str]] = {}  # at the end: the calls on each communicator that were not compared yet
    code: int = 0  # at the end: the exit code
    tick: int = 0
    recent: Mapping[tuple, Mapping[int, tuple[str, str]]] = {}  # the method and collective of calls that it began
    unfinished: str = ""  # the call that an exception left: it makes no further ones

    def has_reached(self, call: PendingCall) -> bool:
        """Whether the rank is in the call, or has passed it."""
        for waiting in self.calls or ():
            if waiting[:2] == call[:2]:
                return call.same_as(waiting.method, waiting.collective)
        recent = self.recent.get(call.on, {}).get(call.number)
        if recent is not None and not call.same_as(*recent):
            return False  # it made another call there, and will not make this one
        return self.begun.get(call.on, 0) >= call.number

    def __str__(self) -> str:
        unfinished = f" makes no further calls, since {self.unfinished}" if self.unfinished else ""
        if self.calls is None:
            code = f", with exit code {self.code}" if self.code else ""
            return f"rank {self.rank} has reached the end of its program{code}" + f"; it{unfinished}" * bool(unfinished)
        if unfinished:
            return f"rank {self.rank}{unfinished}"
        return f"rank {self.rank} {', and '.join(map(str, self.calls))}"


def stuck(states: Mapping[int, State]) -> list[int]:
    """Return the ranks that wait forever. A rank without a state is running, and may reach any call."""
    waits = {r: [_missing_ranks(call, r, states) for call in s.calls] for r, s in states.items() if s.calls}
    blocked = set(states)
    while free := [r for r, calls in waits.items() if any(blocked.isdisjoint(missing) for missing in calls)]:
        blocked.difference_update(free)
        for r in free:
            del waits[r]
    return sorted(waits)


def _missing_ranks(call: PendingCall, rank: int, states: Mapping[int, State]) -> list[int]:
    """Return the ranks that have not reached this call; all others, if all have ended."""
    others = [r for r in call.ranks if r != rank]
    if all(r in states and states[r].calls is None for r in others):
        return others
    return [r for r in others if r in states and not states[r].has_reached(call)]


def _deadlock_message(states: Sequence[State], ranks: Sequence[int]) -> str:
    lines = "\n".join(f"  {state}" for state in states)
    return (
        f"{'Ranks wait' if len(ranks) > 1 else 'A rank waits'} for others that never arrive:\n{lines}\n"
        "All ranks of a mesh must call the same collectives in the same order. Code that only some ranks run (as under "
        "`if mesh.rank == 0:`) must not communicate; shard_map, operations on sharded arrays and gather() all do"
    )


# ---------------------------------------------------------------- the watchdog


class Channel:
    """A separate communicator for the reports of some ranks to their lowest, the coordinator."""

    def __init__(self, comm: Any, ranks: Sequence[int]):
        self.comm = comm
        self.ranks = frozenset(ranks)
        self.lowest = min(ranks)
        self.coordinator = ranks.index(self.lowest)  # its rank on the communicator
        self.is_coordinator = comm.Get_rank() == self.coordinator
        self.sent: list = []  # requests that may still be in flight


class Report(NamedTuple):
    """A state, and the interval over which the rank is known to have been in it."""

    state: State
    first: float
    last: float


class Watchdog:
    """The deadlock watchdog of this process. `end(text, code)` ends the job."""

    def __init__(self, end: Callable[[str, int], None]):
        self.end = end
        self.rank = 0
        self.calls: dict[int, tuple | None] = {}  # thread -> the call that it is in; None between calls
        self.communicators: list[WatchedComm] = []
        self.channels: list[Channel] = []
        self.unfinished: list[str] = []  # the call that an exception left incomplete: this rank makes no others
        self._reports: dict[int, Report] = {}
        self._last_check = time.monotonic()
        self._ticks = itertools.count()
        self._calls_before: dict = {}  # `calls` at the last check
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def reaches(self, ranks: Sequence[int], everyone: int) -> bool:
        """Whether there is a channel for these ranks: theirs, or the whole job's."""
        return any(len(c.ranks) == everyone or c.ranks == frozenset(ranks) for c in self.channels)

    def open(self, comm: Any, ranks: Sequence[int]) -> None:
        """Start reporting to the lowest of these ranks on `comm`, which is for this only."""
        self.rank = ranks[comm.Get_rank()]
        self.channels.append(Channel(comm, ranks))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="deadlock watchdog")
            self._thread.start()

    def forget(self, comm: WatchedComm) -> None:
        """Stop watching a communicator."""
        self.communicators = [c for c in self.communicators if c is not comm]

    def _run(self) -> None:
        while not self._stopping.wait(TICK):
            waiting = () if self.unfinished else self._waiting_calls()
            self._tick(self._state(waiting) if waiting or self.unfinished else None)

    # ------------------------------------------------ this rank

    def _waiting_calls(self) -> tuple[PendingCall, ...]:
        """Return the calls that threads have been in since the last check; none if a thread runs, or began another."""
        before, self._calls_before = self._calls_before, dict([*self.calls.items()])
        if all(call is None or call is not before.get(t) for t, call in self._calls_before.items()):
            return ()  # without the frames of running threads, which keep arrays while somebody has them
        frames = sys._current_frames()
        del frames[get_ident()]  # a frame that refers to itself would keep all others until a collection
        self._calls_before = {t: call for t, call in self._calls_before.items() if t in frames}
        new = {t.ident for t in threading.enumerate() if not (t.daemon or isinstance(t, threading.Timer))}
        waiting = []
        for thread in {*self._calls_before, *(new & frames.keys())}:
            call: Any = self._calls_before.get(thread)
            if call is None:
                if not _waits_for_a_thread(frames[thread]):
                    return ()
            elif call is not before.get(thread):
                return ()
            else:
                comm, number, method, signature = call
                collective, line = signature.text if signature else "", _line_of(thread, frames[thread])
                waiting.append(PendingCall(comm.name, number, method, comm.ranks, collective, line))
        return tuple(sorted(waiting, key=lambda call: (repr(call.on), call.number)))

    def _state(self, calls: tuple[PendingCall, ...] | None, code: int = 0) -> State:
        begun = {comm.name: comm.begun for comm in self.communicators}
        ended = self.communicators if calls is None else []
        since = {(comm.name, comm.ranks): [*map(str, comm.mismatch_check.calls_since)] for comm in ended}
        recent = {comm.name: comm.recent_calls() for comm in self.communicators}
        unfinished = next(iter(self.unfinished), "")
        return State(self.rank, calls, begun, since, code, next(self._ticks), recent, unfinished)

    # ------------------------------------------------ all ranks

    def _tick(self, state: State | None) -> None:
        """Receive other ranks' reports, relay recent ones and this rank's `state`, and look for a deadlock."""
        self._receive()
        if state is not None:
            self._record(state, 0.0)
        self._send()
        self._find_deadlock()

    def _receive(self) -> None:
        for channel in self.channels:
            while channel.is_coordinator and channel.comm.iprobe(tag=Tag.STATE):
                for state, age in channel.comm.recv(tag=Tag.STATE):
                    self._record(state, age)
        self._last_check = time.monotonic()

    def _record(self, state: State, age: float) -> None:
        """Record a state; it held at least until `age` seconds before the last check."""
        now, before = time.monotonic(), self._reports.get(state.rank)
        if before is not None and before.state.tick > state.tick:
            return
        last = math.inf if state.calls is None else self._last_check - age
        if before is not None and _numbers(before.state) == _numbers(state):
            self._reports[state.rank] = Report(state, before.first, max(last, before.last))
        else:
            self._reports[state.rank] = Report(state, now, last)

    def _send(self) -> None:
        """Report this rank's state, and relay recent reports of others.

        It does so once to each coordinator, who may stop receiving when all have reported their end.
        """
        reports = [(r.state, max(0.0, self._last_check - r.last)) for r in list(self._reports.values())]
        reports = [(state, age) for state, age in reports if age <= SNAPSHOT_AGES[-1] * TICK]
        for channel in {channel.lowest: channel for channel in self.channels}.values():
            channel.sent = [request for request in channel.sent if not request.Test()]
            if reports and not channel.is_coordinator and not channel.sent:
                channel.sent.append(channel.comm.isend(reports, channel.coordinator, Tag.STATE))

    def _find_deadlock(self) -> None:
        """End the job if some ranks wait forever.

        The states must have held at one moment: this uses ranks that were in the same call before and after it, and
        ranks whose programs had ended. A report received now was sent since the last check.
        """
        for age in SNAPSHOT_AGES:
            moment = self._last_check - age * TICK
            states = {rank: r.state for rank, r in self._reports.items() if r.first <= moment <= r.last}
            if ranks := stuck(states):
                recent = sorted((rank, r.state) for rank, r in self._reports.items() if r.last >= moment)
                code = next((state.code for _, state in recent if state.code), 1)
                self.end(_deadlock_message([state for _, state in recent], ranks), code)

    # ------------------------------------------------ the end of the program

    def leave(self, code: int = 0) -> None:
        """Report the end of the program and its exit code; a rank that others report to waits until all have ended."""
        if self._thread is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        wait_for([request for channel in self.channels for request in channel.sent])
        self._record(self._state(None, code), 0.0)
        self._send()
        wait_for([request for channel in self.channels for request in channel.sent])
        members = frozenset().union(*(channel.ranks for channel in self.channels if channel.is_coordinator))
        pause = 1e-3
        while not all(r in self._reports and self._reports[r].state.calls is None for r in members):
            self._receive()
            self._find_deadlock()
            time.sleep(pause)
            pause = min(2 * pause, TICK)
        self._compare_uncompared()

    def _compare_uncompared(self) -> None:
        since = {rank: report.state.since for rank, report in sorted(self._reports.items())}
        for comm in {comm for calls_by_comm in since.values() for comm in calls_by_comm}:
            _, ranks = comm
            calls = {rank: calls_by_comm[comm] for rank, calls_by_comm in since.items() if comm in calls_by_comm}
            if len(calls) == len(ranks) and not calls_agree(calls.values()):
                self.end(mismatch_message(calls), 1)


def _numbers(state: State) -> Any:
    return state.calls and [call[:2] for call in state.calls]


def _waits_for_a_thread(frame: FrameType) -> bool:
    """Whether a thread waits in join(), result(), … without a timeout."""
    if frame.f_globals.get("__name__") not in ("threading", "concurrent.futures.thread"):
        return False  # without a look at its local variables, whose values the frame would then keep until it ends
    return frame.f_locals.get("timeout") in (None, -1)


def _line_of(thread: int, frame: FrameType) -> str:
    """Return the line that a thread is at, and the exception that it is handling, if any."""
    line = describe_line(frame)
    error: Any = sys._current_exceptions().get(thread)
    error = error[1] if isinstance(error, tuple) else error  # a tuple before Python 3.12
    return line if error is None else f"{line}; it is handling {type(error).__name__}: {error}"


# ---------------------------------------------------------------- communicators


class WatchedComm:
    """An mpi4py communicator whose blocking calls can be interrupted and are watched."""

    def __init__(self, comm: Any, watchdog: Watchdog, name: tuple, ranks: Sequence[int]):
        self._comm = comm
        self._watchdog = watchdog
        self._calls = watchdog.calls
        self._unfinished = watchdog.unfinished
        self._children = 0  # the number of communicators made from this one
        self.begun = 0  # the number of calls begun
        self.persistent: dict[tuple, list] = {}  # pools of persistent requests, by kind of call
        self._recent: list = [None] * HISTORY
        self.name = name
        self.ranks = tuple(ranks)  # in COMM_WORLD
        self.mismatch_check = MismatchCheck(
            comm,
            self.ranks,
            lambda requests, buffers, arrived: self._compare(requests, buffers),
            unfinished=watchdog.unfinished,
        )
        self._compare = self.watched(COMPARISON, _start_all)
        #: Wait for all requests; an iterator may start them as it goes.
        self.wait_for: Callable[..., None] = self.watched("Waitall", _start_all)
        self._misuse_error = ""  # the error message, once two threads have used it at the same time
        watchdog.communicators.append(self)

    def __getattr__(self, method: str) -> Any:
        function = getattr(self._comm, method)
        if method in WAITING:
            function = self.watched(method, getattr(self._comm, f"I{method[0].lower()}{method[1:]}"))
        self.__dict__[method] = function  # so that the next look-up finds it
        return function

    def watched(self, method: str, start: Callable) -> Callable[..., None]:
        """Return a function that starts a nonblocking call, and waits; `start` returns its request, or a list of them.

        An exception may leave the wait, such as Ctrl-C's. Then this process makes no further calls: others, which may
        complete this one, go on with those that the exception has skipped. All that does not change is looked up here,
        because programs make many short calls.
        """
        calls, recent, unfinished, check = self._calls, self._recent, self._unfinished, self.mismatch_check

        def call(*args):
            thread = get_ident()
            if unfinished:
                check.check_finished()
            try:
                self.begun = number = self.begun + 1
                calls[thread] = recent[number % HISTORY] = self, number, method, check.latest
                if len(calls) > 1 or self._misuse_error:
                    self._check_alone(thread)
                requests = start(*args)
                for request in requests if type(requests) is list else (requests,):
                    if not request.Test():
                        wait_for((request,))
            except BaseException as error:
                abandoned.append(args)
                if not self._misuse_error:
                    unfinished.append(unfinished_call(error, f"MPI {method}", check.latest))
                    self.begun -= 1  # others may wait in it forever: MPI makes progress while its requests are tested
                raise
            finally:
                calls[thread] = None

        return call

    def recent_calls(self) -> dict[int, tuple[str, str]]:
        """Return the last calls by their numbers: MPI's name, and the collective that made the call."""
        calls = filter(None, [*self._recent])
        return {n: (method, signature.text if signature else "") for _, n, method, signature in calls}

    def _check_alone(self, thread: int) -> None:
        """Raise RuntimeError, now and at each later call, if another thread is in a call on this communicator."""
        others = [t for t, call in list(self._watchdog.calls.items()) if t != thread and call and call[0] is self]
        if others:
            names = {t.ident: t.name for t in threading.enumerate()}
            one, two = (repr(names.get(t, "a thread that has ended")) for t in (thread, others[0]))
            self._misuse_error = (
                f"rank {self._watchdog.rank}: the thread {one} makes a call on a mesh while the thread {two} is in "
                "another one on it. Ranks cannot tell the calls of threads apart: use a mesh from one thread at a "
                "time, or give each thread one of its own, as in make_mesh(sizes, names, comm=MPI.COMM_WORLD.Dup())"
            )
        if self._misuse_error:
            raise RuntimeError(self._misuse_error)

    def Dup(self) -> WatchedComm:
        return self._new("Dup", self._comm.Dup)

    def Split(self, color: int, key: int) -> WatchedComm:
        return self._new("Split", self._comm.Split, color, key)

    def _new(self, method: str, make: Callable, *args: Any) -> WatchedComm:
        self._children += 1
        self.watched(method, self._comm.Ibarrier)()  # `make` blocks, but only briefly once all ranks are here
        with self.mismatch_check.critical_section():
            comm = make(*args)
        ranks = [self.ranks[r] for r in comm.Get_group().Translate_ranks(None, self._comm.Get_group())]
        return WatchedComm(comm, self._watchdog, (*self.name, self._children), ranks)

    def free(self) -> None:
        self._watchdog.forget(self)
        self.free_requests()
        self._comm.Free()

    def free_requests(self) -> None:
        while self.persistent:
            self.free_oldest()

    def free_oldest(self) -> None:
        """Free the persistent requests of the kind that came first."""
        for messages in self.persistent.pop(next(iter(self.persistent))):
            messages.free()
