"""Pictures: what is in their text, and what happens without the program that draws it or the package that writes it."""

import re
import sys

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core import Primitive
from minidiff.graph import LOOKS
from spmd import P

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")


def formula(x1, x2):
    return np.log(x1) + x1 * x2 - np.sin(x2)


def nodes(drawing):
    """Each node's label, by its name."""
    return dict(re.findall(r"^\s*(n\d+) \[label=\"?(.*?)\"? (?:color|fillcolor)=", drawing.source, re.M))


def edges(drawing):
    """Edges as pairs of labels' first lines, in order."""
    found = {node: label.split("\\n")[0] for node, label in nodes(drawing).items()}
    return [(found[a], found[b]) for a, b in re.findall(r"(n\d+) -> (n\d+)", drawing.source)]


def fill(drawing, label):
    (line,) = [line for line in drawing.source.splitlines() if label in line and "label=" in line]
    return re.search(r'fillcolor="(#\w+)"', line)[1]


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
    assert fill(drawing, "a:f64[]") == LOOKS["input"]["fillcolor"]
    assert fill(drawing, "b:f64[3]") == LOOKS["constant"]["fillcolor"]
    assert fill(drawing, "return d") == LOOKS["output"]["fillcolor"]
    assert "add(c, 2)\\nd:f64[3]" in nodes(drawing).values()
    assert ("a:f64[]", "return a") in edges(drawing)
    assert "return 1.0" in nodes(drawing).values()


def test_a_tape_or_a_function():
    assert md.draw(md.make_tape(formula)(2.0, 5.0)).source == md.draw(formula)(2.0, 5.0).source


def test_a_body_is_a_cluster_through_which_values_flow():
    f = spmd.shard_map(lambda w, x: psum(np.sum(x * w), "i"), mesh=MESH, in_specs=(P(), P("i")), out_specs=P())
    drawing = md.draw(f)(2.0, np.ones(4))
    (start,) = [i for i, line in enumerate(drawing.source.splitlines()) if "subgraph cluster" in line]
    assert "shard_map(a, b, mesh=(i: 2), in_specs=(P(), P('i')), out_specs=(P(),))" in drawing.source
    found = edges(drawing)
    assert ("a:f64[]", "d:f64[]") in found and ("b:f64[4]", "e:f64[2]{i}") in found
    assert ("return i", "c:f64[]") in found and ("c:f64[]", "return c") in found
    assert fill(drawing, "psum(") == LOOKS["collective"]["fillcolor"]
    lines = drawing.source.splitlines()
    varying = [line for line in lines[start:] if "#2166ac" in line]
    assert varying == [line for line in lines if "{i}" in line and "label=" in line]


def test_several_bodies_hang_on_their_operation():
    tapes = [md.make_tape(f)(1.0) for f in (np.sin, np.cos)]
    either = Primitive("either", None, lambda n, x, branches, times: (x.shape, x.dtype))
    drawing = md.draw(lambda n, x: either.bind(n, x, branches=tuple(tapes), times=2))(1, 2.0)
    assert drawing.source.count("subgraph cluster") == 2
    assert 'label="branches[1]"' in drawing.source
    found = edges(drawing)
    assert ("either(a, b, times=2)", "d:f64[]") in found and ("d:f64[]", "sin(d)") in found
    assert ("either(a, b, times=2)", "return c") in found


def test_what_graphviz_would_read_as_its_own_is_text():
    odd = Primitive("odd", None, lambda x, text: (x.shape, x.dtype))
    source = md.draw(lambda x: odd.bind(x, text='\n"<b>'))(1.0).source
    assert r"\\n" in source and r"\"<b>" in source


# ---------------------------------------------------------------- the program, and the package


@pytest.fixture
def drawing():
    return md.draw(formula)(2.0, 5.0)


def test_without_the_program_there_is_the_text(drawing, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    bundle = drawing._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert "`dot`, which makes the picture, was not found" in bundle["text/plain"]
    assert drawing.source in bundle["text/plain"]
    with pytest.raises(RuntimeError, match=r"`dot`.*was not found.*apt install graphviz"):
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


def test_the_ending_names_the_format(drawing):
    with pytest.raises(ValueError, match=r"the file's ending names the format, as in picture.svg"):
        drawing.render("picture")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"pip install 'minidiff\[draw\]'"):
        md.draw(formula)(2.0, 5.0)
