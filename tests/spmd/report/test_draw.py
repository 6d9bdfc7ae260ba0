"""Pictures: what is in their text, and what happens without the program that draws it or the package that writes it."""

import importlib.util
import re
import sys
from xml.etree import ElementTree

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, psum, psum_scatter, reduced, unreduced
from minidiff.core.primitive import Primitive
from minidiff.printing import COLORS, INVARIANT_COLOR, color_of
from minidiff.show.graph import LOOKS
from spmd import P

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")


def formula(x1, x2):
    return np.log(x1) + x1 * x2 - np.sin(x2)


def nodes(drawing):
    """Each node's label, by its name."""
    return dict(re.findall(r"^\s*(n\d+) \[label=\"?(.*?)\"? (?:color|fillcolor)=", drawing.source, re.M))


def edges(drawing):
    """Edges as pairs of labels' first lines, in order."""
    actual = {node: label.split("\\n")[0] for node, label in nodes(drawing).items()}
    return [(actual[a], actual[b]) for a, b in re.findall(r"(n\d+) -> (n\d+)", drawing.source)]


def node(drawing, label):
    """The attributes of the one node whose label begins so."""
    (line,) = [line for line in drawing.source.splitlines() if re.search(rf'n\d+ \[label="?{re.escape(label)}', line)]
    return dict(re.findall(r'(\w+)="?([^" \]]*)"?', line))


def fill(drawing, label):
    return node(drawing, label)["fillcolor"]


def test_the_names_are_those_of_the_printed_tape():
    drawing, text = md.draw(formula)(2.0, 5.0), str(md.make_tape(formula)(2.0, 5.0))
    labels = list(nodes(drawing).values())
    assert labels[:4] == ["a:f64[]", "b:f64[]", "log(a)\\nc:f64[]", "multiply(a, b)\\nd:f64[]"]
    assert labels[-1] == "return g"
    for label in labels[2:-1]:
        operation, value = label.split("\\n")
        assert f"{value} = {operation}" in text


def test_edges_lead_from_where_values_are_made():
    assert edges(md.draw(formula)(2.0, 5.0)) == [
        ("a:f64[]", "log(a)"),
        ("a:f64[]", "multiply(a, b)"),
        ("b:f64[]", "multiply(a, b)"),
        ("log(a)", "add(c, d)"),
        ("multiply(a, b)", "add(c, d)"),
        ("b:f64[]", "sin(b)"),
        ("add(c, d)", "subtract(e, f)"),
        ("sin(b)", "subtract(e, f)"),
        ("subtract(e, f)", "return g"),
    ]


def test_a_value_taken_twice_has_one_edge():
    assert edges(md.draw(lambda x: x * x)(2.0)) == [("a:f64[]", "multiply(a, a)"), ("multiply(a, a)", "return b")]


def test_inputs_constants_numbers_and_results_are_told_apart():
    drawing = md.draw(lambda x: (x * np.arange(3.0) + 2, 1.0, x))(1.0)
    for label, look in (
        ("a:f64[]", "input"),
        ("b:f64[3]", "constant"),
        ("multiply", "operation"),
        ("return d", "output"),
    ):
        assert LOOKS[look].items() <= node(drawing, label).items()
    looks = [(look["shape"], look.get("peripheries"), look["style"]) for look in LOOKS.values()]
    assert len(set(looks)) == len(LOOKS)
    assert "add(c, 2)\\nd:f64[3]" in nodes(drawing).values()
    assert ("a:f64[]", "return a") in edges(drawing)
    assert "return 1.0" in nodes(drawing).values()


def test_a_tape_or_a_function():
    assert md.draw(md.make_tape(formula)(2.0, 5.0)).source == md.draw(formula)(2.0, 5.0).source


def test_a_body_is_a_cluster_through_which_values_flow():
    f = spmd.shard_map(lambda w, x: psum(np.sum(x * w), "i"), mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    drawing = md.draw(f)(2.0, np.ones(4))
    assert drawing.source.count("subgraph cluster") == 1
    assert "shard_map(a, b, mesh=(i: 2), in_specs=(P(), P('i')), out_specs=(P(),))" in drawing.source
    actual = edges(drawing)
    assert ("a:f64[]", "d:f64[]") in actual and ("b:f64[4]", "e:f64[2]{i}") in actual
    assert ("return i", "c:f64[]") in actual and ("c:f64[]", "return c") in actual


# ---------------------------------------------------------------- what varies, and what communicates


def network(w, x):
    h = np.tanh(x @ all_gather(w, "j", tiled=True))
    h = psum_scatter(h, "j", scatter_dimension=1, tiled=True)
    return psum(np.sum(h), ("i", "j"))


PLANE = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
SPECS = {"mesh": PLANE, "in_specs": (P("j"), P("i")), "out_specs": P()}


def variances(drawing):
    """Return each value's type, and the node's colors."""
    actual = re.findall(r'label="?(?:.*?\\n)?(\w+:\w+\[[\d,]*\](?:\{[^}]*\})?).*? fillcolor="([^"]+)"', drawing.source)
    return [(re.findall(r"\{(.*)\}", value), re.sub(";[.0-9]+", "", colors).split(":")) for value, colors in actual]


@pytest.mark.parametrize("f", [spmd.shard_map(network, **SPECS), md.grad(spmd.shard_map(network, **SPECS))])
def test_a_color_says_what_the_type_says(f):
    actual = variances(md.draw(f)(np.ones((4, 4)), np.ones((4, 4))))
    assert {tuple(axes) for axes, _ in actual} == {(), ("i",), ("j",), ("i,j",)}
    for axes, colors in actual:
        assert colors == [color_of(a) for text in axes for a in text.split(",")] or colors == [INVARIANT_COLOR]
        assert (colors == [INVARIANT_COLOR]) == (not axes)


def test_an_operation_that_is_pointed_at_says_where_it_comes_from():
    def f(x):
        y = np.sin(x)
        return y * len('\\n<"')

    source = md.draw(md.grad(f))(1.0).source
    line = f.__code__.co_firstlineno
    assert f'tooltip="test_draw.py:{line + 1}: y = np.sin(x)"' in source
    assert f'tooltip="backward, of test_draw.py:{line + 1}: y = np.sin(x)"' in source
    assert f"test_draw.py:{line + 2}: return y * len(" in source


def test_what_communicates_stands_out_with_its_bytes():
    drawing = md.draw(spmd.shard_map(network, **SPECS))(np.ones((4, 4)), np.ones((4, 4)))
    loud = {label: text for label, text in nodes(drawing).items() if "bytes per rank" in text}
    assert [text.split("\\n")[0].split("(")[0] for text in loud.values()] == [
        f"\u21c4 {name}" for name in ("all_gather", "psum_scatter", "psum")
    ]
    assert [text.split("\\n")[-1] for text in loud.values()] == [f"{n} bytes per rank" for n in (64, 64, 8)]
    for text in loud.values():
        assert LOOKS["collective"].items() <= node(drawing, text.split("(")[0] + "(").items()
    assert "\u21c4 pbroadcast" not in drawing.source and "pbroadcast(" in drawing.source


def test_a_collective_of_one_rank_is_an_operation_like_any_other():
    mesh = spmd.make_mesh((1,), ("i",), backend="simulated")
    drawing = md.draw(spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))(np.ones(2))
    assert LOOKS["operation"].items() <= node(drawing, "psum(").items()
    assert "communicates" not in drawing.source and "bytes" not in drawing.source


def test_the_legend_says_what_is_there():
    def legend(f, *args):
        return re.findall(r'ALIGN="LEFT">(.*?)<', md.draw(f)(*args).source)

    x = np.ones((4, 4))
    both = ["the same on all ranks", "may vary along i", "may vary along j", "communicates"]
    assert legend(spmd.shard_map(network, **SPECS), x, x) == both
    quiet = spmd.shard_map(lambda x: np.sin(x), mesh=PLANE, in_specs=P("j"), out_specs=P("j"))
    assert legend(quiet, x) == ["the same on all ranks", "may vary along j"]
    untyped = spmd.shard_map(lambda x: psum(x, "i"), mesh=PLANE, in_specs=P("i"), out_specs=P(), check_rep=False)
    assert legend(untyped, x) == ["the same on all ranks", "may vary: there are no types", "communicates"]
    assert legend(formula, 2.0, 5.0) == []


def test_states_differ_in_bands_and_border_and_the_legend_names_them():
    def body(w, x):
        w = reduced(w, "i")
        return psum(unreduced(np.sum(x * w), "i"), "i"), w

    f = spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=(P(), P(reduced={"i"})))
    drawing = md.draw(f)(2.0, np.ones(4))
    color, white = color_of("i"), INVARIANT_COLOR
    looks = {
        "\u21c4 psum(": (white, "filled"),
        "pbroadcast(": (color, "rounded,filled"),
        "unreduced(": (f"{color}:{white}:{color}", "striped"),
        "reduced(": (f"{color};0.5:{white}", "rounded,filled,dotted"),
    }
    for label, (fill_, style) in looks.items():
        assert (fill(drawing, label), node(drawing, label)["style"]) == (fill_, style)
    assert re.findall(r'ALIGN="LEFT">(.*?)<', drawing.source) == [
        "the same on all ranks",
        "may vary along i",
        "partial sums along i",
        "the same along i, its cotangent unreduced",
        "communicates",
    ]
    assert f'STYLE="dotted" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0"><TR><TD WIDTH="15" BGCOLOR="{color}"' in (
        drawing.source
    )


def test_where_there_are_no_types_nothing_is_said_to_be_the_same():
    def body(x):
        return md.checkpoint(lambda x: psum(np.sin(x), "i"))(x)

    specs = {"mesh": MESH, "in_specs": P("i"), "out_specs": P()}
    typed, untyped = (spmd.shard_map(body, **specs, check_rep=rep) for rep in (True, False))
    drawing = md.draw(lambda x: untyped(x) + typed(x))(np.ones(2))
    actual = re.findall(r'label="(\S+?)[:(\\ ].* style="?([\w,]+)', drawing.source)
    dashed = [label for label, style in actual if style.endswith(",dashed")]
    assert dashed == ["c", "e", "sin", "\u21c4", "return", "d", "return"]  # in the first body, and in the body in it
    assert ("sin", "rounded,filled") in actual and ("add", "rounded,filled") in actual
    assert "may vary: there are no types" in drawing.source
    assert "no types" not in md.draw(typed)(np.ones(2)).source


def test_partial_sums_communicate_where_they_leave_the_body():
    sums = P("i", sum="j")
    f = spmd.shard_map(lambda x: (x, np.sin(x)), mesh=PLANE, in_specs=P("i", "j"), out_specs=(P("i", "j"), sums))
    drawing = md.draw(f)(np.ones((4, 6)))
    assert "\u21c4 psum(h, 'j')\\ni:f64[2,3]{i}\\n48 bytes per rank" in nodes(drawing).values()
    assert LOOKS["collective"].items() <= node(drawing, "\u21c4 psum").items()
    assert spmd.communication(f)(np.ones((4, 6))).bytes == 48 and "communicates" in drawing.source


def test_a_loop_s_collectives_say_how_often():
    def step(c, x):
        return md.scan(lambda c, _: (c + psum(x, "i"), None), c, None, length=3)[0], None

    f = spmd.shard_map(lambda x: md.scan(step, 0.0, x)[0], mesh=MESH, in_specs=P("i"), out_specs=P())
    drawing, report = md.draw(f)(np.ones(8)), spmd.communication(f)(np.ones(8))
    assert "8 bytes per rank, 12 times" in drawing.source
    assert report.counts == {"psum": 12} and report.bytes == 12 * 8


def test_what_communicates_in_a_while_loop_does_so_in_each_step():
    def body(x):
        total = psum(x.sum(), "i")
        return md.while_loop(lambda c: psum(c.sum(), "i") < 100, lambda c: c * 2, x) + total

    f = spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    source = md.draw(f)(np.ones(4)).source
    assert source.count("8 bytes per rank") == 2 and source.count("8 bytes per rank, in each step") == 1


def test_a_call_for_several_lines_names_them():
    def f(u, v, x):
        y = u * x
        return psum((y * v).sum(), "i")

    f = spmd.shard_map(f, mesh=MESH, in_specs=(P(), P(), P("i")), out_specs=P())
    source = md.draw(md.grad(f, argnums=(0, 1)))(2.0, 3.0, np.ones(2)).source
    assert re.search(r'tooltip="backward, of [^\n]*: return psum[^\n]*\\nbackward, of [^\n]*: y = u \* x"', source)


def test_three_axes_are_three_colors():
    mesh = spmd.make_mesh((2, 2, 2), ("x", "y", "z"), backend="simulated")
    f = spmd.shard_map(lambda x: np.sin(x), mesh=mesh, in_specs=P("z", "y", "x"), out_specs=P("z", "y", "x"))
    drawing = md.draw(f)(np.ones((2, 2, 2)))
    assert fill(drawing, "sin(") == ":".join(map(color_of, "xyz"))
    assert node(drawing, "sin(")["style"] == "striped" and node(drawing, "c:")["style"] == "wedged"


def gray(color):
    """Return the lightness of a color in gray print, 0 to 100 (CIE L*)."""
    linear = [(int(color[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    luminance = np.dot([0.2126, 0.7152, 0.0722], linear)
    return 116 * luminance ** (1 / 3) - 16


def test_colors_can_be_told_apart_in_grey_and_black_text_can_be_read_on_them():
    assert len(set(COLORS)) == len(COLORS)
    first = sorted(gray(c) for c in (INVARIANT_COLOR, *COLORS[:3]))
    assert min(np.diff(first)) > 10
    assert min(map(gray, COLORS)) > 50


def test_several_bodies_hang_on_their_operation():
    one, other = (md.make_tape(f)(1.0) for f in (np.sin, np.cos))
    either = Primitive("either", None, lambda n, x, one, other, times: (x.shape, x.dtype))
    drawing = md.draw(lambda n, x: either.bind(n, x, one=one, other=other, times=2))(1, 2.0)
    assert drawing.source.count("subgraph cluster") == 2
    assert "label=other " in drawing.source
    actual = edges(drawing)
    assert ("either(a, b, times=2)", "d:f64[]") in actual and ("d:f64[]", "sin(d)") in actual
    assert ("either(a, b, times=2)", "return c") in actual


def test_what_graphviz_would_read_as_its_own_is_text():
    odd = Primitive("odd", None, lambda x, text: (x.shape, x.dtype))
    source = md.draw(lambda x: odd.bind(x, text='\n"<b>'))(1.0).source
    assert r"\\n" in source and r"\"<b>" in source


# ---------------------------------------------------------------- the program, and the package


@pytest.fixture
def drawing():
    return md.draw(formula)(2.0, 5.0)


def test_without_the_program_a_package_draws(drawing, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", "")
    bundle = drawing._repr_mimebundle_()
    assert bundle["text/plain"] == drawing.source
    picture = ElementTree.fromstring(bundle["image/svg+xml"])
    drawn = [line.strip() for line in picture.itertext()]
    assert {"a:f64[]", "multiply(a, b)", "d:f64[]", "return g"} <= set(drawn)
    assert drawing.render(tmp_path / "picture.pdf").read_bytes().startswith(b"%PDF")
    assert capfd.readouterr() == ("", "")


def test_labels_of_bodies_are_drawn_over_the_edges_that_cross_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    f = spmd.shard_map(lambda x, y: x * y, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    drawing = md.draw(lambda x: md.cond(np.sum(x) > 0, lambda: f(x, x), lambda: x))(np.ones(4))
    svg = drawing.render(tmp_path / "picture.svg").read_text()
    assert svg == drawing._repr_mimebundle_()["image/svg+xml"]
    root = ElementTree.fromstring(svg)
    (graph,) = root
    labels = [child.text for child in graph if child.tag.endswith("text")]
    assert {"false_fun", "shard_map", "true_fun"} <= {label.partition("(")[0] for label in labels}
    assert [child.tag.rpartition("}")[2] for child in graph][-len(labels) :] == ["text"] * len(labels)
    in_clusters = [
        part.get("id") for part in graph.iter() if part.get("class") == "cluster" and part.findall("{*}text")
    ]
    assert in_clusters == []


def test_without_program_and_package_there_is_the_text(drawing, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bundle = drawing._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert "`dot`, which makes the picture, was not found" in bundle["text/plain"]
    assert drawing.source in bundle["text/plain"]
    with pytest.raises(RuntimeError, match=r"`dot`.*was not found.*pip install pygraphviz.*apt install graphviz"):
        drawing.render(tmp_path / "picture.svg")
    assert drawing.render(tmp_path / "picture.gv").read_text() == drawing.source == repr(drawing)


def test_with_the_program_there_is_a_picture(drawing, monkeypatch, tmp_path):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "<svg>$*</svg>"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    bundle = drawing._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg>") and bundle["text/plain"] == drawing.source
    assert "-Tpdf" in drawing.render(tmp_path / "picture.pdf").read_text()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"`pip install graphviz pygraphviz`"):
        md.draw(formula)(2.0, 5.0)


def huber(x):
    return md.cond(abs(x) < 1, lambda x: 0.5 * x * x, lambda x: abs(x) - 0.5, x)


def size_of(drawing):
    """The width and the height of a picture, in pixels; a point has 4 / 3."""
    svg = drawing._repr_mimebundle_().get("image/svg+xml")
    if svg is None:
        pytest.skip("there is no Graphviz")
    return [float(n) * 4 / 3 for n in re.search(r'<svg width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups()]


def test_a_picture_is_as_wide_as_a_cell_at_most():
    width, height = size_of(md.draw(md.grad(huber))(0.3))
    narrow, lower = size_of(md.draw(md.grad(huber), width=848)(0.3))
    assert narrow <= 849 < width and lower / height == pytest.approx(narrow / width, rel=0.05)
    small = md.draw(formula)(2.0, 5.0)
    assert size_of(md.draw(formula, width=848)(2.0, 5.0)) == size_of(small)  # it is not made larger


def test_folded_bodies_are_below_each_other():
    flat, folded = (md.draw(md.grad(huber), fold=fold)(0.3) for fold in (False, True))
    assert nodes(flat) == nodes(folded)
    (width, height), (narrow, tall) = map(size_of, (flat, folded))
    assert narrow < 0.7 * width and tall > 1.5 * height
    shown = [line for line in folded.source.splitlines() if "style=invis" not in line]
    assert sorted(shown) == sorted(flat.source.splitlines())
