"""Transposes on MPI ranks: the examples of JEP 17111, with what is communicated, as the mesh counts it and as MPI is
called; and random linear programs.
"""

from collections import Counter

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from tests import linear_programs
from tests.collective_checks import whole
from tests.jep_examples import EXAMPLES, check_on
from tests.programs import assert_trees_close

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
    monkeypatch.setattr(mesh.ranks, "comm", Watched(mesh.ranks.comm, called))

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


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_linear_programs(seed):
    """The inner-product identity, the communication that the tape tells, and the same numbers as on simulated ranks."""
    shape = {2: (2,), 4: (2, 2)}[MPI.COMM_WORLD.size]
    mesh, simulated = (spmd.make_mesh(shape, ("i", "j")[: len(shape)], backend=b) for b in ("mpi", "simulated"))
    choices = np.random.default_rng(seed).integers(0, 100, size=60).tolist()
    args = linear_programs.example(seed)
    tape = md.make_tape(linear_programs.program(choices, [mesh]))(*args)
    transposed = md.transpose(tape, (0, 1))
    cts = [np.cos(np.arange(float(t.size))).reshape(t.shape) for t in tape.out_types]
    outs = [whole(y) for y in tape(*args)]
    assert_trees_close([whole(y) for y in md.transpose(transposed, range(len(cts)))(*args)], outs)
    mesh.reset_calls()
    found = transposed(*cts, args[2])
    assert mesh.calls == spmd.communication(lambda *xs: transposed(*xs))(*transposed.in_types).counts
    found = [whole(x) for x in found]
    left, right = (sum(np.sum(x * y) for x, y in zip(xs, ys)) for xs, ys in ((outs, cts), (found, args)))
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)
    elsewhere = md.transpose(md.make_tape(linear_programs.program(choices, [simulated]))(*args), (0, 1))
    for x, y in zip(found, elsewhere(*cts, args[2])):
        np.testing.assert_allclose(x, whole(y), rtol=1e-9, atol=1e-9)


@pytest.mark.parallel(4)
def test_several_shard_maps():
    """The inner-product identity; and transposing twice gives the function."""
    meshes = (spmd.make_mesh((4,), ("i",), backend="mpi"), spmd.make_mesh((2, 2), ("i", "j"), backend="mpi"))
    x = np.sin(np.arange(16.0))
    for f in linear_programs.several(*meshes).values():
        tape = md.make_tape(f)(x)
        transposed = md.transpose(tape)
        cts = [np.cos(np.arange(float(t.size))).reshape(t.shape) for t in tape.out_types]
        (x_bar,) = transposed(*cts)
        ys = [whole(y) for y in tape(x)]
        np.testing.assert_allclose(np.sum(whole(x_bar) * x), sum(np.sum(y * c) for y, c in zip(ys, cts)))
        assert_trees_close([whole(y) for y in md.transpose(transposed, range(len(cts)))(x)], ys)
