"""Kill processes that save checkpoints, by SIGKILL, and look at what they leave: python -m tests.checkpoint_kills 1000

Each process is forked, and saves one step after the other, of which all numbers are the same. It is killed before its
n-th operation on files, where n is drawn, or after a time that is drawn, wherever it is then. After each kill, the last
step that was complete must be there, or a later one, and the one before it; both must load. The next process goes on
from there, in the same directory.
"""

import gc
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.checkpoint import Checkpoints, files, latest, load

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
#: Audited operations on files, besides those that write: these are `os.fsync` here, which need not flush.
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "shutil.rmtree", "fcntl.lockf")


def state(step):
    return {"split": spmd.distribute(np.full(4, float(step)), MESH, P("i")), "whole": np.full(300, step), "n": step}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(path, moment, report):
    """The life of a process: it reports each step when it is complete."""
    left = [moment]

    def passing(event, arguments=()):
        if event in OPERATIONS and not (event == "open" and path not in str(arguments[0])):
            left[0] -= 1
            if left[0] == 0:
                kill()

    os.fsync = lambda file: passing("os.rename")
    sys.addaudithook(passing)
    with Checkpoints(path, MESH, keep=2) as saved:
        for step in range((saved.latest() or 0) + 1, sys.maxsize):
            saved.save(step, state(step))
            saved.wait()
            os.write(report, step.to_bytes(8, "little"))


def last_reported(reader):
    with os.fdopen(reader, "rb") as opened:
        found = opened.read()
    return int.from_bytes(found[-8:], "little")


def run(kills, seed=0):
    """Returns how many processes were killed at an operation, at a time, and with how many steps saved in all."""
    draw, reported, counts = random.Random(seed), 0, [0, 0]
    gc.freeze()  # what is here already: then processes need not copy it
    with tempfile.TemporaryDirectory() as path:
        for _ in range(kills):
            timed = draw.random() < 0.3
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    save_until_killed(path, 0 if timed else draw.randrange(1, 66), writer)
                finally:
                    os._exit(1)  # not killed: an error
            os.close(writer)
            if timed:
                time.sleep(draw.random() * 0.02)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
            counts[timed] += 1
            reported = max(reported, last_reported(reader))
            found = latest(path) or 0
            assert found in (reported, reported + 1), (found, reported)
            for step in files.steps(Path(path)):
                tree, _ = load(path, state(0), step)
                values = {*np.asarray(tree["split"]), *tree["whole"], tree["n"]}
                assert values == {step}, (step, values)
            assert len(files.steps(Path(path))) >= min(found, 2)
            reported = found
    return *counts, reported


if __name__ == "__main__":
    began = time.perf_counter()
    at_operations, at_times, steps = run(*map(int, sys.argv[1:]))
    seconds = time.perf_counter() - began
    print(f"killed at operations: {at_operations}, at times: {at_times}; steps saved: {steps}; {seconds:.1f} s")
