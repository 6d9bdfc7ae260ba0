"""The values of variables in traced branches and loops: what a program computes, and what must stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.control_flow.carries import Carry, fits_weakly, is_weak
from minidiff.control_flow.partial_eval import TracedBody, lift_value
from minidiff.core.tracer import WeakTracer
from minidiff.core.types import typeof
from minidiff.errors import PrintedText
from minidiff.errors.location import current_location
from minidiff.inputs.arguments import WEAK_TYPES, python_type
from minidiff.inputs.key_reuse import current_loop
from minidiff.values.lists import select
from minidiff.values.settings import override

_ARRAY = "Or write to an array of the largest size: ys = np.zeros(n) before it, and ys = ys.at[i].set(y) in it"


class Undefined:
    """The value of a variable that has none."""

    def __init__(self, name: str, reason: str = "no statement has assigned it"):
        self.name, self.reason = name, reason


class Appended(list):
    """A list in a traced loop, which may only append to it."""

    def _refuse(self, *args: Any) -> Any:
        raise TypeError(
            f"{current_location()}: a traced loop appends to this list, so its steps cannot read it. Keep what they "
            f"need in a variable. {_ARRAY}"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __add__ = _refuse  # type: ignore
    pop = insert = remove = sort = reverse = clear = index = count = copy = _refuse  # type: ignore

    def elements(self) -> list:
        return [*list.__iter__(self)]


def is_dynamic(x: Any) -> bool:
    """Return whether a traced program computes `x`: an array or a number. Anything else must not depend on it."""
    return type(x) in WEAK_TYPES or hasattr(x, "dtype")


def parts_of(value: Any) -> tuple[list, tuple]:
    """Split a value into its arrays and numbers, and a frame: all else, which `with_parts` takes to build it again."""
    leaves, structure = tree.flatten(value)
    dynamic = list(map(is_dynamic, leaves))
    return select(leaves, dynamic), (structure, [None if d else x for x, d in zip(leaves, dynamic)], dynamic)


def with_parts(remaining: Iterator[Any], frame: tuple) -> Any:
    structure, leaves, dynamic = frame
    return tree.unflatten(structure, [next(remaining) if d else x for x, d in zip(leaves, dynamic)])


def copy_value(value: Any) -> Any:
    """Copy the lists, dictionaries and arrays of a value, which a traced branch may change."""

    def copy(x: Any) -> Any:
        return Appended(x.elements()) if type(x) is Appended else x.copy() if isinstance(x, numpy.ndarray) else x

    return tree.map(copy, value)


def zeros_like(value: Any) -> Any:
    """Return a value of the same type, which nothing reads."""
    zero = lambda x: python_type(x)(0) if is_weak(x) else numpy.zeros(typeof(x).shape, typeof(x).dtype)[()]  # noqa: E731
    return tree.map(lambda x: zero(x) if is_dynamic(x) else x, value)


def disagreement(where: str, name: str, a: Any, b: Any, when: str) -> TypeError:
    """Return the error that a variable has two types; `when` says when it has which, with a place for each."""
    show = lambda x: str(typeof(x)) if is_dynamic(x) else "no value" if isinstance(x, Undefined) else f"{x!r:.40}"  # noqa: E731
    texts = [tree.map(lambda leaf: PrintedText(show(leaf)), x) for x in (a, b)]
    subject = "the returned value" if name.endswith("_result") else name
    convert = "Convert one (.astype, np.broadcast_to, a float for an int); other values than arrays must be equal"
    advice = _ARRAY if type(a) is list is type(b) else convert
    return TypeError(f"{where}: {subject} is {when.format(*texts)}; a traced program has one type for both. {advice}")


def join_values(where: str, name: str, a: Any, b: Any, fills: Sequence[bool]) -> tuple[Any, Any, list, list]:
    """Return a frame for the values of a variable in two branches, or else the one value of both; and their parts.

    A branch that jumps need not assign the variable: zeros fill it, if `fills` says so.
    """
    a, b = (x.elements() if type(x) is Appended else x for x in (a, b))
    missing = [isinstance(x, Undefined) for x in (a, b)]
    if a is b or all(missing):
        return None, a, [], []
    if any(m and not fill for m, fill in zip(missing, fills)):
        return None, Undefined(name, f"only one branch of {where} assigns it; assign it before"), [], []
    a, b = zeros_like(b) if missing[0] else a, zeros_like(a) if missing[1] else b
    (left, frame), (right, other) = parts_of(a), parts_of(b)
    if frame != other or not all(map(_agree, left, right)):
        raise disagreement(where, name, a, b, "{} if the condition holds and {} otherwise")
    numbers = WEAK_TYPES - {WeakTracer}
    if all(type(x) is type(y) and type(x) in numbers and x == y for x, y in zip(left, right)):
        return None, a, [], []
    return frame, None, left, right


def _agree(x: Any, y: Any) -> bool:
    """Return whether a variable may have either value: one shape, and one dtype, which a Python number takes."""
    a, b = typeof(x), typeof(y)
    weak = is_weak(x) and is_weak(y)
    return a.shape == b.shape and (weak or a.dtype == b.dtype or fits_weakly(x, b.dtype) or fits_weakly(y, a.dtype))


class Variables:
    """The variables of a traced loop: parts that each step computes, in frames that no step changes.

    `step` maps the number of a step and their values to those after it. It is traced once more if a variable has no
    value before the loop, or is a list, which steps may append to.
    """

    def __init__(self, where: str, names: Sequence[str], values: tuple, step: Callable, count: int | None):
        self.where, self.names, self.before, self.start = where, names, values, values
        self.count, self.lists = count, [k for k, x in enumerate(values) if type(x) is Appended]
        if any(isinstance(x, (Undefined, list)) for x in values):
            types = [typeof(lift_value(x)) for x in (0, *self.parts(values))]
            with override(current_loop, False):  # it uses no keys
                outs = TracedBody(lambda k, *parts: step(WeakTracer(k), self.values(parts)), types).result
            pairs = list(enumerate(zip(values, outs)))
            self.lists += [k for k, (x, y) in pairs if type(x) is list is type(y) and len(y) > len(x)]
            self.start = tuple(
                [] if k in self.lists else zeros_like(y) if isinstance(x, Undefined) else x for k, (x, y) in pairs
            )

    def require_count(self) -> None:
        """Raise TypeError if a list grows, in a loop of a number of steps that is not known."""
        for k in self.lists:
            raise TypeError(
                f"{self.where}: the list {self.names[k]} grows by as many steps as the loop takes, which is not known "
                f"when the program is recorded. Loop over all rows of an array, without break. {_ARRAY}"
            )

    def carry(self, init: Any) -> Carry:
        """Return the carries of a loop, whose errors name the variables."""
        carry = Carry(f"the loop of {self.where}", self.parts, "", init)
        names = [name for name, x in zip(self.names, self.start) for _ in parts_of(x)[0]]
        carry.paths = [*["the number of the step"] * (len(carry.paths) - len(names)), *names]
        return carry

    def parts(self, values: Sequence[Any]) -> list:
        """Return the arrays and numbers of values that a step returns."""
        all_parts = []
        for k, (name, old, new) in enumerate(zip(self.names, self.start, values)):
            parts, frame = ([], None) if k in self.lists or isinstance(old, Undefined) else parts_of(new)
            if frame is not None and frame != parts_of(old)[1]:
                raise disagreement(self.where, name, old, new, "{} before a step and {} after it")
            all_parts += parts
        return all_parts

    def rebuilt(self, parts: Sequence[Any]) -> list:
        """Return the values that have these parts, and empty lists."""
        remaining = iter(parts)
        return [
            Appended() if k in self.lists else with_parts(remaining, parts_of(x)[1]) for k, x in enumerate(self.start)
        ]

    def values(self, parts: Sequence[Any]) -> tuple:
        """Return the values of the variables at the beginning of a step."""
        return tuple(old if isinstance(old, Undefined) else x for old, x in zip(self.before, self.rebuilt(parts)))

    def appended(self, values: Sequence[Any]) -> dict[int, list]:
        """Return what a step has appended to lists."""
        return {k: values[k].elements() for k in self.lists}

    def results(self, parts: Sequence[Any], is_internal: Callable[[str], bool]) -> tuple:
        """Return the values after the loop. A variable that it assigns has none if it may take no step."""
        values: list[Any] = self.rebuilt(parts)
        for k, (name, old) in enumerate(zip(self.names, self.before)):
            if isinstance(old, Undefined) and not (self.count or is_internal(name)):
                values[k] = Undefined(name, f"{self.where} assigns it, and may take no step; assign it before")
            elif k in self.lists:
                values[k] = old
        return tuple(values)
