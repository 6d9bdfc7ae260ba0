"""Pictures of shardings say where the blocks are; `shardings.md` shows them."""

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd import P, visualize_sharding
from tests.checks.meshes import mesh
from tests.spmd.mesh.test_specs import specs


@st.composite
def shardings(draw):
    """Sizes of a mesh, a spec, and a shape that it divides."""
    sizes, ndim = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), draw(st.integers(0, 3))
    spec = draw(specs("ijk"[: len(sizes)], ndim)) if ndim else P()
    counts = [math.prod(sizes["ijk".index(a)] for a in axes) for axes in spec.dims(ndim)]
    return sizes, spec, tuple(n * draw(st.integers(1, 2)) for n in counts)


@settings(max_examples=40, deadline=None)
@given(shardings())
@example(([2, 3], P(("j", "i")), (12,)))
@example(([2, 3, 3], P(("i", "j", "k")), (18,)))  # more blocks than are shown
def test_each_rank_has_the_block_that_the_picture_says(sharding):
    sizes, spec, shape = sharding
    over, whole = mesh(*sizes), np.arange(math.prod(shape)).reshape(shape)
    picture = visualize_sharding(whole, over, spec)
    assert sorted(rank for ranks in picture.ranks.values() for rank in ranks) == list(range(over.size))
    data, varying = over.ranks.place(whole, spec.dims(whole.ndim))
    everywhere = over.ranks.expand(data, varying, over.axis_names)
    parts = [math.prod(over.shape[a] for a in axes) for axes in spec.dims(whole.ndim)]
    for block, ranks in picture.ranks.items():
        index = tuple(slice(b * n // p, (b + 1) * n // p) for b, n, p in zip(block, shape, parts))
        for rank in ranks:
            np.testing.assert_array_equal(everywhere[rank], whole[index])
    assert picture._repr_html_().count(">rank") == str(picture).count("rank") <= len(picture.ranks)
