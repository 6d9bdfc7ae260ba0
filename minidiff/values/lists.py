"""Lists, and masks of them: select the entries that a mask marks, and put them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def select(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """Return the values that the mask marks."""
    return [x for x, is_set in zip(values, mask) if is_set]


def scatter(values: Iterable[Any], mask: Iterable[bool]) -> list:
    """Return the inverse of `select`, with None where the mask is not set."""
    values = iter(values)
    return [next(values) if is_set else None for is_set in mask]


def positions(mask: Iterable[bool]) -> list[int]:
    """Return the indices at which a mask is set."""
    return [i for i, is_set in enumerate(mask) if is_set]


def drop_none(values: Iterable[Any]) -> list:
    """Return the values that are not None."""
    return [x for x in values if x is not None]


def split_list(values: Sequence[Any], *counts: int) -> list[list]:
    """Split a sequence into pieces of these lengths, and a last one of all others."""
    parts, start = [], 0
    for n in counts:
        parts.append(list(values[start : start + n]))
        start += n
    return [*parts, list(values[start:])]


def fixpoint(attempt: Callable[[list[bool]], tuple[Any, Sequence[bool]]], mask: Sequence[bool]) -> tuple[Any, list]:
    """Repeat `attempt`, adding the elements it marks to the mask, until the mask no longer changes."""
    mask = list(mask)
    while True:
        result, marked = attempt(mask)
        grown = [a or b for a, b in zip(mask, marked)]
        if grown == mask:
            return result, mask
        mask = grown
