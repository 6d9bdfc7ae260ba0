"""The communicators of meshes: a pool on each communicator of the user's.

Collectives and comparisons of calls travel on duplicates, never on the user's communicator.
"""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from typing import Any

import numpy

from collectives.backends.mpi.abort import WATCHDOG, leave
from collectives.backends.mpi.library import MPI, world
from collectives.guards.deadlock import WatchedComm
from collectives.guards.mismatch import CallSignature, DisagreementError, report
from collectives.guards.notebook import Communicator, Session, is_interactive

GARBAGE_COLLECTIONS = 64  # one for this many entries of a pool that are all in use


class MeshCommunicators:
    """The communicators of a mesh, by positions of axes and by groups: an entry of a pool.

    `users` are the backends that use them. Another mesh of this shape reuses them if it has the same axis names, or
    once no rank uses them any longer.
    """

    def __init__(self, comm: Any, sizes: dict[str, int]):
        self.names = tuple(sizes)
        self.comms: dict[tuple, Any] = {(tuple(range(len(sizes))),): comm}
        self.users: weakref.WeakSet = weakref.WeakSet()


class CommunicatorPool:
    """The communicators of all meshes on a `parent`, which caches its pool as an attribute.

    MPI allows about two thousand. Freeing one is a collective call, but ranks drop their meshes at different times; so
    unused communicators are reused when a new mesh is made.
    """

    def __init__(self, parent: Any):
        self.parent = parent
        self.entries: dict[tuple[int, ...], list[MeshCommunicators]] = {}  # by the mesh's shape
        self.root: Any = None  # a watched duplicate of the parent; sessions have none

    @staticmethod
    def on(parent: Any) -> CommunicatorPool:
        """Return the pool of a communicator."""
        pool = parent.Get_attr(_POOL)
        if pool is None:
            pool = CommunicatorPool(parent)
            parent.Set_attr(_POOL, pool)
        return pool

    def acquire(self, sizes: dict[str, int]) -> MeshCommunicators:
        """Find or make the communicators of a mesh; all ranks call it."""
        names, entries = tuple(sizes), self.entries.setdefault(tuple(sizes.values()), [])
        for entry in entries:
            if entry.names == names:
                return entry
        if is_interactive():
            comm = _in_session(self.parent, tuple(sizes.items()))
            _compare_sizes(comm, sizes)
            entries.append(MeshCommunicators(comm, sizes))
            return entries[-1]
        self.root = self.root or _watched_duplicate(self.parent)
        _compare_sizes(self.root, sizes)
        unused = self._find_unused(entries)
        if unused is None:
            unused = MeshCommunicators(self.root.Dup(), sizes)
            entries.append(unused)
        unused.names = names
        return unused

    def _find_unused(self, entries: list[MeshCommunicators]) -> MeshCommunicators | None:
        """Return the first entry that no rank uses, or None; look again after a garbage collection, but seldom."""
        for often in (1, GARBAGE_COLLECTIONS):
            if not entries or len(entries) % often:
                return None
            if often > 1:
                gc.collect()
            unused = numpy.array([not entry.users for entry in entries], numpy.uint8)
            everywhere = numpy.empty_like(unused)
            self.root.Allreduce(unused, everywhere, MPI.MIN)
            if everywhere.any():
                return entries[everywhere.argmax()]
        return None

    def free_unused(self) -> None:
        """Free the unused communicators, since the owner of the parent frees it."""
        unused = [entry for entry in itertools.chain.from_iterable(self.entries.values()) if not entry.users]
        for comm in [comm for entry in unused for comm in entry.comms.values()] + [self.root] * bool(self.root):
            comm.free()


_POOL = MPI.Comm.Create_keyval(delete_fn=lambda parent, key, pool: None if is_interactive() else pool.free_unused())


def _compare_sizes(comm: Any, sizes: dict[str, int]) -> None:
    """Raise DisagreementError on all ranks unless they all make the same mesh."""
    axes = ", ".join(f"{a}: {n}" for a, n in sizes.items())
    if lines := comm.mismatch_check.compare_once("make_mesh", sizes, [f"axes ({axes})"]):
        advice = (
            "All ranks make one mesh: give make_mesh the same sizes and names on all of them. Compute sizes from the "
            "number of ranks, not from this process's rank or environment"
        )
        raise DisagreementError(report("ranks make different meshes", lines, advice))


# ---------------------------------------------------------------- watched communicators

_BOOTSTRAP: dict[tuple, WatchedComm] = {}  # by ranks: the communicator on which they agree on names of new ones
_NUMBERS = itertools.count(1)


def _watched_duplicate(parent: Any) -> WatchedComm:
    """Duplicate a communicator for the deadlock watchdog; all its ranks call this, and agree on its name."""
    ranks = tuple(parent.Get_group().Translate_ranks(None, world().Get_group()))
    bootstrap = _BOOTSTRAP.get(ranks)
    if bootstrap is None:
        bootstrap = _BOOTSTRAP[ranks] = WatchedComm(parent, WATCHDOG, ("make_mesh", *ranks), ranks)
        bootstrap.mismatch_check.latest = CallSignature("make_mesh", "", 1)
    threads = _can_use_threads()
    number = next(_NUMBERS) if parent.Get_rank() == 0 else 0
    proposal = numpy.array([number, threads and not WATCHDOG.reaches(ranks, world().Get_size())])
    agreed = numpy.empty_like(proposal)
    bootstrap.watched("Allreduce", parent.Iallreduce)(proposal, agreed, MPI.MAX)
    with bootstrap.mismatch_check.critical_section():
        if agreed[1] and threads and len(ranks) > 1:
            WATCHDOG.open(parent.Dup(), ranks)
        return WatchedComm(parent.Dup(), WATCHDOG, (*ranks[:1], int(agreed[0])), ranks)


def _at_the_end(*_: Any) -> None:
    leave()
    for comm in WATCHDOG.communicators:
        comm.free_requests()


@functools.cache
def _can_use_threads() -> bool:
    """Whether the watchdog's thread may call MPI."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_at_the_end), None)  # runs at MPI_Finalize
    threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    if not threads and world().Get_size() > 1 and world().Get_rank() == 0:
        warnings.warn(
            "the deadlock watchdog is off, since MPI was started without MPI_THREAD_MULTIPLE (as by "
            "mpi4py.rc.threads = False): it will not find ranks that wait for each other forever",
            RuntimeWarning,
            stacklevel=2,
        )
    return threads


_SESSION: list[Session] = []  # the session, if this process is interactive and has a mesh


def _in_session(parent: Any, name: tuple) -> Communicator:
    """Duplicate `parent` for an interactive session."""
    if not _SESSION:
        _SESSION.append(Session(world()))
    ranks = parent.Get_group().Translate_ranks(None, world().Get_group())
    return Communicator(_SESSION[0], list(ranks), name, parent.Dup)
