"""What is shown on real ranks: the same on all of them, and without communication."""

import numpy as np
import pytest

import minidiff as md
from collectives import psum
from spmd import P, communication, compare, make_mesh, shard_map, visualize_sharding

RANKS = pytest.mark.parallel([2, 4])


def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def body(w, x):
    h = np.tanh(x @ w)
    return psum(h.sum(), "i")


def alike(text):
    """Whether all ranks have the same text."""
    return len(set(comm().allgather(text))) == 1


@RANKS
def test_a_picture_of_a_sharding():
    mesh = make_mesh((comm().size,), ("i",))
    whole = np.arange(8.0 * comm().size).reshape(-1, 4)
    x = shard_map(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(whole)
    mesh.reset_calls()
    sharding = visualize_sharding(x)
    (block,) = [block for block, ranks in sharding.ranks.items() if mesh.rank in ranks]
    np.testing.assert_array_equal(x.local, whole[2 * block[0] : 2 * block[0] + 2])
    if mesh.rank == 0:  # the others do not take part
        assert "0:2" in str(sharding) and sharding._repr_html_()
    assert mesh.calls == {}
    assert alike(str(sharding))


@RANKS
def test_who_asks_for_communication():
    mesh = make_mesh((comm().size,), ("i",))
    loss = shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    args = np.ones((3, 2)), np.ones((4 * comm().size, 3))
    mesh.reset_calls()
    report = communication(md.grad(loss))(*args)
    comparison = compare(md.grad(loss), *args)
    assert mesh.calls == {}
    lines = [(row.direction, row.source.text) for row in report.rows]
    assert lines == [("forward", 'return psum(h.sum(), "i")'), ("backward", "h = np.tanh(x @ w)")]
    assert comparison.untyped.counts == {"psum": 3} and comparison.same is None
    assert str(comparison).endswith("\nnot run: that is done on simulated ranks only")
    assert alike(str(report)) and alike(str(comparison))
    md.grad(loss)(*args)
    assert mesh.calls == report.counts
