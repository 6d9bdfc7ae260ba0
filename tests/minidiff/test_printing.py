"""Types and tapes as notebooks show them. (Tables and pictures: test_trace_table.py, test_graph.py.)"""

import html
import re
from xml.etree import ElementTree

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.core.primitive import Primitive
from minidiff.core.types import ShapedArray
from minidiff.printing import color_of
from spmd import P


def _text(shown):
    """Return the text without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", shown))


def test_an_axis_keeps_its_color_in_every_state_and_each_state_has_its_line():
    states = {"": {"variance": {"i"}}, "U:": {"unreduced": {"i"}}, "R:": {"reduced": {"i"}}}
    lines = set()
    for mark, axes in states.items():
        t = ShapedArray((3,), float, **axes)
        assert _text(t._repr_html_()) == str(t) == f"f64[3]{{{mark}i}}"
        (style,) = re.findall(rf'style="(.*?)">{mark}i</span>', t._repr_html_())
        assert style.startswith(f"background:{color_of('i')};color:#000")
        lines.add(style)
    assert len(lines) == 3
    mixed = ShapedArray((3,), float, {"i"}, unreduced={"j"}, reduced={"k"})
    assert _text(mixed._repr_html_()) == str(mixed)
    assert [color_of(a) for a in "ijk"] == re.findall("background:(#\\w+)", mixed._repr_html_())


def test_axes_have_the_same_colors_in_tapes_types_and_pictures():
    mesh = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    f = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i", "j"), out_specs=P(None, "j"))
    tape = md.make_tape(f)(np.ones((2, 2)))
    shown = tape._repr_html_()
    assert shown.startswith("<pre") and _text(shown) == str(tape)
    ElementTree.fromstring(shown)  # every tag is closed
    colored = re.findall(r'background:(#\w+);color:#000">(\w)</span>', shown)
    assert colored == [(color_of(axis), axis) for axis in "ijj"]
    assert all(color_of(axis) in md.draw(tape).source for axis in "ij")


def test_what_html_would_read_as_its_own_is_text():
    odd = Primitive("odd", None, lambda x, text: (x.shape, x.dtype))
    tape = md.make_tape(lambda x: odd.bind(x, text="<b>&"))(1.0)
    assert "<b>" not in tape._repr_html_() and _text(tape._repr_html_()) == str(tape)
