"""Forward mode: push tangents through a function together with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy

from minidiff.core.interpreter import Interpreter, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import cast_like, ranks
from minidiff.core.tracer import Tracer, Value, states_of
from minidiff.core.types import ShapedArray, as_plain_operand, typeof, zeros_like
from minidiff.errors import TracerError, lost_derivative_message
from minidiff.values.dtypes import PLAIN, float0, is_differentiable
from minidiff.values.settings import restores_settings


class JVPTracer(Tracer):
    """A dual number: a primal and a tangent, both values of the interpreter below."""

    __slots__ = ("primal", "tangent")

    def __init__(self, interpreter: JVP, primal: Value, tangent: Value):
        self.interpreter = interpreter
        self.primal = primal
        self.tangent = tangent

    @property
    def type(self) -> ShapedArray:
        return typeof(self.primal)

    shape = property(lambda self: self.primal.shape)  # without making a type
    dtype = property(lambda self: self.primal.dtype)
    states = property(lambda self: states_of(self.primal))

    def concrete(self, use: str) -> Any:
        self.check_alive()
        return self.primal.concrete(use) if isinstance(self.primal, Tracer) else self.primal

    def number(self, use: str) -> NoReturn:
        """Raise TracerError: NumPy assignment and `math` would lose the derivative."""
        self.concrete(use)  # raises its own error if there is no value
        raise TracerError(lost_derivative_message(self, use))

    def __repr__(self) -> str:
        return repr(self.primal)

    def __str__(self) -> str:
        return str(self.primal)

    def __format__(self, spec: str) -> str:
        return format(self.primal, spec)


class JVP(Interpreter):
    """Apply each operation to primals and its derivative to tangents (None is zero)."""

    name = "a derivative"

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        below = self.below
        if primitive.is_higher_order:
            with running(below):
                return primitive.jvp_body(self, args, params)
        primals, tangents = self.split(args)
        if not [t for t in tangents if t is not None]:
            return primitive.apply(below, args, params)
        if not PLAIN.issuperset(map(type, primals)):
            primals = list(map(as_plain_operand, primals))
            sharded = ranks.dispatch(self, primitive, args, params)
            if sharded is not None:
                return sharded
        with running(below):
            out, tangent = below.apply_rule(primitive.jvp, primitive, primals, tangents, params)
        if primitive.multiple_results:
            return [self.join(x, t) for x, t in zip(out, tangent)]
        return self.join(out, tangent)

    def split(self, args: Sequence[Value]) -> tuple[list[Value], list[Value | None]]:
        """Split `args` into primals and tangents; the tangent of a constant is None."""
        primals, tangents = [], []
        for x in args:
            if type(x) is JVPTracer and x.interpreter is self:
                primals.append(x.primal)
                tangents.append(x.tangent)
            else:
                primals.append(x)
                tangents.append(None)
        return primals, tangents

    def join(self, primal: Value, tangent: Value | None) -> Value:
        return primal if tangent is None else JVPTracer(self, primal, tangent)

    def lift_outer(self, x: Any) -> Value:
        primals, tangents = self.outer.split([x])
        return self.join(self.below.lift(primals[0]), self.below.lift(tangents[0]))


@restores_settings
def push_forward(f: Callable, primals: Sequence[Value], tangents: Sequence[Value | None], forward: JVP):
    """Apply `f` to dual numbers: lists of results and of tangents (None is zero)."""
    with transforming(forward):
        outs = f(*[forward.join(p, t) for p, t in zip(primals, tangents)])
    return forward.split(outs)


def instantiate(tangent: Value | None, like: Value) -> Value:
    """Replace a None tangent or cotangent by zeros (of `float0` for integers)."""
    if tangent is not None:
        return tangent
    t = typeof(like)
    if not is_differentiable(t.dtype):
        return numpy.zeros(t.shape, float0)
    return cast_like(zeros_like(t), t)
