"""Runs of the examples that are killed and started again: bit for bit the same; and what another run is refused."""

import shutil

import numpy as np
import pytest

from spmd.checkpoint import CheckpointError
from spmd.examples import digits
from tests.programs.examples import assert_same_run, train, train_until


@pytest.mark.parametrize("name, jit", [("tensor_parallel", True), ("pipeline", False), ("fsdp_tp", False)])
def test_killed_between_steps(tmp_path, name, jit):
    """Then taken up again, twice; and by half of the ranks."""
    for last in (1, 5):
        train_until(last, name, 4, tmp_path, "simulated", jit=jit)
    half = train(name, 2, shutil.copytree(tmp_path, tmp_path / "copy"), "simulated", jit=jit)
    run = train(name, 4, tmp_path, "simulated", jit=jit)
    whole = train(name, 4, backend="simulated", jit=jit)
    assert_same_run(run, whole)
    np.testing.assert_allclose(half.losses, whole.losses, rtol=0, atol=1e-10)


def test_a_run_that_is_asked_for_more_steps_goes_on(tmp_path):
    whole = train("data_parallel", 2, backend="simulated", steps=5)
    train("data_parallel", 2, tmp_path, "simulated", steps=3)
    before = train("data_parallel", 2, tmp_path, "simulated", steps=3)  # nothing is left to do
    assert before.losses == whole.losses[:3]
    assert_same_run(train("data_parallel", 2, tmp_path, "simulated", steps=5, every=3), whole)
    assert sorted(f.name for f in tmp_path.iterdir()) == [".checkpoints.lock", "step-00000003", "step-00000005"]


def test_what_does_not_go_on(tmp_path, monkeypatch):
    """Another run's steps, fewer steps than there are, a step that is damaged, and a place that cannot be written."""
    run = {"name": "fully_sharded", "ranks": 2, "path": tmp_path / "saved", "backend": "simulated", "steps": 4}
    whole = train(**run)
    for other, message in (
        ({"seed": 1}, "seed = 0; this one has seed = 1"),
        ({"jit": True}, "jit = False; this one has jit = True"),
        ({"name": "data_parallel"}, "example = fully_sharded, layers = "),
        ({"steps": 3}, "has made 4 steps already, more than 3"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(**{**run, **other})
    folder = tmp_path / "saved" / "step-00000004"
    (folder / "rank-00000.npz").unlink()
    with pytest.raises(CheckpointError, match=rf"Remove {folder} to continue from step 2"):
        train(**run)
    shutil.rmtree(folder)
    assert_same_run(train(**run), whole)
    monkeypatch.setattr(digits.DigitsRun, "advance", None)  # it is said before there is anything to save
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "in it", " "):
        with pytest.raises(CheckpointError):
            train(**{**run, "path": path})
