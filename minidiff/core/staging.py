"""Staging: run a function on types alone, and record every operation on a tape."""

from __future__ import annotations

from minidiff.core.interpreter import Interpreter
from minidiff.core.ranks import ranks
from minidiff.core.tape import Recorder
from minidiff.core.types import Var
from minidiff.errors.location import RecordingMonitor


class Stage(Recorder):
    """Record every operation. Values are variables with a type and no data."""

    keeps_sources = True

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None, name: str = "make_tape"):
        super().__init__(below, outer)
        self.name = name
        self.monitor = RecordingMonitor()
        self.program = program_around(below or outer)

    def interpret(self, primitive, args, params):
        if primitive.is_higher_order:
            return primitive.stage_body(self, args, params)
        out = ranks.dispatch(self, primitive, args, params)
        return self.record(primitive, args, params) if out is None else out

    def end(self):
        super().end()
        self.program = None  # it may be this object: a reference cycle

    def atom(self, x):
        a = super().atom(x)
        return a if type(a) is Var else self.monitor.constant(a, self)

    def record(self, primitive, args, params):
        out = super().record(primitive, args, params)
        self.monitor.observe(self.equations, out)
        return out


def program_around(interpreter: Interpreter | None) -> Stage | None:
    """Return the program that an interpreter records or is a part of: its tape outlives the call."""
    while interpreter is not None and not isinstance(interpreter, Stage):
        interpreter = interpreter.below or interpreter.outer
    return interpreter and interpreter.program
