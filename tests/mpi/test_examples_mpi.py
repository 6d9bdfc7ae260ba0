"""The examples on MPI ranks: the numbers of simulated ones; killed and taken up again; what one rank cannot read."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from spmd.examples import data_parallel, training
from spmd.examples.checkpoints import CheckpointError
from tests.runs import EXAMPLES, assert_same_run, run_program_of_the_readme, train, train_until

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
everywhere = pytest.mark.parallel([4, 8])


@pytest.fixture
def path():
    """A directory that all ranks have, and nobody else."""
    found = tempfile.TemporaryDirectory() if WORLD.rank == 0 else None
    yield Path(WORLD.bcast(found and found.name))
    WORLD.barrier()
    if found:
        found.cleanup()


@everywhere
@pytest.mark.parametrize("name", EXAMPLES)
def test_killed_and_taken_up_again(path, name):
    whole = train(name, RANKS, steps=4)
    train_until(3, name, RANKS, path, steps=4)
    assert_same_run(train(name, RANKS, path, steps=4), whole)
    simulated = train(name, RANKS, backend="simulated", steps=4)
    np.testing.assert_allclose(whole.losses, simulated.losses, rtol=0, atol=1e-10)
    assert training.accuracy(EXAMPLES[name], whole) == training.accuracy(EXAMPLES[name], simulated)


@pytest.mark.parallel([3, 8])
def test_losses_do_not_depend_on_ranks():
    """Of the example as it is, with the network that it trains."""
    mesh = data_parallel.EXAMPLE.mesh(RANKS)
    losses = training.train(data_parallel.EXAMPLE, mesh, 20).losses
    assert mesh.backend == "mpi" and mesh.calls == {"psum": 2 * len(losses)}
    alone = training.train(data_parallel.EXAMPLE, data_parallel.EXAMPLE.mesh(1, "simulated"), 20).losses
    np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-10)


@pytest.mark.parallel(4)
def test_the_program_of_the_readme(capsys):
    found = run_program_of_the_readme()
    assert found["mesh"].backend == "mpi" and found["mesh"].calls["psum"] == 100  # one in each step
    np.testing.assert_allclose(found["w"], [1, -2, 3], atol=1e-6)
    shown = capsys.readouterr().out
    assert shown.startswith("w = [ 1. -2.  3.]\ncollective ") if WORLD.rank == 0 else not shown


@pytest.mark.parallel(4)
def test_what_one_rank_cannot_read_is_an_error_on_all(path):
    train("fully_sharded", RANKS, path, steps=1)
    file = path / "step-00000001" / "rank-00002.npz"
    if WORLD.rank == 2:
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"rank-00002.npz is damaged \(BadZipFile: .*to start from the beginning"):
        train("fully_sharded", RANKS, path, steps=1)


@pytest.mark.parallel(4)
def test_a_rank_that_cannot_write_is_an_error_on_all(path):
    if WORLD.rank == 3:
        (path / "step-00000001").write_text("in the way")
    WORLD.barrier()
    with pytest.raises(CheckpointError, match=r"it cannot be written: .*File exists"):
        train("fully_sharded", RANKS, path, steps=1)


@pytest.mark.parallel(4)
def test_ranks_that_see_different_directories(path):
    train("data_parallel", RANKS, path, steps=1)
    with pytest.raises(CheckpointError, match=r"different steps there, \[1\], \[\]: .*that all ranks share"):
        train("data_parallel", RANKS, path if WORLD.rank < 3 else path / "elsewhere", steps=1)


@pytest.mark.parallel([2, 4])
def test_files_of_two_ranks_that_were_swapped(path):
    train("fully_sharded", RANKS, path, steps=2, every=1)
    folder = path / "step-00000002"
    one, other = (folder / f"rank-{r:05}.npz" for r in (0, RANKS - 1))
    if WORLD.rank == 0:
        one.rename(folder / "between")
        other.rename(one)
        (folder / "between").rename(other)
    WORLD.barrier()
    expected = (
        r"is damaged \(ValueError: rank-00000.npz is not the file that complete.json has the checksum of\): remove "
    )
    with pytest.raises(CheckpointError, match=expected) as error:
        train("fully_sharded", RANKS, path, steps=2)
    assert len(set(WORLD.allgather(str(error.value)))) == 1


@pytest.mark.parallel([2, 4])
def test_a_file_of_another_run(path):
    """With the same options, of the same rank and step, and of other numbers."""
    train("fully_sharded", RANKS, path / "one", steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "BATCH", 120)
        train("fully_sharded", RANKS, path / "other", steps=1)
    name = f"rank-{RANKS - 1:05}.npz"
    if WORLD.rank == 0:
        (path / "other" / "step-00000001" / name).replace(path / "one" / "step-00000001" / name)
    WORLD.barrier()
    with pytest.raises(CheckpointError, match=rf"is damaged \(ValueError: {name} is not the file"):
        train("fully_sharded", RANKS, path / "one", steps=1)
