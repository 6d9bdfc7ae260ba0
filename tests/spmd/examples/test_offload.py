"""Networks larger than memory: what a process holds; `offload.md` shows when it reads and writes."""

import re
import sys

import pytest

from tests.checks.launch import mpiexec


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Each further thread of BLAS takes memory of its own, which no limit here allows for."""
    for name in ("OMP", "OPENBLAS", "MKL"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")


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
