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
    Value,
    running,
    typeof,
)
from minidiff.higher_order.partial_eval import TracedBody, batched_body
from minidiff.reverse import Linearize, backward_pass
from minidiff.staging import Stage
from minidiff.tape import Tape
from minidiff.vmap import Batch, BatchTracer

Body = Callable[..., list]  # leaves -> leaves


class Call(Primitive):
    """An operation that runs its parameter `body`, a function of leaves or a Tape."""

    is_higher_order = True
    is_inlined = True
    multiple_results = True
    operands_agree = False

    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
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
        tape, constants = TracedBody(params["body"], map(typeof, args)).close(lambda outs: outs)
        return outside.record(self, [*constants, *args], self.staged_params(params, tape, len(constants)))

    def staged_params(self, params: dict, tape: Tape, constants: int) -> dict:
        """The parameters with the body as a tape that takes its constants first."""
        return {**params, "body": tape}

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        tape = params["body"]
        if list(types) != tape.in_types:
            raise TypeError(f"{self.name}: its body takes {tape.in_types}, but the operands have the types {types}")
        return tape.out_types
