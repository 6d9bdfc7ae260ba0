"""Checks and casts of predicates, carries and branches' results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

from minidiff.core import (
    ShapedArray,
    TracerError,
    Value,
    VarianceError,
    WeakTracer,
    current_interpreter,
    current_scope,
    enter,
    pbroadcast_to,
    typeof,
)
from minidiff.forward import as_value
from minidiff.higher_order.partial_eval import concrete_value
from minidiff.ops.base import convert_number
from minidiff.promotion import WEAK_TYPES, promoting, python_type
from minidiff.staging import Stage


def staging() -> bool:
    """Whether the current operations are being recorded on a tape of abstract values."""
    interpreter = current_interpreter()
    while interpreter is not None and not isinstance(interpreter, Stage):
        interpreter = interpreter.below
    return interpreter is not None


def if_known(x: Value, use: str) -> Any:
    """The number `x`, or None if it is abstract or batched.

    Raises VarianceError if it may differ between ranks.
    """
    try:
        return concrete_value(x, use)
    except TracerError:
        return None


def check_functions(what: str, functions: dict[str, Any], otherwise: str = "") -> None:
    """Raise TypeError for a non-function; `otherwise` says what to write instead."""
    for name, f in functions.items():
        if not callable(f):
            raise TypeError(f"{what}: {name} must be a function, got {type(f).__name__}{otherwise}")


def check_invariant(what: str, t: ShapedArray, because: str = "") -> None:
    if t.variance:
        axes = ", ".join(map(repr, sorted(t.variance)))
        raise VarianceError(
            f"{what} must be the same on all ranks, but {t} varies along {axes}{because}: the ranks would go different "
            f"ways, and wait for each other for ever. Make them agree first (psum, pmax or pmin over {axes}), or "
            "choose element by element with np.where"
        )


def is_weak(x: Any) -> bool:
    """Whether `x` is a Python number, traced or not, of weak dtype."""
    return type(x) in WEAK_TYPES and python_type(x) is not bool


def fits_weakly(x: Any, dtype: numpy.dtype) -> bool:
    """Whether `x` is a Python number that promotes to this dtype."""
    return is_weak(x) and numpy.result_type(dtype, promoting(x)) == dtype


def numeric(x: Any, t: ShapedArray) -> Value:
    """Convert `x` to the dtype of `t` if it is a Python number."""
    if type(x) is WeakTracer and is_weak(x):
        return convert_number(as_value(x), t.dtype)
    return numpy.asarray(x, t.dtype)[()] if is_weak(x) else as_value(x)


def as_type(x: Any, t: ShapedArray) -> Value:
    """Cast a Python number to the dtype of `t`; insert a pbroadcast to its variance."""
    return pbroadcast_to(enter(numeric(x, t)), t.variance)


@contextlib.contextmanager
def for_types_alone() -> Iterator[None]:
    """Ignore exceptions in code traced for its types, which may never run.

    A VarianceError is raised even so: types must agree whichever branch runs.
    """
    try:
        yield
    except VarianceError:
        raise
    except Exception:  # also RecursionError, if a branch calls itself until a concrete value stops it
        pass


def vary_everywhere(values: Iterable[Value]) -> bool:
    """Whether all values vary along all axes (False under explicit types)."""
    scope = current_scope()
    return not scope.explicit and all(len(typeof(x).variance) == len(scope.axes) for x in values)
