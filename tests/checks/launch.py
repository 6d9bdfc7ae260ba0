"""Start processes and MPI ranks, as a user does: outside of what this process knows of MPI."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests import PATIENCE

ROOT = Path(__file__).parents[2]
#: For programs: `interrupt_once_it_waits`, and modules.
INTERRUPTING = "import os, signal, sys, threading, time\nfrom tests.checks.launch import interrupt_once_it_waits\n"


def interrupt_once_it_waits():
    """Ctrl-C for this process as soon as its main thread waits for other ranks."""

    def waits(frame):
        return frame is not None and (frame.f_code.co_name == "wait_for" or waits(frame.f_back))

    def interrupt():
        while not waits(sys._current_frames()[threading.main_thread().ident]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def launching(ranks, *command, **environment):
    """A process that runs a Python command on ranks.

    The launcher is that of this Python's own MPI, if it has one. With None for ranks there is no launcher.
    """
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA", "OMPI_COMM"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launched = [launcher, "-n", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*launched, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": path, **environment},
    )


def outcome_of(job, timeout=PATIENCE):
    """The texts that a process prints to stdout and stderr; it is killed where it takes too long."""
    with job:
        try:
            return job.communicate(timeout=timeout)
        except BaseException:
            job.kill()
            raise


def mpiexec(ranks, *command):
    """The outcome of a command on ranks."""
    job = launching(ranks, *command)
    out, err = outcome_of(job)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)
