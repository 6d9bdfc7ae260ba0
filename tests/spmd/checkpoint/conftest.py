"""A run that has saved two steps."""

import shutil

import pytest

from spmd.checkpoint import Checkpoints
from tests.checks.meshes import mesh
from tests.checks.saved_trees import state


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """Return a directory with the steps 2 and 4; no test changes it."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpoints(path, mesh(2, 2, names="xy")) as saved:
        for step in (2, 4):
            saved.save(step, state(float(step)), {"losses": [0.5, 0.25]})
    return path


@pytest.fixture
def run(tmp_path, saved_run):
    """Return a copy of it."""
    return shutil.copytree(saved_run, tmp_path / "run")
