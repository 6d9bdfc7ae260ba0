"""The MPI library: its start, its name, and the communicator of all processes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import mpi4py

from collectives.backends.one_rank import LauncherError


def _start() -> Any:
    """Initialize MPI as mpi4py.rc says, unless MPI would kill this process.

    MPICH built without PMIx ends the process, without a useful message, under a launcher that uses PMIx (Open MPI's;
    `srun --mpi=pmix`). Raises LauncherError instead.
    """
    rc = mpi4py.rc
    starts, rc.initialize = rc.initialize, False
    rc.finalize = starts if rc.finalize is None else rc.finalize
    from mpi4py import MPI

    rc.initialize = starts
    if starts and not MPI.Is_initialized():
        version = MPI.Get_library_version()
        if "PMIX_NAMESPACE" in os.environ and version.startswith("MPICH") and "pmix" not in version:
            raise LauncherError(_name(version))
        with warnings.catch_warnings():  # make_mesh reports a launcher of another MPI, with advice
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}") if rc.threads else MPI.THREAD_SINGLE)
    return MPI


def _name(version: str) -> str:
    """Return the name and number at the beginning of an MPI library's version text."""
    return " ".join(version.split("\n")[0].split(",")[0].replace("\0", "").replace(" Version:", "").split())


MPI = _start()


def world() -> Any:
    """Return the communicator of all processes."""
    return MPI.COMM_WORLD


def library() -> str:
    """Return the MPI library's name and version, and its version of the standard."""
    return f"{_name(MPI.Get_library_version())}, of MPI {'.'.join(map(str, MPI.Get_version()))}"
