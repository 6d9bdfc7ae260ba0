"""Threads: a loop over large arrays runs in pieces, on the processors that this process may use.

Python lets other threads run while one is in a loop of NumPy or of machine code. The pieces depend on types alone, and
sums over pieces are added up in order, so results have the same bits with any number of threads.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from minidiff.values.processes import launcher_size, usable_processors

#: A piece has at least so many elements times operations (`kernels.py`), which take some 70 microseconds or more: to
#: wake a thread takes 20 to 40. The number of pieces is a power of 2, so that threads share them evenly, and at most
#: this.
PIECE_WORK, MAX_PIECES = 1 << 20, 32


@functools.cache
def default_threads() -> int:
    """Return the number of threads of programs that do not say it.

    It is that of the environment variable MINIDIFF_THREADS or OMP_NUM_THREADS, which BLAS follows, too. Without them it
    is 1 for a process that an MPI launcher started, and otherwise the number of processors that this process may use.
    """
    for variable in ("MINIDIFF_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(variable, "").split(",")[0].strip()
        if text.isdecimal() and int(text):
            return int(text)
    return 1 if (launcher_size() or 1) > 1 else len(usable_processors())


def piece_size(elements: int, work: int) -> int:
    """Return the number of elements of a piece, of a loop with `work` operations for each."""
    count = max(1, min(MAX_PIECES, elements * work // PIECE_WORK))
    return -(-elements // (1 << (count.bit_length() - 1)))


def for_each(call: Callable[[Any], object], pieces: Sequence[Any], threads: int) -> None:
    """Call a function for each of some pieces, on up to `threads` threads, this one among them.

    After an error or an interrupt, no thread begins another piece.
    """
    if threads == 1:
        for piece in pieces:
            call(piece)
        return
    waiting, errors = iter(pieces), list[BaseException]()

    def work() -> None:
        try:
            for piece in waiting:
                call(piece)
        except BaseException as error:
            errors.append(error)
        finally:
            for _ in waiting:
                pass

    tasks = [_start(work) for _ in range(min(threads, len(pieces), len(usable_processors())) - 1)]
    work()
    for claim, done in tasks:
        if not claim.acquire(False):  # another thread has
            done.acquire()
    if errors:
        raise errors[0]


def _start(work: Callable[[], object]) -> tuple[Any, Any]:
    """Let another thread run a function soon: return a lock that it acquires before, and one that it releases after it.

    If this thread acquires the first one before, the function does not run.
    """
    claim, done = _thread.allocate_lock(), _thread.allocate_lock()
    done.acquire()

    def task() -> None:
        if claim.acquire(False):
            work()
            done.release()

    _tasks().put(task)
    return claim, done


@functools.cache
def _tasks() -> Any:
    """Return the queue of the functions that the threads of this process run. A forked process makes its own."""
    from queue import SimpleQueue  # slow to load, and only large arrays need it

    tasks: Any = SimpleQueue()
    with contextlib.suppress(RuntimeError):  # the interpreter is about to exit
        for _ in range(len(usable_processors()) - 1):
            _thread.start_new_thread(_serve, (tasks,))
    return tasks


def _serve(tasks: Any) -> None:
    while True:
        tasks.get()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tasks.cache_clear)
