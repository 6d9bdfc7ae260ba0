"""Halos: what is refused, and what is under way meanwhile. `tests/programs/halo.py` has values and derivatives."""

import numpy
import pytest
from numpy.testing import assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import unreduced
from minidiff.errors import UnboundAxisError, VarianceError
from spmd import P
from spmd.parallel import conv
from tests.checks.rewrites import lowered

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
X = numpy.arange(6.0).reshape(3, 2)

REFUSED = {
    "three dimensions": (lambda: spmd.halo(X, 1, ("i", None, None)), "f64[3,2] with widths=1 along P('i', None, None)"),
    "three pairs": (lambda: spmd.halo(X, ((1, 1),) * 3, (None,)), "one pair for each of the 2 dimensions"),
    "a fraction": (lambda: spmd.halo(X, 0.5, (None,)), "widths must be an int"),
    "a negative width": (lambda: spmd.halo(X, (-1, 1), (None,)), "a width is negative"),
    "an unknown mode": (lambda: spmd.halo(X, 1, (None,), "wrap"), "mode must be one of ('periodic', 'zeros', 'edge')"),
    "three modes": (lambda: spmd.halo(X, 1, (None,), ["edge"] * 3), "each of the 2 dimensions"),
    "no edges": (lambda: spmd.halo(X[:0], ((1, 0), (0, 0)), (None,)), "f64[0,2] with widths=((1, 0), (0, 0))"),
    "other channels": (lambda: conv(X, numpy.ones((3, 3, 1)), ()), "x is f64[3,2] and the kernel f64[3,3,1]"),
    "a stride across blocks": (lambda: conv(X, numpy.ones((3, 2, 1)), (), stride=2), "not a multiple of the stride 2"),
    "no space": (lambda: conv(X, numpy.ones((2, 2)), ()), "as many dimensions of space as of taps"),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_refused_with_types_and_widths(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def test_an_entry_is_the_name_of_an_axis():
    with pytest.raises(TypeError, match="an entry is None, the name of a mesh axis, or a tuple of names"):
        spmd.halo(X, 1, (0, None))


def test_axes_are_those_of_a_shard_map():
    with pytest.raises(UnboundAxisError, match=r"halo over .*'i'.* outside a shard_map"):
        spmd.halo(X, 1, ("i", None))
    with pytest.raises(UnboundAxisError, match="halo: there is no axis 'j' here"):
        spmd.shard_map(lambda x: spmd.halo(x, 1, "j"), mesh=MESH, in_specs=P("i"), out_specs=P("i"))(numpy.ones(4))


def test_a_partial_sum_has_no_edges():
    f = spmd.shard_map(
        lambda x: spmd.halo({"a": unreduced(x, "i")}, 1, "i"), mesh=MESH, in_specs=P("i"), out_specs=P("i")
    )
    with pytest.raises(VarianceError, match=r"x\['a'\].*is unreduced along"):
        f(numpy.ones(4))


def test_axes_may_be_a_partition_spec():
    f, g = (
        spmd.shard_map(lambda x, axes=axes: spmd.halo(x, 1, axes), mesh=MESH, in_specs=P("i"), out_specs=P("i"))
        for axes in (P("i"), ("i", None))
    )
    x = numpy.arange(8.0).reshape(4, 2)
    assert_array_equal(f(x).gather(), g(x).gather())


def test_outside_of_a_body_it_pads():
    assert_array_equal(spmd.halo(X, ((1, 4), (0, 0)), (), "periodic"), numpy.pad(X, ((1, 4), (0, 0)), "wrap"))


def test_along_the_axis_of_a_vmap():
    x = numpy.arange(6.0).reshape(3, 2)
    actual = md.vmap(lambda x: spmd.halo(x, 1, "ranks", "edge"), axis_name="ranks")(x)
    assert_array_equal(actual, [[0, 0, 1, 2], [1, 2, 3, 4], [3, 4, 5, 5]])


def test_explicit_bodies():
    """With `auto_pbroadcast=False`, a halo of a varying value inserts nothing."""
    f = spmd.shard_map(
        lambda x: spmd.halo(x, 1, "i", "edge"), mesh=MESH, in_specs=P("i"), out_specs=P("i"), auto_pbroadcast=False
    )
    assert_array_equal(f(numpy.arange(4.0)).gather(), [0, 0, 1, 2, 1, 2, 3, 3])


def test_a_halo_is_on_its_way_while_the_inside_is_computed():
    def body(x):
        p = spmd.halo(x, 1, "i")
        inside = np.sin(np.cos(x[2:] + x[:-2]))
        return np.concatenate([p[:1], inside, p[-1:]])

    f = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    (text,) = lowered(md.jit(f), numpy.arange(16.0))
    done = [line.split("#")[0].split(" = ")[-1].strip().split("(")[0] for line in text.splitlines()[1:]]
    starts, waits = ([k for k, name in enumerate(done) if f"ppermute_{label}" in name] for label in ("start", "wait"))
    assert len(starts) == len(waits) == 2 and max(starts) < done.index("cos") < min(waits)
