"""The tape, a typed straight-line program (a Wengert list), its recorder, and staging, which records all of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import EVALUATE, Interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import PYTHON_NUMBERS, ShapedArray, Var, as_plain_operand, operand_type, typeof
from minidiff.errors import LeakedTracerError, TracerError, leak_message, recorded_message
from minidiff.errors.location import Location, RecordingMonitor, current_location, replays
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.values.dtypes import PLAIN, is_scalar_constant

Atom = Any  # an operand of an equation: a Var, a constant, or a type where no value is needed


class Equation:
    """`outputs = primitive(inputs, **params)`, with its source line if known."""

    __slots__ = ("primitive", "inputs", "params", "outputs", "source")

    bodies = property(lambda self: tapes_of(self.params) if self.params else [])
    settings = property(lambda self: {k: v for k, v in self.params.items() if not isinstance(v, Tape)})

    def __init__(
        self,
        primitive: Primitive,
        inputs: Sequence[Atom],
        params: dict,
        outputs: Sequence[Var],
        source: Location | None = None,
    ):
        self.primitive = primitive
        self.inputs = inputs
        self.params = params
        self.outputs = outputs
        self.source = source


class ConsumedEquations(list[Equation]):
    """Equations that free their operands as a backward pass consumes them."""

    def __reversed__(self) -> Iterator[Equation]:
        while self:
            equation = self.pop()
            yield equation
            equation.inputs = ()


class Tape:
    """A typed program: inputs, equations in order, outputs. Constants are inline.

    A tape is a function of its flat inputs: `tape(*values)` returns the list of its outputs.

    >>> from minidiff import make_tape
    >>> tape = make_tape(lambda x, y: numpy.sin(x) * y)(numpy.ones(3), 2.0)
    >>> print(tape)
    lambda a:f64[3], b:f64[]:
      c:f64[3] = sin(a)
      d:f64[3] = multiply(c, b)
      return d
    >>> tape.in_types, tape.out_types, [str(eqn.primitive) for eqn in tape.equations]
    ([f64[3], f64[]], [f64[3]], ['sin', 'multiply'])
    >>> tape(numpy.zeros(3), 2.0)
    [array([0., 0., 0.])]
    """

    def __init__(self, inputs: Sequence[Var], equations: list[Equation], outputs: Sequence[Atom]):
        self.inputs = list(inputs)
        self.equations = equations
        self.outputs = list(outputs)

    @property
    def in_types(self) -> list[ShapedArray]:
        return [v.type for v in self.inputs]

    @property
    def out_types(self) -> list[ShapedArray]:
        return [typeof(a) for a in self.outputs]

    @property
    def constants(self) -> list[Value]:
        """The distinct constant arrays on the tape; numbers do not count."""
        atoms = itertools.chain(*(eqn.inputs for eqn in self.equations), self.outputs)
        return list(
            {id(a): a for a in atoms if not (isinstance(a, (Var, ShapedArray)) or is_scalar_constant(a))}.values()
        )

    @hide_own_frames
    def __call__(self, *values: Value) -> list[Value]:
        # A Python number would promote weakly and has no methods; the tape was recorded for a NumPy scalar.
        numbers = [numpy.asarray(x)[()] if type(x) in PYTHON_NUMBERS else x for x in values]
        return self.apply(*[x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")) for x in numbers])

    def apply(self, *values: Value) -> list[Value]:
        """Apply the operations one by one, under the current interpreter."""
        if len(values) != len(self.inputs):
            raise TypeError(f"the tape takes {len(self.inputs)} values, got {len(values)}")
        env = dict(zip(self.inputs, values))
        for eqn in self.equations:
            evaluate_equation(eqn, env)
        return [a.copy() if isinstance(a, numpy.ndarray) else read(env, a) for a in self.outputs]

    # Attached in `minidiff/__init__.py`: `==`, equality of programs up to names; `check`, of types; and printing.
    check: Callable[..., None]
    close: Callable[[], tuple[Tape, list[Value]]]  # the constants become leading inputs
    __hash__ = object.__hash__


def with_equations(tape: Tape, equations: list[Equation]) -> Tape:
    """Return a tape with the same inputs and outputs, and other equations."""
    return Tape(tape.inputs, equations, tape.outputs)


def tapes_of(params: dict) -> list[Tape]:
    """Return the tapes among an operation's parameters."""
    return [x for x in params.values() if isinstance(x, Tape)]


def read(env: dict[Var, Value], a: Atom) -> Value:
    return env[a] if isinstance(a, Var) else a


@replays
def evaluate_equation(equation: Equation, env: dict[Var, Value]) -> None:
    """Apply one equation to the values in `env`, and store its results there."""
    out = equation.primitive.bind(*[read(env, a) for a in equation.inputs], **equation.params)
    env.update(zip(equation.outputs, out if equation.primitive.multiple_results else [out]))


# ---------------------------------------------------------------- writing


class RecordedTracer(Tracer):
    """A value that is a variable on a tape, and has no data."""

    __slots__ = ("variable",)  # not `var`, which is a method of arrays

    def __init__(self, interpreter: Recorder, var: Var):
        self.interpreter = interpreter
        self.variable = var

    @property
    def type(self) -> ShapedArray:
        return self.variable.type

    def concrete(self, use: str) -> numpy.ndarray:
        self.check_alive()
        raise TracerError(recorded_message(self, use))

    def __repr__(self) -> str:
        return f"Traced<{self.type}>"


class Recorder(Interpreter):
    """An interpreter that records operations on a tape."""

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None):
        super().__init__(below, outer)
        self.inputs: list[Var] = []
        self.equations: list[Equation] = []
        self.captured: list[Tracer] = []  # outer tracers that became inputs, in the order of those inputs

    def new_input(self, type: ShapedArray) -> RecordedTracer:
        var = Var(type)
        self.inputs.append(var)
        return RecordedTracer(self, var)

    def lift_outer(self, x: Tracer) -> Tracer:
        self.captured.append(x)
        return self.new_input(x.type)

    def record(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        atoms = [self.atom(x) for x in args]
        outputs = [Var(t) for t in primitive.typecheck([operand_type(a) for a in atoms], params)]
        self.equations.append(Equation(primitive, atoms, params, outputs, self.source()))
        tracers = [RecordedTracer(self, v) for v in outputs]
        return tracers if primitive.multiple_results else tracers[0]

    def source(self) -> Location | None:
        """Return the current source line, if this or a lower interpreter keeps sources."""
        interpreter: Interpreter | None = self
        while interpreter is not None and not interpreter.keeps_sources:
            interpreter = interpreter.below
        return None if interpreter is None else current_location()

    def owns(self, x: Value) -> bool:
        return type(x) is RecordedTracer and x.interpreter is self

    def variable_of(self, x: Value) -> Var | None:
        """Return the variable of a value that this tape defines; None for all others."""
        return x.variable if self.owns(x) else None

    def atom(self, x: Value) -> Atom:
        if self.owns(x):
            return x.variable
        if type(x) in PLAIN:
            return x
        if isinstance(x, Tracer) and x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return as_plain_operand(x)

    def tape(self, outs: Sequence[Value]) -> Tape:
        return Tape(self.inputs, self.equations, [self.atom(x) for x in outs])


class Stage(Recorder):
    """Record every operation of a function that runs on types alone: values are variables without data."""

    keeps_sources = True

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None, name: str = "make_tape"):
        super().__init__(below, outer)
        self.name = name
        self.monitor = RecordingMonitor()
        self.program = program_around(below or outer)

    def interpret(self, primitive, args, params):
        if primitive.is_higher_order:
            return primitive.stage_body(self, args, params)
        out = self.monitor.evaluate(EVALUATE, primitive, args, params) if self.monitor.eager else None
        out = ranks.dispatch(self, primitive, args, params) if out is None else out
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
