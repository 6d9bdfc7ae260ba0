"""Slices that no mesh divides: see `tests/programs/neighbors.py`."""

import numpy
import pytest

import minidiff as md
import spmd
from spmd import P
from tests.programs.neighbors import PROGRAMS, X, check, heat


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_exchange_edges(name, ranks):
    check(PROGRAMS[name], spmd.make_mesh((ranks,), ("i",), backend="simulated"))


def test_along_one_axis_of_two():
    check(PROGRAMS["heat"], spmd.make_mesh((2, 2), ("i", "j"), backend="simulated"))


def test_the_rewrite_can_be_left_out():
    mesh = spmd.make_mesh((4,), ("i",), backend="simulated")
    x = spmd.distribute(X, mesh, P("i"))
    report = spmd.communication(md.jit(heat, without=("exchange halos",)))(x)
    assert report.counts == {"all_gather_invariant": 1}
    numpy.testing.assert_allclose(md.jit(heat)(x).gather(), heat(X), rtol=1e-12)
