"""Pictures of what ranks hold (notebooks/pictures.py): who contributed to an entry, and what is shown of it."""

import io
import sys
from pathlib import Path

import numpy
import pytest

import minidiff as md
import spmd
from collectives import all_gather, pbroadcast, pmax, ppermute, psum
from minidiff.errors import VarianceError
from spmd import P

pytest.importorskip("matplotlib")
pytest.importorskip("graphviz")
sys.path.append(str(Path(__file__).parents[2] / "notebooks"))  # where the notebooks import it from
import charts
from charts import _in_few_colors
from graphs import beside, draw_adjoints, draw_sweeps, draw_tree
from pictures import RANK_COLORS, Table, _short, diagonal_band, draw, draw_collective, draw_layouts, on_ranks
from PIL import Image

MESH = spmd.make_mesh((3,), ("i",), backend="simulated")
X = numpy.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])  # blocks [3, 1], [4, 1], [5, 9]


def origins(held):
    """For each rank and each entry of its (flat) block, from which ranks it came; "same" for what all have."""
    names = [*range(MESH.size), "same"]
    return [
        [{names[k] for k in numpy.flatnonzero(entry)} for entry in actual.reshape(-1, len(names))]
        for actual in held.origins
    ]


def test_numbers_are_followed_to_where_they_go():
    before, moved, total, most = on_ranks(
        lambda x: [x, ppermute(x, "i", [(0, 1), (1, 2)]), psum(x, "i"), pmax(x, "i")], X, mesh=MESH, in_specs=P("i")
    )
    assert origins(before) == [[{0}] * 2, [{1}] * 2, [{2}] * 2]
    assert origins(moved) == [[set()] * 2, [{0}] * 2, [{1}] * 2]
    assert origins(total) == [[{0, 1, 2}] * 2] * 3
    assert origins(most) == [[{2}] * 2] * 3
    assert [str(h.type) for h in (before, moved, total)] == ["f64[2]{i}", "f64[2]{i}", "f64[2]"]
    numpy.testing.assert_array_equal(total.blocks, [[12.0, 11.0]] * 3)


def test_what_all_ranks_have_comes_from_no_one_of_them():
    same, sums = on_ranks(lambda w, x: [w, w + x], X[:2], X, mesh=MESH, in_specs=(P(), P("i")))
    assert origins(same) == [[{"same"}] * 2] * 3
    assert origins(sums) == [[{r, "same"}] * 2 for r in range(3)]


def test_only_the_numbers_of_some_arguments_are_followed():
    (product,) = on_ranks(lambda x, y: x * psum(y, "i"), X, X, mesh=MESH, in_specs=P("i"), follow=[0])
    assert origins(product) == [[{r}] * 2 for r in range(3)]


def test_ranks_of_a_plane():
    plane = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    (total,) = on_ranks(lambda x: psum(x, "i"), numpy.ones((2, 2)), mesh=plane, in_specs=P("i", "j"))
    assert [numpy.flatnonzero(actual[0, 0]).tolist() for actual in total.origins] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_picture_is_a_png_and_says_what_it_shows():
    before, after = on_ranks(lambda x: [x, all_gather(x, "i", tiled=True)], X, mesh=MESH, in_specs=P("i"))
    picture = draw("a group", ("before", before), ("after", after), changes=True)
    assert str(picture).splitlines() == [
        "a group:",
        "before f64[2]{i}: [3.,1.] | [4.,1.] | [5.,9.]",
        "after f64[6]{i}: [3.,1.,4.,1.,5.,9.] | [3.,1.,4.,1.,5.,9.] | [3.,1.,4.,1.,5.,9.]",
    ]
    png, shown = picture._repr_png_()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    assert numpy.allclose(image.size, 2 * numpy.array([shown["width"], shown["height"]]), atol=1)
    pixels = numpy.asarray(image)
    colors = {f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in numpy.unique(pixels.reshape(-1, 3), axis=0)}
    assert {*RANK_COLORS[:3], "#ffffff"} <= colors
    assert len(colors) <= 48


def test_a_picture_in_few_colors_keeps_the_most_frequent_ones():
    pixels = numpy.zeros((20, 20, 3), numpy.uint8)
    pixels[:, :, 0] = numpy.arange(20) * 5
    pixels[::2, :, 1] = numpy.arange(0, 200, 20)[:, None]
    pixels[1::2] = numpy.array([7, 8, 9])
    few = _in_few_colors(Image.fromarray(pixels))
    result = numpy.asarray(few.convert("RGB"))
    assert len(numpy.unique(result.reshape(-1, 3), axis=0)) == 48
    numpy.testing.assert_array_equal(result[1::2], pixels[1::2])
    assert {*map(tuple, result.reshape(-1, 3))} <= {*map(tuple, pixels.reshape(-1, 3))}


@pytest.mark.parametrize(
    "number, shown", [(1500.0, "1500"), (66538.0, "66538"), (5.2e-131, "5e-131"), (0.5, "0.5"), (3, "3")]
)
def test_a_number_of_a_cell(number, shown):
    assert _short(number) == shown


def test_bands_cover_a_square_from_one_corner_to_the_other():
    assert diagonal_band(0, 3).tolist() == [[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]
    assert diagonal_band(2, 4).tolist() == [[1, 0], [1, 0], [1, 1], [0, 1], [0, 1]]
    assert diagonal_band(3, 4).tolist() == [[1, 0.5], [1, 1], [0.5, 1]]


@pytest.mark.parametrize(
    "f, spec, titles",
    [
        (lambda x: psum(x, "i"), P("i"), ["psum:", "its transpose: pbroadcast:"]),
        (lambda x: pbroadcast(x, "i"), P(), ["pbroadcast:", "its transpose: psum:"]),
    ],
)
def test_a_collective_and_its_transpose(f, spec, titles):
    lines = str(draw_collective(f, X, MESH, spec)).splitlines()
    assert [line for line in lines if line.endswith(":")] == titles


def test_a_program_without_ranks_is_an_error():
    with pytest.raises(VarianceError):
        on_ranks(lambda x: pbroadcast(x, "i"), X, mesh=MESH, in_specs=P("i"))


def test_a_table():
    table = Table(["name", "bytes"], [["psum", "1,024"], ["pmax", 8]])
    assert str(table).splitlines() == ["name  bytes", "----  -----", "psum  1,024", "pmax      8"]
    assert table._repr_html_().count("<tr>") == 3


def test_a_layout_for_each_array():
    shown = draw_layouts({"data": (MESH, {"x": P("i"), "w": P()}), "tensor": (MESH, {"w": P(None, "i")})}, (4, 3))
    assert repr(shown) == "data: x P('i'), w P()\ntensor: w P(None, 'i')"


def product_plus_sine(x, y):
    return x * y + numpy.sin(x)


def test_adjoints_on_a_graph():
    source = draw_adjoints(product_plus_sine, 2.0, 3.0).source
    assert source.count("style=dashed") == 5  # two of the product, two of the sum, one of the sine
    for adjoint in md.grad(product_plus_sine, argnums=(0, 1))(2.0, 3.0):
        assert f"adjoint {adjoint:.4g}" in source
    assert f"× {numpy.cos(2.0):.4g}" in source


def test_what_the_backward_sweep_needs_is_red():
    step = md.make_tape(lambda x: x - 0.1 * md.grad(lambda x: numpy.sum(numpy.tanh(x) ** 2))(x))(numpy.ones(4))
    source = draw_sweeps(step).source
    tanh = next(line for line in source.splitlines() if '"tanh' in line).split()[0]
    red = [line for line in source.splitlines() if "c1272d" in line]
    assert red and all(line.split()[0] == tanh for line in red)
    assert sum("32 bytes" in line for line in red) == 1  # said once
    assert "multiply(0.1, ·)" in source


def test_graphs_side_by_side_have_nodes_of_their_own():
    one = md.draw(numpy.sin)(1.0)
    source = beside({"one": one, "other": one}).source
    assert source.count("sin(a)") == 2
    assert "n0_0 -> n0_1" in source and "n1_0 -> n1_1" in source and "n0 ->" not in source


def test_a_tree_of_an_expression():
    source = draw_tree("2 * x").source
    assert all(text in source for text in ("BinOp\\n2 * x", "Constant\\n2", "Mult", "Name\\nx"))


def test_one_curve_has_a_title_and_several_have_a_legend(monkeypatch):
    monkeypatch.setattr(charts, "Picture", lambda figure, text: figure)
    (one,) = charts.curves({"times": ([1, 2], [3, 4])}).axes
    assert one.get_title() == "times" and one.get_legend() is None
    (two,) = charts.curves({"times": ([1, 2], [3, 4]), "bytes": ([1, 2], [4, 5])}).axes
    assert two.get_title() == "" and [text.get_text() for text in two.get_legend().get_texts()] == ["times", "bytes"]


@pytest.mark.parametrize("largest, shown", [(800, "100"), (10**7, "$\\mathdefault{10^{2}}$")])
def test_moderate_numbers_of_a_logarithmic_axis_are_written_out(largest, shown, monkeypatch):
    monkeypatch.setattr(charts, "Picture", lambda figure, text: figure)
    (axes,) = charts.curves({"times": ([1, 2], [50, largest])}, yscale="log").axes
    axes.figure.canvas.draw()
    assert shown in [label.get_text() for label in axes.get_yticklabels()]
