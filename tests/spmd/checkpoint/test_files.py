"""The files of a checkpoint: what is read of them, and what is removed, or never touched."""

import shutil

import pytest

from spmd.checkpoint import CheckpointError, Checkpoints, files, latest, load, save
from spmd.checkpoint.__main__ import main
from tests.checks.meshes import mesh
from tests.checks.saved_trees import assert_like, contents, state


def test_a_slice_needs_only_the_blocks_that_overlap_it(run):
    """Another block may be damaged."""
    saved, file = files.Saved(run, 4), run / "step-00000004" / "rank-00000.npz"
    b = state(4.0)["b"].tobytes()
    file.write_bytes(file.read_bytes().replace(b, b[::-1]))
    assert saved.read("['w']", (0, 1), (2, 1)).tolist() == [[5], [7]]
    with pytest.raises(CheckpointError):
        saved.read("['b']", (0,), (3,))


def test_removed_by_its_run_while_it_is_read(run):
    saved = files.Saved(run, 4)
    shutil.rmtree(saved.folder)
    with pytest.raises(CheckpointError, match="step-00000004 was removed while it was read: load the last step again"):
        saved.read("['b']", (0,), (3,))


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
    others = {name: path / name for name in ("step-²", "step-٣", "step-7", "step-", "step-000000009", "step-00000000")}
    for folder in others.values():
        folder.mkdir()
        (folder / "index.json").write_text('{"of": "another program"}')
    before = contents(archive)
    with Checkpoints(path, mesh(2, 2, names="xy"), keep=1) as saved:
        for step in (4, 5):
            saved.save(step, state(float(step)))
    assert contents(archive) == before and (path / "step-00000001").is_symlink()
    assert [f.name for f in (path / "step-00000002").iterdir()] == ["why.txt"]
    assert not (path / "step-00000003").exists() and not (path / "step-00000004").exists()
    assert all("another program" in (folder / "index.json").read_text() for folder in others.values())
    assert latest(path) == 5
    assert_like(load(path, state(), step=1)[0], state(1.0))
    assert main([str(path / "step-²")]) == 1


def test_a_folder_in_the_place_of_a_file_stays(run):
    folder = run / "step-00000004"
    (folder / "rank-00007.npz").mkdir()
    files.remove_step(folder)
    assert [file.name for file in folder.iterdir()] == ["rank-00007.npz"]


def test_a_link_where_a_step_goes_is_not_followed(tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "rank-00000.npz").write_text("the user's")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(archive)
    with pytest.raises(CheckpointError, match="step-00000001 is a symbolic link, and is not followed: move it"):
        save(tmp_path / "run", 1, state())
    assert contents(archive) == {"rank-00000.npz": b"the user's"}
