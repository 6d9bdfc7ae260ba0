"""Checkpoints on MPI ranks: written and read by other numbers of ranks and the other backend; errors on all alike."""

import os
import traceback

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from spmd import P
from spmd.checkpoint import CheckpointError, Checkpoints, load, save, saving
from tests.checks.all_ranks import all_raise, check_alike
from tests.checks.saved_trees import MESHES, assert_like, tree_on

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
MESH = spmd.make_mesh((RANKS,), ("i",), backend="mpi")
STEP = "step-00000001"
two = pytest.mark.parallel(2)


def split(x=0.0):
    return {"w": spmd.distribute(np.arange(24.0) + x, MESH, P("i")), "alike": np.full(3, x), "n": 3}


def on_all(match):
    """Expect one error, the same on all ranks."""
    return pytest.raises(CheckpointError, match=match)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("shape", [s for s in MESHES if np.prod(s) == RANKS])
def test_other_meshes_and_backends(path, shape):
    """Saved by MPI ranks, loaded by simulated ones and by half of the MPI ranks; and the other way round."""
    mesh, rng = spmd.make_mesh(shape, ("x", "y"), backend="mpi"), np.random.default_rng(0)
    save(path / "mpi", 1, tree_on(mesh, rng))
    half = WORLD.Split(WORLD.rank % 2)
    meshes = [mesh, spmd.make_mesh((half.size, 1), ("x", "y"), comm=half)]
    meshes += [spmd.make_mesh(other, ("x", "y"), backend="simulated") for other in MESHES]
    for k, other in enumerate(meshes):
        expected = tree_on(other, np.random.default_rng(0))
        assert_like(load(path / "mpi", expected)[0], expected)
        if other.backend == "simulated" and WORLD.rank == 0:
            save(path / str(k), 1, expected)
    WORLD.barrier()
    for k, other in enumerate(meshes):
        if other.backend == "simulated":
            expected = tree_on(mesh, np.random.default_rng(0))
            assert_like(load(path / str(k), expected)[0], expected)
    half.Free()


@pytest.mark.parallel([2, 4])
def test_written_while_training_goes_on(path):
    """Writes after `save` are not in it, and each rank writes its own blocks."""
    with Checkpoints(path, MESH, keep=2) as saved:
        for step in range(1, 6):
            state = split(float(step))
            saved.save(step, state)
            state["alike"] += 100.0
        assert saved.latest() == 5
        assert_like(saved.load(split())[0], split(5.0))
    names = sorted(f.name for f in (path / "step-00000005").iterdir())
    assert names == ["index.json", *[f"rank-{rank:05}.npz" for rank in range(RANKS)]]
    assert sorted(f.name for f in path.iterdir()) == [".checkpoints.lock", "step-00000004", "step-00000005"]


@two
def test_a_rank_that_cannot_write(path):
    """It is an error on all ranks at the next call, and the step is not complete; nor is one that rank 0 cannot."""
    saved = Checkpoints(path, MESH)
    saved.save(1, split(1.0))
    saved.wait()
    for rank, name in ((RANKS - 1, "write_blocks"), (0, "write_index")):
        with pytest.MonkeyPatch.context() as patch:
            if WORLD.rank == rank:
                patch.setattr(saving, name, lambda *args: os.stat("nowhere"))
            saved.save(2, split(2.0))
            wrong = "it cannot be written: FileNotFoundError: .*nowhere"
            all_raise(lambda: saved.save(3, split(3.0)), wrong, CheckpointError)
        assert saved.latest() == 1
    saved.save(2, split(2.0))
    saved.close()
    assert_like(load(path, split())[0], split(2.0))


@two
def test_what_a_killed_run_left(path):
    """Files of the same step by more ranks do not get into the new checkpoint."""
    save(path, 1, split(-1.0))
    folder = path / STEP
    if WORLD.rank == 0:
        (folder / "index.json").unlink()
        for rank in range(RANKS + 2):
            (folder / f"rank-{rank:05}.json").write_text('{"files": {}, "blocks": []}')
        (folder / f"rank-{RANKS + 1:05}.npz").write_text("")
    WORLD.barrier()
    save(path, 1, split(1.0))
    assert_like(load(path, split())[0], split(1.0))
    assert sorted(f.name for f in folder.iterdir()) == ["index.json", *[f"rank-{k:05}.npz" for k in range(RANKS)]]


@two
def test_what_one_rank_cannot_read(path):
    save(path, 1, split())
    file = path / STEP / f"rank-{RANKS - 1:05}.npz"
    if WORLD.rank == 0:
        file.write_bytes(file.read_bytes()[:100])
    WORLD.barrier()
    with on_all(rf"{file.name} is damaged: it has 100 bytes, expected \d+; block \[\d+:24\] of array \['w'\]") as error:
        load(path, split())
    check_alike(str(error.value))
    shown = "".join(traceback.format_exception(error.value))
    assert shown.count("is damaged") == 1  # also on the rank that has raised it for all


@two
def test_ranks_that_see_different_directories(path):
    save(path, 1, split())
    with on_all(r"different steps there, \[1\], \[\]: .*that all ranks share"):
        load(path if WORLD.rank else path / "elsewhere", split())


@two
def test_files_of_other_ranks_and_runs(path):
    """A rank's file is that of another rank, or that of another run of the same types."""
    for run in ("one", "other"):
        save(path / run, 1, split(float(run == "other")))
    file, other = (path / "one" / STEP / f"rank-{rank:05}.npz" for rank in (1, 0))
    for source in (path / "other" / STEP / file.name, other):
        if WORLD.rank == 0:
            file.write_bytes(source.read_bytes())
        WORLD.barrier()
        with on_all(rf"{file.name} is damaged: (it has|block .* has the CRC-32)"):
            load(path / "one", split())
        WORLD.barrier()


# ---------------------------------------------------------------- ranks that do not make the same calls


LAST = WORLD.rank == RANKS - 1
W = f"['w']: float64[24], split as P('i') over {{'i': {RANKS}}}"
#: What the last rank saves, what the others say that they save, and what it says.
OTHERS = {
    "another step": ((2, split()), "step 1", "step 2"),
    "no step": ((-1, split()), "save", "ValueError: checkpoint.save: step must be an integer"),
    "a leaf more": ((1, {**split(), "x": 1}), "nothing more", "['x']: a Python int, 1"),
    "a leaf less": ((1, {k: v for k, v in split().items() if k != "w"}), W, "nothing more"),
    "another dtype": ((1, {**split(), "alike": np.zeros(3, "f4")}), "float64[3]", "float32[3]"),
    "another spec": (
        (1, {**split(), "w": spmd.distribute(np.arange(24.0), MESH, P(None))}),
        W,
        "['w']: float64[24], split as P()",
    ),
    "another number": ((1, {**split(), "n": 4}), "['n']: a Python int, 3", "['n']: a Python int, 4"),
    "notes that are not JSON": ((1, split(), {"x": object()}), "save", "TypeError: checkpoint.save: notes are not"),
}


@two
def test_ranks_that_save_different_things(path):
    """At once, on all ranks, for every part of what is saved; nothing of it is written."""
    with Checkpoints(path, MESH) as saved:
        for label, (other, on_all, on_one) in OTHERS.items():
            args = other if LAST else (1, split())
            text = all_raise(lambda a=args: saved.save(*a), "checkpoint: all ranks must make the same calls")
            one, _, two = text.partition(f"; rank {RANKS - 1}: ")
            assert "rank" in one and on_all in one and on_one in two, (label, text)
        assert saved.latest() is None
        saved.save(1, split(1.0))
        with pytest.raises(ValueError, match=r"rank.* 0.*: save; rank.*: latest$"):
            saved.latest() if LAST else saved.save(2, split())
        with pytest.raises(ValueError, match=r"rank.* 0.*: load; rank.*: wait$"):
            saved.wait() if LAST else saved.load(split())
        with pytest.raises(ValueError, match=r"rank.* 0.*: \['n'\]: a Python int.*; rank.*: \['w'\]: float64\[24\]"):
            saved.load({"w": split()["w"]} if LAST else {"n": 0, "w": split()["w"]}, 1)
        with pytest.raises(ValueError, match=r"rank.* 0.*: step 1; rank.*: step None"):
            load(path, split(), step=None if LAST else 1)
        assert_like(saved.load(split())[0], split(1.0))
    assert_like(load(path, split())[0], split(1.0))


@two
def test_ranks_that_open_another_directory_or_with_other_options(path):
    with on_all(r"on rank(s 1, 2,)? \d is not the directory of rank 0: save to a file system that all ranks share"):
        Checkpoints(path / "here" if WORLD.rank == 0 else path / "there", MESH)
    with pytest.raises(ValueError, match=rf"rank.* 0.*: keep=None; rank {RANKS - 1}: keep=2"):
        Checkpoints(path, MESH, keep=2 if LAST else None)
    with pytest.raises(ValueError, match=rf"rank.* 0.*: Checkpoints; rank {RANKS - 1}: ValueError: .*got 0"):
        Checkpoints(path, MESH, keep=0 if LAST else None)
    save(path / "here", 1, split())  # no lock is left


@two
def test_two_in_one_job(path):
    with Checkpoints(path, MESH) as first:
        for _ in range(2):
            with on_all("this process is saving there already, with Checkpoints that are not closed"):
                Checkpoints(path, MESH)
        first.save(1, split(1.0))
    save(path, 2, split(2.0))


@two
def test_arrays_on_other_ranks(path):
    """One whose ranks are others than the checkpoint's would be saved twice, or in part."""
    alone = WORLD.Split(WORLD.rank)
    local = spmd.make_mesh((1,), ("i",), comm=alone)
    simulated = spmd.make_mesh((2,), ("i",), backend="simulated")
    with Checkpoints(path, MESH) as saved:
        for mesh in (local, simulated):
            with pytest.raises(ValueError, match=r"\['x'\] is split over Mesh.*, whose ranks are not those of Mesh"):
                saved.save(1, {"x": spmd.distribute(np.ones(2), mesh, P("i"))})
    with Checkpoints(path / str(WORLD.rank), local) as saved:  # each process saves alone
        saved.save(1, {"x": spmd.distribute(np.ones(2), simulated, P("i"))})
    del local
    alone.Free()
