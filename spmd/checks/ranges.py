"""The ranges of values that make sense, for fields of dataclasses and options of functions."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy


class Allowed(NamedTuple):
    """Values that make sense: their meaning, what to write, and whether a value is one of them.

    With `of`, Mapping or Sequence, they are dicts by name or sequences of such values.
    """

    meaning: str
    allowed: str
    contains: Callable[[Any], bool]
    of: Any = None


def check_ranges(owner: str, ranges: Mapping[str, Allowed], values: Mapping[str, Any]) -> None:
    """Raise ValueError for a value outside of its range: one line with its name and what to write instead."""
    for name, (meaning, allowed, contains, of) in ranges.items():
        value, entries = values[name], {name: values[name]}
        if of is not None:
            if not isinstance(value, of) or isinstance(value, str) or (of is Mapping and not _are_names(value)):
                kind = "a dict by name" if of is Mapping else "a sequence"
                raise ValueError(f"{owner}: {name} is {kind}; got {value!r}: for each entry, write {allowed}")
            pairs = value.items() if of is Mapping else enumerate(value)
            entries = {f"{name}[{key!r}]": x for key, x in pairs}
        for path, x in entries.items():
            if not contains(x):
                raise ValueError(f"{owner}: {path} is {meaning}; got {x!r}: write {allowed}")


def by_name(values: Allowed) -> Allowed:
    """Return the range of dicts with such values for names."""
    return values._replace(of=Mapping)


def several(values: Allowed) -> Allowed:
    """Return the range of sequences of such values."""
    return values._replace(of=Sequence)


def instance_of(kind: type | tuple[type, ...], write: str = "", of: Any = None) -> Allowed:
    """Return the range of instances of a class, or of collections of them."""
    name = (kind if isinstance(kind, type) else kind[0]).__name__
    return Allowed(f"a {name}", write or f"a {name}", lambda x: isinstance(x, kind), of)


def _number(meaning: str, allowed: str, contains: Callable[[Any], bool], kind: type = numbers.Real) -> Allowed:
    """Return a range of numbers; truth values are none, and comparisons with NaN are false."""
    return Allowed(
        meaning, allowed, lambda x: isinstance(x, kind) and not isinstance(x, (bool, numpy.bool_)) and contains(x)
    )


def _are_names(x: Any) -> bool:
    return isinstance(x, Collection) and not isinstance(x, str) and all(isinstance(name, str) for name in x)


# A time may be zero, and a rate infinite: those of an ideal machine.
SECONDS = _number("in seconds, not negative", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
RATE = _number("so many a second", "a number above 0 (math.inf if it takes no time)", lambda x: x > 0)
NBYTES = _number("in bytes", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
CAPACITY = _number("a size in bytes", "a number above 0 (math.inf if there is no limit)", lambda x: x > 0)
SIZE = _number("a size", "a finite number of at least 0", lambda x: 0 <= x < math.inf)
FACTOR = _number("a factor", "a finite number above 0", lambda x: 0 < x < math.inf)
SHARE = _number("a share", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
COUNT = _number("a count", "an integer of at least 1", lambda x: x >= 1, numbers.Integral)
MANY = _number("a count", "an integer of at least 1, or math.inf", lambda x: x >= 1 and x in (math.inf, x // 1))
TEXT = instance_of(str)
FLAG = instance_of((bool, numpy.bool_), "True or False")
NAMES = Allowed("names, each once", "a tuple, ('data', 'feats')", lambda x: _are_names(x) and len({*x}) == len(x))
