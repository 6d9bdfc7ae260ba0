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
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each


def formula(x1, x2):
    return np.log(x1) + x1 * x2 - np.sin(x2)


def on_ranks(f, in_specs=P("i"), out_specs=P("i"), over=None, **options):
    return mapped(f, over or mesh(2), in_specs, out_specs, **options)


def network(w, x):
    h = np.tanh(x @ all_gather(w, "j", tiled=True))
    h = psum_scatter(h, "j", scatter_dimension=1, tiled=True)
    return psum(np.sum(h), ("i", "j"))


def states(w, x):
    w = reduced(w, "i")
    return psum(unreduced(np.sum(x * w), "i"), "i"), w


def in_a_checkpoint(x):
    return md.checkpoint(lambda x: psum(np.sin(x), "i"))(x)


def in_loops(x):
    step = lambda c, x: (md.scan(lambda c, _: (c + psum(x, "i"), None), c, length=3)[0], None)  # noqa: E731
    return md.scan(step, 0.0, x)[0]


def in_each_step(x):
    total = psum(x.sum(), "i")
    return md.while_loop(lambda c: psum(c.sum(), "i") < 100, lambda c: c * 2, x) + total


def two_lines(u, v, x):
    y = u * x
    return psum((y * v).sum(), "i")


def either(n, x):
    one, other = (md.make_tape(f)(1.0) for f in (np.sin, np.cos))
    operation = Primitive("either", None, lambda n, x, one, other, times: (x.shape, x.dtype))
    return operation.bind(n, x, one=one, other=other, times=2)


def odd(x):
    return Primitive("odd", None, lambda x, text: (x.shape, x.dtype)).bind(x, text='\n"<b>')


PLANE, ONES = mesh(2, 2), np.ones((4, 4))
NETWORK = on_ranks(network, (P("j"), P("i")), P(), PLANE)

#: Functions and arguments, whose drawings are in one golden text.
DRAWN = {
    "a formula": (formula, 2.0, 5.0),
    "a constant, numbers, and an argument that is a result": (lambda x: (x * np.arange(3.0) + 2, 1.0, x), 1.0),
    "a value that is taken twice": (lambda x: x * x, 2.0),
    "along two axes": (NETWORK, ONES, ONES),
    "along three axes": (on_ranks(np.sin, *[P("k", "j", "i")] * 2, mesh(2, 2, 2)), np.ones((2, 2, 2))),
    "along one axis": (on_ranks(np.sin, P("j"), P("j"), PLANE), ONES),
    "of one rank": (on_ranks(lambda x: psum(x, "i"), P("i"), P(), mesh(1)), np.ones(2)),
    "states": (on_ranks(states, (P(), P("i")), (P(), P(reduced={"i"}))), 2.0, np.ones(4)),
    "partial sums": (on_ranks(np.sin, P("i", "j"), P("i", sum="j"), PLANE), np.ones((4, 6))),
    "types and no types": (
        lambda x: on_ranks(in_a_checkpoint, check_rep=False)(x) + on_ranks(in_a_checkpoint)(x),
        np.ones(2),
    ),
    "a collective in loops": (on_ranks(in_loops, P("i"), P()), np.ones(8)),
    "collectives in each step": (on_ranks(in_each_step), np.ones(4)),
    "a sum for two lines": (
        md.grad(on_ranks(two_lines, (P(), P(), P("i")), P()), argnums=(0, 1)),
        *(2.0, 3.0, np.ones(2)),
    ),
    "several bodies": (either, 1, 2.0),
    "text that Graphviz would read": (odd, 1.0),
    "a source line that it would read": (md.grad(lambda x: np.sin(x) * len('\\n<"')), 1.0),
}


def test_drawings(golden):
    """Without fonts, and with the lines of gradients alone."""
    text = "\n".join(f"{name}:\n{md.draw(f)(*args).source}" for name, (f, *args) in DRAWN.items())
    text = re.sub(r' tooltip="(?!backward, of test_graph)(\\.|[^"])*"|^\t(graph|node|edge) .*\n', "", text, flags=re.M)
    golden("drawings", re.sub(r"\.py:\d+", ".py", text))


@each("name", [name for name, (f, *_) in DRAWN.items() if f is not odd])  # which has no cost
def test_the_bytes_are_those_that_are_communicated(name):
    f, *args = DRAWN[name]
    sent = re.findall(r"(\d+) bytes per rank(?:, (\d+) times)?", md.draw(f)(*args).source)
    assert sum(int(n) * int(times or 1) for n, times in sent) == spmd.communication(f)(*args).bytes


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
    f = on_ranks(lambda x, y: x * y)
    drawing = md.draw(lambda x: md.cond(np.sum(x) > 0, lambda: f(x, x), lambda: x))(np.ones(4))
    svg = drawing.render(tmp_path / "picture.svg").read_text()
    assert svg == drawing._repr_mimebundle_()["image/svg+xml"]
    root = ElementTree.fromstring(svg)
    (graph,) = root
    labels = [child.text.partition("(")[0] for child in graph if child.tag.endswith("text")]
    assert {"false_fun", "shard_map", "true_fun"} <= {*labels}
    assert all(child.tag.endswith("text") for child in [*graph][-len(labels) :])
    assert not [part for part in graph.iter() if part.get("class") == "cluster" and part.findall("{*}text")]


def test_without_program_and_package_there_is_the_text(drawing, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bundle = drawing._repr_mimebundle_()
    assert set(bundle) == {"text/plain"}
    assert "`dot`, which makes the picture, was not found" in bundle["text/plain"]
    assert drawing.source in bundle["text/plain"]
    with pytest.raises(RuntimeError, match="apt install graphviz"):
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
    with pytest.raises(ImportError):
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
    """One that is narrower is not made larger."""
    (width, height), (narrow, lower) = (size_of(md.draw(md.grad(huber), width=w)(0.3)) for w in (None, 848))
    assert narrow <= 849 < width and lower / height == pytest.approx(narrow / width, rel=0.05)
    assert size_of(md.draw(formula, width=848)(2.0, 5.0)) == size_of(md.draw(formula)(2.0, 5.0))


def test_folded_bodies_are_below_each_other():
    flat, folded = (md.draw(md.grad(huber), fold=fold)(0.3) for fold in (False, True))
    (width, height), (narrow, tall) = map(size_of, (flat, folded))
    assert narrow < 0.7 * width and tall > 1.5 * height
    shown = [line for line in folded.source.splitlines() if "style=invis" not in line]
    assert sorted(shown) == sorted(flat.source.splitlines())
