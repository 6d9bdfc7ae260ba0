"""Memory on MPI ranks: what a rank writes into its arguments changes no result, and no derivative."""

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import pmax, psum
from spmd import P

RANKS = MPI.COMM_WORLD.size
everywhere = pytest.mark.parallel([1, 2, 4])

BODIES = {
    "identity": (lambda x: x, P("i")),
    "unmapped": (lambda x: x, P()),
    "maximum": (lambda x: pmax(x, "i"), P()),
    "square": (lambda x: x * x, P("i")),
}


def mapped(name):
    body, spec = BODIES[name]
    return spmd.shard_map(body, spmd.make_mesh((RANKS,), ("i",)), in_specs=spec, out_specs=spec)


def whole(x):
    return x.gather() if hasattr(x, "gather") else x


@everywhere
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_results_are_not_the_arguments(name, compiled):
    x = np.arange(2.0 * RANKS)
    f = md.jit(mapped(name)) if compiled else mapped(name)
    result, expected = f(x), x * x if name == "square" else x.copy()
    x[...] = 7.0
    assert whole(result).tolist() == expected.tolist()


@everywhere
def test_a_pullback_survives_writing_in_place():
    x, c = np.arange(2.0 * RANKS), np.full(2, 3.0)
    mesh = spmd.make_mesh((RANKS,), ("i",))
    f = spmd.shard_map(lambda x: psum(x * x * c, "i"), mesh, in_specs=P("i"), out_specs=P())
    value, pullback = md.vjp(f, x)
    expected = 6.0 * x
    for a in (x, c, value):
        a[...] = 100.0
    for _ in range(2):
        assert whole(pullback(np.ones(2))[0]).tolist() == expected.tolist()


@everywhere
@pytest.mark.parametrize("inside", [False, True])
def test_constants_are_values_when_the_program_is_recorded(inside):
    w, mesh = np.arange(2.0), spmd.make_mesh((RANKS,), ("i",))
    mapped = lambda f: spmd.shard_map(f, mesh, in_specs=P("i"), out_specs=P())  # noqa: E731
    body = lambda x: psum(x[0] * w + w * 2, "i")  # noqa: E731
    f = mapped(md.jit(body)) if inside else md.jit(mapped(body))
    x = np.ones((RANKS, 1))
    assert f(x).tolist() == [0.0, 3.0 * RANKS]
    w[...] = 5.0
    assert f(x).tolist() == [0.0, 3.0 * RANKS]
