"""Colors of mesh axes, in pictures and in printed types.

Color-blind readers can tell the hues apart (they are Okabe and Ito's, but lighter), and the first few also differ in
grayscale. Color repeats the type's text, and adds nothing. An axis has one color, whatever the state; the states
differ in the line under the axis, and in pictures in bands and border (`bands_of`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from minidiff.core.states import REDUCED, STATES, UNREDUCED, AxisStates

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
    reduced has white beside it, since ranks hold the same value.
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
