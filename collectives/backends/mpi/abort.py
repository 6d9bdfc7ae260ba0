"""The end of the whole job when a rank fails: the other ranks would wait forever."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from typing import Any

from collectives.backends.mpi.library import MPI, world
from collectives.backends.one_rank import ignore_interrupts
from collectives.guards.deadlock import Watchdog, abandoned
from collectives.guards.mismatch import group_reports
from collectives.tags import Tag


def abort(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End the whole job because of an exception: other ranks would wait forever.

    The traceback is printed once, with the rank's number. If several ranks fail at once, as they do from a mistake in
    the program they all run, the lowest rank prints it, and then which of the others failed with the same error, or
    with which other one.
    """
    text = "".join(traceback.format_exception(kind, error, trace))
    last = "".join(traceback.format_exception_only(kind, error))
    end(f"{text}rank {world().Get_rank()} of {world().Get_size()} failed; the job ends.", 1, error=last)


def _print(text: str) -> None:
    """Print with this rank's number, in one write: lines of ranks must not mix."""
    os.write(2, "".join(f"[rank {world().Get_rank()}] {line}\n" for line in text.splitlines()).encode())


def _stop_capturing() -> None:
    """Let pytest show what comes next, which it would keep for the end of the test, and what the test has printed."""
    capture: Any = sys.modules.get("_pytest.capture")
    with contextlib.suppress(Exception):  # its classes may change, and the job must end
        for manager in [x for x in (gc.get_objects() if capture else ()) if type(x) is capture.CaptureManager]:
            manager.suspend_fixture()
            manager.stop_global_capturing()


FEW = 16  # the lowest ranks, which get the errors of all others, and send theirs


def end(text: str, code: int, patience: float = 1.0, error: str = "") -> None:
    """End the whole job with an exit code; the lowest rank that does prints `text`.

    Higher ranks wait `patience` seconds and a little more, so that the lowest comes first: a rank inside an MPI call
    does not react to signals. They send it their `error`, which it groups with its own.
    """
    ignore_interrupts()
    comm = world()
    rank = comm.Get_rank()
    errors: dict[int, Any] = {}
    if error:
        others = [r for r in range(comm.Get_size()) if r != rank and min(r, rank) < FEW]
        abandoned.append([comm.isend(error[:1000], r, Tag.ERROR) for r in others])
    if rank:
        _receive_errors(errors, min(patience + 0.05 * rank, 3.0))
        if min(errors, default=rank) < rank:  # that rank is ending the job
            _receive_errors(errors, 3.0)
    sys.stdout.flush()
    sys.stderr.flush()
    _stop_capturing()
    _print(text)
    _receive_errors(errors, 0.5)  # launchers drop output that they have not read yet when the job is aborted
    if errors:
        same = "failed with the same error"
        reports = {r: same if e == error[:1000] else f"failed: {e.splitlines()[0]}" for r, e in errors.items()}
        _print("\n".join(line.replace(": ", " ", 1) for line in group_reports(reports)))
        time.sleep(0.2)
    comm.Abort(code)
    os._exit(code)  # Abort returns if a scheduler is already ending the job


def _receive_errors(errors: dict[int, str], seconds: float) -> None:
    """Wait, and receive the errors of other ranks that end the job."""
    comm, until = world(), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        status = MPI.Status()
        while comm.iprobe(tag=Tag.ERROR, status=status):
            errors[status.Get_source()] = comm.recv(source=status.Get_source(), tag=Tag.ERROR)
        time.sleep(min(left, 0.02))


WATCHDOG = Watchdog(end)
leave = WATCHDOG.leave
