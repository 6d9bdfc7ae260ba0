"""Jobs that go on: ranks that die, in many ways, and what the supervisor does and says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest

from tests import PATIENCE

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
RUN = (sys.executable, "-m", "spmd", "run")
DYING = ("-m", "tests.programs.dying")


def run(*command, **variables):
    """Run a program that may fail."""
    environment = os.environ | variables
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE, env=environment)


def reports(done):
    """The supervisor's reports, but for the step that a job starts from, and which of the ranks has failed first."""
    text = re.sub(r"from (step [123]0|the beginning)", "from START", done.stderr)
    return re.findall(r"^spmd run: (.*)", re.sub(r"rank \d ended with ValueError", "a ValueError", text), re.M)


def losses(path):
    return json.loads((path / "losses.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of runs that nobody kills, by their ranks."""
    known = {}

    def of(ranks, steps=40):
        if (ranks, steps) not in known:
            path = tmp_path_factory.mktemp("undisturbed")
            done = run(*RUN, *["-n", ranks] * (ranks > 1), *DYING, path, "--steps", steps)
            assert done.returncode == 0 and not reports(done), done.stderr
            known[ranks, steps] = losses(path)
        return known[ranks, steps]

    return of


class Job(NamedTuple):
    """Options of the supervisor and of the program; how it ends, what comes then, each time; whose losses it has."""

    options: str
    dying: str
    end: str
    then: list[str]
    losses_of: int = 0
    code: int = 0
    launcher: tuple = ()


def again(on, of):
    """It goes on, on so many ranks, at the first of so many restarts."""
    return f"starting again from START{f' on {on} ranks' if on else ''} (restart 1 of {of})"


LAST, REPEATS = "no restarts are left", "as before, with nothing saved since: another restart would repeat it"
LATE, ALWAYS = "--step 28", "--step 8 --always"
JOBS = {
    "killed": Job("--restarts 2", LATE, "the program ended by signal 9 at step 28", [again(0, 2)], 1),
    "exit code": Job(
        "--restarts 2", f"{LATE} --die 3", "the program ended with exit code 3 at step 28", [again(0, 2)], 1
    ),
    "of a rank": Job(
        "-n 2 --restarts 2", f"{LATE} --die 3", "rank 1 ended with exit code 3 at step 28", [again(2, 2)], 2
    ),
    "an error": Job(
        "-n 3 --restarts 2", f"{LATE} --die raise", "rank 2 ended with ArithmeticError at step 28", [again(3, 2)], 3
    ),
    "no error": Job(
        "-n 2 --restarts 1", f"{LATE} --die 0", "rank 1 ended with os._exit(0) at step 28", [again(2, 1)], 2
    ),
    "on fewer ranks": Job("-n 3 --restarts 1 --shrink", LATE, "rank 2 ended by signal 9 at step 28", [again(2, 1)], 3),
    "numbers of ranks that are refused": Job(
        "-n 4 --restarts 1 --shrink",
        f"{LATE} --even",
        "rank 3 ended by signal 9 at step 28",
        [again(3, 1), f"a ValueError; {again(2, 1)}"],
        2,
    ),
    "always": Job("-n 2 --restarts 1", ALWAYS, "rank 1 ended by signal 9 at step 8", [again(2, 1), LAST], code=137),
    "no restarts": Job("-n 2", "--step 8 --die 7", "rank 1 ended with exit code 7 at step 8", [LAST], code=7),
    "an error that repeats": Job(
        "-n 2 --restarts 9",
        f"{ALWAYS} --die raise",
        "rank 1 ended with ArithmeticError at step 8",
        [again(2, 9), REPEATS],
        code=1,
    ),
    **{
        text: Job(
            "--restarts 9",
            f"{ALWAYS} --die {k}",
            f"the program ended with {text} at step 8",
            [again(0, 9), REPEATS],
            0,
            code,
        )
        for k, code, text in ((5, 5, "exit code 5"), (0, 1, "os._exit(0)"))
    },
    "under a launcher": Job(
        "--restarts 1", LATE, "rank 1 ended by signal 9 at step 28", [again(2, 1)], 2, launcher=(MPIEXEC, "-n", "2")
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name, tmp_path, undisturbed):
    """They end with the losses of a run that nobody kills; on fewer ranks, sums are in another order."""
    job = JOBS[name]
    done = run(*job.launcher, *RUN, *job.options.split(), *DYING, tmp_path, *job.dying.split())
    expected = [then if "Error; " in then else f"{job.end}; {then}" for then in job.then]
    assert (done.returncode, reports(done)) == (job.code, expected), done.stderr
    assert done.stderr.count("ArithmeticError: step ") == len(expected) * ("raise" in job.dying)
    if job.losses_of:
        np.testing.assert_allclose(losses(tmp_path), undisturbed(job.losses_of), rtol=1e-12 * ("shrink" in job.options))


def test_killed_at_random_twenty_times(tmp_path, undisturbed):
    """Killed at steps and moments after them that are drawn, also while a step is saved."""
    done = run(*RUN, "-n", 2, "--restarts", 20, *DYING, tmp_path, "--kills", 20, "--steps", 200)
    assert done.returncode == 0 and [*map(int, re.findall(r"\d+(?= of 20)", done.stderr))] == [*range(1, 21)]
    assert {line[:24] for line in reports(done)} == {f"rank {rank} ended by signal 9" for rank in range(2)}
    assert len({*re.findall("from step ([0-9]+)", done.stderr)}) > 2
    assert losses(tmp_path) == undisturbed(2, steps=200)


def test_no_number_of_ranks_is_left(tmp_path):
    script = tmp_path / "script.py"
    first = "if os.environ['SPMD_RESTART'] == '0': os._exit(4)"
    script.write_text(f"import os, spmd\n{first}\nspmd.make_mesh((2,), ('i',))")
    done = run(*RUN, "-n", 2, "--restarts", 2, "--shrink", script)
    assert [report.partition("; ")[2][:29] for report in reports(done)] == [
        "starting again from START on ",
        "no ranks are left whose numbe",
    ]
    assert done.returncode == 1 and "ValueError: make_mesh: a mesh of 2 needs 2 ranks" in done.stderr


# ---------------------------------------------------------------- the supervisor's end


def processes(path):
    """Return the processes whose command line has a path."""
    shown = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if str(path) in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("launcher", [(), ("-n", "2"), (MPIEXEC, "-n", "2")])
def test_no_process_is_left(launcher, number, tmp_path):
    """Ctrl-C, a signal to the supervisor, and its death, while the ranks sleep."""
    before, options = (launcher, ()) if MPIEXEC in launcher else ((), launcher)
    command = *before, *RUN, *options, "--restarts", "3", *DYING, str(tmp_path), "--step", "5", "--die", "sleep"
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


# ---------------------------------------------------------------- options

NO_MPIEXEC = "import sys; sys.executable = '/nowhere/python'; from spmd.__main__ import main; main(sys.argv[1:])"
MPI, SRUN = {"PMI_SIZE": "2", "PMI_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "variables, command, message",
    [
        (MPI, [*RUN, "-n", 2], "the launcher has started ranks. Without the launcher: .* -n 2 "),
        (MPI | {"MPI_LOCALNRANKS": "1"}, RUN, "on several machines, none can. .* run -n 2 "),
        (SRUN, RUN, "under srun, or on several machines, none can. "),
        (
            {"PATH": ""},
            [sys.executable, "-c", NO_MPIEXEC, "run", "-n", 2],
            "there is no mpiexec, .*`pip install mpi4py",
        ),
        ({}, [*RUN, "-n", 0], "-n must be at least 1, and --restarts at least 0"),
    ],
)
def test_options_that_cannot_be(variables, command, message, tmp_path):
    (tmp_path / "script.py").touch()
    restarts = [] if "PATH" in variables else ["--restarts", 3]
    done = run(*command, *restarts, tmp_path / "script.py", **variables)
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr


def test_the_example(tmp_path):
    """The output that its docstring and the page of topics show."""
    command = *RUN, "-n", 4, "--restarts", 3, "-m", "spmd.examples.restarts", tmp_path, "--kill", 37
    done, later = run(*command), run(*command)  # everything is saved
    assert reports(done) == [
        "rank 2 ended by signal 9 at step 37; starting again from START on 4 ranks (restart 1 of 3)"
    ]
    assert done.returncode == later.returncode == 0 and not reports(later)
    assert done.stdout.endswith(later.stdout)  # after what mpiexec says about the rank that was killed
    assert re.fullmatch(r"losses: 3\.936\d*( [01]\.\d+){5}\n", later.stdout)
