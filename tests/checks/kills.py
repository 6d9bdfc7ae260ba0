"""Kill processes that save checkpoints, by SIGKILL, and look at what they leave: python -m tests.checks.kills 1000

Each process is forked, and saves one step after the other, of which all numbers are the same. It is killed before its
n-th operation on files, where n is drawn, or after a time that is drawn, wherever it is then. After each kill, the last
step that was complete must be there, or a later one, and the one before it; both must load. The next process goes on
from there, in the same directory. With `--ranks 2` each is an MPI job, of which one rank is killed, which ends all.
"""

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.checkpoint import Checkpoints, files, latest, load
from tests import PATIENCE

#: Audited operations on files, besides those that write: these are `os.fsync` here, which need not flush.
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.listdir", "fcntl.flock")


def state(mesh, step):
    return {"split": spmd.distribute(np.full(24, float(step)), mesh, P("i")), "whole": np.full(300, step), "n": step}


def save_until_killed(mesh, path, report, moment, victim=0):
    """The life of a process, or of a job whose rank `victim` is killed. It reports each step when it is complete."""
    left, report = [moment], os.open(report, os.O_WRONLY)

    def passing(event, arguments=()):
        if event in OPERATIONS and not (event == "open" and path not in str(arguments[0])):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if mesh.rank == victim:
        os.fsync = lambda file: passing("os.rename")
        sys.addaudithook(passing)
    with Checkpoints(path, mesh, keep=2) as saved:
        for step in range((saved.latest() or 0) + 1, sys.maxsize):
            saved.save(step, state(mesh, step))
            saved.wait()
            if mesh.rank == 0:
                os.pwrite(report, step.to_bytes(8, "little"), 0)


def kill_process(mesh, path, report, draw):
    """Fork a process, and kill it; returns whether it was killed at a time."""
    timed = draw.random() < 0.3
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(mesh, path, report, 0 if timed else draw.randrange(1, 66))
        finally:
            os._exit(1)  # not killed: an error
    if timed:
        time.sleep(draw.random() * 0.02)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    return timed


def kill_rank(ranks, path, report, draw):
    """Start an MPI job, one rank of which kills itself at an operation, never at a time."""
    life = f"life(*{(path, report, draw.randrange(1, 90), draw.randrange(ranks))!r})"
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", f"from tests.checks.kills import life; {life}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode, "no rank was killed"
    assert "Traceback" not in done.stderr, done.stderr
    return False


def life(*arguments):
    save_until_killed(spmd.make_mesh((-1,), ("i",), backend="mpi"), *arguments)


def run(kills, seed=0, ranks=1):
    """Returns how many were killed at an operation, at a time, and with how many steps saved in all."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    draw, counts, before = random.Random(seed), [0, 0], 0
    gc.freeze()  # what is here already: then processes need not copy it
    with tempfile.TemporaryDirectory() as folder:
        path, report = os.path.join(folder, "saved"), os.path.join(folder, "report")
        Path(report).write_bytes(bytes(8))
        for _ in range(kills):
            timed = kill_process(mesh, path, report, draw) if ranks == 1 else kill_rank(ranks, path, report, draw)
            counts[timed] += 1
            reported = max(before, int.from_bytes(Path(report).read_bytes(), "little"))
            actual = latest(path) or 0
            assert actual in (reported, reported + 1), (actual, reported)
            for step in files.saved_steps(Path(path)):
                tree, _ = load(path, state(mesh, 0), step)
                values = {*np.asarray(tree["split"]), *tree["whole"], tree["n"]}
                assert values == {step}, (step, values)
            assert len(files.saved_steps(Path(path))) >= min(actual, 2)
            before = actual
    return *counts, before


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    began = time.perf_counter()
    at_operations, at_times, steps = run(**vars(parser.parse_args()))
    seconds = time.perf_counter() - began
    print(f"killed at operations: {at_operations}, at times: {at_times}; steps saved: {steps}; {seconds:.1f} s")
