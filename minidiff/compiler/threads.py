"""Threads: a loop over large arrays runs in pieces, on the processors that this process may use.

NumPy lets other threads run while it is in a loop, its own or a compiled one. The pieces depend on types alone, and
sums over pieces are added up in order, so results have the same bits with any number of threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidiff.values.processes import launcher_size, usable_processors

#: A piece has at least so many elements times operations (`kernels.py`), which take some 200 microseconds or more: a
#: thread needs 50 to wake and to prepare its piece. The number of pieces is a power of 2, so that threads share them
#: evenly, and at most this.
PIECE_WORK, MAX_PIECES = 1 << 21, 32


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
    waiting = iter(pieces)

    def work() -> None:
        try:
            for piece in waiting:
                call(piece)
        finally:
            for _ in waiting:
                pass

    helpers = [*_start(work, min(threads, len(pieces)) - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _start(work: Callable[[], None], count: int) -> Iterator[Any]:
    for _ in range(count):
        try:
            yield _pool().submit(work)
        except RuntimeError:  # the interpreter is about to exit
            return


@functools.cache
def _pool() -> Any:
    """Return the threads of this process. A forked process has none of its parent's, and makes its own."""
    from concurrent.futures import ThreadPoolExecutor  # slow to load, and only large arrays need it

    return ThreadPoolExecutor(len(usable_processors()), "minidiff")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
