"""What notebooks show of types and tapes. (Tables and pictures: test_trace.py, test_draw.py.)"""

import html
import re

import minidiff as md
import minidiff.numpy as np
from minidiff.core import Primitive, ShapedArray


def _text(shown):
    """What is read, once the tags are gone."""
    return html.unescape(re.sub(r"<[^>]*>", "", shown))


def test_a_type():
    t = ShapedArray((3, 4), float, {"i"})
    assert t._repr_html_() == "<code>f64[3,4]{i}</code>"


def test_a_tape():
    tape = md.make_tape(lambda x, y: (np.sin(x) * y, np.argmax(x)))(np.ones(3), 2.0)
    shown = tape._repr_html_()
    assert shown.startswith("<pre")
    assert _text(shown) == str(tape)
    assert shown.count("<span") == 5  # a type each for two arguments and three results


def test_what_html_would_read_as_its_own_is_text():
    odd = Primitive("odd", None, lambda x, text: (x.shape, x.dtype))
    tape = md.make_tape(lambda x: odd.bind(x, text="<b>&"))(1.0)
    assert "<b>" not in tape._repr_html_() and _text(tape._repr_html_()) == str(tape)
