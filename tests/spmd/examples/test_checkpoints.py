"""Runs of the examples that are killed and started again: bit for bit the same; and what another run is refused."""

import re
import shutil

import numpy as np
import pytest

from spmd.checkpoint import CheckpointError
from spmd.examples import digits
from tests.programs.examples import EXAMPLES, assert_same_run, train, train_until


@pytest.mark.parametrize("name", EXAMPLES)
def test_killed_between_steps(tmp_path, name):
    ranks, jit = 4, name == "tensor_parallel"
    for last in (1, 5):
        train_until(last, name, ranks, tmp_path, "simulated", jit=jit)
    run = train(name, ranks, tmp_path, "simulated", jit=jit)
    assert_same_run(run, train(name, ranks, backend="simulated", jit=jit))


@pytest.mark.parametrize("name", EXAMPLES)
def test_on_another_number_of_ranks(tmp_path, name):
    train_until(5, name, 4, tmp_path, "simulated")
    run = train(name, 2, tmp_path, "simulated")
    np.testing.assert_allclose(run.losses, train(name, 2, backend="simulated").losses, rtol=0, atol=1e-10)


def test_a_run_that_is_asked_for_more_steps_goes_on(tmp_path):
    train("data_parallel", 2, tmp_path, "simulated", steps=3)
    before = train("data_parallel", 2, tmp_path, "simulated", steps=3)  # nothing is left to do
    assert_same_run(before, train("data_parallel", 2, backend="simulated", steps=3))
    after = train("data_parallel", 2, tmp_path, "simulated", steps=5, every=3)
    assert_same_run(after, train("data_parallel", 2, backend="simulated", steps=5))
    assert sorted(f.name for f in tmp_path.iterdir()) == [".checkpoints.lock", "step-00000003", "step-00000005"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    train("fully_sharded", 2, path, "simulated", steps=4)
    return path


def test_the_last_step_is_damaged(tmp_path, saved):
    path = shutil.copytree(saved, tmp_path / "damaged")
    folder = path / "step-00000004"
    (folder / "rank-00000.npz").unlink()
    with pytest.raises(CheckpointError, match=rf"npz is damaged: .*\. Remove {folder} to continue from step 2"):
        train("fully_sharded", 2, path, "simulated", steps=4)
    shutil.rmtree(folder)
    run = train("fully_sharded", 2, path, "simulated", steps=4)
    assert_same_run(run, train("fully_sharded", 2, backend="simulated", steps=4))


OTHERS = {
    "seed": ({"seed": 1}, "seed = 0; this one has seed = 1"),
    "jit": ({"jit": True}, "jit = False; this one has jit = True"),
    "example": (
        {"name": "data_parallel"},
        "example = fully_sharded, layers = [64, 16, 16]; this one has example = data_parallel, layers = [64, 16, 10]",
    ),
}


@pytest.mark.parametrize("label", OTHERS)
def test_of_another_run(saved, label):
    options, message = OTHERS[label]
    with pytest.raises(CheckpointError, match=re.escape(f"was made by a run with {message}. Use the same options")):
        train(**{"name": "fully_sharded", "ranks": 2, "path": saved, "backend": "simulated", "steps": 4, **options})


def test_fewer_steps_than_there_are(saved):
    with pytest.raises(CheckpointError, match=r"has made 4 steps already, more than 3: ask for at least that many"):
        train("fully_sharded", 2, saved, "simulated", steps=3)


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    """It is said before there is anything to save."""
    monkeypatch.setattr(digits.DigitsRun, "advance", None)
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "in it", "Not a directory")):
        with pytest.raises(CheckpointError, match=rf"it cannot be written: .*{why}"):
            train("fully_sharded", 2, path, "simulated", steps=2)
