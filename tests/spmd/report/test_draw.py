"""Pictures of shardings: as they are drawn, and that what they say is where the blocks are."""

import html
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import minidiff as md
import spmd
from spmd import P, visualize_sharding
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.spmd.mesh.test_specs import specs

PLANE, CUBE = mesh(4, 2, names="xy"), mesh(2, 2, 2, names="xyz")
SHARDED = spmd.distribute(np.ones((8, 16)), PLANE, P("x", "y"))

#: Arguments, whose pictures are in one golden text.
PICTURES = [
    ((8, 16), PLANE, P("x", "y")),
    ((16, 4), PLANE, P("y", None)),
    ((8, 4), PLANE, P("x", None)),
    (np.zeros((16, 4)), PLANE, P("y")),
    ((4,), PLANE, P("y")),
    ((), PLANE, P()),
    ((32,), mesh(16), P("i")),  # many blocks of one dimension run down
    ((2, 4, 4), PLANE, P(None, "x", "y")),  # two dimensions are drawn, and the others said
    ((4, 2, 4), PLANE, P("x", None, "y")),
    ((4, 4, 4), CUBE, P("x", "y", "z")),
    ((8,), PLANE, P("y", unreduced={"x"})),  # ranks that hold parts of a block are said to
    ((2, 4, 4), PLANE, P(None, "y", unreduced={"x"})),
    ((8,), PLANE, P("y", reduced={"x"})),
    ((128, 64), mesh(64, 32, names="xy"), P("x", "y")),  # the beginning and the end of a large mesh
    ((), mesh(4, 16, names="xy"), P()),  # many ranks are said in few words
    ((4,), mesh(4, 16, names="xy"), P("x")),
    ((16,), mesh(4, 16, names="xy"), P("y")),
    ((2,), mesh(16, 2, names="xy"), P("y")),
    (np.ones(3),),
    (SHARDED,),
    (SHARDED, CUBE, P("z")),
]


def test_pictures(golden):
    golden("shardings", "\n\n".join(str(visualize_sharding(*args)) for args in PICTURES))


def test_of_many_pictures_the_first_are_shown():
    sharding = visualize_sharding((2, 2, 16), mesh(2, 2, 16, names="xyz"), P("x", "y", "z"))
    assert str(sharding).count("┌") == 8 and str(sharding).endswith("\n(and 8 more)")
    assert sharding._repr_html_().count("<table") == 8 and len(sharding.ranks) == 64


@each("args", PICTURES)
def test_a_notebook_shows_the_same_cells(args):
    sharding = visualize_sharding(*args)
    shown = f"<div>{sharding._repr_html_()}</div>"
    ElementTree.fromstring(shown)  # every tag is closed
    cells = [html.unescape(re.sub("<[^>]*>", "", c)) for c in re.findall(r"<td.*?</td>", shown)]
    text = str(sharding)
    assert repr(sharding) == text and shown.count(">rank") == text.count("│ rank")
    assert all(cell in re.sub(r"[ …│]+", " ", text) or "…" in cell for cell in cells)
    if len(cells) <= 8:
        assert len({*re.findall(r"background:(#[0-9a-f]{6})", shown)}) == len({*sharding.ranks})


def test_nothing_communicates():
    PLANE.reset_calls()
    str(visualize_sharding(SHARDED)), visualize_sharding(SHARDED)._repr_html_()
    assert PLANE.calls == {}


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


@each("record", [lambda f: mapped(f, PLANE, P("x"), P())(np.ones((8, 2))), lambda f: md.make_tape(f)(np.ones(3))])
def test_a_traced_value_is_not_an_array(record):
    with pytest.raises(TypeError, match="is a traced value"):
        record(visualize_sharding)
