"""Runs that are killed at any moment and started again: bit for bit the same. What is damaged or another's is said."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spmd
from minidiff import tree
from spmd import P
from spmd.examples import training
from spmd.examples.checkpoints import CheckpointError, Checkpoints, _checksum
from tests.runs import EXAMPLES, Killed, assert_same_run, train, train_until
from tests.tree_classes import CLASSES, parts

# ---------------------------------------------------------------- killed


class Killer:
    """Dies in the so manieth operation on files: before it, after it, or, where it is many, between."""

    def __init__(self, moment, monkeypatch):
        self.moment, self.passed = moment, 0
        for owner, name in ((os, "replace"), (Path, "unlink"), (shutil, "rmtree"), (np, "savez")):
            monkeypatch.setattr(owner, name, self.deadly(name, getattr(owner, name)))
        monkeypatch.setattr(os, "fsync", lambda file: None)

    def deadly(self, name, act):
        def acting(*args, **kwargs):
            self.survive()
            for file in sorted(args[0].iterdir()) if name == "rmtree" else ():
                os.remove(file)
                self.survive()
            act(*args, **kwargs)
            self.survive()

        return acting

    def survive(self):
        self.passed += 1
        if self.passed == self.moment:
            raise Killed


def test_what_is_there_is_one_step_at_any_moment(tmp_path, monkeypatch):
    """Steps are saved, of which all numbers are the same, until the killer comes: the last is there, or the next."""
    mesh = EXAMPLES["fully_sharded"].mesh(2, "simulated")
    like = {"split": spmd.distribute(np.zeros(4), mesh, P("batch")), "alike": np.zeros(3)}

    def save(path, steps):
        for step in steps:
            Checkpoints(path, mesh, {}).save(step, {name: x + step for name, x in like.items()}, {"step": step})
            saved.append(step)

    def load(path):
        arrays, notes = Checkpoints(path, mesh, {}).load(like) or ({}, {"step": 0})
        assert {float(x) for array in arrays.values() for x in np.asarray(array)} <= {notes["step"]}
        return notes["step"]

    moment, killed = 0, True
    while killed:
        moment, saved, path = moment + 1, [0], tmp_path / str(moment)
        with monkeypatch.context() as patch:
            killer = Killer(moment, patch)
            with contextlib.suppress(Killed):
                save(path, range(1, 4))
        killed = killer.passed == moment
        assert load(path) in (saved[-1], saved[-1] + 1)
        save(path, range(load(path) + 1, 6))
        assert load(path) == 5
        assert sorted(f.name for f in path.iterdir()) == ["step-00000004", "step-00000005"]
    assert moment > 30


@pytest.mark.parametrize("moment", [1, 15, 28, 41])
def test_killed_while_saving(tmp_path, monkeypatch, moment):
    with monkeypatch.context() as patch:
        Killer(moment, patch)
        with pytest.raises(Killed):
            train("fully_sharded", 2, tmp_path, "simulated")
    run = train("fully_sharded", 2, tmp_path, "simulated")
    assert_same_run(run, train("fully_sharded", 2, backend="simulated"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_killed_between_steps(tmp_path, name):
    ranks, jit = 4, name == "tensor_parallel"
    for last in (1, 5):
        train_until(last, name, ranks, tmp_path, "simulated", jit=jit)
    run = train(name, ranks, tmp_path, "simulated", jit=jit)
    assert_same_run(run, train(name, ranks, backend="simulated", jit=jit))


def test_parameters_of_every_class_of_trees(tmp_path):
    """Arrays are named by where they stand in the tree, whatever its classes are."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    split = spmd.distribute(np.arange(4.0), mesh, P("i"))
    params = {name: make(split, np.ones(2)) for name, (make, _) in CLASSES.items()}
    arrays, structure = tree.flatten_with_paths(params, "params")
    Checkpoints(tmp_path, mesh, {}).save(1, dict(arrays), {})
    found, _ = Checkpoints(tmp_path, mesh, {}).load(dict(arrays))
    again = tree.unflatten(structure, found.values())
    for name, (_, cls) in CLASSES.items():
        w, b = parts(again[name])
        assert type(again[name]) is cls and w.spec == P("i")
        assert w.gather().tolist() == [0.0, 1.0, 2.0, 3.0] and b.tolist() == [1.0, 1.0]


def test_a_run_that_is_asked_for_more_steps_goes_on(tmp_path):
    train("data_parallel", 2, tmp_path, "simulated", steps=3)
    before = train("data_parallel", 2, tmp_path, "simulated", steps=3)  # nothing is left to do
    assert_same_run(before, train("data_parallel", 2, backend="simulated", steps=3))
    after = train("data_parallel", 2, tmp_path, "simulated", steps=5, every=3)
    assert_same_run(after, train("data_parallel", 2, backend="simulated", steps=5))


# ---------------------------------------------------------------- damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    train("fully_sharded", 2, path, "simulated", steps=4)
    return path


def cut(data, rng):
    return data[: rng.integers(len(data))]


def changed(data, rng):
    """One bit of it is another."""
    at = rng.integers(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :]


@pytest.mark.parametrize("file", ["complete.json", "whole.npz", "rank-00000.npz"])
@pytest.mark.parametrize("damage", [cut, changed])
def test_damaged(tmp_path, saved, file, damage):
    """It is said, and what to do; or the damage is where nothing depends on it, and what is loaded is right."""
    expected = train("fully_sharded", 2, backend="simulated", steps=4)
    path, rng, said = shutil.copytree(saved, tmp_path / "damaged"), np.random.default_rng(0), 0
    folder, data = path / "step-00000004", (saved / "step-00000004" / file).read_bytes()
    for _ in range(40):
        (folder / file).write_bytes(damage(data, rng))
        try:
            assert_same_run(train("fully_sharded", 2, path, "simulated", steps=4), expected)
        except CheckpointError as error:
            said += 1
            damaged = rf"{folder}\S* is damaged \(.*\): remove {folder} to go on from step 2"
            assert re.match(rf"{damaged}$|{folder / file} was made by a run with .*; this one has", str(error), re.S)
    assert said == 40 if damage is cut else said > 30
    shutil.rmtree(folder)
    assert_same_run(train("fully_sharded", 2, path, "simulated", steps=4), expected)


@pytest.mark.parametrize("file", ["whole.npz", "rank-00000.npz"])
def test_a_file_that_is_gone(tmp_path, saved, file):
    path = shutil.copytree(saved, tmp_path / "damaged")
    (path / "step-00000004" / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file} is damaged \(FileNotFoundError: .*to go on from step 2"):
        train("fully_sharded", 2, path, "simulated", steps=4)


def test_the_only_step_is_damaged(tmp_path):
    train("fully_sharded", 2, tmp_path, "simulated", steps=1)
    (tmp_path / "step-00000001" / "whole.npz").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-00000001 to start from the beginning"):
        train("fully_sharded", 2, tmp_path, "simulated", steps=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from(["mesh", "step", "checksums", "rank"]), x),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_complete_json_that_says_something_else(tmp_path_factory, saved, data):
    """Any JSON, or any change of what is there, is an error that names the file."""
    path = shutil.copytree(saved, tmp_path_factory.mktemp("tampered") / "run")
    file = path / "step-00000004" / "complete.json"
    told = json.loads(file.read_text())
    other = data.draw(JSON)
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(told)))
        other = {k: v for k, v in told.items() if k != key} | ({key: other} if data.draw(st.booleans()) else {})
    file.write_text(json.dumps(other))
    if other != told:
        said = rf"{file.parent}\S* (is damaged \(\w+: .*\): remove .* to go on from step 2|was made by a run with )"
        with pytest.raises(CheckpointError, match=said):
            train("fully_sharded", 2, path, "simulated", steps=4)


def rewritten(file, honest, **changes):
    """Write a file of arrays anew with some of them changed (None: left out), and with `honest` checksums."""
    with np.load(file) as archive:
        found = dict(archive)
    found = {k: changes.get(k, x) for k, x in found.items() if k not in changes or changes[k] is not None}
    if honest:
        complete = json.loads((file.parent / "complete.json").read_text())
        complete["checksums"][file.name] = _checksum(found)
        (file.parent / "complete.json").write_text(json.dumps(complete))
    np.savez(file, **found)


NOTES = {"a list": "[]", "null": "null", "no JSON": "{", "none": None, "some": '{"other": []}', "an array": np.ones(3)}


@pytest.mark.parametrize("honest", [False, True])
@pytest.mark.parametrize("what", NOTES)
def test_notes_that_are_not_what_was_written(tmp_path, saved, what, honest):
    path = shutil.copytree(saved, tmp_path / "run")
    rewritten(path / "step-00000004" / "whole.npz", honest, notes=NOTES[what])
    with pytest.raises(CheckpointError, match=r"step-00000004\S* is damaged \(\w+: .*\): remove .* from step 2"):
        train("fully_sharded", 2, path, "simulated", steps=4)


@pytest.mark.parametrize("file", ["whole.npz", "rank-00000.npz"])
def test_arrays_that_are_not_what_was_written(tmp_path, file):
    """Of the right types, in a file that nothing else is wrong with: also where it is that of another run."""
    mesh = EXAMPLES["fully_sharded"].mesh(2, "simulated")
    arrays = {"split": spmd.distribute(np.zeros(4), mesh, P("batch")), "alike": np.zeros(3)}
    one, other = (Checkpoints(tmp_path / name, mesh, {}) for name in ("one", "other"))
    one.save(1, arrays, {})
    other.save(1, {name: x + 1.0 for name, x in arrays.items()}, {})
    mine = tmp_path / "one" / "step-00000001" / file
    shutil.copy(tmp_path / "other" / "step-00000001" / file, mine)
    with pytest.raises(CheckpointError, match=rf"is damaged \(ValueError: {file} is not the file"):
        one.load(arrays)
    one.save(1, arrays, {})
    name = "split" if "rank" in file else "alike"
    rewritten(mine, False, **{name: np.load(mine)[name] + 1.0})
    with pytest.raises(CheckpointError, match=rf"is damaged \(ValueError: {file} is not the file"):
        one.load(arrays)


# ---------------------------------------------------------------- two runs in one place

HOLDER = """
import sys, spmd
from spmd.examples.checkpoints import Checkpoints
run = Checkpoints(sys.argv[1], spmd.make_mesh((2,), ("i",), backend="simulated"), {})
run.prepare()
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_runs_that_save_in_one_place(tmp_path):
    """The second says so, whichever it is; one that was killed is no obstacle."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        said = rf"{tmp_path}: another run is saving there \(process {first.pid} on .*\)\. Wait until it has ended"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=said):
                train("data_parallel", 2, tmp_path, "simulated", steps=1)
        assert not (tmp_path / "step-00000001").exists()
        second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert second.returncode != 0 and f"another run is saving there (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "lock").read_text().startswith(f"process {first.pid} on ")
    train("data_parallel", 2, tmp_path, "simulated", steps=1)
    train("data_parallel", 2, tmp_path, "simulated", steps=1)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    last = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (last.returncode, last.stdout) == (0, "ready\n")  # this process has ended its runs


# ---------------------------------------------------------------- another's

OTHERS = {
    "seed": ({"seed": 1}, "seed = 0; this one has seed = 1"),
    "jit": ({"jit": True}, "jit = False; this one has jit = True"),
    "ranks": ({"ranks": 4}, "mesh = {'batch': 2}; this one has mesh = {'batch': 4}"),
    "example": (
        {"name": "data_parallel"},
        "example = fully_sharded, layers = [64, 16, 16]; this one has example = data_parallel, layers = [64, 16, 10]",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_of_another_run(saved, what):
    options, message = OTHERS[what]
    with pytest.raises(CheckpointError, match=re.escape(f"was made by a run with {message}. Use the same options")):
        train(**{"name": "fully_sharded", "ranks": 2, "path": saved, "backend": "simulated", "steps": 4, **options})


def test_fewer_steps_than_there_are(saved):
    with pytest.raises(CheckpointError, match=r"has made 4 steps already, more than 3: ask for at least as many"):
        train("fully_sharded", 2, saved, "simulated", steps=3)


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    """It is said before there is anything to save."""
    monkeypatch.setattr(training.Run, "advance", None)
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "in it", "Not a directory")):
        with pytest.raises(CheckpointError, match=rf"it cannot be written: .*{why}"):
            train("fully_sharded", 2, path, "simulated", steps=2)
