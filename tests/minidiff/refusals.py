"""Tests of tables of what is refused."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.checks.samples import each


def refusals(rows: Iterable[tuple] | Mapping[str, tuple], run: Callable = lambda f: f(), error: Any = None) -> Callable:
    """A test that `run(f)` raises the error of each row `(f, error, message)`, and that the message matches.

    With `error`, which all rows have, they are `(f, message)`.

    >>> refusals([(lambda: 1 / 0, ZeroDivisionError, "by zero")])()
    >>> refusals([(lambda: 1 / 0, "by one")], error=ZeroDivisionError)()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    AssertionError: 1 of 1 fails
    """
    named = rows if isinstance(rows, Mapping) else {f"{k}, {row[-1]}": row for k, row in enumerate(rows)}
    table = [(f, *(kind or [error]), message) for f, *kind, message in named.values()]

    @each("f, kind, message", table, ids=named)
    def test_refusals(f, kind, message):
        with pytest.raises(kind, match=message):
            run(f)

    return test_refusals
