"""States and parameters in files on MPI ranks: a rank that cannot write them is an error on all."""

import pytest
from mpi4py import MPI

import spmd
from spmd.examples.offload import StoredTree, offload
from tests.programs.offload import LAYERS, OPTIMIZERS, example, mean_error

RANKS = MPI.COMM_WORLD.size


@pytest.mark.parallel([2, 4])
def test_a_rank_that_cannot_write(path, monkeypatch):
    mesh = spmd.make_mesh((RANKS,), ("batch",))
    init, step = offload(LAYERS, mean_error, OPTIMIZERS["adam"], mesh, path)
    params, batch = example()
    if mesh.rank == 1:
        (path / "rank-1").touch()
    with pytest.raises(ValueError, match="File exists"):
        init(params)
    if mesh.rank == 1:
        (path / "rank-1").unlink()
    stored = init(params)
    step(*stored, batch)

    def full(self, data):
        raise OSError(28, "No space left on device")

    if mesh.rank == 1:
        monkeypatch.setattr(StoredTree, "_put", full)
    with pytest.raises(ValueError, match="No space left on device"):
        step(*stored, batch)
    monkeypatch.undo()
    assert float(step(*init(params), batch)) > 0  # the ranks go on together
