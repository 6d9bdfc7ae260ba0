"""Batches on MPI ranks: each reads its rows alone, and together they have the batches of one process."""

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from collectives.guards.mismatch import DisagreementError
from spmd import P
from spmd.data import batches, join
from tests.programs.batches import ONE, Recorded, broken, check_join, data_of, seen, stream_of

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size
MESH = spmd.make_mesh((RANKS // 2, 2) if RANKS % 2 == 0 else (RANKS, 1), ("i", "j"), backend="mpi")
LINE = spmd.make_mesh((RANKS,), ("i",), backend="mpi")
any_number = pytest.mark.parallel([2, 3])
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


@any_number
@pytest.mark.parametrize("until", ["first", "last"])
def test_ranks_leave_together(until):
    for lengths in ([[2]], [[2, 1], [2, 2, 2]], [[0], [3, 3, 1]], [[1, 0, 1]], [[0]]):
        check_join(LINE, [lengths[rank % len(lengths)] for rank in range(RANKS)], until)


@any_number
def test_one_rank_s_word_is_enough():
    steps = join(lambda rank: [np.ones(2)] * (9 if rank else 5), LINE, P("i"))
    for k, _ in enumerate(steps):
        if k == 3 and WORLD.rank == RANKS - 1:
            steps.stop()
    assert k == 3 and [*steps] == []


@any_number
def test_what_one_rank_cannot_read_raises_on_all():
    """No rank waits for another, and all go on afterwards."""
    for _ in range(2):
        steps = join(broken(WORLD.rank), LINE, P("i"))
        next(steps)
        with pytest.raises(ValueError, match=r"reading failed: .*rank 1: OSError: the disk is full"):
            next(steps)
        assert [*steps] == []
    for mistake, message in (
        ([np.ones(2, int)], r"block: int64.*block: float64|block: float64.*block: int64"),
        ([], "rank 1: ValueError: join: a rank has no block"),
        ([np.ones(2), np.ones(3)], "rank 1: ValueError: join: a rank's blocks are like the first.*of 3 examples"),
        ([np.ones(2), np.ones(2, int)], "rank 1: ValueError: join: a rank's blocks .*int64"),
    ):
        with pytest.raises(ValueError, match=message):
            [*join(mistake if WORLD.rank == 1 else [np.ones(2)] * 3, LINE, P("i"))]
    assert len([*join([np.ones(2)], LINE, P("i"))]) == 1
