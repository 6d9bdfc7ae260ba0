"""Operations whose body runs inline: `checkpoint` and custom rules.

To the current interpreter, the body is part of the program around it: under evaluation it runs on concrete values, and
Python's `if` sees them. It may close over traced values. These are further inputs, which the interpreters that continue
the outer ones inside the body adopt. On a tape the body becomes a tape.

(Bodies that run many times or not at all, those of loops and branches, are tapes from the start: `partial_eval.py`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff.core import (
    Primitive,
    ShapedArray,
    Tracer,
    Value,
    current_interpreter,
    running,
    transforming,
    typeof,
)
from minidiff.forward import JVP
from minidiff.reverse import Linearize, backward_pass
from minidiff.staging import Stage
from minidiff.tape import Tape
from minidiff.vmap import Batch, BatchTracer, stacked

Body = Callable[..., list]  # leaves -> leaves


# ---------------------------------------------------------------- interpreters inside a body


class Continued:
    """An interpreter that continues its `outer` one inside a body."""

    def interpret(self, primitive, args, params):
        return super().interpret(primitive, [self.adopt(x) if isinstance(x, Tracer) else x for x in args], params)

    def adopt(self, x: Value) -> Value:
        if not isinstance(x, Tracer) or self._knows(x):
            return x
        known = self._adopted.get(id(x))
        if known is None:
            known = self._adopted[id(x)] = (x, self._adopt(x))
        return known[1]

    def _knows(self, x: Tracer) -> bool:
        """Whether `x` belongs to this interpreter or to one below it."""
        interpreter = self
        while interpreter is not None:
            if x.interpreter is interpreter:
                return True
            interpreter = interpreter.below
        return False


class JVPInside(Continued, JVP):
    """Forward mode, continued inside a body."""


class BatchInside(Continued, Batch):
    """vmap, continued inside a body."""


def batched_body(body: Body, outside: Batch, batched: Sequence[bool]) -> Body:
    """Vectorise a body over the first axis of batched arguments and all results."""

    def vectorised(*values):
        inside = BatchInside(current_interpreter(), outside.size_of_batch, outer=outside)
        with transforming(inside):
            outs = body(*[BatchTracer(inside, x, 0) if b else x for x, b in zip(values, batched)])
            outs = [inside.adopt(x) for x in outs]
        return [None if x is None else stacked(inside, x, 0) for x in outs]

    return vectorised


# ---------------------------------------------------------------- the operation


class Call(Primitive):
    """An operation that runs its parameter `body`, a function of leaves or a Tape."""

    is_higher_order = True
    is_inlined = True
    multiple_results = True
    operands_agree = False

    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        return params["body"](*args)

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        with running(outside):
            return params["body"](*args)

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the body: its operations on tangents are linear, and recorded."""
        if not any(outside.owns(x) for x in args):
            return self.bind(*args, **params)
        with running(outside):
            return params["body"](*args)

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        linear = [isinstance(x, ShapedArray) for x in operands]
        found = iter(backward_pass(params["body"], linear, operands, cts))
        return [next(found) if yes else None for yes in linear]

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        batched = [outside.owns(x) for x in args]
        values = [outside.in_front(x) for x in args]
        results = self.bind(*values, **self.batched_params(params, outside, batched))
        return [BatchTracer(outside, x, 0) for x in results]

    def batched_params(self, params: dict, outside: Batch, batched: Sequence[bool]) -> dict:
        return {**params, "body": batched_body(params["body"], outside, batched)}

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        inside = Stage(outside)
        inputs = [inside.new_input(typeof(x)) for x in args]
        with transforming(inside):
            tape, constants = inside.tape(params["body"](*inputs)).close()
        return outside.record(self, [*constants, *args], self.staged_params(params, tape, len(constants)))

    def staged_params(self, params: dict, tape: Tape, constants: int) -> dict:
        """The parameters with the body as a tape that takes its constants first."""
        return {**params, "body": tape}

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        tape = params["body"]
        if list(types) != tape.in_types:
            raise TypeError(f"{self.name}: its body takes {tape.in_types}, but the operands have the types {types}")
        return tape.out_types
