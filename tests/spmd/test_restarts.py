"""Jobs that go on: ranks that die, in many ways, and what the supervisor does and says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import PATIENCE

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
RUN = (sys.executable, "-m", "spmd", "run")
DYING = ("-m", "tests.programs.dying")


def run(*command, **variables):
    """Run a program that may fail."""
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)


def reports(done):
    """Return what the supervisor has said."""
    return re.findall(r"^spmd run: (.*)", done.stderr, re.M)


def losses(path):
    return json.loads((path / "losses.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of runs that nobody kills, by their ranks."""
    known = {}

    def of(ranks, steps=40):
        if (ranks, steps) not in known:
            path = tmp_path_factory.mktemp("undisturbed")
            done = run(*RUN, *["-n", str(ranks)] * (ranks > 1), *DYING, str(path), "--steps", str(steps))
            assert done.returncode == 0 and not reports(done), done.stderr
            known[ranks, steps] = losses(path)
        return known[ranks, steps]

    return of


@pytest.mark.parametrize(
    "ranks, end, cause",
    [
        (1, "kill", "by signal 9"),
        (1, "3", "with exit code 3"),
        (2, "3", "with exit code 3"),
        (3, "raise", "with Arith"),
    ],
)
def test_a_job_goes_on_with_the_same_losses(ranks, end, cause, tmp_path, undisturbed):
    several = ["-n", str(ranks)] * (ranks > 1)
    done = run(*RUN, *several, "--restarts", "2", *DYING, str(tmp_path), "--step", "28", "--die", end)
    (report,) = reports(done)
    who = f"rank {ranks - 1}" if several else "the program"
    assert done.returncode == 0 and report.startswith(f"{who} ended {cause}") and " at step 28; starting" in report
    on = rf" on {ranks} ranks" if several else ""
    assert re.search(rf" from (step [12]0|the beginning){on} \(restart 1 of 2\)$", report)  # step 20 may be incomplete
    assert losses(tmp_path) == undisturbed(ranks) and len(losses(tmp_path)) == 40
    assert ("ArithmeticError: step 28 has failed" in done.stderr) == (end == "raise")


def test_killed_at_random_twenty_times(tmp_path, undisturbed):
    """Killed at steps and moments after them that are drawn, also while a step is saved."""
    done = run(*RUN, "-n", "2", "--restarts", "20", *DYING, str(tmp_path), "--kills", "20", "--steps", "200")
    shown = reports(done)
    assert done.returncode == 0 and [*map(int, re.findall(r"\d+(?= of 20)", done.stderr))] == [*range(1, 21)], shown
    assert {line[:24] for line in shown} == {f"rank {rank} ended by signal 9" for rank in range(2)}
    assert len({*re.findall("from step ([0-9]+)", done.stderr)}) > 2
    assert losses(tmp_path) == undisturbed(2, steps=200)


def test_on_the_ranks_that_are_left(tmp_path, undisturbed):
    done = run(*RUN, "-n", "3", "--restarts", "1", "--shrink", *DYING, str(tmp_path), "--step", "28")
    (report,) = reports(done)
    assert done.returncode == 0 and report.endswith(" on 2 ranks (restart 1 of 1)"), done.stderr
    np.testing.assert_allclose(losses(tmp_path), undisturbed(3), rtol=1e-12)


def test_numbers_of_ranks_that_the_program_refuses(tmp_path, undisturbed):
    done = run(*RUN, "-n", "4", "--restarts", "1", "--shrink", *DYING, str(tmp_path), "--step", "28", "--even")
    first, second = reports(done)
    assert done.returncode == 0 and "on 3 ranks (restart 1 of 1)" in first, done.stderr
    start = re.search(r"from (.*) on 3", first)[1]
    assert re.sub("[012]", "0", second, count=1) == (
        f"rank 0 ended with ValueError; starting again from {start} on 2 ranks (restart 1 of 1)"
    )
    np.testing.assert_allclose(losses(tmp_path), undisturbed(2), rtol=1e-12)


def test_no_number_of_ranks_is_left(tmp_path):
    script = tmp_path / "script.py"
    first = "if os.environ['SPMD_RESTART'] == '0': os._exit(4)"
    script.write_text(f"import os, spmd\n{first}\nspmd.make_mesh((2,), ('i',))")
    done = run(*RUN, "-n", "2", "--restarts", "2", "--shrink", str(script))
    assert [report.partition("; ")[2][:29] for report in reports(done)] == [
        "starting again from the begin",
        "no ranks are left whose numbe",
    ]
    assert done.returncode == 1 and "ValueError: make_mesh: a mesh of 2 needs 2 ranks" in done.stderr


def test_no_restarts_are_left(tmp_path):
    done = run(*RUN, "-n", "2", "--restarts", "1", *DYING, str(tmp_path), "--step", "8", "--always")
    assert done.returncode == 128 + signal.SIGKILL
    assert reports(done) == [
        "rank 1 ended by signal 9 at step 8; starting again from the beginning on 2 ranks (restart 1 of 1)",
        "rank 1 ended by signal 9 at step 8; no restarts are left",
    ]
    done = run(*RUN, "-n", "2", *DYING, str(tmp_path), "--step", "8", "--die", "7")
    assert (done.returncode, *reports(done)) == (7, "rank 1 ended with exit code 7 at step 8; no restarts are left")


@pytest.mark.parametrize("end", ["raise", "5", "0"])
def test_an_error_that_repeats_ends_early(end, tmp_path):
    """Nothing was saved in between; a rank that has left by os._exit(0) has not come to its end."""
    ranks = ["-n", "2"] if end == "raise" else []
    done = run(*RUN, *ranks, "--restarts", "9", *DYING, str(tmp_path), "--step", "8", "--always", "--die", end)
    first, second = reports(done)
    assert first.endswith("(restart 1 of 9)")
    assert second.endswith("at step 8; as before, with nothing saved since: another restart would repeat it")
    assert second.partition(";")[0] == first.partition(";")[0]
    cause = {"raise": "ArithmeticError", "5": "exit code 5", "0": "os._exit(0)"}[end]
    assert done.returncode == max(1, int(end.replace("raise", "1"))) and f" ended with {cause} at step 8" in first
    assert done.stderr.count("ArithmeticError: step 8 has failed\n") == 2 * (end == "raise")


def test_a_rank_that_leaves_without_an_error(tmp_path, undisturbed):
    done = run(*RUN, "-n", "2", "--restarts", "1", *DYING, str(tmp_path), "--step", "28", "--die", "0")
    assert done.returncode == 0 and "rank 1 ended with os._exit(0) at step 28" in reports(done)[0], done.stderr
    assert losses(tmp_path) == undisturbed(2)


def test_under_a_launcher(tmp_path, undisturbed):
    done = run(MPIEXEC, "-n", "2", *RUN, "--restarts", "1", *DYING, str(tmp_path), "--step", "28")
    assert done.returncode == 0 and "on 2 ranks (restart 1 of 1)" in " ".join(reports(done)), done.stderr
    assert losses(tmp_path) == undisturbed(2)
    done = run(MPIEXEC, "-n", "2", *RUN, "--restarts", "1", *DYING, str(tmp_path / "2"), "--step", "8", "--always")
    assert done.returncode == 128 + signal.SIGKILL and len(reports(done)) == 2


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


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "the launcher has started ranks. Without the launcher: .* -n 2 "),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, "on several machines, none can. .* run -n 2 "),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "under srun, or on several machines, none can. "),
        ({"PATH": ""}, "there is no mpiexec, which starts the ranks: install it with `pip install mpi4py"),
        ({}, "-n must be at least 1, and --restarts at least 0"),
    ],
)
def test_options_that_cannot_be(variables, message, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.touch()
    launched = "PMI_SIZE" in variables or "SLURM_PROCID" in variables
    ranks = [] if launched and "several" in message else ["-n", "2" if variables else "0"]
    python = sys.executable
    if "PATH" in variables:  # a Python that has no mpiexec beside it
        python = "import sys; sys.executable = '/nowhere/python'; from spmd.__main__ import main; main(sys.argv[1:])"
        done = run(sys.executable, "-c", python, "run", *ranks, str(script), **variables)
    else:
        done = run(python, "-m", "spmd", "run", "--restarts", "3", *ranks, str(script), **variables)
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr


def test_the_example(tmp_path):
    """The output that its docstring and the page of topics show."""
    command = *RUN, "-n", "4", "--restarts", "3", "-m", "spmd.examples.restarts", str(tmp_path), "--kill", "37"
    done = run(*command)
    report = r"rank 2 ended by signal 9 at step 37; starting again from step [123]0 on 4 ranks \(restart 1 of 3\)"
    assert re.fullmatch(report, *reports(done)), done.stderr
    again = run(*command)  # everything is saved
    assert done.returncode == again.returncode == 0 and not reports(again)
    assert done.stdout.endswith(again.stdout)  # after what mpiexec says about the rank that was killed
    assert re.fullmatch(r"losses: 3\.936\d*( [01]\.\d+){5}\n", again.stdout)
