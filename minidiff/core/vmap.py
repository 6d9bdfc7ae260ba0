"""vmap: apply a function of one element along an axis of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import Interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, as_plain_operand, typeof
from minidiff.errors import MisfitError, TracerError, batched_message
from minidiff.values.dtypes import PLAIN


class BatchTracer(Tracer):
    """One element of a batch. `value` is the whole batch, along its axis `axis`."""

    __slots__ = ("value", "axis")
    interpreter: Batch

    def __init__(self, interpreter: Batch, value: Value, axis: int):
        self.interpreter = interpreter
        self.value = value
        self.axis = axis

    @property
    def type(self) -> ShapedArray:
        whole = typeof(self.value)
        sharding = whole.sharding and whole.sharding.of_element(self.axis, whole.ndim)
        return whole.update(shape=whole.shape[: self.axis] + whole.shape[self.axis + 1 :], sharding=sharding)

    def concrete(self, use: str) -> Any:
        self.check_alive()
        raise TracerError(batched_message(self, use))

    def __repr__(self) -> str:
        return f"Batched<{self.type}>(along axis {self.axis} of {self.value!r})"


class Batch(Interpreter):
    """Apply each operation once, along the batch axis of the batched operands."""

    name = "vmap"

    def __init__(
        self, below: Interpreter | None, size: int, outer: Batch | None = None, axis_name: Any = None, spmd: Any = None
    ):
        super().__init__(below, outer)
        self.size_of_batch = size
        self.axis_name: Any = axis_name if outer is None else outer.axis_name
        self.spmd_axis_name: Any = spmd if outer is None else outer.spmd_axis_name  # mesh axes that split the batch
        #: Whether its elements are those of one rank, while bodies were recorded for elements of the whole batch.
        self.is_block: bool = outer is not None and outer.is_block

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        with running(self.below):
            if primitive.is_higher_order:
                return primitive.batch_body(self, args, params)
            if self.axis_name is not None and self.runs_along(primitive, params):
                return primitive.batch_along(self, args, params)
            batched = [self.owns(x) for x in args]
            args = [x if b or type(x) in PLAIN else as_plain_operand(x) for x, b in zip(args, batched)]
            if not any(batched):
                return self.below.process(primitive, args, params)
            values = list(map(self.in_front, args))
            try:
                out = primitive.batch(values, batched, params)
            except MisfitError:  # its message has the types of batches, not of elements
                raise MisfitError(primitive, args) from None
            return [BatchTracer(self, x, 0) for x in out] if primitive.multiple_results else BatchTracer(self, out, 0)

    def runs_along(self, primitive: Primitive, params: dict) -> bool:
        """Whether an operation is a collective over this batch's axis, with a `batch_along` rule."""
        return primitive.batch_along is not None and params["axes"] == (self.axis_name,)

    def owns(self, x: Value) -> bool:
        return type(x) is BatchTracer and x.interpreter is self

    def in_front(self, x: Value) -> Value:
        """Move the batch axis of `x` to the front; return a constant unchanged."""
        if not self.owns(x):
            return x
        return numpy.moveaxis(x.value, x.axis, 0) if x.axis else x.value

    def lift_outer(self, x: Any) -> Value:
        return BatchTracer(self, self.below.lift(x.value), x.axis)
