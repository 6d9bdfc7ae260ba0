"""Error handling for interactive sessions: MPI ranks that run notebook cells.

If a rank of a script fails, the whole job ends (`spmd.mesh.launch`). A session continues: a rank that waits for others
can be interrupted, is told if another rank has failed, and is synchronized with the others again in the next cell. A
waiting rank sleeps between polls, since ranks may share a processor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from collectives.guards.mismatch import MismatchCheck
from collectives.tags import Tag

MAX_PAUSE = 2e-4  # seconds between two polls
FIRST_POLLS = 50  # at the beginning of a cell
PATIENCE = 2.0  # seconds to wait for messages to be sent
GRACE = 0.3  # seconds in which messages that a rank sent before it failed may still arrive, via slower ranks


class OtherRankError(RuntimeError):
    """Another rank failed while this one was waiting for it."""


def is_interactive() -> bool:
    """Whether this process is an interactive interpreter, not a script."""
    return hasattr(sys, "ps1")


class Session:
    """The state of an interactive session on this rank: the ranks that failed, and in which cell.

    If some ranks began a collective that others never reached, the others' next collective would be matched with it. So
    in the cell after a failure all ranks switch to new communicators: `generation` is the last cell with a failure.
    (Each rank counts its own cells; if only some ranks run a cell, the others may not be told about failures in it.)
    """

    def __init__(self, world: Any):
        self.world = world
        self.cell = 1
        self.generation = 0
        self.last_report = 0.0  # the time of the latest message about a failure
        self.failed: dict[int, tuple[int, str]] = {}  # rank -> the cell in which it last failed, and the error
        self.arrived: dict[tuple, set[int]] = {}  # barrier -> ranks that have reached it
        self.synchronized = True  # False once a call was abandoned while it waited for other ranks
        self.abandoned: list = []  # abandoned calls, and their buffers, which MPI may still write into
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None:
            shell.events.register("pre_execute", self.cell_begins)
            shell.events.register("post_run_cell", self.cell_ends)

    def cell_begins(self, *_: Any) -> None:
        self.cell += 1
        for _look in range(FIRST_POLLS):  # messages from the previous cell may take a moment
            self.receive_failures()
            time.sleep(MAX_PAUSE)
        last = max([cell for cell, _ in self.failed.values() if cell < self.cell], default=0)
        if last > self.generation:
            self.generation, self.synchronized = last, True

    def cell_ends(self, result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is None or isinstance(error, OtherRankError):  # all ranks know of the original error
            return
        this_rank, failure = self.world.Get_rank(), (self.cell, f"{type(error).__name__}: {error}")
        self.failed[this_rank] = failure
        others = [r for r in range(self.world.Get_size()) if r != this_rank]
        sent = [self.world.isend((this_rank, failure), rank, Tag.FAILED) for rank in others]
        give_up = time.monotonic() + PATIENCE
        while not all(r.Test() for r in sent) and time.monotonic() < give_up:  # polling drives MPI's progress
            time.sleep(MAX_PAUSE)
        self.abandoned.append(sent)

    def barrier(self, ranks: Sequence[int], name: tuple) -> None:
        """Wait until all these ranks reach the barrier of this name.

        It uses messages alone: a wait that fails leaves no collective behind.
        """
        this_rank = self.world.Get_rank()
        missing = set(ranks) - {this_rank}
        self.abandoned.append([self.world.isend((this_rank, name), rank, Tag.ARRIVED) for rank in missing])
        while missing := missing - self.arrived.get(name, set()):
            while self.world.iprobe(tag=Tag.ARRIVED):
                rank, reached = self.world.recv(tag=Tag.ARRIVED)
                self.arrived.setdefault(reached, set()).add(rank)
            self.check(missing)
            time.sleep(MAX_PAUSE)

    def receive_failures(self) -> None:
        while self.world.iprobe(tag=Tag.FAILED):
            rank, failure = self.world.recv(tag=Tag.FAILED)
            self.failed[rank] = failure
            self.last_report = time.monotonic()

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Raise OtherRankError if a rank (one of `ranks`, if given) has failed."""
        self.receive_failures()
        if time.monotonic() < self.last_report + GRACE:
            return
        for rank, (cell, text) in sorted(self.failed.items()):
            if cell >= self.cell and (ranks is None or rank in ranks):
                raise OtherRankError(f"rank {rank} failed, and this rank waited for it. There it was {text}")


class Communicator:
    """An mpi4py communicator that all `ranks` `make`; its calls raise OtherRankError if another rank fails."""

    def __init__(self, session: Session, ranks: Sequence[int], name: tuple, make: Callable[[], Any]):
        self.session = session
        self._ranks = ranks
        self._name = name
        self._make = make
        self._splits = 0
        self._renew()

    def _renew(self) -> None:
        self.session.barrier(self._ranks, (self.session.generation, *self._name))
        self._comm = self._make()
        ranks = self._comm.Get_group().Translate_ranks(None, self.session.world.Get_group())
        self._mismatch_check = MismatchCheck(
            self._comm,
            ranks,
            lambda requests, buffers, arrived: self.wait_for(requests, buffers, not arrived),
            every_call=True,
        )
        self._generation = self.session.generation

    def _current(self) -> Any:
        if self._generation != self.session.generation:
            self._renew()
        if not self.session.synchronized:
            raise RuntimeError(
                "a collective of this mesh was interrupted while it waited for other ranks: the ranks are no longer "
                "synchronized; restart them"
            )
        return self._comm

    @property
    def mismatch_check(self) -> MismatchCheck:
        """The mismatch check of the current communicator; a new one starts empty."""
        self._current()
        return self._mismatch_check

    def __getattr__(self, name: str) -> Any:
        comm = self._current()
        start = getattr(comm, f"I{name[0].lower()}{name[1:]}", None)
        if start is None:
            return getattr(comm, name)
        return lambda *args: self.wait_for([start(*args)], args)

    def Split(self, color: int, key: int) -> Communicator:
        self._splits += 1
        name = (*self._name, self._splits)
        return Communicator(self.session, self._ranks, name, lambda: self._current().Split(color, key))

    def wait_for(self, requests: Iterable[Any], buffers: Any = (), check: bool = True) -> None:
        """Wait for all `requests`; with `check`, raise OtherRankError if a rank fails.

        `buffers` are what they read and write: they are kept alive if the wait is interrupted.
        """
        pause = 1e-6
        try:
            requests = [*requests]  # an iterator starts them as it goes
            if not self.session.synchronized:  # the requests will never complete
                self.session.abandoned.append((requests, buffers))
                return
            while requests and not requests[0].Testall(requests):
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE)
                if check and pause == MAX_PAUSE:
                    self.session.check()
        except BaseException:
            self.session.synchronized = False
            self.session.abandoned.append((requests, buffers))
            raise
