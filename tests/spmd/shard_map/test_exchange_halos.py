"""Slices that no mesh divides: compiled, ranks exchange edges. See `tests/programs/neighbors.py`."""

import itertools

import minidiff as md
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.neighbors import PROGRAMS, X, check, heat


@each("name, ranks", zip(PROGRAMS, itertools.cycle([2, 3, 4])))
def test_ranks_exchange_edges(name, ranks):
    check(PROGRAMS[name], mesh(ranks))


def test_along_one_axis_of_two():
    check(PROGRAMS["heat"], mesh(2, 2))


def test_single_precision_stays():
    x = spmd.distribute(X.astype("float32"), mesh(4), P("i"))
    assert md.jit(heat)(x).dtype == "float32"


def test_the_rewrite_can_be_left_out():
    f, x = md.jit(heat, without=("exchange halos",)), spmd.distribute(X, mesh(4), P("i"))
    assert spmd.communication(f)(x).counts == {"all_gather_invariant": 1}
    assert_trees_close(f(x), heat(X))
