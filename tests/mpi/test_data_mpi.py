"""Batches on MPI ranks: each reads its rows alone, and together they have the batches of one process."""

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from collectives.guards.mismatch import DisagreementError
from spmd import P
from spmd.data import batches
from tests.spmd.test_data import ONE, Recorded, data_of, seen, stream_of

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
MESH = spmd.make_mesh((RANKS // 2, 2) if RANKS % 2 == 0 else (RANKS, 1), ("i", "j"), backend="mpi")
everywhere = pytest.mark.parallel([2, 4])


@everywhere
@pytest.mark.parametrize("last", ["drop", "wrap"])
@pytest.mark.parametrize("source", [data_of, stream_of])
def test_ranks_together_have_the_batches_of_one(source, last):
    want = seen(batches(source(21), ONE, P(), batch=8, last=last, epochs=3))
    actual = batches(source(21), MESH, (P(("i", "j")), P("i", "j")), batch=8, last=last, epochs=3)
    first = next(actual)
    state, calls = actual.state(), MESH.calls
    rest = [*actual]
    assert MESH.calls == calls  # reading does not communicate
    actual.restore(state)
    for each in (rest, actual):
        assert seen(map(spmd.gather, [first, *each])) == want


@everywhere
def test_each_rank_reads_its_block():
    numbers, rows = map(Recorded, data_of(16))
    actual = next(batches((numbers, rows), MESH, P(("i", "j")), batch=8, prefetch=0))
    assert [read for read, _ in numbers.read] == [read for read, _ in rows.read] == [actual[0].local.tolist()]
    assert len(actual[0].local) == 8 // RANKS


@everywhere
def test_ranks_that_differ():
    for differing in ({"seed": WORLD.rank}, {"batch": 4 * (1 + WORLD.rank)}, {"data": np.arange(20 + WORLD.rank)}):
        options = {"data": np.arange(20), "batch": 4, "seed": 0, **differing}
        with pytest.raises(DisagreementError, match=r"ranks make different batches:\n +rank.*=.*\n"):
            batches(mesh=MESH, spec=P(), **options)
