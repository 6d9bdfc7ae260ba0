"""The examples of JEP 17111 on MPI ranks: what is communicated, as the mesh counts it, and as MPI is called."""

from collections import Counter

import pytest
from mpi4py import MPI

import spmd
from tests.jep_examples import EXAMPLES, check_on

#: How MPI's names of collective operations begin -> the collective that they are called for.
CALLED_FOR = {
    "allreduce": {"psum"},
    "allgather": {"all_gather", "all_gather_invariant"},
    "reduce_scatter": {"psum_scatter"},
}


class Watched:
    """A communicator whose calls are counted by MPI's names; those that ask for nothing but its state are not."""

    def __init__(self, comm, calls):
        self._comm = comm
        self._calls = calls

    def __getattr__(self, name):
        value = getattr(self._comm, name)
        if callable(value) and not name.startswith("Get_"):
            self._calls[name.lower()] += 1
        return value


@pytest.mark.parallel([1, 2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("options", [{}, {"check_rep": False}], ids=["typed", "untyped"])
def test_numbers_and_communication(name, options, monkeypatch):
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi")
    called = Counter()
    along = mesh.ranks.along
    along(("i",))  # communicators are made at first use, which is no collective of the program's
    monkeypatch.setattr(mesh.ranks, "along", lambda axes: Watched(along(axes), called))

    def calls():
        """What the mesh counted, once it is found to be what MPI was called for."""
        counted = mesh.calls
        mesh.reset_calls()
        assert sum(called.values()) == sum(counted.values())
        for mpi_name in called:
            wanted = [c for prefix, c in CALLED_FOR.items() if mpi_name.removeprefix("i").startswith(prefix)]
            assert len(wanted) == 1 and called[mpi_name] == sum(counted.get(c, 0) for c in wanted[0])
        called.clear()
        return counted

    check_on(mesh, EXAMPLES[name], calls, **options)
