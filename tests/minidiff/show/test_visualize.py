"""Pictures of shardings: what they say is where the blocks are."""

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
from spmd.mesh.specs import axes_of_entry
from tests.minidiff.refusals import refusals

PLANE = spmd.make_mesh((4, 2), ("x", "y"), backend="simulated")
CUBE = spmd.make_mesh((2, 2, 2), ("x", "y", "z"), backend="simulated")


def identity(mesh, spec):
    return spmd.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)


# ---------------------------------------------------------------- what they say


def test_the_tutorials_pictures():
    a, b, c = (str(visualize_sharding(s, PLANE, p)) for s, p in SHARDINGS)
    assert re.findall(r"ranks? ([\d,]+)", a) == [str(rank) for rank in range(8)]
    assert a.count("┼") == 3
    assert re.findall(r"ranks? ([\d,]+)", b) == ["0,2,4,6", "1,3,5,7"]
    assert re.findall(r"ranks? ([\d,]+)", c) == ["0,1", "2,3", "4,5", "6,7"]


SHARDINGS = [((8, 16), P("x", "y")), ((16, 4), P("y", None)), ((8, 4), P("x", None))]


def test_a_grid():
    assert str(visualize_sharding(np.zeros((16, 4)), PLANE, P("y"))) == (
        "f64[16,4] split as P('y') over (x: 4, y: 2): blocks f64[8,4]\n"
        "       0:4\n"
        "     ┌───────────────┐\n"
        "0:8  │ ranks 0,2,4,6 │\n"
        "     ├───────────────┤\n"
        "8:16 │ ranks 1,3,5,7 │\n"
        "     └───────────────┘"
    )


def test_one_dimension_and_none():
    assert str(visualize_sharding((4,), PLANE, P("y"))) == (
        "[4] split as P('y') over (x: 4, y: 2): blocks [2]\n"
        "  0:2             2:4\n"
        "┌───────────────┬───────────────┐\n"
        "│ ranks 0,2,4,6 │ ranks 1,3,5,7 │\n"
        "└───────────────┴───────────────┘"
    )
    assert str(visualize_sharding((), PLANE, P())) == (
        "[] split as P() over (x: 4, y: 2): blocks []\n"
        "┌───────────────────────┐\n"
        "│ ranks 0,1,2,3,4,5,6,7 │\n"
        "└───────────────────────┘"
    )


def test_many_blocks_of_one_dimension_run_down():
    mesh = spmd.make_mesh((16,), ("i",), backend="simulated")
    lines = str(visualize_sharding((32,), mesh, P("i"))).splitlines()
    assert len(lines) == 1 + 16 + 17 and lines[2] == "0:2   │ rank 0  │" and max(map(len, lines)) < 60


def test_two_dimensions_are_drawn_and_the_others_said():
    last = str(visualize_sharding((2, 4, 4), PLANE, P(None, "x", "y")))
    assert "down is dimension 1, across is dimension 2; dimension 0 is not split\n" in last
    assert last.count("┌") == 1
    both = str(visualize_sharding((4, 2, 4), PLANE, P("x", None, "y")))
    assert "down is dimension 0, across is dimension 2; dimension 1 is not split\n" in both
    three = str(visualize_sharding((4, 4, 4), CUBE, P("x", "y", "z")))
    assert "dimension 2 is split\n[:, :, 0:2]\n" in three and "\n[:, :, 2:4]\n" in three
    assert [re.findall(r"rank (\d)", part) for part in three.split("[:, :, ")[1:]] == [list("0246"), list("1357")]


def test_ranks_that_hold_parts_of_a_block_are_said_to():
    message = "the ranks of a block hold partial sums over 'x'"
    for shape, spec in (((8,), P("y", unreduced={"x"})), ((2, 4, 4), P(None, "y", unreduced={"x"}))):
        picture = visualize_sharding(shape, PLANE, spec)
        assert message in str(picture) and html.escape(message) in picture._repr_html_()
        assert "a sum" not in str(visualize_sharding(shape, PLANE, P(*spec, reduced={"x"})))


def test_of_many_pictures_the_first_are_shown():
    mesh = spmd.make_mesh((2, 2, 16), ("x", "y", "z"), backend="simulated")
    sharding = visualize_sharding((2, 2, 16), mesh, P("x", "y", "z"))
    assert str(sharding).count("┌") == 8 and str(sharding).endswith("\n(and 8 more)")
    assert sharding._repr_html_().count("<table") == 8 and len(sharding.ranks) == 64


def test_of_a_large_mesh_the_beginning_and_the_end_are_shown():
    mesh = spmd.make_mesh((64, 32), ("x", "y"), backend="simulated")
    sharding = visualize_sharding((128, 64), mesh, P("x", "y"))
    lines = str(sharding).splitlines()
    assert len(lines) == 2 + 16 + 17
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert rows[0][:2] == ["0:2", "rank 0"] and rows[13][:2] == ["26:28", "rank 416"]
    assert rows[14][0] == "…" and set(rows[14][1:-1]) == {"…"}
    assert rows[15][0] == "126:128" and rows[15][13:17] == ["rank 2028", "rank 2029", "…", "rank 2047"]
    assert len(ElementTree.fromstring(f"<div>{sharding._repr_html_()}</div>").findall(".//td")) == 16 * 16


def test_many_ranks_are_said_in_few_words():
    mesh = spmd.make_mesh((4, 16), ("x", "y"), backend="simulated")
    assert "│ ranks 0-63 │" in str(visualize_sharding((), mesh, P()))
    assert "│ ranks 16-31 │" in str(visualize_sharding((4,), mesh, P("x")))
    assert "│ ranks 0,16,32,48  │" in str(visualize_sharding((16,), mesh, P("y")))
    mesh = spmd.make_mesh((16, 2), ("x", "y"), backend="simulated")
    assert "ranks 1,3,5,7,9," in (text := str(visualize_sharding((2,), mesh, P("y")))) and "11,…,31" in text
    assert visualize_sharding((2,), mesh, P("y")).ranks[1,] == list(range(1, 32, 2))


def test_sharded_arrays_and_plain_ones():
    x = identity(PLANE, P("x", "y"))(np.ones((8, 16)))
    assert str(visualize_sharding(x)) == str(visualize_sharding(np.ones((8, 16)), PLANE, P("x", "y")))
    assert str(visualize_sharding(np.ones(3))) == "f64[3]: one block, on no mesh\n  0:3\n┌──────┐\n│ here │\n└──────┘"
    assert str(visualize_sharding(x, CUBE, P("z"))).startswith("f64[8,16] split as P('z')")
    assert repr(visualize_sharding(x)) == str(visualize_sharding(x))


def test_a_notebook_shows_the_same_cells():
    for shape, spec in SHARDINGS:
        sharding = visualize_sharding(shape, PLANE, spec)
        cells = [html.unescape(re.sub("<[^>]*>", "", c)) for c in re.findall(r"<td.*?</td>", sharding._repr_html_())]
        assert cells == re.findall(r"ranks? [\d,]+", str(sharding))
        colors = re.findall(r"background:(#[0-9a-f]{6})", sharding._repr_html_())
        assert len(set(colors)) == len(cells)
        ElementTree.fromstring(f"<div>{sharding._repr_html_()}</div>")  # every tag is closed
    assert "P(&#x27;x&#x27;, None)" in sharding._repr_html_()


def test_nothing_communicates():
    x = identity(PLANE, P("x", "y"))(np.ones((8, 16)))
    PLANE.reset_calls()
    str(visualize_sharding(x)), visualize_sharding(x)._repr_html_()
    assert PLANE.calls == {}


# ---------------------------------------------------------------- where the blocks are


@st.composite
def shardings(draw):
    """A mesh, a spec, and a shape that it divides."""
    count = draw(st.integers(1, 3))
    axes = ("i", "j", "k")[:count]
    sizes = [draw(st.integers(1, 3)) for _ in axes]
    ndim = draw(st.integers(0, 4))
    entries = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(axes)):
        d = draw(st.integers(-1, ndim - 1))
        if d >= 0:
            entries[d].append(axis)
    spec = [tuple(e) if len(e) > 1 else e[0] if e else None for e in entries]
    parts = [math.prod(dict(zip(axes, sizes))[a] for a in axes_of_entry(e)) for e in spec]
    shape = tuple(n * draw(st.integers(1, 2)) for n in parts)
    return sizes, axes, spec, shape


@settings(max_examples=60, deadline=None)
@given(shardings())
@example(([2, 3], ("i", "j"), [("j", "i")], (12,)))
@example(([2, 3, 3], ("i", "j", "k"), [("i", "j", "k")], (18,)))  # more blocks than are shown
def test_each_rank_has_the_block_that_the_picture_says(sharding):
    sizes, axes, spec, shape = sharding
    mesh = spmd.make_mesh(sizes, axes, backend="simulated")
    whole = np.arange(math.prod(shape)).reshape(shape)
    ranks_of = visualize_sharding(whole, mesh, P(*spec)).ranks
    assert sorted(rank for ranks in ranks_of.values() for rank in ranks) == list(range(mesh.size))
    data, varying = mesh.ranks.place(whole, P(*spec).dims(whole.ndim))
    everywhere = mesh.ranks.expand(data, varying, mesh.axis_names)
    for block, ranks in ranks_of.items():
        parts = [math.prod(dict(zip(axes, sizes))[a] for a in axes_of_entry(e)) for e in spec]
        index = tuple(slice(b * n // p, (b + 1) * n // p) for b, n, p in zip(block, shape, parts))
        for rank in ranks:
            np.testing.assert_array_equal(everywhere[rank], whole[index])
    text, notebook = str(visualize_sharding(shape, mesh, P(*spec))), visualize_sharding(shape, mesh, P(*spec))
    assert text.count("rank") <= len(ranks_of) and notebook._repr_html_().count(">rank") == text.count("rank")


# ---------------------------------------------------------------- errors


test_mistakes = refusals(
    [
        (((8, 4),), TypeError, r"the shape \(8, 4\) alone does not name ranks; pass the mesh and the spec too"),
        (((8, 4), PLANE), TypeError, "a mesh needs a spec: pass both, or neither"),
        (((8, 4), None, P("x")), TypeError, "a spec needs a mesh"),
        (((8, 4), P("x"), PLANE), TypeError, r"mesh is P\('x'\), which is not a mesh: write visualize_sharding"),
        (((8, 4), PLANE, "x"), TypeError, r"spec is 'x', which is not a partition spec; write P\('x'\)"),
        (((8, 4), PLANE, P("q")), ValueError, r"names the axis 'q', but the axes of the mesh are 'x' \(\d\) and 'y'"),
        (((8,), PLANE, P("x", "y")), ValueError, "has 2 entries, but the array has 1 dimension "),
        (((6, 4), PLANE, P("x")), ValueError, r"dimension 0, of size 6, cannot be split evenly along 'x' \(4\)"),
        (("array",), TypeError, "takes a ShardedArray, a NumPy array, or a shape with a mesh and a spec; got str"),
    ],
    lambda args: visualize_sharding(*args),
)


def test_a_traced_value_is_not_an_array():
    with pytest.raises(TypeError, match=r"f64\[2,2\]\{x\} is a traced value.*print it to see the blocks"):
        spmd.shard_map(visualize_sharding, mesh=PLANE, in_specs=P("x"), out_specs=P())(np.ones((8, 2)))
    with pytest.raises(TypeError, match="is a traced value"):
        md.make_tape(visualize_sharding)(np.ones(3))
