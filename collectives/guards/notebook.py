"""Ranks of an interactive session: engines that MPI started, and that run a notebook's cells.

Scripts end as one job where a rank fails (`spmd.launch`). Sessions stay; so here ranks that wait for others can be
interrupted, learn that the one they wait for has failed, and are in step again in the next cell. While a rank waits,
it leaves the processor to others, since they may share one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from collectives.guards.mismatch import MismatchCheck

FAILED, COMING = 31998, 31999  # tags of messages
LONGEST = 2e-4  # seconds between two looks at whether others have come
LOOKS = 50
PATIENCE = 2.0  # seconds that messages may take to leave
GRACE = 0.3  # seconds in which what a rank sent before it failed may still arrive, by way of slower ranks


class OtherRankError(RuntimeError):
    """Another rank failed, and this one waited for it."""


def is_interactive() -> bool:
    """Whether this process runs what somebody types, not a script."""
    return hasattr(sys, "ps1")


class Session:
    """What this rank knows of the others: which of them failed, and in which cell.

    A collective that some ranks began, and others never came to, would be taken for the next one. So once a rank has
    failed, all of them go over to new communicators in the cell after that: `generation` is the last cell in which one
    did. (Each rank counts cells for itself; where only some ran one, others may not be told of what fails.)
    """

    def __init__(self, world: Any):
        self.world = world
        self.cell = 1
        self.generation = 0
        self.heard = 0.0  # when another one was heard to have failed
        self.failed: dict[int, tuple[int, str]] = {}  # rank -> when it failed last, and of what
        self.came: dict[tuple, set[int]] = {}  # where to -> ranks that have told so
        self.in_step = True  # whether no call was given up while others had yet to answer it
        self.abandoned: list = []  # calls that were given up, and the buffers that MPI may still write into
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is not None:
            shell.events.register("pre_execute", self.cell_begins)
            shell.events.register("post_run_cell", self.cell_ends)

    def cell_begins(self, *_: Any) -> None:
        self.cell += 1
        for _ in range(LOOKS):  # what was sent in the cell before may take a moment
            self.listen()
            time.sleep(LONGEST)
        last = max([cell for cell, _ in self.failed.values() if cell < self.cell], default=0)
        if last > self.generation:
            self.generation, self.in_step = last, True

    def cell_ends(self, result: Any) -> None:
        error = result.error_before_exec or result.error_in_exec
        if error is None or isinstance(error, OtherRankError):  # of that one all have been told
            return
        here, what = self.world.Get_rank(), (self.cell, f"{type(error).__name__}: {error}")
        self.failed[here] = what
        others = [r for r in range(self.world.Get_size()) if r != here]
        sent = [self.world.isend((here, what), rank, FAILED) for rank in others]
        give_up = time.monotonic() + PATIENCE
        while not all(r.Test() for r in sent) and time.monotonic() < give_up:  # they go nowhere unless one looks
            time.sleep(LONGEST)
        self.abandoned.append(sent)

    def meet(self, ranks: Sequence[int], what: tuple) -> None:
        """Wait until all these ranks have come to `what`: after that, none waits for another in making a communicator.

        It is done by messages of their own, so that nothing is left behind by ranks that wait in vain.
        """
        here = self.world.Get_rank()
        missing = set(ranks) - {here}
        self.abandoned.append([self.world.isend((here, what), rank, COMING) for rank in missing])
        while missing := missing - self.came.get(what, set()):
            while self.world.iprobe(tag=COMING):
                rank, whereto = self.world.recv(tag=COMING)
                self.came.setdefault(whereto, set()).add(rank)
            self.check(missing)
            time.sleep(LONGEST)

    def listen(self) -> None:
        while self.world.iprobe(tag=FAILED):
            rank, what = self.world.recv(tag=FAILED)
            self.failed[rank] = what
            self.heard = time.monotonic()

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Raise OtherRankError where one (of these) that this rank waits for has failed."""
        self.listen()
        if time.monotonic() < self.heard + GRACE:
            return
        for rank, (cell, text) in sorted(self.failed.items()):
            if cell >= self.cell and (ranks is None or rank in ranks):
                raise OtherRankError(f"rank {rank} failed, and this rank waited for it. There it was {text}")


class Communicator:
    """A communicator of mpi4py whose calls wait as a session wants it.

    `make` makes it, on all `ranks` (of the world) together; `name` is what they call it.
    """

    def __init__(self, session: Session, ranks: Sequence[int], name: tuple, make: Callable[[], Any]):
        self.session = session
        self._ranks = ranks
        self._name = name
        self._make = make
        self._splits = 0
        self._renew()

    def _renew(self) -> None:
        self.session.meet(self._ranks, (self.session.generation, *self._name))
        self._comm = self._make()
        ranks = self._comm.Get_group().Translate_ranks(None, self.session.world.Get_group())
        self._mismatch_check = MismatchCheck(
            self._comm, ranks, lambda requests, here: self.wait_for(requests, check=not here), each=True
        )
        self._generation = self.session.generation

    def _current(self) -> Any:
        if self._generation != self.session.generation:
            self._renew()
        if not self.session.in_step:
            raise RuntimeError(
                "a collective of this mesh was interrupted while it waited for other ranks: they are out of step, and "
                "have to be started anew"
            )
        return self._comm

    @property
    def mismatch_check(self) -> MismatchCheck:
        """What is called on it, as its ranks compare it; from its beginning where they went over to a new one."""
        self._current()
        return self._mismatch_check

    def __getattr__(self, name: str) -> Any:
        comm = self._current()
        start = getattr(comm, f"I{name[0].lower()}{name[1:]}", None)
        if start is None:
            return getattr(comm, name)
        return lambda *args: self.wait_for([start(*args)], args)

    def Split(self, colour: int, key: int) -> Communicator:
        self._splits += 1
        name = (*self._name, self._splits)
        return Communicator(self.session, self._ranks, name, lambda: self._current().Split(colour, key))

    def wait_for(self, requests: Sequence[Any], buffers: Any = (), check: bool = True) -> None:
        """Wait until all of these are done; with `check`, as long as no rank fails.

        `buffers` are what they read and write.
        """
        if not self.session.in_step:  # they are cleared away; nothing will come of them
            self.session.abandoned.append((requests, buffers))
            return
        pause = 1e-6
        try:
            while requests and not requests[0].Testall(requests):
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
                if check and pause == LONGEST:
                    self.session.check()
        except BaseException:
            self.session.in_step = False
            self.session.abandoned.append((requests, buffers))
            raise
