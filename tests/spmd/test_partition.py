"""Partition specs: their algebra, and what is said of those that do not fit."""

import itertools
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidiff import ShapedArray, VarianceError
from spmd import P, make_mesh, shard_map
from spmd.mesh import checks as checks_of_specs
from spmd.mesh.specs import block_type, global_type
from tests.checks.samples import check_raises, each

SIZES = {"x": 4, "y": 2}


def test_what_a_spec_names():
    assert P("x", None, ("y", "z")).axes == {"x", "y", "z"}
    assert P("x").dims(3) == (("x",), (), ())
    assert P(("y", "x"), None).dims(2) == (("y", "x"), ())


def test_equality_ignores_how_a_spec_is_written():
    assert P("x") == P(("x",)) == P("x", None)
    assert hash(P("x")) == hash(P("x", None))
    assert P("x", "y") != P("y", "x")


def test_a_spec_of_another_process_equals_one_of_this():
    """Each process has its own hashes of strings."""
    program = "import pickle, sys, spmd; sys.stdout.buffer.write(pickle.dumps({spmd.P('x', 'y')}))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed}
    results = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, env=env).stdout
    assert pickle.loads(results) == {P("x", "y")}


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


MISFITS = {
    "check_spec(P('k'), SIZES, 'in_specs[0]')": (
        r"ValueError: in_specs\[0\] = P\('k'\) names the axis 'k', but .*'x' \(4\) and 'y' \(2\): name one"
    ),
    "check_spec(P('x', 'x'), SIZES, 'in_specs')": r"ValueError: names the axis 'x' twice.* name 'x' \(4\) once",
    "check_spec(P(('x', 'y'), 'y'), SIZES, 'in_specs')": r"ValueError: P\(\('x', 'y'\), 'y'\) names the axis 'y' twice",
    "check_ndim(P('x', None), (4,), 'in_specs', 'args[0]')": (
        r"ValueError: 2 entries, but args\[0\] has 1 dimension \(.*one entry for each dimension"
    ),
    "check_divides(P(('x', 'y')), (12,), SIZES, 'in_specs', 'args[0]')": (
        r"ValueError: args\[0\] has shape \(12,\): dimension 0, .*'x' \(4\) and 'y' \(2\).*multiple of 8, or do not"
        " split it"
    ),
}


@each("program", MISFITS)
def test_specs_that_do_not_fit(program):
    check_raises(lambda: eval(program, {**vars(checks_of_specs), **globals()}), MISFITS[program])


def test_entries_are_names():
    with pytest.raises(TypeError, match="an entry is None, the name of a mesh axis, or a tuple of names"):
        P(3)


# ---------------------------------------------------------------- what specs mean, rank by rank


@st.composite
def specs(draw, axes, ndim):
    """A spec of an array of `ndim` dimensions, with some of the axes, each once, alone or in tuples."""
    named = draw(st.permutations(axes))[: draw(st.integers(0, len(axes)))]
    entries = [[] for _ in range(ndim)]
    for a in named:
        entries[draw(st.integers(0, ndim - 1))].append(a)
    written = [tuple(e) if len(e) > 1 else e[0] if e else None for e in entries]
    while written and written[-1] is None and draw(st.booleans()):
        written.pop()
    return P(*written)


@st.composite
def placements(draw):
    sizes = dict(zip("ijk", draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))))
    ndim = draw(st.integers(1, 3))
    return sizes, ndim, draw(specs(list(sizes), ndim)), draw(specs(list(sizes), ndim))


def window(spec, sizes, at, block):
    """The slices of a whole array that are the block of the rank at these coordinates."""
    results = []
    for axes, n in zip(spec.dims(len(block)), block):
        part = 0
        for a in axes:
            part = part * sizes[a] + at[a]
        results.append(slice(part * n, (part + 1) * n))
    return tuple(results)


def shape_of_whole(spec, sizes, block):
    return tuple(n * math.prod(sizes[a] for a in axes) for axes, n in zip(spec.dims(len(block)), block))


@settings(deadline=None, max_examples=80)
@given(placements())
@example(({"i": 2, "j": 3}, 2, P("i", "j"), P("j", "i")))  # blocks transposed
@example(({"i": 2, "j": 3}, 2, P("i"), P(None, ("j", "i"))))  # tiled along j, which the first does not name
@example(({"i": 2, "j": 3}, 1, P(("j", "i")), P(("i", "j"))))
def test_blocks_go_in_and_come_out_as_specs_say(placement):
    """Cut up by one spec and put together by the other; along axes that the second does not name all must be alike."""
    sizes, ndim, in_spec, out_spec = placement
    mesh = make_mesh(tuple(sizes.values()), tuple(sizes), backend="simulated")
    block = (2, 1, 3)[:ndim]
    x = np.arange(math.prod(shape_of_whole(in_spec, sizes, block))).reshape(shape_of_whole(in_spec, sizes, block))
    f = shard_map(lambda x: x + 1, mesh, in_specs=in_spec, out_specs=out_spec)
    differing = sorted(in_spec.axes - out_spec.axes)
    if differing:
        with pytest.raises(VarianceError, match=f"may differ from rank to rank along '{differing[0]}'"):
            f(x)
        f = shard_map(lambda x: x + 1, mesh, in_specs=in_spec, out_specs=out_spec, check_rep=False)
    expected = np.full(shape_of_whole(out_spec, sizes, block), -1)
    for coordinates in reversed(list(itertools.product(*map(range, sizes.values())))):  # the first rank's stays
        at = dict(zip(sizes, coordinates))
        expected[window(out_spec, sizes, at, block)] = x[window(in_spec, sizes, at, block)] + 1
    np.testing.assert_array_equal(np.asarray(f(x)), expected)
