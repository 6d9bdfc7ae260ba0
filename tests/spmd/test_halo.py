"""Halos: where they run, and what is under way meanwhile. `tests/programs/halo.py` has values and derivatives."""

import numpy
from numpy.testing import assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.rewrites import lowered

TWO = mesh(2)
X = numpy.arange(6.0).reshape(3, 2)


def test_axes_may_be_a_partition_spec():
    f, g = (mapped(lambda x, a=axes: spmd.halo(x, 1, a), TWO, P("i"), P("i")) for axes in (P("i"), ("i", None)))
    assert_array_equal(f(numpy.arange(8.0).reshape(4, 2)), g(numpy.arange(8.0).reshape(4, 2)))


def test_outside_of_a_body_it_pads():
    assert_array_equal(spmd.halo(X, ((1, 4), (0, 0)), (), "periodic"), numpy.pad(X, ((1, 4), (0, 0)), "wrap"))


def test_along_the_axis_of_a_vmap():
    actual = md.vmap(lambda x: spmd.halo(x, 1, "ranks", "edge"), axis_name="ranks")(X)
    assert_array_equal(actual, [[0, 0, 1, 2], [1, 2, 3, 4], [3, 4, 5, 5]])


def test_explicit_bodies():
    """With `auto_pbroadcast=False`, a halo of a varying value inserts nothing."""
    f = mapped(lambda x: spmd.halo(x, 1, "i", "edge"), TWO, P("i"), P("i"), auto_pbroadcast=False)
    assert_array_equal(f(numpy.arange(4.0)), [0, 0, 1, 2, 1, 2, 3, 3])


def test_a_halo_is_on_its_way_while_the_inside_is_computed():
    def body(x):
        p = spmd.halo(x, 1, "i")
        return np.concatenate([p[:1], np.sin(np.cos(x[2:] + x[:-2])), p[-1:]])

    (text,) = lowered(md.jit(mapped(body, TWO, P("i"), P("i"))), numpy.arange(16.0))
    done = [line.split("#")[0].split(" = ")[-1].strip().split("(")[0] for line in text.splitlines()[1:]]
    starts, waits = ([k for k, name in enumerate(done) if f"ppermute_{label}" in name] for label in ("start", "wait"))
    assert len(starts) == len(waits) == 2 and max(starts) < done.index("cos") < min(waits)
