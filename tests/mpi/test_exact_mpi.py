"""Exact sums on MPI ranks: the bits of simulated ranks, and of one rank alone."""

import math

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, psum, psum_scatter, reduce
from spmd import P
from spmd.examples import same_bits
from tests.checks.meshes import mapped, mesh

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size


def mesh_on(comm, **options):
    return spmd.make_mesh((comm.size,), ("i",), backend="mpi", comm=comm, **options)


def bits(tree):
    return [numpy.asarray(x).tobytes() for x in md.tree.leaves(tree)]


def addends(dtype=float):
    rng = numpy.random.default_rng(0)
    return (rng.standard_normal((24, 4)) * 10.0 ** rng.integers(-3, 4, (24, 4))).astype(dtype)


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float16, numpy.complex64])
def test_sums_are_the_nearest_numbers(dtype):
    x = addends(dtype)
    total = lambda x: psum(x, "i", exact=True, axis=0)  # noqa: E731
    f, alone = (mapped(total, on, P("i"), P()) for on in (mesh(RANKS, backend="mpi"), mesh(1)))
    assert bits(f(x)) == bits(md.jit(f)(x[::-1])) == bits(alone(x))
    if dtype is numpy.float64:
        assert f(x).tolist() == [math.fsum(column) for column in x.T]


@pytest.mark.parallel([2, 4])
def test_all_that_add_are_exact_as_on_simulated_ranks():
    def body(w, x):
        total = psum(w * x[0], "i")
        return total, psum_scatter(np.repeat(x[0], RANKS), "i", tiled=True), reduce(x, "i"), all_gather(x[0], "i")

    x, w = addends()[:RANKS], numpy.linspace(1, 2, 4)
    results = []
    for backend in ("mpi", "simulated"):
        on = spmd.make_mesh((RANKS,), ("i",), backend=backend, exact_sums=True)
        f = mapped(body, on, (P(), P("i")), (P(), P("i"), P("i"), P("i")))
        g = md.grad(lambda w, f=f: np.sum(f(w, x)[0]))
        results += [bits((spmd.gather(wrap(f)(w, x)), wrap(g)(w))) for wrap in (lambda f: f, md.jit)]
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.parallel([2, 3])
def test_a_training_run_has_the_same_bits_on_any_number_of_ranks():
    """The same as on one rank alone, which is another mesh."""
    here, alone = (list(same_bits.train(mesh_on(comm), steps=3)) for comm in (WORLD, MPI.COMM_SELF))
    assert here == alone and len({*here}) == 4
