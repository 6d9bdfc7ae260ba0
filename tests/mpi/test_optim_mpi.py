"""Optimizers of sharded arrays on MPI ranks: the same numbers and communication as on simulated ones."""

import pytest
from mpi4py import MPI

import spmd
from minidiff import optim
from tests.optim_programs import OPTIMIZERS, SHARDINGS, assert_communicates

RANKS = MPI.COMM_WORLD.size


@pytest.mark.parallel([2, 4])
def test_steps_communicate_the_norm_alone():
    shape, axes = {2: ((2,), ("i",)), 4: ((2, 2), ("i", "j"))}[RANKS]
    mesh = spmd.make_mesh(shape, axes, backend="mpi")
    for specs, psums in SHARDINGS.values():
        if not all(set(spec.axes) <= set(axes) for spec in specs.values()):
            continue
        for optimizer in OPTIMIZERS.values() if specs is SHARDINGS["along one axis, or whole"][0] else ():
            assert_communicates(optimizer, mesh, specs, {})
        clipped = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1))
        assert_communicates(clipped, mesh, specs, {"psum": psums})
