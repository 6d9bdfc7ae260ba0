"""Jobs that go on: ranks that die, in many ways, as the page `jobs.md` shows; what is left, and at random."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests import PATIENCE
from tests.checks.sessions import COMMANDS, MPIEXEC, check_session, read_sessions, run_command

SESSIONS = read_sessions(Path(__file__).parent / "jobs.md")
RUN, DYING = ("python", "-m", "spmd", "run"), ("-m", "tests.programs.dying")
KILLS = int(os.environ.get("SUPERVISOR_KILLS", "5"))


def losses(path):
    return json.loads((path / "losses.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the losses of a run that nobody kills, by its ranks; its supervisor says nothing."""
    known = {}

    def of(ranks, steps=40):
        if (ranks, steps) not in known:
            path = tmp_path_factory.mktemp("undisturbed")
            done = run_command([*RUN, *["-n", ranks] * (ranks > 1), *DYING, path, "--steps", steps], path)
            assert done.returncode == 0 and "spmd run: " not in done.stderr, done.stderr
            known[ranks, steps] = losses(path)
        return known[ranks, steps]

    return of


@pytest.mark.parametrize("name", SESSIONS)
def test_jobs(name, tmp_path, undisturbed):
    """Those that come to their end have the losses of one that nobody kills; on fewer ranks, sums in another order."""
    check_session(SESSIONS[name], tmp_path)
    if (tmp_path / "run" / "losses.json").exists():
        command = SESSIONS[name][1]
        ranks = 2 if "-n" in command else 1  # at the end
        rtol = 1e-12 if "--shrink" in command else 0
        np.testing.assert_allclose(losses(tmp_path / "run"), undisturbed(ranks), rtol=rtol)


def test_killed_at_random(tmp_path, undisturbed):
    """Killed at steps and moments after them that are drawn, also while a step is saved."""
    options = "--restarts", KILLS, *DYING, tmp_path, "--kills", KILLS, "--steps", 100
    done = run_command([*RUN, "-n", 2, *options], tmp_path)
    restarts = re.findall(
        r"^spmd run: rank [01] ended by signal 9.* from (.*) on 2 .*restart (\d+) of", done.stderr, re.M
    )
    assert done.returncode == 0 and [int(k) for _, k in restarts] == [*range(1, KILLS + 1)], done.stderr
    assert len({step for step, _ in restarts}) > 1 and losses(tmp_path) == undisturbed(2, steps=100)


def processes(path):
    """Return the processes whose command line has a path."""
    shown = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if str(path) in line]


@pytest.mark.parametrize(
    "launcher, number",
    [
        *(((), signal.SIGTERM), (("-n", "2"), signal.SIGINT), (("-n", "2"), signal.SIGKILL)),
        *(((MPIEXEC, "-n", "2"), signal.SIGTERM), ((MPIEXEC, "-n", "2"), signal.SIGKILL)),
    ],
)
def test_no_process_is_left(launcher, number, tmp_path):
    """Ctrl-C, a signal to the supervisor, and its death, while the ranks sleep."""
    before, options = (launcher, ()) if MPIEXEC in launcher else ((), launcher)
    command = *before, *RUN, *options, "--restarts", "3", *DYING, str(tmp_path), "--step", "5", "--die", "sleep"
    command = [COMMANDS.get(word, word) for word in command]
    job = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + PATIENCE
    while not [*tmp_path.glob("process-*")]:
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.05)
    assert len(processes(tmp_path)) >= (6 if launcher else 3)
    (os.killpg if number == signal.SIGINT else os.kill)(job.pid, number)
    shown = job.communicate(timeout=PATIENCE)[1]
    assert job.returncode == (128 + number if number != signal.SIGKILL else -number) and "spmd run: " not in shown
    while processes(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_example(tmp_path):
    """The output that its docstring and the page of topics show; later everything is saved."""
    command = *RUN, "-n", 4, "--restarts", 3, "-m", "spmd.examples.restarts", tmp_path, "--kill", 37
    done, later = run_command(command, tmp_path), run_command(command, tmp_path)
    message = r"spmd run: rank 2 ended by signal 9 at step 37; starting again from .* on 4 ranks \(restart 1 of 3\)\n"
    assert re.search(message, done.stderr) and done.stderr.count("spmd run: ") == 1 and "spmd run: " not in later.stderr
    assert done.returncode == later.returncode == 0
    assert done.stdout.endswith(later.stdout)  # after what mpiexec says about the rank that was killed
    assert re.fullmatch(r"losses: 3\.936\d*( [01]\.\d+){5}\n", later.stdout)
