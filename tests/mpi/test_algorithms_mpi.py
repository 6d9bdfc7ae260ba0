"""The algorithms on MPI ranks: the checks of the simulated ones."""

import functools

import pytest
from mpi4py import MPI

import spmd
from collectives import algorithms
from collectives.cost import ALGORITHMS
from tests.algorithm_checks import cases, check_derivatives, check_value, run_divisible, runs_on


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
    for case in cases(name, mesh.size)[:1]:
        check_derivatives(mesh, case)


class Counting:
    """A communicator that takes note of the bytes that it sends and receives from rank to rank."""

    def __init__(self, comm, nbytes):
        self.comm = comm
        self.nbytes = nbytes

    def __getattr__(self, name):
        found = getattr(self.comm, name)
        if name not in self.nbytes:
            return found

        def call(buffer, *rank):
            self.nbytes[name] += buffer[0].nbytes
            return found(buffer, *rank)

        return call


@on_ranks
@every
def test_formulas_are_what_mpi_sends(name, monkeypatch):
    mesh = mesh_of_all()
    if not runs_on(name, mesh.size):
        return
    along, nbytes = mesh.ranks.along, {"Isend": 0, "Irecv": 0}
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: Counting(along(axes), nbytes), raising=False)
    whole, formulas = run_divisible(name, mesh), ALGORITHMS[name]
    assert mesh.calls == {"ppermute": formulas.steps(mesh.size) * formulas.ports}
    everywhere = MPI.COMM_WORLD.allgather((nbytes["Isend"], nbytes["Irecv"]))
    assert tuple(map(max, zip(*everywhere))) == (formulas.sent(mesh.size, whole), formulas.received(mesh.size, whole))


@pytest.mark.parallel(4)
@every
def test_several_axes_of_a_mesh(name):
    mesh = spmd.make_mesh((2, 2), ("x", "y"), backend="mpi")
    for axes, n in (("y", 2), (("y", "x"), 4)):
        check_value(mesh, cases(name, n)[0], axes)
