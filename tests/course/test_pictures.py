"""Pixels of pictures, graphs and charts of the notebooks; `pictures.md` has what is shown of ranks."""

import io
import sys
from pathlib import Path

import numpy
import pytest

import minidiff as md
import spmd
from collectives import all_gather
from spmd import P

pytest.importorskip("matplotlib")
pytest.importorskip("graphviz")
sys.path.append(str(Path(__file__).parents[2] / "notebooks"))  # where the notebooks import it from
import charts
from charts import _in_few_colors
from graphs import beside, draw_adjoints, draw_sweeps, draw_tree
from pictures import RANK_COLORS, Table, draw, on_ranks
from PIL import Image

MESH = spmd.make_mesh((3,), ("i",), backend="simulated")
X = numpy.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])


def test_a_picture_is_a_sharp_png_in_colors_of_ranks():
    before, after = on_ranks(lambda x: [x, all_gather(x, "i", tiled=True)], X, mesh=MESH, in_specs=P("i"))
    picture = draw("a group", ("before", before), ("after", after), changes=True)
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


def test_a_table_has_rows():
    assert Table(["name", "bytes"], [["psum", "1,024"], ["pmax", 8]])._repr_html_().count("<tr>") == 3


def test_adjoints_on_a_graph():
    source = draw_adjoints(lambda x, y: x * y + numpy.sin(x), 2.0, 3.0).source
    assert source.count("style=dashed") == 5  # two of the product, two of the sum, one of the sine
    for adjoint in (3 + numpy.cos(2.0), 2.0):
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
