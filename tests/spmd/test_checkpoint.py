"""Checkpoints: loaded as they were saved, on any mesh; what is damaged, missing or another's is said."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from spmd import P
from spmd.checkpoint import CheckpointError, Checkpoints, files, latest, load, save, saving
from spmd.checkpoint.__main__ import main
from tests import PATIENCE
from tests.checks.samples import NOT_PLAIN, each
from tests.checks.saved_trees import MESHES, SPECS, assert_like, tree_on
from tests.checks.tree_classes import CLASSES

MESH = spmd.make_mesh((2, 2), ("x", "y"), backend="simulated")


def state(x=0.0):
    return {"w": spmd.distribute(np.arange(8.0).reshape(4, 2) + x, MESH, P("x")), "b": np.full(3, x), "n": 3}


# ---------------------------------------------------------------- saved and loaded


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_loaded_on_any_mesh(tmp_path_factory, data):
    """A tree of every kind of leaf, saved and loaded with shardings that are drawn."""
    path, seed = tmp_path_factory.mktemp("any"), data.draw(st.integers(0, 99))
    saved, loaded = (
        tree_on(
            spmd.make_mesh(data.draw(st.sampled_from(MESHES)), ("x", "y"), backend="simulated"),
            np.random.default_rng(seed),
            data.draw(st.permutations(SPECS)),
        )
        for _ in range(2)
    )
    save(path, 1, saved)
    assert_like(load(path, loaded, verify=data.draw(st.booleans()))[0], loaded)
    types = md.tree.map(lambda x: x.type if isinstance(x, spmd.ShardedArray) else x, loaded)
    assert_like(load(path, types)[0], loaded)


def test_trees_of_every_class(tmp_path):
    params = {name: make(state()["w"], np.ones(2)) for name, (make, _) in CLASSES.items()}
    save(tmp_path, 1, params)
    assert_like(load(tmp_path, params)[0], params)


def test_parts_and_notes(tmp_path):
    """A part of a tree, only the notes, all by their paths; and files that NumPy reads."""
    notes = {"losses": [0.1, float("inf"), 1e-300], "deep": {"a": None}}
    save(tmp_path, 7, state(), notes)
    assert load(tmp_path, {"n": 0}) == ({"n": 3}, notes) and load(tmp_path, {}) == ({}, notes)
    actual, _ = load(tmp_path)
    assert set(actual) == {"['n']", "['b']", "['w']"}
    assert actual["['w']"].tolist() == state()["w"].gather().tolist()
    with np.load(tmp_path / "step-00000007" / "rank-00000.npz") as archive:
        assert archive["['w'][2:4, 0:2]"].tolist() == [[4, 5], [6, 7]] and len(archive.files) == 3


def test_removed_by_its_run_while_it_is_read(tmp_path):
    save(tmp_path, 1, state())
    saved = files.Saved(tmp_path, 1)
    shutil.rmtree(saved.folder)
    with pytest.raises(CheckpointError, match="step-00000001 was removed while it was read: load the last step again"):
        saved.read("['b']", (0,), (3,))


def test_a_slice_needs_only_the_blocks_that_overlap_it(tmp_path):
    """Another block may be damaged; the files are mapped, not read."""
    save(tmp_path, 1, state())
    saved = files.Saved(tmp_path, 1)
    assert saved.read("['w']", (0, 1), (2, 1)).tolist() == [[1], [3]]
    assert len(saved._intact) == 1 and all(isinstance(x, np.memmap) for x in saved._maps.values())


@pytest.mark.parametrize("leaf", [np.random.default_rng(0), state()["w"].type, {1, 2}], ids=type)
def test_leaves_that_are_not_saved(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"checkpoint.save: \['x'\].* which cannot be saved: make it a number.*\.state"):
        save(tmp_path, 1, {"x": leaf})
    assert latest(tmp_path) is None


def test_values_that_are_not_saved(tmp_path):
    parts = spmd.distribute(np.zeros(4), MESH, P(unreduced={"x"}))
    with pytest.raises(TypeError, match=r"\['x'\] is split as P\(unreduced={'x'}\), partial sums: .*reshard\(x, P\("):
        save(tmp_path, 1, {"x": parts})
    with pytest.raises(TypeError, match=r"\['x'\] is traced: save outside of jit"):
        md.jit(lambda x: save(tmp_path, 1, {"x": x}))(1.0)
    for notes in ({"x": np.ones(2)}, [1]):
        with pytest.raises(TypeError, match=r"notes (are not JSON|must be a dict of JSON)"):
            save(tmp_path, 1, {}, notes)


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
    assert sorted(f.name for f in tmp_path.iterdir()) == [".checkpoints.lock", "step-00000004", "step-00000005"]
    assert sorted(f.name for f in (tmp_path / "step-00000005").iterdir()) == ["index.json", "rank-00000.npz"]


def test_finished_at_exit_and_after_an_error(tmp_path):
    code = (
        "import sys, numpy, spmd; from spmd.checkpoint import Checkpoints\n"
        "mesh = spmd.make_mesh((2,), ('i',), backend='simulated')\n"
        "Checkpoints(sys.argv[1], mesh).save(1, {'w': numpy.ones(1000000)})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert latest(tmp_path) == 1
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, MESH) as saved:
        saved.save(2, state(2.0))
        raise ZeroDivisionError
    assert_like(load(tmp_path, state())[0], state(2.0))


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


def test_nothing_is_overwritten(tmp_path):
    save(tmp_path, 4, state(4.0))
    for step in (4, 3):
        with pytest.raises(
            CheckpointError, match=f"has step 4 already, so step {step} cannot be saved: steps increase"
        ):
            save(tmp_path, step, state(0.0))
    assert_like(load(tmp_path, state())[0], state(4.0))


# ---------------------------------------------------------------- killed


def test_killed_at_any_moment():
    """By SIGKILL, at operations on files and between: what was complete is there, bit for bit."""
    kills = os.environ.get("CHECKPOINT_KILLS", "300")
    command = [sys.executable, "-m", "tests.checks.kills", kills]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    at_operations, at_times, steps = map(int, re.findall(r"\d+(?=[,;])", done.stdout))
    assert at_operations + at_times == int(kills) and min(at_operations, at_times, steps) > int(kills) // 5


def test_one_rank_killed():
    command = [sys.executable, "-m", "tests.checks.kills", "6", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("killed at operations: 6, ")


# ---------------------------------------------------------------- damaged


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept")
    with Checkpoints(path, MESH) as saved:
        for step in (2, 4):
            saved.save(step, state(float(step)), {"losses": [0.5, 0.25]})
    return path


def contents(path):
    return {f.relative_to(path): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def cut(data, rng):
    return data[: rng.integers(len(data))]


def flipped(data, rng):
    """One bit of it is another."""
    at = rng.integers(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["index.json", "rank-00000.npz"])
@pytest.mark.parametrize("damage", [cut, flipped])
def test_damaged(tmp_path, saved_run, name, damage):
    """The error names the file and the array; or nothing depends on the damage, and what is loaded is right."""
    path, rng, output = shutil.copytree(saved_run, tmp_path / "damaged"), np.random.default_rng(0), 0
    folder, data = path / "step-00000004", (saved_run / "step-00000004" / name).read_bytes()
    for _ in range(100):
        (folder / name).write_bytes(damage(data, rng))
        before = contents(path)
        try:
            actual, notes = load(path, state())
        except CheckpointError as error:
            output += 1
            label = {"index.json": "it|its", "rank-00000.npz": r".*block \[.*\] of array \['\w'\].*"}[name]
            advice = rf"is damaged: ({label}) .*\. Remove {folder} to continue from step 2"
            version = f"version .* of the format, expected {files.VERSION}: "
            assert re.match(rf"{folder / name} ({advice}$|has {version})", str(error)), error
            assert main([str(path)]) == 1
        else:
            assert_like(actual, state(4.0))
            assert notes == {"losses": [0.5, 0.25]}
        assert contents(path) == before
    assert output == 100 if damage is cut else output > 30
    assert_like(load(path, state(), step=2)[0], state(2.0))


def test_missing(tmp_path, saved_run):
    path = shutil.copytree(saved_run, tmp_path / "damaged")
    folder = path / "step-00000004"
    (folder / "rank-00000.npz").unlink()
    output = r"rank-00000.npz is damaged: block \[0:3\] of array \['b'\] cannot be read \(FileNotFoundError"
    with pytest.raises(CheckpointError, match=output):
        load(path, state())
    (folder / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no complete step 4; complete steps: 2"):
        load(path, state(), step=4)
    assert_like(load(path, state())[0], state(2.0))
    with pytest.raises(CheckpointError, match="nowhere has no complete step: there is nothing to load"):
        load(path / "nowhere", state())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from(["version", "leaves", "checksum"]), x),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_index_that_says_something_else(tmp_path_factory, saved_run, data):
    """Any JSON, or any change of what is there, is an error that names the file."""
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("tampered") / "run")
    file = path / "step-00000004" / "index.json"
    text = json.loads(file.read_text())
    other = data.draw(JSON)
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(text)))
        other = {k: v for k, v in text.items() if k != key} | ({key: other} if data.draw(st.booleans()) else {})
    file.write_text(json.dumps(other))
    if other != text:
        output = rf"{file} (is damaged: .*\. Remove .* to continue .* 2|has version .*, expected {files.VERSION})"
        with pytest.raises(CheckpointError, match=output):
            load(path, state())


def test_an_index_without_a_block(tmp_path, saved_run):
    """With a checksum that is right: no number is made up."""
    path = shutil.copytree(saved_run, tmp_path / "run")
    folder = path / "step-00000004"
    text = json.loads((folder / "index.json").read_text())
    text["leaves"]["['w']"]["blocks"].pop()
    files.write_index(folder, {k: v for k, v in text.items() if k != "checksum"})
    with pytest.raises(CheckpointError, match=r"blocks of array \['w'\] cover 0 of the 4 numbers of \[2:4, 0:2\]"):
        load(path, state())


LIKE = {
    "no such leaf": ({"v": np.ones(3)}, r"has no array \['v'\]; it has \['b'\], \['n'\], \['w'\]\. Did"),
    "a shape": ({"b": np.ones(4)}, r"\['b'\] is float64\[3\], expected float64\[4\]"),
    "a dtype": ({"w": np.ones((4, 2), "f4")}, r"\['w'\] is float64\[4, 2\], expected float32\[4, 2\]"),
    "an array": ({"n": np.ones(2)}, r"\['n'\] is a Python int, expected float64\[2\]"),
    "a number": ({"b": 1.0}, r"\['b'\] is float64\[3\], expected a Python float"),
    "a type": ({"n": True}, r"\['n'\] is a Python int, expected a Python bool"),
}


@pytest.mark.parametrize("label", LIKE)
def test_what_is_not_like_the_saved_tree(saved_run, label):
    like, output = LIKE[label]
    with pytest.raises(CheckpointError, match=rf"step-00000004/index.json:? {output}"):
        load(saved_run, like)


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
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        output = rf"{tmp_path}: another run is saving there \(process {first.pid} on .*\)\. Wait until it has ended"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=output):
                save(tmp_path, 2, state())
        assert_like(load(tmp_path, state())[0], state())
        second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert second.returncode != 0 and f"another run is saving there (process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGKILL)
    save(tmp_path, 2, state())
    last = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (last.returncode, last.stdout) == (0, "ready\n")  # this process has closed it


@pytest.mark.parametrize("keep", [0, -1])
def test_arguments(tmp_path, keep):
    for step in (keep - 1, 0.5, "1"):
        with pytest.raises(ValueError, match=rf"step must be an integer of at least 0; got {step!r}"):
            save(tmp_path, step, state())
    save(tmp_path, np.int32(1 - keep), state())
    assert_like(load(tmp_path, state(), step=1 - keep)[0], state())
    with pytest.raises(ValueError, match=f"keep must be a number of steps, at least 1, or None; got {keep}"):
        Checkpoints(tmp_path, MESH, keep=keep)
    with pytest.raises(CheckpointError, match="the directory to save to is '': name one"):
        Checkpoints(" ", MESH)


# ---------------------------------------------------------------- python -m spmd.checkpoint


def test_listing(tmp_path, saved_run, capsys):
    path = shutil.copytree(saved_run, tmp_path / "run")
    (path / "step-00000006").mkdir()
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "step 4, saved by simulated ranks; notes: losses" in out and "step 6 is incomplete" in out
    assert re.search(r"^\['w'\] +<f8 +\(4, 2\) +P\('x'\) +x: 2, y: 2 +2 +64$", out, re.M)
    assert re.search(r"^\['n'\] +int +3$", out, re.M) and re.search(r"^ +3 +88$", out, re.M)
    file = path / "step-00000004" / "rank-00000.npz"
    file.write_bytes(file.read_bytes()[:-1])
    assert [main([str(path / f"step-0000000{step}")]) for step in (2, 4)] == [0, 1]
    assert capsys.readouterr().out.count("rank-00000.npz is damaged: it has ") == 3
    assert main([str(tmp_path)]) == 1 and "has no complete step" in capsys.readouterr().out


def test_bfloat16_and_numbers_that_a_step_has_made_numpys(tmp_path):
    x = np.arange(8.0).astype(ml_dtypes.bfloat16)
    like = {"w": spmd.distribute(x, MESH, P("x")), "whole": x, "scale": 2.0}
    save(tmp_path, 1, {**like, "scale": np.float64(3.0)})
    actual, _ = load(tmp_path, like)
    assert actual["w"].dtype == actual["whole"].dtype == x.dtype and actual["scale"] == 3.0
    assert (actual["w"].gather() == x).all()
    with pytest.raises(CheckpointError, match=r"\['scale'\] is float64\[\], expected a Python int"):
        load(tmp_path, {"scale": 2})


@each("kind", ["masked", "matrix", "objects", "structured", "records"])
def test_arrays_that_would_lose_something_are_not_saved(tmp_path, kind):
    x, message = NOT_PLAIN[kind]
    for leaf in (x, x[:1]):
        with pytest.raises(TypeError, match=rf"(?s)checkpoint.save: \['w'\].*({message}|cannot be saved)"):
            save(tmp_path, 1, {"w": leaf})
    assert latest(tmp_path) is None
