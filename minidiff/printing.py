"""Print tapes as typed programs, and types in notebooks: with each mesh axis in its own color.

Pictures take these colors, too (`graph.py`).
"""

from __future__ import annotations

import itertools
import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

from minidiff.core.states import REDUCED, STATES, UNREDUCED, AxisStates
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.values.dtypes import is_scalar_constant

WIDTH = 112  # of the lines of a printed tape, before bodies are indented


def letters(reserved: frozenset = frozenset()) -> Iterator[str]:
    """Generate a, b, …, z, aa, ab, …, without keywords and reserved names."""
    for length in itertools.count(1):
        for combination in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length):
            name = "".join(combination)
            if not keyword.iskeyword(name) and name not in reserved:
                yield name


def names_of(tape: Any, names: Iterator[str]) -> dict[Any, str]:
    """Name every variable, and every constant by its id, bodies included."""
    known: dict[Any, str] = {v: next(names) for v in tape.inputs}
    known |= {id(c): next(names) for c in tape.constants}
    for eqn in tape.equations:
        for v in eqn.outputs:
            known[v] = next(names)
        for body in eqn.bodies:
            known |= names_of(body, names)
    return known


def text_of(tape: Any) -> str:
    """Return a tape as text, with its bodies indented below their equations."""
    return "\n".join(_lines(tape, names_of(tape, letters())))


def _lines(tape: Any, known: dict[Any, str]) -> Iterator[str]:
    def tuple_of(parts: list[str]) -> str:
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"

    inputs = ", ".join(declare(v, known) for v in tape.inputs)
    yield from _wrap(f"lambda {inputs}:" if inputs else "lambda:", "")
    for c in tape.constants:
        yield f"  {declare(c, known)} = constant"
    for eqn in tape.equations:
        yield from _wrap(show_equation(eqn, known), "  ")
        for body in eqn.bodies:
            yield from ("    " + line for line in _lines(body, known))
    yield f"  return {tuple_of([show_atom(a, known) for a in tape.outputs])}"


def show_equation(eqn: Equation, known: dict[Any, str]) -> str:
    """Return an equation as tapes print it, without its bodies; `known` are names."""
    params = eqn.primitive.show_params(eqn.settings)
    arguments = ", ".join([*[show_atom(a, known) for a in eqn.inputs], *([params] if params else [])])
    results = f"{', '.join(declare(v, known) for v in eqn.outputs)} = " if eqn.outputs else ""
    return f"{results}{eqn.primitive}({arguments})"


def declare(a: Any, known: dict[Any, str]) -> str:
    """Return a variable or a constant with its type."""
    return f"{known[a if isinstance(a, Var) else id(a)]}:{typeof(a)}"


def show_atom(a: Any, known: dict[Any, str]) -> str:
    """Return an operand as tapes print it: a name, a number or a type."""
    if isinstance(a, Var):
        return known[a]
    if isinstance(a, ShapedArray):
        return str(a)
    return repr(a.item() if isinstance(a, numpy.generic) else a) if is_scalar_constant(a) else known[id(a)]


def _wrap(line: str, indent: str) -> list[str]:
    """Wrap a long line, with a deeper indent from its second line on."""
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + 6 * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---------------------------------------------------------------- how tapes and types print


def tape_as_html(tape: Tape) -> str:
    """Return the printed tape as HTML, with gray types. A narrow cell breaks lines between words, and not within."""
    style = "text-align:left;font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:normal"
    return f'<pre style="{style}">{types_as_html(str(tape), "color:#888")}</pre>'


def type_as_html(type: ShapedArray) -> str:
    return f"<code>{types_as_html(str(type))}</code>"


# ---------------------------------------------------------------- colors of mesh axes
# Color-blind readers can tell the hues apart (they are Okabe and Ito's, but lighter), and the first few also differ in
# grayscale. Color repeats the type's text, and adds nothing. An axis has one color, whatever the state; the states
# differ in the line under the axis, and in pictures in bands and border (`bands_of`).

COLORS = ("#a6d8f5", "#e69f00", "#bb6d9b", "#f0e442", "#3fae8c", "#d8d8d8")
INVARIANT_COLOR = "#ffffff"  # the same value on all ranks

_TYPE = r"(?:^|(?<=:))(\w+\[[\d,]*\])(?:\{([^{}]*)\})?"  # alone, or after a name

_UNDERLINED = {"": "", "U": ";border-bottom:2px dashed #000", "R": ";border-bottom:2px dotted #000"}

_known: dict[str, str] = {}


def color_of(axis: str) -> str:
    """Return the color of an axis: the next free one when the axis is first shown."""
    return _known.setdefault(str(axis), COLORS[len(_known) % len(COLORS)])


def assign_colors(axes: Iterable[str]) -> None:
    """Assign colors to these axes in order, before several are shown together."""
    for axis in sorted(set(map(str, axes))):
        color_of(axis)


def bands_of(states: AxisStates) -> list[str]:
    """Return the colors of the bands that show a value in these states.

    An axis along which it varies is one band; one along which it is unreduced is cut into parts; one along which it is
    reduced has white next to it, since ranks hold the same value.
    """
    marked = [band for state, axes in zip(STATES, states) for a in sorted(map(str, axes)) for band in bands(a, state)]
    return marked or [INVARIANT_COLOR]


def bands(axis: str, state: str) -> list[str]:
    """Return the bands of one axis, in one state."""
    color, white = color_of(axis), INVARIANT_COLOR
    return {UNREDUCED: [color, white, color], REDUCED: [color, white]}.get(state, [color])


def types_as_html(text: str, around: str = "") -> str:
    """Text as HTML with colored axes in its types, which get the style `around`."""
    import html  # only notebooks need it

    text = html.escape(text)
    assign_colors(
        axis.rpartition(":")[2] for _, axes in re.findall(_TYPE, text) for axis in filter(None, axes.split(","))
    )

    def colored(match: re.Match) -> str:
        shown = match[1] + (f"{{{','.join(map(_axis, match[2].split(',')))}}}" if match[2] else "")
        return f'<span style="{around}">{shown}</span>' if around else shown

    return re.sub(_TYPE, colored, text)


def _axis(marked: str) -> str:
    """Return the span of an axis, `i` or `U:i`."""
    mark, _, axis = marked.rpartition(":")
    return f'<span style="background:{color_of(axis)};color:#000{_UNDERLINED[mark]}">{marked}</span>'
