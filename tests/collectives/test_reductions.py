"""Extrema and prefix sums on simulated ranks: ties, messages of derivatives, branches, and the axis of a vmap."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmax, pmin, pscan
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_collectives import check_scans_in_branches
from tests.checks.samples import each


@each("extremum, x", [(pmax, [2.0, 1.0, 2.0, 0.0]), (pmin, [-2.0, -1.0, -2.0, 0.0])])
def test_ranks_that_tie_share_the_derivative(extremum, x):
    f = mapped(lambda x: extremum(x, "i")[0], mesh(4), P("i"), P())
    numpy.testing.assert_array_equal(md.grad(f)(numpy.array(x)), [0.5, 0.0, 0.5, 0.0])


def test_the_way_back_of_an_extremum_communicates_nothing():
    f = mapped(lambda x: pmax(np.sin(x), "i"), mesh(2, 3), P("i"), P())
    rows = spmd.communication(lambda x, ct: md.vjp(f, x)[1](ct))(numpy.ones(4), numpy.ones(2)).rows
    assert [(row.collective, row.count, row.bytes) for row in rows] == [("pmax", 1, 16), ("psum", 1, 16)]
    linear = md.make_tape(md.linearize(f, numpy.ones(4))[1])(numpy.ones(4))
    assert spmd.communication(linear).counts == {"psum": 1}
    transposed = md.make_tape(md.vjp(f, numpy.ones(4))[1])(numpy.ones(2))
    assert spmd.communication(transposed).counts == {}


def test_scans_in_branches():
    check_scans_in_branches(mesh(2, 2, names="xy"))


@each("how, expected", [
    ({}, [3, 4, 8, 9]),
    ({"reverse": True}, [9, 6, 5, 1]),
    ({"exclusive": True}, [0, 3, 4, 8]),
    ({"reverse": True, "exclusive": True}, [6, 5, 1, 0]),
])  # fmt: skip
def test_scans_over_the_axis_of_a_vmap(how, expected):
    x, weights = np.array([3.0, 1.0, 4.0, 1.0]), np.array([1.0, 10.0, 100.0, 1000.0])
    f = md.vmap(lambda x: pscan(x, "i", **how), axis_name="i")
    for run in (f, md.jit(f)):
        np.testing.assert_array_equal(run(x), expected)
    opposite = {**how, "reverse": not how.get("reverse", False)}
    transposed = md.vmap(lambda ct: pscan(ct, "i", **opposite), axis_name="i")
    np.testing.assert_array_equal(md.grad(lambda x: f(x) @ weights)(x), transposed(weights))
