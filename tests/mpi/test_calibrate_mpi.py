"""Calibration on MPI ranks: all get the same model, and a mistake on one is an error on all."""

import functools

import pytest
from mpi4py import MPI

import spmd
from spmd.report.calibrate import _PARAMETERS

RANKS = pytest.mark.parallel([2, 3])


@functools.cache
def mesh_of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi")


def calibrate(**arguments):
    return spmd.calibrate(mesh_of_all(), **{"sizes": (8, 4096), "repeats": 1, **arguments})


@RANKS
def test_all_ranks_have_the_same_model():
    mesh_of_all().reset_calls()
    model = calibrate()
    assert {m.collective for m in model.measurements} == set(_PARAMETERS)
    assert model.source == f"fitted to times on {MPI.COMM_WORLD.size} MPI ranks"
    everywhere = MPI.COMM_WORLD.allgather((model.alpha, model.beta, model.measurements))
    assert everywhere == [everywhere[0]] * MPI.COMM_WORLD.size
    assert max(model.alpha, model.beta) > 0
    assert mesh_of_all().calls == {"all_gather": 1}  # of their arguments: measured calls do not count


@RANKS
@pytest.mark.parametrize("wrong", [{"collectives": ["pmean"]}, {"sizes": None}, {"axis_name": "k"}, {"repeats": 0}])
def test_a_mistake_on_one_rank_is_an_error_on_all(wrong):
    here = MPI.COMM_WORLD.rank == 1
    with pytest.raises(ValueError, match=r"with the same arguments: .*; rank 1: ValueError: calibrate"):
        calibrate(**wrong if here else {})


@RANKS
@pytest.mark.parametrize("other", [{"sizes": (8, 800)}, {"repeats": 2}, {"collectives": ["psum"]}])
def test_ranks_that_are_to_measure_different_things(other):
    with pytest.raises(ValueError, match="calibrate: all ranks must call it with the same arguments"):
        calibrate(**other if MPI.COMM_WORLD.rank == 1 else {})


@pytest.mark.parallel(4)
def test_each_axis_has_its_numbers_on_all_ranks():
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="mpi")
    model = spmd.calibrate(mesh, sizes=(8, 4096, 65536), repeats=2)
    assert [*model.alpha] == [*model.beta] == ["i", "j"]
    assert {(m.axes, m.ranks) for m in model.measurements} == {(("i",), 2), (("j",), 2)}
    assert model.source == "fitted to times on 2 and 2 MPI ranks"
    everywhere = MPI.COMM_WORLD.allgather((model, model.residual))
    assert everywhere == [everywhere[0]] * 4
