"""Gradients whose pbroadcasts are hoisted, on MPI ranks: taken around a body or in it, they make the same calls."""

import functools

import pytest

import minidiff as md
import spmd
from spmd import P
from tests.collectives.passes.test_hoist_pbroadcasts import IJ, SUMS, WS, W, X, averaged
from tests.programs import assert_trees_close, run_and_count


@functools.cache
def mesh():
    return spmd.make_mesh((2, 2), IJ, backend="mpi")


@pytest.mark.parallel(4)
@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
def test_gradients_around_a_body_and_in_it(f):
    on_ranks, whole = averaged(f)
    expected = md.grad(whole, (0, 1, 2))(X, W, WS)
    around = md.grad(on_ranks(mesh=mesh()), (0, 1, 2))
    inside = on_ranks(lambda loss: md.grad(loss, (0, 1, 2)), (P(IJ), P(), P()), mesh=mesh())
    for gradient in (around, inside):
        mesh().reset_calls()
        found = gradient(X, W, WS)
        assert mesh().calls == {"psum": SUMS[f]}
        run_and_count(gradient, mesh(), X, W, WS)
        assert mesh().calls == {"psum": SUMS[f]}
        assert_trees_close(found, expected)
        assert_trees_close(md.jit(gradient)(X, W, WS), expected)
