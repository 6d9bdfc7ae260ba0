"""Speed-up on MPI ranks: measured and predicted, the same on all; a mistake on one is an error on all."""

import functools

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

RANKS = pytest.mark.parallel([2, 4])
MODEL = spmd.CostModel(alpha=1e-5, beta=1e-9)


@functools.cache
def mesh_of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi")


def loss(w, x):
    return np.sum(np.tanh(x @ w))


def program(w, x):
    sharded = spmd.shard_map(
        lambda w, x: psum(loss(w, x), "i"), mesh=mesh_of_all(), in_specs=(P(), P("i")), out_specs=P()
    )
    return md.grad(sharded)(w, x)


gradient = md.grad(loss)


def run(one=gradient, f=program, args=None, **settings):
    args = (np.ones((16, 8)), np.ones((64, 16))) if args is None else args
    return spmd.speed_up(f, mesh_of_all(), MODEL, one, repeats=2, **settings)(*args)


@RANKS
def test_measured_and_predicted_on_all_ranks():
    n = MPI.COMM_WORLD.size
    calls = []

    def one(w, x):
        calls.append(type(x).__name__)
        return gradient(w, x)

    found = run(one, ranks=(64,))
    assert calls == (["ndarray"] * 3 if MPI.COMM_WORLD.rank == 0 else [])
    assert MPI.COMM_WORLD.allgather(found) == [found] * n
    assert {*found.measured} == {1, n}
    assert {*found.predicted} == {1, n, 64}
    alone, here = found.measured[1].seconds, found.measured[n]
    assert here.speed_up == alone / here.seconds
    assert here.efficiency == alone / (n * here.seconds)
    sent = MODEL.predict(program)(np.ones((16, 8)), np.ones((64, 16))).seconds[n]
    assert found.predicted[n].seconds == pytest.approx(alone / n + sent)
    assert run(0.5).measured[1] == (0.5, 1.0, 1.0)


@RANKS
def test_sharded_arguments_are_whole_on_one_rank():
    n = MPI.COMM_WORLD.size
    x = spmd.distribute(np.ones((64, 16)), mesh_of_all(), P("i"))
    assert {*run(args=(np.ones((16, 8)), x)).measured} == {1, n}
    assert {*run(f=gradient, args=(np.ones((16, 8)), x)).measured} == {1, n}


@RANKS
@pytest.mark.parametrize(
    "wrong", [{"one": 0.0}, {"one": 0.5}, {"ranks": (8,)}, {"args": (1.0, 2.0)}, {"ranks": None}, {"f": gradient}]
)
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong):
    here = MPI.COMM_WORLD.rank == 1
    with pytest.raises(ValueError, match="speed_up: all ranks must call it with the same arguments: "):
        run(**wrong if here else {})


@RANKS
def test_an_error_on_the_one_rank_is_an_error_on_all():
    def one(w, x):
        raise KeyError("lost")

    with pytest.raises(ValueError, match=r"the function of one rank failed: .*rank 0: KeyError: 'lost'"):
        run(one)
