"""Colours of mesh axes, in pictures and in printed types.

Colour-blind readers can tell the hues apart (they are Okabe and Ito's, but lighter), and the first few also differ in
greyscale. Colour repeats what the type's text says, and adds nothing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

COLOURS = ("#a6d8f5", "#e69f00", "#bb6d9b", "#f0e442", "#3fae8c", "#d8d8d8")
INVARIANT_COLOUR = "#ffffff"  # the same value on all ranks

_TYPE = re.compile(r"(?:^|(?<=:))(\w+\[[\d,]*\])(?:\{([^{}]*)\})?")  # alone, or after a name

_known: dict[str, str] = {}


def colour_of(axis: str) -> str:
    """The colour of an axis: the next free one when the axis is first shown."""
    return _known.setdefault(str(axis), COLOURS[len(_known) % len(COLOURS)])


def show_axes(axes: Iterable[str]) -> None:
    """Assign colours to these axes in order, before several are shown together."""
    for axis in sorted(set(map(str, axes))):
        colour_of(axis)


def colours_of(variance: Iterable[str]) -> list[str]:
    """The colours of a value that may vary along these axes."""
    return [colour_of(axis) for axis in sorted(map(str, variance))] or [INVARIANT_COLOUR]


def types_as_html(text: str, around: str = "") -> str:
    """Text as HTML with coloured axes in its types, which get the style `around`."""
    show_axes(axis for found in _TYPE.finditer(text) for axis in _axes(found))
    return "".join(_parts(text, around))


def _axes(found: re.Match) -> list[str]:
    return found[2].split(",") if found[2] else []


def _parts(text: str, around: str) -> Iterator[str]:
    end = 0
    for found in _TYPE.finditer(text):
        yield html.escape(text[end : found.start()])
        axes = _axes(found)
        shown = html.escape(found[1]) + (f"{{{','.join(map(_axis, axes))}}}" if axes else "")
        yield f'<span style="{around}">{shown}</span>' if around else shown
        end = found.end()
    yield html.escape(text[end:])


def _axis(axis: str) -> str:
    return f'<span style="background:{colour_of(axis)};color:#000">{html.escape(axis)}</span>'
