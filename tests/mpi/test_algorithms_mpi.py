"""The algorithms on MPI ranks: the checks of the simulated ones."""

import functools

import pytest
from mpi4py import MPI

import spmd
from collectives import algorithms
from tests.algorithm_checks import cases, check_derivatives, check_value


@functools.cache
def mesh_of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi")


on_ranks = pytest.mark.parallel([2, 3, 4])
every = pytest.mark.parametrize("name", algorithms.__all__)


@on_ranks
@every
def test_values(name):
    mesh = mesh_of_all()
    for case in cases(name, mesh.size):
        check_value(mesh, case)


@on_ranks
@every
def test_derivatives(name):
    mesh = mesh_of_all()
    for case in cases(name, mesh.size)[:2]:
        check_derivatives(mesh, case)


@pytest.mark.parallel(4)
@every
def test_several_axes_of_a_mesh(name):
    mesh = spmd.make_mesh((2, 2), ("x", "y"), backend="mpi")
    for axes, n in (("y", 2), (("y", "x"), 4)):
        check_value(mesh, cases(name, n)[0], axes)
