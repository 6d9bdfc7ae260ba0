"""Blocks of arrays, as partition specs say, rank by rank; `specs.md` shows the specs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minidiff import VarianceError
from spmd import P
from tests.checks.meshes import mapped, mesh

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
