"""Properties that tests show of programs, and the checks that show them: `make coverage-table` prints a table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

PROPERTIES = {
    "reference": "values are those of NumPy, or of the function of whole arrays",
    "derivatives": "derivatives are those of differences, or of the function of whole arrays",
    "adjoint": "the transpose is the adjoint, and transposed twice it is the program again",
    "modes": "eager, on a tape, compiled and batched programs agree",
    "types": "types on the tape are those of values; with types and without, programs agree",
    "counts": "collectives are those that the report counts, the backend counts, and the page says",
    "memory": "results share memory only where they may, or the memory taken is what was predicted",
    "errors": "what does not fit is an error that says what to write, on every rank",
}


def shows(*properties: str) -> Callable[[Callable], Callable]:
    """Decorate a check of a row of a table with the properties that it shows.

    >>> @shows("reference", "modes")
    ... def check_doubled(x):
    ...     assert x + x == 2 * x
    >>> sorted(shown_by(check_doubled))
    ['modes', 'reference']
    """
    unknown = {*properties} - {*PROPERTIES}
    assert not unknown, f"{unknown} are not in PROPERTIES"

    def decorate(check: Callable) -> Callable:
        check.shows = frozenset(properties)
        return check

    return decorate


def shown_by(check: Callable) -> frozenset[str]:
    """Return the properties that a check shows, which may have some of its arguments already."""
    while isinstance(check, functools.partial):
        check = check.func
    return getattr(check, "shows", frozenset())


def together(checks: Iterable[Any]) -> frozenset[str]:
    """Return the properties that checks show together."""
    return frozenset().union(*map(shown_by, checks))
