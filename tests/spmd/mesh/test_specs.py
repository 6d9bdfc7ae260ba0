"""Partition specs: their algebra, and what they mean, rank by rank."""

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
from spmd import P
from spmd.mesh.specs import block_type, global_type
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each


def test_what_a_spec_names():
    assert P("x", None, ("y", "z")).axes == {"x", "y", "z"}
    assert P("x").dims(3) == (("x",), (), ())
    assert P(("y", "x"), None).dims(2) == (("y", "x"), ())


def test_equality_ignores_how_a_spec_is_written():
    assert P("x") == P(("x",)) == P("x", None) and hash(P("x")) == hash(P("x", None))
    assert P("x", "y") != P("y", "x")


def test_a_spec_of_another_process_equals_one_of_this():
    """Each process has its own hashes of strings."""
    program = "import pickle, sys, spmd; sys.stdout.buffer.write(pickle.dumps({spmd.P('x', 'y')}))"
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    results = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, env=env).stdout
    assert pickle.loads(results) == {P("x", "y")}


@each(
    "spec, block",
    [
        (P("x", "y"), (2, 8)),
        (P("x"), (2, 16)),
        (P(None, ("y", "x")), (8, 2)),
        (P(), (8, 16)),
    ],
)
def test_types_of_blocks(spec, block):
    whole, sizes = ShapedArray((8, 16), "float32"), {"x": 4, "y": 2}
    assert block_type(whole, spec, sizes) == ShapedArray(block, "float32", spec.axes)
    assert block_type(whole, spec, sizes, typed=False) == ShapedArray(block, "float32")
    assert global_type(block_type(whole, spec, sizes), spec, sizes) == whole


@pytest.mark.parametrize("entry", [3, ("x", 0)])
def test_entries_are_names(entry):
    with pytest.raises(TypeError):
        P(entry)


# ---------------------------------------------------------------- what specs mean, rank by rank


@st.composite
def specs(draw, axes, ndim):
    """A spec of an array of `ndim` dimensions, with some of the axes, each once, alone or in tuples."""
    entries = [[] for _ in range(ndim)]
    for a in draw(st.permutations(axes))[: draw(st.integers(0, len(axes)))]:
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
@example(({"i": 2, "j": 3}, 2, P(), P("i", "j")))
def test_blocks_go_in_and_come_out_as_specs_say(placement):
    """Cut up by one spec and put together by the other; along axes that the second does not name all must be alike."""
    sizes, ndim, in_spec, out_spec = placement
    over, block, shapes = mesh(*sizes.values()), (2, 1, 3)[:ndim], []
    x = np.arange(math.prod(shape_of_whole(in_spec, sizes, block))).reshape(shape_of_whole(in_spec, sizes, block))
    body = lambda x: shapes.append(x.shape) or x + 1  # noqa: E731
    f = mapped(body, over, in_spec, out_spec)
    if differing := sorted(in_spec.axes - out_spec.axes):
        with pytest.raises(VarianceError, match=f"along '{differing[0]}'"):
            f(x)
        f = mapped(body, over, in_spec, out_spec, check_rep=False)
    expected = np.full(shape_of_whole(out_spec, sizes, block), -1)
    for coordinates in reversed(list(itertools.product(*map(range, sizes.values())))):  # the first rank's stays
        at = dict(zip(sizes, coordinates))
        expected[window(out_spec, sizes, at, block)] = x[window(in_spec, sizes, at, block)] + 1
    np.testing.assert_array_equal(np.asarray(f(x)), expected)
    assert {*shapes} == {block}
