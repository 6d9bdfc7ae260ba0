"""Partition specs: their algebra, and what is said of those that do not fit."""

import pytest

from minidiff import ShapedArray
from spmd import P
from spmd.partition import block_type, check_divides, check_rank, check_spec, global_type

SIZES = {"x": 4, "y": 2}


def test_what_a_spec_names():
    assert P("x", None, ("y", "z")).axes == {"x", "y", "z"}
    assert P("x").dims(3) == (("x",), (), ())
    assert P(("y", "x"), None).dims(2) == (("y", "x"), ())


def test_equality_ignores_how_a_spec_is_written():
    assert P("x") == P(("x",)) == P("x", None)
    assert hash(P("x")) == hash(P("x", None))
    assert P("x", "y") != P("y", "x")
    assert P() != P.stacked("x")


@pytest.mark.parametrize(
    "spec, block, variance",
    [
        (P("x", "y"), (2, 8), {"x", "y"}),
        (P("x"), (2, 16), {"x"}),
        (P(None, ("y", "x")), (8, 2), {"x", "y"}),
        (P(), (8, 16), set()),
    ],
)
def test_types_of_blocks(spec, block, variance):
    whole = ShapedArray((8, 16), "float32")
    assert block_type(whole, spec, SIZES) == ShapedArray(block, "float32", variance)
    assert block_type(whole, spec, SIZES, typed=False) == ShapedArray(block, "float32")
    assert global_type(block_type(whole, spec, SIZES), spec, SIZES) == whole


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_stacked_blocks_may_have_any_shape(shape):
    spec = P.stacked("x", "y")
    whole = global_type(ShapedArray(shape, float, {"x", "y"}), spec, SIZES)
    assert whole == ShapedArray((4, 2, *shape), float)
    assert block_type(whole, spec, SIZES) == ShapedArray(shape, float, {"x", "y"})


@pytest.mark.parametrize(
    "check, message",
    [
        (lambda: check_spec(P("k"), SIZES, "in_specs[0]"), r"in_specs\[0\] = P\('k'\) names the axis 'k', but .*'y'"),
        (lambda: check_spec(P("x", "x"), SIZES, "in_specs"), r"names the axis 'x' twice"),
        (
            lambda: check_rank(P("x", None), (4,), "in_specs", "args[0]"),
            r"2 entries, but args\[0\] has 1 dimension \(.*one entry for each dimension",
        ),
        (
            lambda: check_divides(P(("x", "y")), (12,), SIZES, "in_specs", "args[0]"),
            r"args\[0\] has shape \(12,\): dimension 0, of size 12, .*'x' \(4\) and 'y' \(2\).*multiple of 8",
        ),
    ],
)
def test_specs_that_do_not_fit(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_entries_are_names():
    with pytest.raises(TypeError, match="an entry is None, the name of a mesh axis, or a tuple of names"):
        P(3)


@pytest.mark.parametrize(
    "outer, inner, both",
    [
        (P("x"), P("y"), "P(('x', 'y'))"),
        (P("x"), P(None, "y"), "P('x', 'y')"),
        (P(None, "x"), P("y", ("z", "w")), "P('y', ('x', 'z', 'w'))"),
        (P(), P("y", None), "P('y', None)"),
        (P("x", None), P(), "P('x', None)"),
        (P.stacked("x"), P("y"), None),
        (P.stacked("x"), P.stacked("y"), None),
    ],
)
def test_blocks_are_split_further(outer, inner, both):
    found = outer.split_further(inner)
    assert both is None or repr(found) == both
    assert found.axes == outer.axes | inner.axes
    assert outer.rest_of(found) == inner


def test_no_spec_says_how_they_are_split_further():
    assert P("x").split_further(P.stacked("y")) is None
    assert P("x").rest_of(P("y")) is None and P("x").rest_of(P(("y", "x"))) is None
