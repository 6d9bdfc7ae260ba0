"""The deadlock watchdog: it finds ranks of a script that wait for each other for ever, says so, and ends the job.

MPI does not notice a deadlock. So each process has one more thread, which looks twice a second whether all threads of
the program wait, and for which ranks. If so, it reports that to the lowest rank of each group that there is a mesh on.
That rank puts the reports together: a call completes once all its ranks come to it, and a rank can come if one of its
threads runs, or waits in a call that can complete. The ranks that are left over wait for ever. A program that is merely
slow goes on, since a thread that computes may come to any call.

To be interruptible, and to be watched, a call is started without blocking and then polled. What ranks call is compared
by the mismatch check (`lockstep`); the calls that it had yet to compare when the program ends are compared here.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from collectives.guards.mismatch import MismatchCheck, agree, disagreement
from minidiff.location import location_of

TICK = 0.5  # seconds between two looks
PAST = 3, 6  # ticks ago are the moments that are judged: all reports of them have come; later, if others relayed them
STATE = 1  # tag of messages
SPIN = 10  # tests of a request before the processor is offered to other processes
COMPARISON = "comparison of calls"

#: Calls that wait for other ranks, each with a form that does not block: Iallgather, …
WAITING = {"Allgather", "Allreduce", "Alltoall", "Alltoallv", "Barrier", "Bcast", "Gather", "Reduce", "Scatter"}
WAITING |= {"Reduce_scatter_block"}

_offer_processor = getattr(os, "sched_yield", lambda: time.sleep(0))
#: What was interrupted while MPI may still write into its buffers.
abandoned: list = []


def wait_for(requests: Sequence[Any]) -> None:
    """Wait until all of these are done, in a way that Ctrl-C interrupts at once.

    This polls, and never sleeps: some MPIs move long messages only while they are called.
    """
    if not requests:
        return
    first = requests[0]
    test = first.Test if len(requests) == 1 else lambda: first.Testall(requests)
    try:
        for _ in range(SPIN):
            if test():
                return
        while not test():
            _offer_processor()
    except BaseException:
        abandoned.append(requests)
        raise


# ---------------------------------------------------------------- what ranks say


class Call(NamedTuple):
    """A call that a thread waits in: the `number`-th on a communicator, of all these ranks."""

    on: tuple  # the communicator's name
    number: int
    method: str  # of MPI
    ranks: tuple[int, ...]
    what: str = ""  # the collective that it is part of
    place: str = ""  # the line of the program

    def __str__(self) -> str:
        if self.method == COMPARISON:
            return f"compares its next call, {self.what}, with {self._others()}; {self.place}"
        return f"waits in {self.what or 'a call'} (MPI {self.method}) with {self._others()}; {self.place}"

    def _others(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"


class State(NamedTuple):
    """What a rank says of itself: the calls that its threads wait in; None once its program has ended."""

    rank: int
    calls: tuple[Call, ...] | None
    begun: Mapping[tuple, int]  # how many calls it began on each communicator
    since: Mapping[tuple, list[str]] = {}  # at the end: the calls on each communicator that were not compared yet
    code: int = 0  # at the end: the exit code
    tick: int = 0

    def has_come_to(self, call: Call) -> bool:
        for mine in self.calls or ():
            if mine[:2] == call[:2]:
                return mine.method == call.method and (mine.what == call.what or mine.method == COMPARISON)
        return self.begun.get(call.on, 0) >= call.number

    def __str__(self) -> str:
        if self.calls is None:
            return f"rank {self.rank} has come to the end of its program" + f", with exit code {self.code}" * (
                self.code != 0
            )
        return f"rank {self.rank} {', and '.join(map(str, self.calls))}"


def stuck(states: Mapping[int, State]) -> list[int]:
    """The ranks that wait for ever. A rank without a state runs, and may come to any call."""
    waits = {r: [_missing(call, r, states) for call in s.calls] for r, s in states.items() if s.calls is not None}
    blocked = set(states)
    while free := [r for r, calls in waits.items() if any(blocked.isdisjoint(missing) for missing in calls)]:
        blocked.difference_update(free)
        for r in free:
            del waits[r]
    return sorted(waits)


def _missing(call: Call, rank: int, states: Mapping[int, State]) -> list[int]:
    """The ranks that have yet to come to this call; all of the others, if all have left."""
    others = [r for r in call.ranks if r != rank]
    if all(r in states and states[r].calls is None for r in others):
        return others
    return [r for r in others if r in states and not states[r].has_come_to(call)]


def _report(states: Sequence[State], ranks: Sequence[int]) -> str:
    lines = "\n".join(f"  {state}" for state in states)
    return (
        f"{'Ranks wait' if len(ranks) > 1 else 'A rank waits'} for others that never come:\n{lines}\n"
        "All ranks of a mesh call the same collectives, in one order. What only some of them do (`if mesh.rank == 0:`) "
        "must not communicate: a shard_map, an operation on a sharded array and gather() do, on every rank"
    )


# ---------------------------------------------------------------- the watchdog


class Channel:
    """Where the ranks of a group report to the lowest of them, on a communicator of its own."""

    def __init__(self, comm: Any, ranks: Sequence[int]):
        self.comm = comm
        self.ranks = frozenset(ranks)
        self.judge = ranks.index(min(ranks))  # its rank on the communicator
        self.is_mine = comm.Get_rank() == self.judge
        self.sent: list = []  # what may still be on its way


class Heard(NamedTuple):
    """A state, and the time over which the rank is known to have been in it."""

    state: State
    first: float
    last: float


class Watchdog:
    """The deadlock watchdog of this process. `end(text, code)` ends the job."""

    def __init__(self, end: Callable[[str, int], None]):
        self.end = end
        self.rank = 0
        self.calls: dict[int, tuple | None] = {}  # of threads that ever called: where each is now
        self.communicators: list[Watched] = []
        self.channels: list[Channel] = []
        self._heard: dict[int, Heard] = {}
        self._looked = time.monotonic()
        self._ticks = itertools.count()
        self._before: dict = {}  # `calls`, at the last look
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def reaches(self, ranks: Sequence[int], everyone: int) -> bool:
        """Whether there is a channel for these ranks: their own, or that of all ranks of the job."""
        return any(len(c.ranks) == everyone or c.ranks == frozenset(ranks) for c in self.channels)

    def open(self, comm: Any, ranks: Sequence[int]) -> None:
        """Report to the lowest of these ranks, by a communicator that is for this alone."""
        self.rank = ranks[comm.Get_rank()]
        self.channels.append(Channel(comm, ranks))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="deadlock watchdog")
            self._thread.start()

    def forget(self, comm: Watched) -> None:
        """Watch a communicator no longer."""
        self.communicators = [c for c in self.communicators if c is not comm]

    def _run(self) -> None:
        while not self._leaving.wait(TICK):
            waiting = self._waiting_calls()
            self._tick(self._state(waiting) if waiting else None)

    # ------------------------------------------------ this rank

    def _waiting_calls(self) -> tuple[Call, ...]:
        """The calls that threads wait in since the last look; none if any thread may come to another call."""
        frames, before = sys._current_frames(), self._before
        self._before = {t: call for t, call in list(self.calls.items()) if t in frames}
        new = {t.ident for t in threading.enumerate() if not (t.daemon or isinstance(t, threading.Timer))}
        waiting = []
        for thread in {*self._before, *(new & frames.keys())}:
            call = self._before.get(thread)
            if call is None:
                if not _waits_for_a_thread(frames[thread]):
                    return ()
            elif call is not before.get(thread):
                return ()
            else:
                comm, number, method, kind = call
                what, place = kind.text if kind else "", _place(thread, frames[thread])
                waiting.append(Call(comm.name, number, method, comm.ranks, what, place))
        return tuple(sorted(waiting, key=lambda call: (repr(call.on), call.number)))

    def _state(self, calls: tuple[Call, ...] | None, code: int = 0) -> State:
        begun = {comm.name: comm.begun for comm in self.communicators}
        ended = [] if calls else self.communicators
        since = {(comm.name, comm.ranks): [*map(str, comm.mismatch_check.since)] for comm in ended}
        return State(self.rank, calls, begun, since, code, next(self._ticks))

    # ------------------------------------------------ all ranks

    def _tick(self, mine: State | None) -> None:
        """Hear the others, report what is known, and judge."""
        self._listen()
        if mine is not None:
            self._hear(mine, 0.0)
        self._tell()
        self._judge()

    def _listen(self) -> None:
        for channel in self.channels:
            while channel.is_mine and channel.comm.iprobe(tag=STATE):
                for state, age in channel.comm.recv(tag=STATE):
                    self._hear(state, age)
        self._looked = time.monotonic()

    def _hear(self, state: State, age: float) -> None:
        """Take note of a state. It was so at this rank's last look, at least, if the news took no time."""
        now, before = time.monotonic(), self._heard.get(state.rank)
        if before is not None and before.state.tick > state.tick:
            return
        same = before is not None and _numbers(before.state) == _numbers(state)
        last = math.inf if state.calls is None else self._looked - age
        self._heard[state.rank] = (
            Heard(state, before.first, max(last, before.last)) if same else Heard(state, now, last)
        )

    def _tell(self) -> None:
        """Report this rank's state, and those that others reported to it lately."""
        known = [(h.state, max(0.0, self._looked - h.last)) for h in list(self._heard.values())]
        known = [(state, age) for state, age in known if age <= PAST[-1] * TICK]
        for channel in self.channels:
            channel.sent = [request for request in channel.sent if not request.Test()]
            if known and not channel.is_mine and not channel.sent:
                channel.sent.append(channel.comm.isend(known, channel.judge, STATE))

    def _judge(self) -> None:
        """End the job if some ranks wait for ever.

        This is judged of one moment, by the ranks that were in one call before and after it, and those that had left:
        they all were, at once. A report that comes now has been sent since the last look.
        """
        for past in PAST:
            moment = self._looked - past * TICK
            states = {rank: h.state for rank, h in self._heard.items() if h.first <= moment <= h.last}
            if ranks := stuck(states):
                known = sorted((rank, h.state) for rank, h in self._heard.items() if h.last >= moment)
                code = next((state.code for _, state in known if state.code), 1)
                self.end(_report([state for _, state in known], ranks), code)

    # ------------------------------------------------ the end of the program

    def leave(self, code: int) -> None:
        """Report the end of the program. Those that others report to stay until all have ended, as MPI does anyway."""
        if self._thread is None or self._leaving.is_set():
            return
        self._leaving.set()
        self._thread.join()
        wait_for([request for channel in self.channels for request in channel.sent])
        self._hear(self._state(None, code), 0.0)
        self._tell()
        wait_for([request for channel in self.channels for request in channel.sent])
        mine = [channel for channel in self.channels if channel.is_mine]
        members = frozenset().union(*(channel.ranks for channel in mine))
        pause = 1e-3
        while not all(r in self._heard and self._heard[r].state.calls is None for r in members):
            self._listen()
            self._judge()
            time.sleep(pause)
            pause = min(2 * pause, TICK)
        self._compare_what_is_left()

    def _compare_what_is_left(self) -> None:
        since = {rank: heard.state.since for rank, heard in sorted(self._heard.items())}
        for comm in {comm for found in since.values() for comm in found}:
            _, ranks = comm
            calls = {rank: found[comm] for rank, found in since.items() if comm in found}
            if len(calls) == len(ranks) and not agree(calls.values()):
                self.end(disagreement(calls), 1)


def _numbers(state: State) -> list | None:
    return state.calls and [call[:2] for call in state.calls]


def _waits_for_a_thread(frame: FrameType) -> bool:
    """Whether a thread waits, for as long as it takes, for another of this process: in join(), result(), …"""
    module, timeout = frame.f_globals.get("__name__"), frame.f_locals.get("timeout")
    return module in ("threading", "concurrent.futures.thread") and timeout in (None, -1)


def _place(thread: int, frame: FrameType) -> str:
    """The line that a thread is at, and the error that it is about to clean up after."""
    place = str(location_of(frame) or "")
    error = sys._current_exceptions().get(thread)
    error = error[1] if isinstance(error, tuple) else error  # as it was before Python 3.12
    return place if error is None else f"{place}; it is handling {type(error).__name__}: {error}"


# ---------------------------------------------------------------- communicators


class Watched:
    """A communicator of mpi4py. Calls that wait for other ranks can be interrupted, and are watched."""

    def __init__(self, comm: Any, watchdog: Watchdog, name: tuple, ranks: Sequence[int]):
        self._comm = comm
        self._watchdog = watchdog
        self._made = 0  # communicators from this one
        self.begun = 0  # calls
        self.name = name
        self.ranks = tuple(ranks)  # of the job
        self.mismatch_check = MismatchCheck(
            comm, self.ranks, lambda requests, here: self.wait_for(requests, COMPARISON)
        )
        watchdog.communicators.append(self)

    def __getattr__(self, method: str) -> Any:
        if method not in WAITING:
            return getattr(self._comm, method)
        start = getattr(self._comm, f"I{method[0].lower()}{method[1:]}")
        call = self.__dict__[method] = functools.partial(self.wait, method, start)
        return call

    def wait(self, method: str, start: Callable | None, *args: Any) -> None:
        """Start a call that does not block, and wait for it; without `start`, wait for the requests given."""
        self.begun += 1
        calls, thread = self._watchdog.calls, threading.get_ident()
        calls[thread] = self, self.begun, method, self.mismatch_check.latest
        try:
            wait_for([start(*args)] if start else args[0])
        except BaseException:
            abandoned.append(args)
            raise
        finally:
            calls[thread] = None

    def wait_for(self, requests: Sequence[Any], method: str = "Waitall") -> None:
        """Wait until all of these are done."""
        self.wait(method, None, requests)

    def Dup(self) -> Watched:
        return self._further("Dup", self._comm.Dup)

    def Split(self, colour: int, key: int) -> Watched:
        return self._further("Split", self._comm.Split, colour, key)

    def _further(self, method: str, make: Callable, *args: Any) -> Watched:
        self._made += 1
        self.wait(method, self._comm.Ibarrier)  # making it blocks, but then no longer than a moment
        comm = make(*args)
        ranks = [self.ranks[r] for r in comm.Get_group().Translate_ranks(None, self._comm.Get_group())]
        return Watched(comm, self._watchdog, (*self.name, self._made), ranks)

    def free(self) -> None:
        self._watchdog.forget(self)
        self._comm.Free()
