"""Colours of mesh axes: what may vary along an axis is shown in its colour, in pictures as in printed types.

The hues can be told apart by colour-blind readers (they are Okabe's and Ito's, but lighter), and the first of them in
grey print too. No colour says anything that the type's text does not.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

COLOURS = ("#a6d8f5", "#e69f00", "#bb6d9b", "#f0e442", "#3fae8c", "#d8d8d8")
INVARIANT_COLOUR = "#ffffff"  # of what is the same on all ranks

_TYPE = re.compile(r"(?:^|(?<=:))(\w+\[[\d,]*\])(?:\{([^{}]*)\})?")  # alone, or after a name

_known: dict[str, str] = {}


def colour_of(axis: str) -> str:
    """An axis's colour: the next that is free when the axis is first shown, and the same from then on."""
    return _known.setdefault(str(axis), COLOURS[len(_known) % len(COLOURS)])


def show_axes(axes: Iterable[str]) -> None:
    """Let these have their colours, in order: for what shows several axes together."""
    for axis in sorted(set(map(str, axes))):
        colour_of(axis)


def colours_of(variance: Iterable[str]) -> list[str]:
    """The colours of what may vary along these axes."""
    return [colour_of(axis) for axis in sorted(map(str, variance))] or [INVARIANT_COLOUR]


def types_as_html(text: str, around: str = "") -> str:
    """Text as HTML, in whose types the axes have their colours; types themselves have the style `around`."""
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
