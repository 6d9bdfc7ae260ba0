"""Checkpoints in a hostile place: a full disk, others' files and links, forged indexes, a cell that is run twice."""

import gc
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import spmd
from spmd import P
from spmd.checkpoint import CheckpointError, Checkpoints, files, latest, load, save
from spmd.checkpoint.__main__ import main
from spmd.checkpoint.files import OWN, STEP
from tests import PATIENCE
from tests.checks.saved_trees import assert_like

MESH = spmd.make_mesh((2, 2), ("x", "y"), backend="simulated")
LOCK = ".checkpoints.lock"


def state(x=0.0):
    split = spmd.distribute(np.arange(8.0).reshape(4, 2) + x, MESH, P("x"))
    return {
        "w": split,
        "b": np.full(3, x),
        "n": 3,
        "z": 1 - 2j,
        "name": "é",
        "h": np.float32(x),
        "none": np.zeros((0, 2)),
    }


# ---------------------------------------------------------------- the lock


def test_two_in_one_process(tmp_path):
    """A notebook's cell that runs twice: the second says what to do, and leaves the first one's lock alone."""
    first = Checkpoints(tmp_path, MESH)
    for _ in range(2):
        message = rf"{tmp_path}: this process is saving there already.*{os.path.basename(__file__)}.*saved\.close\(\)"
        with pytest.raises(CheckpointError, match=message):
            Checkpoints(tmp_path / ".", MESH)
    with pytest.raises(CheckpointError, match="this process is saving there already"):
        save(tmp_path, 1, state())
    first.save(1, state(1.0))
    first.close()
    save(tmp_path, 2, state(2.0))
    assert_like(load(tmp_path, state())[0], state(2.0))


def test_dropped_without_close(tmp_path):
    """One that nobody holds any longer is no obstacle."""
    saved = Checkpoints(tmp_path, MESH)
    saved.save(1, state())
    saved.wait()
    saved._thread.shutdown()  # its thread lets go of it
    del saved
    gc.collect()
    save(tmp_path, 2, state(2.0))
    assert latest(tmp_path) == 2


@pytest.mark.parametrize("name", ["lock", LOCK])
def test_files_of_others_are_not_written_to(tmp_path, name):
    path, local = tmp_path / "run", tmp_path / "mine"
    path.mkdir()
    local.write_text("mine")
    (path / name).symlink_to(local)
    if name == "lock":
        save(path, 1, state())
    else:
        with pytest.raises(CheckpointError, match=r"it cannot be written: OSError: .*\.checkpoints\.lock"):
            save(path, 1, state())
        (path / name).unlink()
        (path / name).write_text("mine")
        with pytest.raises(CheckpointError, match=r"checkpoints\.lock is not a lock, but a file of another program"):
            save(path, 1, state())
        assert (path / name).read_text() == "mine"
    assert local.read_text() == "mine"


def test_a_lock_stays_where_its_holder_has_ended(tmp_path):
    save(tmp_path, 1, state())
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    save(tmp_path, 2, state())
    assert (tmp_path / LOCK).read_text().count("\n") == 1


# ---------------------------------------------------------------- what is removed


def test_only_what_was_saved_is_removed(tmp_path):
    """No file of the user, nothing behind a link, no directory of another program."""
    path, archive = tmp_path / "run", tmp_path / "archive"
    for step in range(1, 4):
        save(path, step, state(float(step)))
    shutil.copytree(path, archive)
    shutil.rmtree(path / "step-00000001")
    (path / "step-00000001").symlink_to(archive / "step-00000001")
    (path / "step-00000002" / "why.txt").write_text("the best")
    (path / "step-00000003" / "rank-00009.npz").symlink_to(archive / "step-00000003" / "rank-00000.npz")
    (path / "step-00000000").mkdir()
    (path / "step-00000000" / "index.json").write_text('{"of": "another program"}')
    others = {name: path / name for name in ("step-²", "step-٣", "step-7", "step-", "step-000000009")}
    for folder in others.values():
        folder.mkdir()
        (folder / "index.json").write_text("mine")
    before = contents(archive)
    with Checkpoints(path, MESH, keep=1) as saved:
        for step in (4, 5):
            saved.save(step, state(float(step)))
    assert contents(archive) == before
    assert (path / "step-00000001").is_symlink()
    assert [f.name for f in (path / "step-00000002").iterdir()] == ["why.txt"]
    assert not (path / "step-00000003").exists() and not (path / "step-00000004").exists()
    assert (path / "step-00000000" / "index.json").exists()
    assert all((folder / "index.json").read_text() == "mine" for folder in others.values())
    assert latest(path) == 5
    assert_like(load(path, state(), step=1)[0], state(1.0))
    assert main([str(path / "step-²")]) == 1


def test_a_link_where_a_step_goes(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "rank-00000.npz").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(archive)
    with pytest.raises(CheckpointError, match="step-00000001 is a symbolic link, and is not followed: move it"):
        save(tmp_path / "run", 1, state())
    assert contents(archive) == {"rank-00000.npz": b"mine"}


def contents(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# ---------------------------------------------------------------- a full disk

FULL = """
import resource, sys
import numpy as np, spmd
from pathlib import Path
from spmd.checkpoint import CheckpointError, Checkpoints, load
path = Path(sys.argv[1])
mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
saved = Checkpoints(path, mesh)
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
saved.close()
print(load(path)[0]["['w']"].sum())
"""


def test_a_full_disk(tmp_path):
    """Nothing of the step that failed is left to fill it, and the next one can be saved."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    error = f"{tmp_path}: it cannot be written: OSError: [Errno 27] File too large"
    assert done.stdout.splitlines() == 2 * [error, str([LOCK, "step-00000001"])] + ["300000.0"]


# ---------------------------------------------------------------- names


@given(st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=2)), st.integers(), max_size=4))
@example({"k" * 70_000: 1, "k" * 70_000 + "j": 2})
@example({"../../up": 1, "a\0b": 2, "\ud800": 3, "/": 4, "\n": 5, "": 6})
@settings(max_examples=30, deadline=None)
def test_any_key(tmp_path_factory, keys):
    """Long ones, and ones that no file could have: each array comes back, and NumPy reads the files too."""
    path = tmp_path_factory.mktemp("keys")
    tree = {key: np.array([k, n % 2**32], np.int64) for k, (key, n) in enumerate(keys.items())}
    try:
        save(path, 1, tree)
    except (ValueError, TypeError) as error:  # keys that have one order are a tree; others are not
        assert "sort" in str(error) or "two leaves at" in str(error) or "key" in str(error)
        return
    assert_like(load(path, tree)[0], tree)
    assert main([str(path)]) == 0
    if tree:
        with np.load(path / "step-00000001" / "rank-00000.npz") as archive:
            assert len({*archive.files}) == len(tree)
    with pytest.raises(CheckpointError, match="has no array") as error:
        load(path, {"no such key" * 10_000: np.ones(2)})
    assert len(str(error.value)) < 2000


# ---------------------------------------------------------------- forged and damaged


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("kept")
    save(path, 2, state(2.0), {"losses": [0.5, 0.25]})
    return path


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([-1, 2**31, 2**63, 2**70, 10**400, 1e400, float("nan"), 0.5, -0.0])
    | st.sampled_from(["", "../rank-00000.npz", "/etc/passwd", "rank-00001.npz", "index.json", "rank-00000.npz\0"])
    | st.sampled_from(
        ["O", "|O8", "f8,f8", "(2,)<f8", "<f3", "<U999999999999", "|V0", "|S0", "<M8[ns]", "complex", "é"]
    ),
    lambda x: (
        st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["blocks", "type", "value", "a"]), x, max_size=2)
    ),
    max_leaves=4,
)


def places(x, here=()):
    """The paths of all values in JSON."""
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return [here, *[place for key, value in inside for place in places(value, (*here, key))]]


def changed(x, place, other):
    """A copy of it with `other` at a place; without what is there, if `other` is Ellipsis."""
    if not place:
        return None if other is ... else other
    copy = x.copy()
    if other is ... and len(place) == 1:
        del copy[place[0]]
    else:
        copy[place[0]] = changed(x[place[0]], place[1:], other)
    return copy


def attempts(path):
    """All ways to read what is in a directory; each may raise CheckpointError, and nothing else."""
    for like in (None, state(), {}):
        for verify in (True, False):
            yield lambda like=like, verify=verify: load(path, like, verify=verify)
    yield lambda: main([str(path)])
    yield lambda: latest(path)
    yield lambda: save(path, 2, state(2.0))


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_forged_index(tmp_path_factory, saved_run, capsys, data):
    """With a checksum that is right, and any value in any place: CheckpointError, or what is there, and no more."""
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("forged") / "run")
    folder = path / "step-00000002"
    text = json.loads((folder / "index.json").read_text())
    del text["checksum"]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(text)[1:]))
        text = changed(text, place, data.draw(ANY | st.just(...)))
        if not isinstance(text, dict):
            return
    content = {**text, "checksum": files._checksum(text)}
    (folder / "index.json").write_text(json.dumps(content))
    before = contents(path)
    for attempt in attempts(path):
        try:
            attempt()
        except CheckpointError as error:
            assert str(path) in str(error)
    assert {k: v for k, v in contents(path).items() if k != LOCK} == {k: v for k, v in before.items() if k != LOCK}


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes(tmp_path_factory, saved_run, capsys, data):
    """Cut, flipped, replaced, inserted: CheckpointError, or what was saved."""
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("damaged") / "run")
    file = path / "step-00000002" / data.draw(st.sampled_from(["index.json", "rank-00000.npz"]))
    content = file.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
        end = min(end, start + data.draw(st.sampled_from([0, 1, 10, len(content)])))
        content = content[:start] + data.draw(st.binary(max_size=4)) + content[end:]
    file.write_bytes(content)
    try:
        actual, notes = load(path, state())
    except CheckpointError as error:
        assert str(file) in str(error)
    else:
        assert_like(actual, state(2.0))
        assert notes == {"losses": [0.5, 0.25]}
    for attempt in list(attempts(path))[:-1]:
        try:
            attempt()
        except CheckpointError as error:
            assert str(file) in str(error)


DEEP = "[" * 100_000
FORGED = {
    "it is nested too deeply": (DEEP, "is damaged: it is not JSON"),
    "it is a link to itself": (None, "has no complete step"),
    "it has a number of many digits": ('{"version": ' + "9" * 5000 + "}", "is damaged: it is not JSON"),
    "it is not text": (b"\xff\xfe\xfa", "is damaged: it is not JSON"),
}


@pytest.mark.parametrize("label", FORGED)
def test_an_index_that_no_parser_likes(tmp_path, saved_run, label):
    path = shutil.copytree(saved_run, tmp_path / "run")
    file, (content, message) = path / "step-00000002" / "index.json", FORGED[label]
    file.unlink()
    if content is None:
        file.symlink_to(file)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        load(path, state(), step=2)


def test_blocks_that_overlap(tmp_path, saved_run):
    """A number that two blocks have is none that another lacks: no number is made up."""
    path = shutil.copytree(saved_run, tmp_path / "run")
    folder = path / "step-00000002"
    text = json.loads((folder / "index.json").read_text())
    text["leaves"]["['w']"]["blocks"][1]["start"] = [1, 0]
    files.write_index(folder, {k: v for k, v in text.items() if k != "checksum"})
    for like in (state(), None):
        with pytest.raises(CheckpointError, match=r"index.json is damaged: blocks of array \['w'\] "):
            load(path, like)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("file", "/etc/passwd", "LookupError: '/etc/passwd' is not a file of the step"),
        ("file", "../step-00000002/rank-00000.npz", "LookupError: .* is not a file of the step"),
        ("dtype", "|O", "TypeError: "),
    ],
)
def test_an_index_of_what_no_checkpoint_has(tmp_path, saved_run, key, value, message):
    """The error names the index, not a file elsewhere; and no array of objects is made, even of none."""
    path = shutil.copytree(saved_run, tmp_path / "run")
    folder = path / "step-00000002"
    content = json.loads((folder / "index.json").read_text())
    array = content["leaves"]["['w']"]
    (array if key == "dtype" else array["blocks"][0])[key] = value
    files.write_index(folder, {k: v for k, v in content.items() if k != "checksum"})
    for like in (state(), None, {}):
        with pytest.raises(CheckpointError, match=rf"index.json is damaged: it is not the index of a step \({message}"):
            load(path, like)


def test_a_pipe_in_the_place_of_a_file(tmp_path, saved_run):
    """It is not waited for."""
    path = shutil.copytree(saved_run, tmp_path / "run")
    for name in ("rank-00000.npz", "index.json"):
        file = path / "step-00000002" / name
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match=f"{name} is damaged: it has 0 bytes|no complete step 2"):
            load(path, state(), step=2)


def test_a_folder_in_the_place_of_a_file_stays(tmp_path, saved_run):
    folder = shutil.copytree(saved_run, tmp_path / "run") / "step-00000002"
    (folder / "rank-00007.npz").mkdir()
    files.remove_step(folder)
    assert [file.name for file in folder.iterdir()] == ["rank-00007.npz"]


def test_names_of_files():
    assert all(map(OWN.fullmatch, ["index.json", ".index.json", "rank-00000.npz", ".rank-123456.json"]))
    assert not any(
        map(OWN.fullmatch, ["index.json~", "rank-0.npz", "rank-00000.npy", "..rank-00000.npz", "step-00000001"])
    )
    assert STEP.fullmatch("step-00000012") and not STEP.fullmatch("step-12") and not STEP.fullmatch("step-0000000²")
