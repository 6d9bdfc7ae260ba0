"""Traced Python numbers, which promote weakly, as Python numbers do in NumPy."""

from __future__ import annotations

from typing import Any

from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray


class WeakTracer(Tracer):
    """A traced Python number, which wraps the tracer of its value.

    It promotes as Python numbers do in NumPy (NEP 50). Combined with an array it takes the array's precision (2.0 with
    float32 is float32); a Python operator on weak numbers gives a weak number (`minidiff/ops/operators.py`); anything
    else makes it float64, int64 or complex128. Only the user's function sees it: interpreters and tapes get its
    `value`, converted (`Primitive.strong`).
    """

    __slots__ = ("value", "is_bool")
    __hash__ = object.__hash__
    interpreter = property(lambda self: self.value.interpreter)

    def __init__(self, value: Tracer, is_bool: bool = False):
        self.value = value
        self.is_bool = is_bool

    @property
    def type(self) -> ShapedArray:
        return self.value.type

    def concrete(self, use: str) -> Any:
        return self.value.concrete(use)

    def number(self, use: str) -> Any:
        return self.value.number(use)


def unwrap_weak(x: Any) -> Any:
    """Unwrap a `WeakTracer`; return anything else unchanged."""
    return x.value if type(x) is WeakTracer else x
