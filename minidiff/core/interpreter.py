"""The current interpreter decides what applying an operation does.

It evaluates it with NumPy, pushes a tangent through it, records it on a tape, or runs it on every rank. A function
transformation installs an interpreter, runs the user's function on that interpreter's tracers, and restores the
previous one.

Interpreters form a stack. The rules of each one are written in terms of operations, which run under the interpreter
below it. A tracer belongs to one interpreter, and every other interpreter treats it as a constant. This is why
higher-order derivatives need no special treatment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from minidiff.core.ranks import ranks
from minidiff.core.tracer import Tracer, Value, WeakTracer, unwrap_weak
from minidiff.core.types import as_plain_operand
from minidiff.errors import LeakedTracerError, MisfitError, explains_itself, leak_message
from minidiff.values.dtypes import NARROW, PLAIN, evaluate_wide, runs_wide
from minidiff.values.settings import setting


class Interpreter:
    """The meaning of operations while it is current. Subclasses implement `interpret`.

    `below` is the interpreter that its rules run under, and `scope` is the `shard_map` body that it works
    in. A transformation *around* a `shard_map` continues in the body with a second interpreter, whose
    `outer` is the one outside. `lift` converts values from outside.
    """

    name = "interpreter"
    origin: tuple[str, str] | None = None  # (transformation, function), such as ("grad", "loss"): errors name both
    ended = False  # whether the transformation is over, so that its tracers are invalid
    keeps_sources = False  # whether operations recorded above it keep their source line

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None):
        self.below: Any = below  # None only at the bottom, where no rules run
        self.outer: Any = outer
        self.scope: Any = below.scope if below is not None else None  # a Scope; None outside of bodies
        self.casts: dict = {}  # (id of value, states) -> (value, its cast to these states)
        self.lifted: dict = {}  # id of outer tracer -> (outer tracer, its counterpart here)

    def process(self, primitive: Any, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation to any values: a traced Python number gets the dtype to which NumPy promotes it."""
        if WeakTracer in map(type, args):
            return self.process(primitive, primitive.strong(args), params)
        return self.interpret(primitive, args, params)

    def interpret(self, primitive: Any, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation. Rules run under the interpreter `below`."""
        raise NotImplementedError

    def apply_rule(self, rule: Callable, primitive: Any, *args: Any) -> Any:
        """Apply a derivative rule of an operation, `rule(*args)`. `debug_nans` checks what it returns."""
        return rule(*args)

    def watch_sweep(self, sweep: Any) -> None:
        """Prepare for the forward sweep of reverse mode. `debug_nans` checks what it records."""

    def run_compiled(self, tape: Any, values: Sequence[Value]) -> Sequence[Value] | None:
        """Run a compiled tape as a whole; return None if it must be applied op by op."""
        return None

    def lift(self, x: Value) -> Value:
        """Convert a value that a body closes over to a value inside the body.

        In a `shard_map` it becomes an implicit, unmapped argument. It is lifted only once, so that two uses
        of it are uses of the same value.
        """
        if not isinstance(x, Tracer) or x.interpreter is self or self.is_in_body(x):
            return x
        pair = self.lifted.get(id(x))
        if pair is None:
            pair = self.lifted[id(x)] = (x, self._lift(x))
        return pair[1]

    def is_in_body(self, x: Tracer) -> bool:
        """Whether `x` is a value of the body that this interpreter works in."""
        return x.interpreter.scope is self.scope

    def _lift(self, x: Tracer) -> Value:
        if self.outer is not None:
            x = self.outer.lift(x)
            if isinstance(x, Tracer) and x.interpreter is self.outer:
                return self.lift_outer(x)
        if self.below is None:
            raise LeakedTracerError(leak_message(x))
        return self.below.lift(x)

    def end(self) -> None:
        """End the transformation, and break its reference cycles with tracers."""
        self.ended = True
        self.casts.clear()
        self.lifted.clear()
        if self.scope is not None and self.scope.bottom is self:
            self.scope.bottom = None
            self.scope.views.clear()

    def lift_outer(self, x: Tracer) -> Value:
        """Convert `x`, a tracer of `self.outer`, to a value of this interpreter."""
        raise NotImplementedError


class Evaluate(Interpreter):
    """The interpreter at the bottom of every stack: apply operations to NumPy arrays."""

    name = "evaluate"

    def process(self, primitive: Any, args: Sequence[Value], params: dict) -> Value:
        if primitive.is_higher_order:
            return primitive.evaluate(args, params)
        for x in args:
            if type(x) not in PLAIN:
                args = list(map(as_plain_operand, args))
                tracer = next((x for x in args if isinstance(x, Tracer)), None)
                if tracer is None:
                    break
                out = ranks.dispatch(self, primitive, args, params)
                if out is None:
                    raise LeakedTracerError(leak_message(tracer))
                return out
        try:
            if NARROW and runs_wide(primitive, args):
                return evaluate_wide(primitive, *args, **params)
            return primitive.impl(*args, **params)
        except (AttributeError, TypeError):
            list(map(as_plain_operand, args))  # says what is wrong with a structured array, for example
            raise
        except ValueError as error:
            if explains_itself(error, primitive):
                raise
            raise MisfitError(primitive, args, str(error).strip()) from None


EVALUATE = Evaluate(None)

#: The bottom of every stack: `EVALUATE`, or one that `minidiff/debug.py` makes check every result.
BOTTOM = EVALUATE if os.environ.get("MINIDIFF_DEBUG_NANS", "0") in ("", "0") else Evaluate(None)

#: Each thread and each asynchronous task has its own.
_current = setting("interpreter", BOTTOM)

#: `current_interpreter()` returns the interpreter that is current.
current_interpreter: Callable[[], Interpreter] = _current.get

#: `set_interpreter(interpreter)` makes it current. The caller must restore the previous one, as `running` does.
set_interpreter: Callable[[Interpreter], Any] = _current.set


class running:
    """`with running(interpreter):` makes it current, then restores the previous one."""

    __slots__ = ("interpreter", "previous")

    def __init__(self, interpreter: Interpreter):
        self.interpreter = interpreter

    def __enter__(self) -> Interpreter:
        self.previous = current_interpreter()
        set_interpreter(self.interpreter)
        return self.interpreter

    def __exit__(self, *exc) -> None:
        set_interpreter(self.previous)


class transforming(running):
    """`with transforming(interpreter):` as `running`, then invalidate its tracers."""

    __slots__ = ()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.interpreter.end()


def current_scope() -> Any:
    """Return the innermost running `shard_map` body, a `Scope`, or None outside one."""
    return current_interpreter().scope


def lift(x: Value) -> Value:
    """Make a tracer that the `shard_map` body closes over an unmapped input."""
    return current_interpreter().lift(unwrap_weak(x)) if isinstance(x, Tracer) else x
