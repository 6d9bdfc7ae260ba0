"""Tests that loop over many samples, and name those that fail.

A case of pytest takes several milliseconds of its own, which is longer than what most samples take to check. So a test
is parametrised by what one would select with `-k`, as an operation, and loops over the rest.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import pytest


def check_each(checks: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Call all checks, and raise an AssertionError that lists those that fail, from the first of their errors.

    >>> check_each([("one", lambda: None), ("two", lambda: 1 / 0)])
    Traceback (most recent call last):
    AssertionError: 1 of 2 fails:
      two: ZeroDivisionError: division by zero
    """
    errors, number = [], 0
    for name, check in checks:
        number += 1
        try:
            check()
        except pytest.skip.Exception:
            pass
        except (Exception, pytest.fail.Exception) as error:
            errors.append((name, error))
    assert number, "there is nothing to check"
    if errors:
        lines = [f"{name}: {type(e).__name__}: {_first_line(e)}" for name, e in errors]
        verb = "fails" if len(errors) == 1 else "fail"
        raise AssertionError("\n  ".join([f"{len(errors)} of {number} {verb}:", *lines])) from errors[0][1]


def check_raises(call: Callable[[], Any], expected: str) -> None:
    """Check that a call raises the error that a text names: `"ValueError: "`, and a pattern in its message.

    >>> check_raises(lambda: [][3], "IndexError: list .* range")
    """
    kind, _, pattern = expected.partition(": ")
    with pytest.raises(Exception, match=pattern) as error:
        call()
    assert kind in [c.__name__ for c in type(error.value).__mro__], f"{type(error.value).__name__}, not {kind}"


def each(names: str | Sequence[str], samples: Iterable, ids: Callable | Iterable[str] | None = None) -> Callable:
    """Decorate a test as `pytest.mark.parametrize` does, so that one case of it checks all samples.

    Several such decorators make the product of their samples. Fixtures are set up once for all of them.

    >>> @each("x", [1, 2, 3], ids=str)
    ... @each("y", [10, 20], ids=str)
    ... def test_sum(x, y):
    ...     1 / (x + y - 23)
    >>> test_sum()
    Traceback (most recent call last):
    AssertionError: 1 of 6 fails:
      3, 20: ZeroDivisionError: division by zero
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    samples = list(samples)
    values = samples if len(arguments) > 1 else [(s,) for s in samples]
    axis = [
        (label, dict(zip(arguments, value, strict=True)))
        for label, value in zip(_labels(samples, ids), values, strict=True)
    ]

    def decorate(test: Callable) -> Callable:
        looping = _looping(getattr(test, "of_one", test), [axis, *getattr(test, "axes", [])])
        looping.pytestmark = getattr(test, "pytestmark", [])
        return looping

    return decorate


def _looping(test: Callable, axes: list[list[tuple[str, dict[str, Any]]]]) -> Callable:
    """The test in a loop over the product of the axes, as a function of the fixtures that remain."""

    @functools.wraps(test)
    def looping(**fixtures: Any) -> None:
        check_each(
            (
                ", ".join(label for label, _ in samples),
                functools.partial(test, **fixtures, **dict(ChainMap(*(values for _, values in samples)))),
            )
            for samples in itertools.product(*axes)
        )

    looping.of_one, looping.axes = test, axes
    inputs = {name for axis in axes for _, values in axis for name in values}
    signature = inspect.signature(test)
    others = [p for name, p in signature.parameters.items() if name not in inputs]
    looping.__signature__ = signature.replace(parameters=others)
    return looping


def _labels(samples: list, ids: Callable | Iterable[str] | None) -> Iterable[str]:
    if ids is None:
        return [getattr(s, "__name__", None) or _first_line(s) for s in samples]
    return map(ids, samples) if callable(ids) else ids


def _first_line(x: Any) -> str:
    text = str(x).strip()
    return text.splitlines()[0] if text else ""


#: Arrays that are none of numbers, or would lose what their class adds, and what the error says of each.
NOT_PLAIN: dict[str, tuple[Any, str]] = {
    "masked": (numpy.ma.masked_array(numpy.arange(4.0), [0, 1, 0, 0]), "its mask would be lost"),
    "matrix": (numpy.matrix(numpy.eye(4)), r"write numpy.asarray\(x\)"),
    "objects": (numpy.array([1, None, 2, 3], object), "object"),
    "strings": (numpy.array(["a", "b", "c", "d"]), "<U1: convert it to numbers"),
    "bytes": (numpy.array([b"a"] * 4), "S1: convert it to numbers"),
    "structured": (numpy.zeros(4, [("a", float)]), "'a', '<f8'"),
    "records": (numpy.rec.array([(1, 2.0)] * 4), "f0"),
    "dates": (numpy.arange(4).astype("M8[s]"), "subtract a reference time"),
    "durations": (numpy.arange(4).astype("m8[s]"), "divide it by a unit"),
}
