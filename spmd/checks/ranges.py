"""The ranges of numbers that make sense, for fields of dataclasses and options of functions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy


class Range(NamedTuple):
    """Values that make sense: their meaning, what to write, and whether a value is one of them."""

    meaning: str
    allowed: str
    contains: Callable[[Any], bool]
    is_named: bool = False  # whether values are dicts, with such a value for each name

    @property
    def each(self) -> Range:
        """Dicts with such a value for each name."""
        return self._replace(is_named=True)


def check_ranges(owner: str, ranges: Mapping[str, Range], values: Mapping[str, Any]) -> None:
    """Raise ValueError for a value outside of its range: one line with its name and what to write instead."""
    for name, (meaning, allowed, contains, is_named) in ranges.items():
        named = {name: values[name]}
        if is_named:
            if not isinstance(values[name], Mapping) or not all(isinstance(key, str) for key in values[name]):
                raise ValueError(f"{owner}: {name} is a dict; got {values[name]!r}: for each name, write {allowed}")
            named = {f"{name}[{key!r}]": x for key, x in values[name].items()}
        for path, x in named.items():
            if not contains(x):
                raise ValueError(f"{owner}: {path} is {meaning}; got {x!r}: write {allowed}")


def _number(meaning: str, allowed: str, contains: Callable[[Any], bool], kind: type = numbers.Real) -> Range:
    """A range of numbers; truth values are none. Comparisons with NaN are false."""
    return Range(
        meaning, allowed, lambda x: isinstance(x, kind) and not isinstance(x, (bool, numpy.bool_)) and contains(x)
    )


def instance_of(*kinds: type, write: str = "") -> Range:
    """The instances of some classes."""
    names = " or ".join(kind.__name__ for kind in kinds)
    return Range(f"a {names}", write or f"a {names}", lambda x: isinstance(x, kinds))


#: Time may be zero, and a rate infinite: of an ideal machine.
SECONDS = _number("in seconds, not negative", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
RATE = _number("so many a second", "a number above 0 (math.inf if it takes no time)", lambda x: x > 0)
NBYTES = _number("in bytes", "a number of at least 0", lambda x: x >= 0)
CAPACITY = _number("a size in bytes", "a number above 0 (math.inf if there is no limit)", lambda x: x > 0)
SIZE = _number("a size", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
FACTOR = _number("a factor", "a finite number above 0", lambda x: 0 < x < math.inf)
SHARE = _number("a share", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
COUNT = _number("a count", "an integer of at least 1", lambda x: x >= 1, numbers.Integral)
MANY = _number("a count", "an integer of at least 1, or math.inf", lambda x: x >= 1 and x in (math.inf, x // 1))
TEXT = instance_of(str)
FLAG = instance_of(bool, numpy.bool_, write="True or False")
