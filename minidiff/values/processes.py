"""The processes of a job, and the processors of this one, as the environment and the system tell them."""

from __future__ import annotations

import os

#: The environment variables in which MPI launchers pass the number of processes, and this one's rank.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def launcher_variable() -> str | None:
    """The environment variable with an MPI launcher's number of processes; None without a launcher."""
    for variable in LAUNCHERS:
        if os.environ.get(variable, "").isdecimal():
            # A Slurm step of one task is as often an interactive shell as a job of one rank.
            return None if os.environ[variable] == "1" and variable.startswith("SLURM") else variable
    return None


def launcher_size() -> int | None:
    """The number of processes that the MPI launcher started; None without a launcher."""
    variable = launcher_variable()
    return None if variable is None else int(os.environ[variable])


def usable_processors() -> set[int]:
    """The processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
