"""Indices into sharded arrays on MPI ranks: the values of whole arrays, and the collectives that programs need."""

import pytest
from mpi4py import MPI

import spmd
from spmd import P
from tests.programs import indexing as programs

RANKS = MPI.COMM_WORLD.size
PROGRAMS = {**programs.BATCHES, **programs.LOOKUPS, **programs.NEIGHBORS, **programs.TOTALS}
everywhere = pytest.mark.parallel([2, 3, 4])


@everywhere
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    programs.check(PROGRAMS[name], spmd.make_mesh((RANKS,), ("i",), backend="mpi"))


@pytest.mark.parallel([4])
@pytest.mark.parametrize("spec", [P("i", "j"), P(("j", "i"))], ids=str)
def test_on_two_axes(spec):
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="mpi")
    for name in ("take_along_axis", "set", "convolve", "searchsorted", "cond", "switch", "rows", "roll both", "inside"):
        programs.check(PROGRAMS[name], mesh, spec)
