"""Meshes: their shapes, how their backend is chosen, and when they are freed."""

import gc
import weakref

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import psum
from spmd import P
from spmd.mesh import launch
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each


@pytest.fixture
def no_launcher(monkeypatch):
    for variable in launch.LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


def test_a_mesh_says_what_it_is():
    new = spmd.make_mesh((4, 2), ("x", "y"), backend="simulated")
    assert (new.shape, new.axis_names, new.size, new.rank) == ({"x": 4, "y": 2}, ("x", "y"), 8, 0)
    assert repr(new) == "Mesh(x: 4, y: 2; 8 ranks, simulated)" and new.calls == new.bytes == {}


BODIES = {
    "in an expression": lambda mesh, x: x * mesh.rank,
    "in a Python if": lambda mesh, x: x if mesh.rank == 0 else -x,
    "in a branch": lambda mesh, x: md.cond(True, lambda x: x * mesh.rank, lambda x: x, x),
    "in a loop": lambda mesh, x: md.scan(lambda c, _: (c * mesh.rank, None), x, None, length=2)[0],
    "in jit": lambda mesh, x: md.jit(lambda x: x * mesh.rank)(x),
    "under grad": lambda mesh, x: md.grad(lambda x: np.sum(x * mesh.rank))(x),
    "under vmap": lambda mesh, x: md.vmap(lambda x: x * mesh.rank)(x),
    "of the process": lambda mesh, x: x * spmd.process_index(),
}


@each("wrap", [lambda f: f, md.jit, lambda f: md.grad(lambda x: np.sum(f(x)))])
@each("how", BODIES)
def test_the_number_of_a_rank_in_a_body_is_an_error(how, wrap):
    """It has no type that says that it differs from rank to rank: `axis_index` has."""
    plane = mesh(2, 2)
    with pytest.raises(md.VarianceError):
        wrap(mapped(lambda x: BODIES[how](plane, x), plane, P("i"), P("i")))(np.ones(4))
    assert plane.rank == 0


def test_ranks_are_simulated_without_a_launcher_and_an_open_size_is_that_of_the_launcher(no_launcher, monkeypatch):
    for ranks, sizes, expected in [
        (1, (4,), (4,)),
        (1, (-1,), (1,)),
        (1, (4, -1), (4, 1)),
        (1, (-1, 2), (1, 2)),
        (8, (-1,), (8,)),
        (8, (-1, 2), (4, 2)),
        (8, (2, -1, 4), (2, 1, 4)),
        (8, (8, np.int64(-1)), (8, 1)),
    ]:
        if ranks > 1:
            monkeypatch.setenv("PMI_SIZE", str(ranks))
        new = spmd.make_mesh(sizes, ("x", "y", "z")[: len(sizes)], backend="simulated" if ranks > 1 else None)
        assert (tuple(new.shape.values()), new.backend) == (expected, "simulated")
    with pytest.raises(ValueError):
        spmd.make_mesh((-1, 3), ("x", "y"), backend="simulated")


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["simulated", "mpi"])
def test_a_mesh_is_freed_with_its_last_user(backend, jit):
    """MPI has a few thousand communicators, and a script may make meshes in each step."""

    def use():
        new = spmd.make_mesh((1,) if backend == "mpi" else (2,), ("i",), backend=backend)
        f = mapped(lambda x: (psum(x * 2, "i"), x), new, P("i"), (P(), P("i")))
        f = md.jit(f) if jit else f
        for x in (np.ones(4), spmd.distribute(np.ones(4), new, P("i"))):
            (f(x)[1] * 2).sum()
            md.grad(lambda x: f(x)[0].sum())(x)
        return weakref.ref(new), weakref.ref(new.ranks)

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
