"""How this process was started: by an MPI launcher as one of several ranks, or alone."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

#: Where MPI launchers tell a process how many there are.
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launcher_size() -> int | None:
    """How many processes the MPI launcher says it started; None where there is no launcher."""
    for variable in LAUNCHERS:
        if os.environ.get(variable, "").isdigit():
            size = int(os.environ[variable])
            # A scheduler's step of one task is as often a shell as it is a job of one rank.
            return None if size == 1 and variable.startswith("SLURM") else size
    return None


def import_mpi() -> ModuleType:
    """The MPI backend. Raises ImportError, with what to install, where mpi4py is missing."""
    try:
        from collectives import mpi
    except ImportError as error:
        launched = launcher_size()
        why = f"an MPI launcher started this process as one of {launched}" if launched else "the backend is 'mpi'"
        raise ImportError(
            f"{why}, but mpi4py cannot be imported ({error}). Install it with `pip install 'minidiff[mpi]'` where the "
            "machine has an MPI, or `pip install 'minidiff[mpich]'` where it has none; "
            "or simulate the ranks with backend='simulated'"
        ) from error
    return mpi


def end_job_on_exception() -> None:
    """Where this process is one of several ranks, let an exception that nobody catches end them all.

    The others would wait for this one for ever. Interactive sessions are left alone.
    """
    if (launcher_size() or 1) > 1 and not hasattr(sys, "ps1"):
        sys.excepthook = _end_job


def end_job(text: str, code: int) -> None:
    """Say why, and end this process with an exit code: where it is one of several ranks, all of them."""
    if (launcher_size() or 1) > 1:
        import_mpi().end(text, code)
    else:
        print(text, file=sys.stderr)
    sys.exit(code)


def _end_job(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    try:
        mpi = import_mpi()
    except ImportError:
        sys.__excepthook__(kind, error, trace)
    else:
        mpi.abort(kind, error, trace)
