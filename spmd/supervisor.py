"""Jobs that go on: `python -m spmd run --restarts` starts a job again when one of its ranks has died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spmd.checkpoint.files import latest
from spmd.mesh.launch import launcher_size
from spmd.mesh.supervised import FOLDER, end_with_parent

#: Variables in which a launcher tells a process that it is one of its ranks: the job's launcher must not see them.
LAUNCHED = re.compile(r"PMI|HYDI_|MPI_LOCAL|MV2_COMM_|(OMPI|PRTE)_(?!ALLOW|MCA_rmaps)")
DEATHS = ("signal", "exit code", "os._exit")  # other failures are exceptions
OUTSIDE = ("signal 9", "signal 15")  # other programs send these; all other failures are the program's


class Failure(NamedTuple):
    """A job's failure: the rank that failed first, its exit code, the cause, its step, and the last step saved."""

    who: str
    code: int
    cause: str
    step: int | None
    saved: int | None

    def __str__(self) -> str:
        by = "by" if self.cause.startswith("signal") else "with"
        return f"{self.who} ended {by} {self.cause}{f' at step {self.step}' if self.step else ''}"


def supervise(program: Sequence[str], mpiexec: str, ranks: int | None, restarts: int, shrink: bool) -> int:
    """Run a program until it ends without an error, or no restarts are left; return the exit code.

    It starts on as many ranks as before. With `shrink` it starts on one less for each rank that has died, and on fewer
    while the program refuses their number, by a ValueError before its first step. With None as `ranks` it is one
    process, whose ranks are simulated.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    used, wanted, saved = 0, ranks, None
    before: Failure | None = None
    while failure := _run_job(program, mpiexec, ranks, used, saved):
        saved = failure.saved
        refused = ranks != wanted and failure.step is None and failure.cause == "ValueError"
        repeated = before is not None and failure[2:] == before[2:] and failure.cause not in OUTSIDE
        used += not refused
        if ranks and shrink and (refused or failure.cause.startswith(DEATHS)):
            ranks -= 1
        if repeated and not refused:
            end = "as before, with nothing saved since: another restart would repeat it"
        elif used > restarts:
            end = "no restarts are left"
        else:
            end = "no ranks are left whose number the program accepts" if ranks == 0 else ""
        on = f" on {ranks} rank{'s' * (ranks > 1)}" if ranks else ""
        start = f"starting again from {'the beginning' if saved is None else f'step {saved}'}{on}"
        print(f"spmd run: {failure}; {end or f'{start} (restart {used} of {restarts})'}", file=sys.stderr, flush=True)
        if end:
            return failure.code
        before = failure
    return 0


def _run_job(program: Sequence[str], mpiexec: str, ranks: int | None, used: int, saved: int | None) -> Failure | None:
    """Run the program once, and return its failure; `saved` is the last step that was saved before."""
    command = [*[mpiexec, "-n", str(ranks)] * bool(ranks), sys.executable, "-m", "spmd", "run", *program]
    variables = {k: v for k, v in os.environ.items() if not (launcher_size() and LAUNCHED.match(k))}
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="spmd-run-") as folder:
        variables |= {FOLDER: folder, "SPMD_RESTART": str(used)}
        job = subprocess.Popen(command, env=variables, preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM))
        try:
            code = job.wait()
        except SystemExit as stop:  # by Ctrl-C, which a terminal sends to the job, too; or by SIGTERM
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(3.0 if stop.code == 128 + signal.SIGINT else 0.0)
            job.terminate()
            job.wait(10.0)
            raise
        notes = {file.name: file.read_text().partition("\n")[0] for file in Path(folder).iterdir()}
    if code == 0 and "failure" not in notes:
        return None
    rank, number, cause = (notes.get("failure") or f"? {code} exit code {code}").split(" ", 2)
    step = int(notes.get(f"step-{rank}") or 0) or None
    saved = latest(notes["checkpoints"]) if "checkpoints" in notes else saved
    return Failure(f"rank {rank}" if ranks and rank != "?" else "the program", int(number), cause, step, saved)
