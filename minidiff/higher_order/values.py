"""What decides, and what the functions of users return: is it known, may ranks disagree about it, what is its type?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

from minidiff.core import (
    WEAK_TYPES,
    ShapedArray,
    TracerError,
    Value,
    VarianceError,
    WeakTracer,
    current_interpreter,
    current_scope,
    enter,
    pbroadcast_to,
    promoting,
    python_type,
    typeof,
)
from minidiff.forward import as_value
from minidiff.higher_order.partial_eval import concrete_value
from minidiff.ops.elementwise import convert_number
from minidiff.staging import Stage


def staging() -> bool:
    """Whether what runs now is being recorded as a program for values not yet known."""
    interpreter = current_interpreter()
    while interpreter is not None and not isinstance(interpreter, Stage):
        interpreter = interpreter.below
    return interpreter is not None


def if_known(x: Value, use: str) -> Any:
    """The number that `x` is, or None if it is only a name, or many at once. VarianceError where ranks may differ."""
    try:
        return concrete_value(x, use)
    except TracerError:
        return None


def check_functions(what: str, functions: dict[str, Any], otherwise: str = "") -> None:
    """TypeError where one of them is no function; `otherwise` is what to write instead."""
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
    """Whether it is a Python number, traced or not, whose dtype gives way to an array's."""
    return type(x) in WEAK_TYPES and python_type(x) is not bool


def fits_weakly(x: Any, dtype: numpy.dtype) -> bool:
    """Whether `x` is a Python number that takes this dtype beside an array of it."""
    return is_weak(x) and numpy.result_type(dtype, promoting(x)) == dtype


def numeric(x: Any, t: ShapedArray) -> Value:
    """`x`, with the dtype of `t` if it is a Python number."""
    if type(x) is WeakTracer and is_weak(x):
        return convert_number(as_value(x), t.dtype)
    return numpy.asarray(x, t.dtype)[()] if is_weak(x) else as_value(x)


def as_type(x: Any, t: ShapedArray) -> Value:
    """`x` as a value of type `t`, which differs from its own at most as a Python number's may, and in variance."""
    return pbroadcast_to(enter(numeric(x, t)), t.variance)


@contextlib.contextmanager
def for_types_alone() -> Iterator[None]:
    """Around what is recorded though it may never be run: if it raises (it may ask for numbers) it has no say.

    That types disagree is an error, whatever is run.
    """
    try:
        yield
    except VarianceError:
        raise
    except Exception:  # also RecursionError, of a branch that calls itself as long as a value says so
        pass


def vary_everywhere(values: Iterable[Value]) -> bool:
    """Whether no other value can make these vary more (where types must agree as they are written, one must look)."""
    scope = current_scope()
    return not scope.explicit and all(len(typeof(x).variance) == len(scope.axes) for x in values)
