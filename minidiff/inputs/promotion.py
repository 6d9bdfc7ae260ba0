"""Type promotion of Python numbers, traced or not (NEP 50): they take the precision of the array beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minidiff.core.tracer import Tracer, Value, WeakTracer

#: The types of values that promote weakly.
WEAK_TYPES = frozenset({bool, int, float, complex, WeakTracer})


_PYTHON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def python_type(x: Any) -> type:
    """Return the Python type whose numbers promote as a weakly promoting value does."""
    return _PYTHON_TYPES[x.dtype.kind] if type(x) is WeakTracer else type(x)


def promotion_argument(x: Value) -> Any:
    """Return the argument for `numpy.result_type`: a dtype, or a Python number."""
    return python_type(x)(0) if type(x) in WEAK_TYPES else x.dtype


def are_weak(leaves: Iterable[Any]) -> list[bool]:
    """Return whether each argument is a Python number, traced or not, as `restore_weak` takes it."""
    return list(map(WEAK_TYPES.__contains__, map(type, leaves)))


def restore_weak(weak: Sequence[bool], values: Sequence[Value]) -> Sequence[Value]:
    """Convert the values marked as `weak` back to Python numbers."""
    if True not in weak:
        return values
    return (
        [as_weak(x) if is_weak else x for x, is_weak in zip(values, weak)]
        if False in weak
        else list(map(as_weak, values))
    )


def as_weak(x: Value) -> Value:
    """Convert a number to a Python number, or a tracer to one that promotes like it."""
    if isinstance(x, Tracer):
        return WeakTracer(x, x.dtype.kind == "b")
    return x.item() if x.dtype.kind in _PYTHON_TYPES else x
