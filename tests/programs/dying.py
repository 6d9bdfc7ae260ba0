"""Training that dies in many ways, for a supervisor: python -m spmd run --restarts 3 -m tests.programs.dying --help

It writes its losses into a file, if it comes to its end.
"""

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import spmd
from spmd.checkpoint import Checkpoints
from spmd.examples.restarts import train

restart = int(os.environ.get("SPMD_RESTART", "0"))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def die(options, saved, step, start):
    """Die at this step, if the options say so, or a moment later."""
    if restart < options.kills:  # a rank, a step and a moment after it that are drawn
        draw, mesh = random.Random(f"{options.seed} {restart}"), saved.mesh
        rank, victim, delay = draw.randrange(mesh.size), start + draw.randrange(20), draw.random() * 0.01
        if step == victim and draw.random() < 0.5:
            saved.wait()  # so that some starts make progress, however slow the disk is
        if step == victim and (mesh.backend == "simulated" or mesh.rank == rank):
            threading.Timer(delay, kill).start() if draw.random() < 0.7 else kill()
    if step == options.step and (restart == 0 or options.always) and spmd.process_index() == spmd.process_count() - 1:
        if options.die == "raise":
            raise ArithmeticError(f"step {step} has failed\nfor a reason")
        if options.die == "kill":
            kill()
        if options.die == "sleep":
            (options.path / f"process-{os.getpid()}").touch()
            time.sleep(1000)
        os._exit(int(options.die))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kills", type=int, default=0, help="how many starts are killed at a random step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="of the last rank's end")
    parser.add_argument("--die", default="kill", help="kill, raise, sleep, or an exit code")
    parser.add_argument("--always", action="store_true", help="at that step of each start, not of the first only")
    parser.add_argument("--even", action="store_true", help="refuse an odd number of ranks")
    options = parser.parse_args()
    if options.even:
        spmd.make_mesh((2, -1), ("i", "j"))
    mesh, steps = spmd.make_mesh((-1,), ("batch",)), Checkpoints.steps

    def dying(saved, stop):
        start = None
        for step in steps(saved, stop):
            start = start or step
            die(options, saved, step, start)
            yield step

    with mock.patch.object(Checkpoints, "steps", dying):
        losses = train(mesh, str(options.path), options.steps)
    if spmd.process_index() == 0:
        (options.path / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
