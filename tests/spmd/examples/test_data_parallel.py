"""The data-parallel example: it learns, shows what it says it shows, and does the same on any number of ranks."""

import re
import subprocess
import sys

import numpy as np
import pytest

from spmd.examples import digits
from spmd.examples.data_parallel import EXAMPLE
from tests import PATIENCE
from tests.checks.launch import mpiexec

STEPS = 20


def simulated(ranks, **options):
    mesh = EXAMPLE.mesh(ranks, "simulated")
    return digits.train(EXAMPLE, mesh, **{"steps": STEPS, **options})


@pytest.fixture(scope="module")
def reference():
    return simulated(1)


def test_it_learns():
    run = simulated(4, steps=150)
    assert digits.accuracy(EXAMPLE, run) >= 0.95
    assert np.mean(run.losses[-10:]) < 0.1 * run.losses[0]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_losses_do_not_depend_on_ranks(ranks, reference):
    np.testing.assert_allclose(simulated(ranks).losses, reference.losses, rtol=0, atol=1e-10)


def test_seeds_differ():
    assert simulated(1, steps=2).losses != simulated(1, steps=2, seed=1).losses


def shown(text):
    """The program shows the types, that it sends 1 + 1 all-reduces where 2 + 6 were sent without, and the outcome."""
    assert re.search(r"f64\[64,128\]\S* = psum\(", text)
    assert re.search(r"^total +2 +8 ", text, re.M)
    return float(re.search(r"held-out accuracy ([\d.]+)", text).group(1))


def test_the_program_on_mpi_ranks():
    run = mpiexec(4, "-m", "spmd.examples.data_parallel", "--steps", "100")
    assert run.returncode == 0, run.stderr
    assert "Mesh(batch: 4; 4 ranks, mpi)" in run.stdout
    assert shown(run.stdout) >= 0.95
    assert "100/100" in run.stderr  # the progress bar


def test_the_program_without_a_launcher():
    command = [sys.executable, "-m", "spmd.examples.data_parallel", "--steps", "5", "--ranks", "2", "--seed", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    assert "No MPI launcher: 2 ranks are simulated" in run.stdout
    shown(run.stdout)
