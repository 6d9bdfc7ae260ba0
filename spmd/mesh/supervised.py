"""Notes that the ranks of a job leave for its supervisor, `spmd.supervisor`: how one ended, and at which step.

The notes are files in a folder, which the supervisor passes in an environment variable. A job that has no supervisor
leaves none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from spmd.mesh.launch import launcher_rank

FOLDER = "SPMD_SUPERVISED"
_folder: list[str] = []  # of this job's notes, if it has a supervisor


def note(name: str, text: str, flags: int = 0) -> None:
    """Write a note over the one of this name, in one call, so that a rank that is killed leaves either of them.

    With the flag O_EXCL it is written only if there is none.
    """
    for folder in _folder:
        with contextlib.suppress(OSError):
            file = os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY | flags)
            os.write(file, f"{text}\n".encode())
            os.close(file)


def note_failure(code: int, cause: str) -> None:
    """Note this rank's exit code, and why it failed. The supervisor reports the first rank that does."""
    note("failure", f"{launcher_rank()} {code} {cause}", os.O_EXCL)


def note_step(step: int) -> None:
    """Note the step that this rank makes."""
    note(f"step-{launcher_rank()}", str(step))


def watch_this_rank() -> None:
    """Go on in a child process, whose end this process notes: a rank that is killed cannot do so itself.

    Without a supervisor there is nobody to read it, and nothing changes.
    """
    _folder[:] = filter(None, [os.environ.pop(FOLDER, "")])  # programs that the script starts are not this job
    if not _folder:
        return
    parent, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(parent, signal.SIGKILL)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers and terminals send it to the child, too
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    cause = f"signal {-code}" if code < 0 else f"exit code {code}"
    if code == 0 and os.path.isdir(*_folder) and not os.path.exists(os.path.join(*_folder, f"end-{launcher_rank()}")):
        code, cause = 1, "os._exit(0)"  # launchers take it for success, though others wait for this rank
    if code := code if code >= 0 else 128 - code:
        note_failure(code, cause)
    os._exit(code)


def end_with_parent(parent: int, number: int) -> None:
    """Let the system send this process a signal when its parent ends. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
