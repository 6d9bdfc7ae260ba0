"""Lists of which a mask, a list of booleans, marks some entries: choosing them, and putting them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def choose(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """The values that the mask marks."""
    return [x for x, yes in zip(values, mask) if yes]


def place(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """The inverse of `choose`, with None where the mask is not set."""
    values = iter(values)
    return [next(values) if yes else None for yes in mask]


def positions(mask: Iterable[bool]) -> list[int]:
    """The indices at which a mask is set."""
    return [i for i, yes in enumerate(mask) if yes]


def drop_none(values: Iterable[Any]) -> list:
    """The values that are not None."""
    return [x for x in values if x is not None]


def split_list(values: Sequence[Any], *counts: int) -> list[list]:
    """Split a sequence into pieces of these lengths, and the rest."""
    parts, start = [], 0
    for n in counts:
        parts.append(list(values[start : start + n]))
        start += n
    return [*parts, list(values[start:])]


def fixpoint(attempt: Callable[[list[bool]], tuple[Any, Sequence[bool]]], mask: Sequence[bool]) -> tuple[Any, list]:
    """Repeat `attempt`, adding what it marks to the mask, until the mask stays."""
    mask = list(mask)
    while True:
        result, more = attempt(mask)
        grown = [a or b for a, b in zip(mask, more)]
        if grown == mask:
            return result, mask
        mask = grown
