"""Save steps in the background: a killed run loses no complete one, a full disk none, and two runs do not mix."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from spmd.checkpoint import CheckpointError, Checkpoints, latest, load, save, saving
from tests import PATIENCE
from tests.checks.meshes import mesh
from tests.checks.saved_trees import assert_like, state

MESH = mesh(2, 2, names="xy")
LOCK = ".checkpoints.lock"


def run(*command, **options):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE, **options)


# ---------------------------------------------------------------- in the background


def test_written_while_training_goes_on(tmp_path, monkeypatch):
    """`save` returns before anything is written, with a copy; the next waits; at the end all is there."""
    go_on, write = threading.Event(), saving.write_blocks
    monkeypatch.setattr(saving, "write_blocks", lambda *args: go_on.wait() and write(*args))
    with Checkpoints(tmp_path, MESH, keep=2) as saved:
        tree = state()
        saved.save(1, tree)
        tree["b"][:] = 100.0
        assert latest(tmp_path) is None
        go_on.set()
        for step in range(2, 6):
            saved.save(step, state(float(step)))
            assert latest(tmp_path) >= step - 1
            if step == 2:
                assert_like(saved.load(state(), 1)[0], state())
        assert saved.latest() == 5
    assert sorted(f.name for f in tmp_path.iterdir()) == [LOCK, "step-00000004", "step-00000005"]
    assert sorted(f.name for f in (tmp_path / "step-00000005").iterdir()) == ["index.json", "rank-00000.npz"]


@pytest.mark.parametrize("name", ["write_blocks", "write_json", "write_index"])
def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch, name):
    def full(*args):
        raise OSError(28, "No space left on device")

    saved = Checkpoints(tmp_path, MESH)
    saved.save(1, state(1.0))
    saved.wait()
    with monkeypatch.context() as patch:
        patch.setattr(saving, name, full)
        saved.save(2, state(2.0))
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: it cannot be written: OSError: .*No space left"):
            saved.wait()
    assert saved.latest() == 1
    saved.save(2, state(2.0))
    saved.close()
    assert_like(load(tmp_path, state())[0], state(2.0))


FULL = """
import resource, sys
import numpy as np, spmd
from pathlib import Path
from spmd.checkpoint import CheckpointError, Checkpoints
path = Path(sys.argv[1])
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
saved = Checkpoints(path, spmd.make_mesh((2,), ("i",), backend="simulated"))
saved.save(1, {"w": np.ones(1000)})
saved.wait()
for tree in ({"w": np.ones(100000)}, {"w" * 1000 + str(k): k for k in range(20)}):  # a file of blocks, the index
    limit(10000)
    saved.save(2, tree)
    try:
        saved.wait()
    except CheckpointError as error:
        print(error)
    limit(resource.RLIM_INFINITY)
    print(sorted(f.name for f in path.iterdir()))
saved.save(3, {"w": np.full(100000, 3.0)})
"""


def test_a_full_disk(tmp_path):
    """Nothing of the step that failed is left to fill it. The next one can be saved, which is finished at exit."""
    done = run("-c", FULL, str(tmp_path))
    error = f"{tmp_path}: it cannot be written: OSError: [Errno 27] File too large"
    assert done.stdout.splitlines() == 2 * [error, str([LOCK, "step-00000001"])], done.stderr
    assert load(tmp_path)[0]["['w']"].sum() == 300000.0


# ---------------------------------------------------------------- killed


def test_killed_at_any_moment():
    """By SIGKILL, at operations on files and between: what was complete is there, bit for bit."""
    kills = os.environ.get("CHECKPOINT_KILLS", "100")
    done = run("-m", "tests.checks.kills", kills)
    assert done.returncode == 0, done.stderr
    at_operations, at_times, steps = map(int, re.findall(r"\d+(?=[,;])", done.stdout))
    assert at_operations + at_times == int(kills) and min(at_operations, at_times, steps) > int(kills) // 5


def test_one_rank_killed():
    done = run("-m", "tests.checks.kills", "3", "--ranks", "2")
    assert done.returncode == 0 and done.stdout.startswith("killed at operations: 3, "), done.stderr


# ---------------------------------------------------------------- two runs in one place

HOLDER = """
import sys, spmd
from spmd.checkpoint import Checkpoints
saved = Checkpoints(sys.argv[1], spmd.make_mesh((2,), ("i",), backend="simulated"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_runs_that_save_in_one_place(tmp_path):
    """The second says so, whichever it is; one that was killed is no obstacle, and nor is reading."""
    save(tmp_path, 1, state())
    command = ["-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], **pipes) as first:
        assert first.stdout.readline() == "ready\n"
        message = rf"{tmp_path}: another run is saving there \(process {first.pid} on .*\)\. Wait until it has ended"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=message):
                save(tmp_path, 2, state())
        assert_like(load(tmp_path, state())[0], state())
        second = run(*command, stdin=subprocess.DEVNULL)
        assert second.returncode != 0 and f"another run is saving there (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGKILL)
    save(tmp_path, 2, state())


def test_one_that_nobody_holds_any_longer_is_no_obstacle(tmp_path):
    saved = Checkpoints(tmp_path, MESH)
    saved.save(1, state())
    saved.wait()
    del saved
    until = time.monotonic() + PATIENCE
    while latest(tmp_path) != 2:
        gc.collect()
        try:
            save(tmp_path, 2, state(2.0))
        except CheckpointError:  # its thread has not let go of it
            assert time.monotonic() < until
