"""Ranks of a script that wait for each other for ever: found, and said, and the job ends.

A rank that takes another branch than the others, or leaves before them, lets them wait for it. MPI does not notice. So
in each process a thread looks, twice a second, whether the program is still in the same call as before; where it is, it
tells rank 0 in which, and whom it waits for. Rank 0 puts that together: a rank may go on if it waits for nobody, or
for ranks that may go on; those that are left over never will. A program that merely is slow is left alone: what it
waits for may go on.

The calls themselves are as they were: all that they do for it is to say when they begin and end. (What they are of,
`lockstep` compares; what it had yet to compare when the program ends is compared here.)
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from collectives.lockstep import Lockstep, agree, disagreement
from minidiff.location import location_of

TICK = 0.5  # seconds between two looks
PAST = 3  # ticks ago is the moment that is judged: all that ranks said of it has come
STATE = 1  # tag of messages

#: Calls that wait for other ranks.
WAITING = {"Allgather", "Allreduce", "Alltoall", "Alltoallv", "Bcast", "Gather", "Reduce", "Scatter"}
WAITING |= {"Reduce_scatter_block"}
COMPARISON = "comparison of calls"


class Call(NamedTuple):
    """A call that the program is in: the `number`-th on a communicator, which waits for `ranks`."""

    on: tuple  # the communicator's name
    number: int
    method: str
    ranks: tuple[int, ...]


class State(NamedTuple):
    """What a rank says of itself: its call (None: it has come to its end), and how many it began on communicators."""

    rank: int
    call: Call | None
    begun: dict[tuple, int]
    place: str = ""  # the line of the program
    latest: str | None = None  # what the program asked for last
    since: dict[tuple, list[str]] | None = None  # what it called on communicators and never compared, at its end

    def has_come_to(self, call: Call) -> bool:
        if self.call is not None and self.call[:2] == call[:2]:
            return self.call.method == call.method
        return self.begun.get(call.on, 0) >= call.number

    def __str__(self) -> str:
        if self.call is None:
            return f"rank {self.rank} has come to the end of its program"
        others = ", ".join(str(r) for r in self.call.ranks if r != self.rank)
        if self.call.method == COMPARISON:
            return f"rank {self.rank} has come to {self.latest}, and asks whether {others} have; {self.place}"
        latest = f"; its latest call is {self.latest}" if self.latest else ""
        return f"rank {self.rank} is in an MPI {self.call.method} with {others}; {self.place}{latest}"


def stuck(states: Mapping[int, State]) -> list[int]:
    """The ranks that wait, and will for ever. Those that there is no state of are not waiting."""
    waits = {r: _missing(s.call, r, states) for r, s in states.items() if s.call is not None}
    while going := [r for r, others in waits.items() if not any(m in waits or m in states for m in others)]:
        for r in going:
            del waits[r]
            states = {k: s for k, s in states.items() if k != r}
    return sorted(waits)


def _missing(call: Call, rank: int, states: Mapping[int, State]) -> list[int]:
    """The ranks that have yet to come to this call; all of the others, if all have left."""
    others = [r for r in call.ranks if r != rank]
    if all(r in states and states[r].call is None for r in others):
        return others
    return [r for r in others if r in states and not states[r].has_come_to(call)]


class Watch:
    """The thread of this rank. `world` is a communicator of its own, `end(text, code)` ends the job.

    Ranks are called as in `names`, a group that has them all. Where MPI bears no threads, there is none.
    """

    def __init__(self, world: Any, names: Any, end: Callable[[str, int], None], threads: bool = True):
        self.world = world
        self.names = names
        self.end = end
        self.call: tuple[Watched, int, str] | None = None  # in which the program is now
        self.latest: list = [None]  # what it asked for last
        self.communicators: list[Watched] = []
        (self.rank,) = world.Get_group().Translate_ranks([world.Get_rank()], names)
        self._judges = world.Get_rank() == 0
        self._heard: dict[int, tuple[State, float, float]] = {}  # of each rank: since when, until when
        self._looked = time.monotonic()
        self._sent: list = []
        self._leaving = threading.Event()
        self._program = threading.current_thread().ident
        self._thread = threading.Thread(target=self._run, daemon=True)
        if threads:
            self._thread.start()
            _WATCHES.append(self)

    def _run(self) -> None:
        last = None
        while not self._leaving.wait(TICK):
            call = self.call
            if call is not None and call is last:
                on, number, method = call
                self._say(Call(on.name, number, method, on.ranks))
            last = call
            if self._judges:
                self._judge()

    def _place(self) -> str:
        """The line that the program is at, and the error that it is about to clear up after."""
        place = str(location_of(sys._current_frames().get(self._program)) or "")
        error = sys._current_exceptions().get(self._program)
        error = error[1] if isinstance(error, tuple) else error  # as it was before Python 3.12
        return place if error is None else f"{place}; it is handling {type(error).__name__}: {error}"

    def _say(self, call: Call | None) -> None:
        begun = {comm.name: comm.begun for comm in self.communicators}
        ended = [] if call else self.communicators
        since = {(comm.name, comm.ranks): [*map(str, comm.lockstep.since)] for comm in ended}
        state = State(self.rank, call, begun, self._place(), self.latest[0] and self.latest[0].text, since)
        if self._judges:
            self._hear(state)
        else:
            self._sent = [r for r in self._sent if not r.Test()]
            self._sent.append(self.world.isend(state, 0, STATE))

    def _hear(self, state: State) -> None:
        now = time.monotonic()
        before, first, _ = self._heard.get(state.rank, (state, now, now))
        until = self._looked if state.call else math.inf
        self._heard[state.rank] = (state, first if before.call == state.call else now, until)

    def _judge(self) -> None:
        """Listen to the others, and end the job if there are some that wait in vain.

        That is judged of one moment, by those that were in one call before and after it, and those that had left: they
        all were, at once. What comes now has been sent since one looked last.
        """
        while self.world.iprobe(tag=STATE):
            self._hear(self.world.recv(tag=STATE))
        self._looked = time.monotonic()
        moment = self._looked - PAST * TICK
        states = {rank: s for rank, (s, first, last) in self._heard.items() if first <= moment <= last}
        if ranks := stuck(states):
            known = sorted((rank, s) for rank, (s, _, last) in self._heard.items() if last >= moment)
            self.end(_report([s for _, s in known], ranks), 1)

    def leave(self) -> None:
        """The end of the program."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._thread.join()
            self._say(None)

    def stay(self) -> None:
        """Rank 0 stays until all have come to their end, as MPI has them wait anyway."""
        pause = 1e-3
        while self._judges and sum(s.call is None for s, *_ in self._heard.values()) < self.world.Get_size():
            self._judge()
            time.sleep(pause)
            pause = min(2 * pause, TICK)
        since = {rank: s.since or {} for rank, (s, *_) in sorted(self._heard.items())}
        for comm in {comm for found in since.values() for comm in found}:
            calls = {rank: found[comm] for rank, found in since.items() if comm in found}
            if not agree(calls.values()):
                self.end(disagreement(calls), 1)


_WATCHES: list[Watch] = []


@atexit.register
def leave() -> None:
    """The end of the program: all watches are told so before one waits for other ranks."""
    for watch in _WATCHES:
        watch.leave()
    for watch in _WATCHES:
        watch.stay()
    _WATCHES.clear()


def _report(states: Sequence[State], ranks: Sequence[int]) -> str:
    lines = "\n".join(f"  {state}" for state in states)
    return (
        f"{'Ranks wait' if len(ranks) > 1 else 'A rank waits'} for others that never come:\n{lines}\n"
        "All ranks of a mesh call the same collectives, in one order. What only some of them do (`if mesh.rank == 0:`) "
        "must not communicate: a shard_map, an operation on a sharded array and gather() do, on every rank"
    )


class Watched:
    """A communicator of mpi4py. Calls that wait for others say when they begin and end."""

    def __init__(self, comm: Any, watch: Watch, name: tuple = ()):
        self._comm = comm
        self._watch = watch
        self._made = 0  # communicators from this one
        self.begun = 0  # calls
        self.name = name
        self.ranks = tuple(comm.Get_group().Translate_ranks(None, watch.names))
        watch.communicators.append(self)
        self.lockstep = Lockstep(
            functools.partial(self._waiting, COMPARISON, comm.Dup),
            self.ranks,
            lambda requests, here: self.wait_for(requests, COMPARISON),
            watch.latest,
        )

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._comm, method)
        if method in WAITING:
            call = self.__dict__[method] = functools.partial(self._waiting, method, call)
        return call

    def _waiting(self, method: str, call: Callable, *args: Any) -> Any:
        self.begun += 1
        watch = self._watch
        watch.call = self, self.begun, method
        try:
            return call(*args)
        finally:
            watch.call = None

    def Dup(self) -> Watched:
        return self._further("Dup", self._comm.Dup)

    def Split(self, colour: int, key: int) -> Watched:
        return self._further("Split", self._comm.Split, colour, key)

    def _further(self, method: str, make: Callable, *args: Any) -> Watched:
        self._made += 1
        return Watched(self._waiting(method, make, *args), self._watch, (*self.name, self._made))

    def wait_for(self, requests: Sequence[Any], method: str = "Waitall") -> None:
        """Wait until all of these are done."""
        self._waiting(method, lambda: requests and requests[0].Waitall(requests))
