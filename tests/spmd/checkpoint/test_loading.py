"""Load a saved tree: as it was saved, on any mesh; or an error that names what is damaged, missing, or unlike."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from spmd.checkpoint import CheckpointError, files, latest, load, save
from spmd.checkpoint.__main__ import main
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.checks.saved_trees import MESHES, SPECS, assert_like, contents, state, tree_on
from tests.checks.tree_classes import CLASSES

in_copies = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_loaded_on_any_mesh(tmp_path_factory, data):
    """A tree of every kind of leaf, saved and loaded with shardings that are drawn."""
    path, seed = tmp_path_factory.mktemp("any"), data.draw(st.integers(0, 99))
    saved, loaded = (
        tree_on(
            mesh(*data.draw(st.sampled_from(MESHES)), names="xy"),
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


@given(st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=2)), st.integers(), max_size=4))
@example({"k" * 70_000: 1, "k" * 70_000 + "j": 2})
@example({"../../up": 1, "a\0b": 2, "\ud800": 3, "/": 4, "\n": 5, "": 6})
@settings(max_examples=12, deadline=None)
def test_any_key(tmp_path_factory, keys):
    """Long ones, and ones that no file could have: each array comes back, and NumPy reads the files too."""
    path = tmp_path_factory.mktemp("keys")
    tree = {key: np.array([k, n % 2**32], np.int64) for k, (key, n) in enumerate(keys.items())}
    try:
        save(path, 1, tree)
    except (ValueError, TypeError):  # keys that have no order, or that are written alike
        return
    assert_like(load(path, tree)[0], tree)
    assert main([str(path)]) == 0
    if tree:
        with np.load(path / "step-00000001" / "rank-00000.npz") as archive:
            assert len({*archive.files}) == len(tree)
    with pytest.raises(CheckpointError) as error:
        load(path, {"no such key" * 10_000: np.ones(2)})
    assert len(str(error.value)) < 2000


# ---------------------------------------------------------------- damaged and forged


def attempts(path):
    """All ways to read what is in a directory; each may raise CheckpointError, and nothing else."""
    for like in (None, state(), {}):
        for verify in (True, False):
            yield lambda like=like, verify=verify: load(path, like, verify=verify)
    yield lambda: main([str(path)])
    yield lambda: latest(path)
    yield lambda: save(path, 4, state(4.0))


def check_attempts(path, expected):
    """Each names what it does not like; nothing is written."""
    before = contents(path)
    for attempt in attempts(path):
        try:
            attempt()
        except CheckpointError as error:
            assert str(expected) in str(error)
    assert contents(path) == before


@given(st.data())
@settings(in_copies, max_examples=40)
def test_damaged_bytes(tmp_path_factory, saved_run, data):
    """Cut, flipped, replaced, inserted: an error that says what to do, or what was saved."""
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("damaged") / "run")
    file = path / "step-00000004" / data.draw(st.sampled_from(["index.json", "rank-00000.npz"]))
    content = file.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
        end = min(end, start + data.draw(st.sampled_from([0, 1, 10, len(content)])))
        content = content[:start] + data.draw(st.binary(max_size=4)) + content[end:]
    file.write_bytes(content)
    try:
        actual, notes = load(path, state())
    except CheckpointError as error:
        advice = f"Remove {file.parent} to continue from step 2"
        assert str(file) in str(error) and (advice in str(error) or "of the format, expected" in str(error))
        assert main([str(path)]) == 1
    else:
        assert_like((actual, notes), (state(4.0), {"losses": [0.5, 0.25]}))
    check_attempts(path, path)
    assert_like(load(path, state(), step=2)[0], state(2.0))


@pytest.mark.parametrize("name", ["index.json", "rank-00000.npz"])
def test_every_cut_is_found(run, name):
    file = run / "step-00000004" / name
    content = file.read_bytes()
    for size in range(0, len(content), 37):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=name):
            load(run, state())


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


def change(x, place, other):
    """Write another value at a place, or remove what is there, if it is Ellipsis."""
    for key in place[:-1]:
        x = x[key]
    if other is ...:
        del x[place[-1]]
    else:
        x[place[-1]] = other


@given(st.data())
@settings(in_copies, max_examples=40)
def test_a_forged_index(tmp_path_factory, saved_run, data):
    """Any value in any place. Without the checksum of it, that is an error."""
    path = shutil.copytree(saved_run, tmp_path_factory.mktemp("forged") / "run")
    file = path / "step-00000004" / "index.json"
    text, forged = (json.loads(file.read_text()) for _ in range(2))
    for _ in range(data.draw(st.integers(1, 2))):
        change(forged, data.draw(st.sampled_from(places(forged)[1:])), data.draw(ANY | st.just(...)))
    if data.draw(st.booleans()):
        forged.pop("checksum", None)
        files.write_index(file.parent, forged)
    else:
        file.write_text(json.dumps(forged))
        if json.dumps(forged) != json.dumps(text):
            with pytest.raises(CheckpointError, match=r"index.json (is damaged: .*\. Remove .* 2$|has version )"):
                load(path, state())
    check_attempts(path, path)


UNREADABLE = {
    "nested too deeply": b"[" * 100_000,
    "a number of many digits": b'{"version": ' + b"9" * 5000 + b"}",
    "not text": b"\xff\xfe\xfa",
    "a link to itself": lambda file: file.symlink_to(file),
    "a pipe": os.mkfifo,  # it is not waited for
}


@each("name", UNREADABLE)
@each("file", ["index.json", "rank-00000.npz"])
def test_a_file_that_cannot_be_read(tmp_path_factory, saved_run, file, name):
    path, content = shutil.copytree(saved_run, tmp_path_factory.mktemp("unreadable") / "run"), UNREADABLE[name]
    place = path / "step-00000004" / file
    place.unlink()
    place.write_bytes(content) if isinstance(content, bytes) else content(place)
    with pytest.raises(CheckpointError):
        load(path, state(), step=4)
