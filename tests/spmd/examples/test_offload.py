"""Networks larger than memory: what a process holds, when it reads and writes, and what happens if it cannot."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ml_dtypes import bfloat16

import spmd
from minidiff import optim, tree
from minidiff.nn import relu
from spmd.examples.offload import StoredTree, offload
from tests.checks.launch import mpiexec
from tests.programs.offload import OPTIMIZERS, mean_error


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Each further thread of BLAS takes memory of its own, which no limit here allows for."""
    for name in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")


MESH = spmd.make_mesh((1,), ("batch",), backend="simulated")


def limited(stage, limit=0):
    """Return the output of a training with 144 MiB of parameters and states, and a memory limit beyond its start."""
    options = ["--layers", "24", "--features", "512", "--steps", "2", "--stage", str(stage), "--limit", str(limit)]
    return mpiexec(None, "-m", "tests.programs.offload_limit", *options)


def losses_of(run):
    assert run.returncode == 0, run.stderr
    return run.stdout.split("losses ")[1].split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and sizes as Linux has them")
def test_a_network_that_is_larger_than_the_limit():
    """It trains to the last bit as it does in memory, which the same limit ends; resident is less than it has."""
    in_memory = losses_of(limited(0))
    for stage, limit in ((3, 72), (2, 112)):
        actual = limited(stage, limit)
        assert losses_of(actual) == in_memory and len({*in_memory}) == 2
        size, resident = map(int, re.search(r"(\d+) MiB, resident: at most (\d+) MiB", actual.stdout).groups())
        assert size == 144 and resident <= limit
    refused = limited(0, 112)
    assert refused.returncode and "Unable to allocate" in refused.stderr and "losses" not in refused.stdout


def test_what_is_read_ahead_and_written_behind(monkeypatch, tmp_path):
    """A layer's neighbor is read, and the last one written, by the thread, while the layer computes."""
    events = []
    for name in ("prefetch", "read", "write"):
        method = getattr(StoredTree, name)

        def noted(self, *args, method=method, name=name):
            where = self._file.name if hasattr(self, "_file") else ""
            if name != "prefetch" or self._reading is None:  # one that begins
                events.append(f"{name} {where}")
            return method(self, *args)

        monkeypatch.setattr(StoredTree, name, noted)

    def layer(k):
        def compute(W, x):
            events.append(f"compute {k}")
            return relu(x @ W)

        return compute

    init, step = offload([layer(k) for k in range(3)], mean_error, optim.sgd(0.1, momentum=0.9), MESH, tmp_path)
    params, states = init([np.eye(8)] * 3)
    events.clear()
    step(params, states, (np.ones((4, 8)), np.zeros((4, 8))))
    order = {event: k for k, event in enumerate(events)}  # the last time
    for k in (0, 1):
        assert events.index(f"prefetch params-{k + 1}") < events.index(f"compute {k}")
    for k in (2, 1):  # backward
        for name in ("params", "states"):
            assert order[f"prefetch {name}-{k - 1}"] < order[f"compute {k}"] < order[f"write {name}-{k}"]
            assert order[f"write {name}-{k}"] < order[f"compute {k - 1}"]
    for place, event in enumerate(events):  # all that is read has been asked for before
        if event.startswith("read"):
            assert event.replace("read", "prefetch") in events[: place + 2]


def test_what_is_read_is_what_was_written(tmp_path):
    saved = {"bits": np.array([True, False, True]), "none": np.zeros((0, 2)), "one": np.float32(1.5)}
    with ThreadPoolExecutor(1) as thread:
        stored = StoredTree(tmp_path / "x", {}, thread)
        assert stored.read() == {}
        for n, dtype in ((2, np.float64), (3, np.complex64), (1, bfloat16)):
            stored.write({**saved, "a": np.arange(n).astype(dtype)})
            actual = stored.read()
            assert actual["a"].dtype == dtype and actual["a"].tolist() == [*range(n)]
            assert all(np.array_equal(actual[name], x) and actual[name].dtype == x.dtype for name, x in saved.items())
            actual["a"][0] = 7  # of a copy, not of the file
            assert stored.read()["a"][0] == 0


def test_two_networks_in_one_folder(tmp_path):
    """Each has its files, and they are used again when it is gone; those of another process are left alone."""
    make = lambda: offload([lambda W, x: x @ W], mean_error, OPTIMIZERS["adam"], MESH, tmp_path)  # noqa: E731
    batch = np.ones((4, 8)), np.zeros((4, 8))
    first, second = make(), make()
    networks = [first[0]([np.eye(8)]), second[0]([2 * np.eye(8)]), first[0]([3 * np.eye(8)])]
    for k, (params, states) in enumerate(networks, 1):
        np.testing.assert_array_equal(params[0].read(), k * np.eye(8))
        assert not np.asarray(states[0].read()[0].mu).any()
    steps = first[1], second[1], first[1]
    assert [float(step(*network, batch)) for step, network in zip(steps, networks)] == [1, 4, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-0-2", "rank-0-3"]
    del params, states
    networks.pop(0)
    again = make()[0]([np.eye(8)])
    assert len([*tmp_path.iterdir()]) == 3
    program = "import sys, fcntl, os; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "rank-0")], capture_output=True, text=True)
    assert "BlockingIOError" in run.stderr
    np.testing.assert_array_equal(again[0][0].read(), np.eye(8))


@pytest.mark.parametrize("stage, folder", [(2, "files"), (3, "files"), (3, None)])
def test_what_is_stored_is_a_copy(stage, folder, tmp_path):
    """Neither what was given to `init` nor what `read` returns is what the next step takes."""
    where = folder and tmp_path / folder
    init, step = offload([lambda W, x: x @ W], mean_error, OPTIMIZERS["momentum"], MESH, where, stage)
    W, batch = np.eye(8), (np.ones((4, 8)), np.zeros((4, 8)))
    params, states = init([W])
    expected = spmd.gather((params[0].read(), states[0].read()))
    W[...] = 7
    for stored in (*params, *states):
        for x in tree.leaves(stored.read()):
            block = x if isinstance(x, np.ndarray) else x.data
            block.flags.writeable and block.fill(7)
    for x, y in zip(*map(tree.leaves, (spmd.gather((params[0].read(), states[0].read())), expected)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert float(step(params, states, batch)) == 1
