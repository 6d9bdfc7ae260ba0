"""Forward mode that records each operation as one linear equation, without the rules in between.

Nearly all operations under `grad` have one or two operands, which are plain arrays or values with a tangent, and a
derivative that is one equation on the linear tape (`linearization_rule`). On plain arrays such an operation takes
little more time than its NumPy function. A tangent is its equation, which is its own variable.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.forward import JVP, JVPTracer
from minidiff.core.interpreter import EVALUATE, Interpreter, current_interpreter, running, set_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Atom, Equation, RecordedTracer, Tape
from minidiff.core.tracer import OPERATIONS, Tracer, Value, WeakTracer
from minidiff.core.types import ShapedArray, Var, array_type, as_plain_operand, typeof
from minidiff.errors.location import Location
from minidiff.errors.tracebacks import trim_traceback
from minidiff.ops import elementwise, linalg, reduction
from minidiff.ops.base import Differentiable, Linear, differential_of, sum_p
from minidiff.values.dtypes import NARROW, PLAIN, has_narrow


class LinearEquation(Var):
    """An equation with one result, which is its own output variable."""

    __slots__ = ("primitive", "inputs", "params")
    primitive: Primitive
    inputs: Sequence[Atom]
    params: dict

    source: Location | None = None
    bodies, settings = Equation.bodies, Equation.settings

    @property
    def outputs(self) -> tuple[Var]:
        return (self,)


class LocatedEquation(LinearEquation):
    """An equation that keeps its source line, for the tape of a program."""

    __slots__ = ("source",)


class ArrayTape(Tape):
    """A linear tape whose values, and those of its tangents, are plain arrays."""


# ---------------------------------------------------------------- what is recorded


class LinearizationRule:
    """The function that runs an operation, and the equation of `operation` that its derivative is recorded as.

    `pick_inputs` selects the equation's inputs from `(type of the result, result, *operands, *tangents)`. Without an
    operation, the tangent of the result is zero if `is_zero`; else it is that of the operand, if both have one type.
    """

    __slots__ = ("run", "operation", "pick_inputs", "is_zero")

    def __init__(self, run: Callable, operation: Primitive | None, picked: Sequence[int] = (0,), is_zero: bool = False):
        self.run = run
        self.operation = operation
        picked = picked if len(picked) > 1 else [slice(picked[0], picked[0] + 1)]
        self.pick_inputs: Callable = operator.itemgetter(*picked)
        self.is_zero = is_zero


#: Python's operators use NumPy's scalar arithmetic, which is faster on single numbers than ufuncs.
RUN: dict[Primitive, Callable] = {
    elementwise.less.primitive: operator.lt,
    elementwise.less_equal.primitive: operator.le,
    elementwise.greater.primitive: operator.gt,
    elementwise.greater_equal.primitive: operator.ge,
    elementwise.add.primitive: operator.add,
    elementwise.subtract.primitive: operator.sub,
    elementwise.multiply.primitive: operator.mul,
    elementwise.divide.primitive: operator.truediv,
    elementwise.negative.primitive: operator.neg,
}


@functools.cache
def linearization_rule(primitive: Primitive, active: tuple[int, ...], count: int) -> LinearizationRule | None:
    """Return the rule of an operation on `count` operands if these are active; None if it takes several equations."""
    if primitive.multiple_results or type(primitive).jvp is not Primitive.jvp:
        return None
    run, tangent, first = RUN.get(primitive, primitive.impl), type(primitive).tangent, 2 + count
    if tangent is Differentiable.tangent:
        derivative = differential_of(primitive, active, count)
        if derivative is None:
            return LinearizationRule(run, None, is_zero=True)
        values = [1 + j if j in derivative.residuals else 0 for j in range(1 + count)]
        return LinearizationRule(run, derivative, [*values, *[first + active.index(i) for i in derivative.active]])
    if tangent is elementwise.Sum.tangent and len(active) == 1:
        return LinearizationRule(run, None) if primitive.signs[active[0]] > 0 else None
    linear = {Linear.tangent: getattr(primitive, "linear_operands", None) or count, elementwise.Sum.tangent: 2}
    n = linear.get(tangent)
    if active != tuple(range(n or 0)) or not active:
        return None
    return LinearizationRule(run, primitive, [*range(first, first + n), *range(2 + n, first)])


# ---------------------------------------------------------------- the forward sweep

#: The rules of operations that have run on plain arrays, by the operands that are active.
ONE: dict[Primitive, LinearizationRule] = {}
BOTH: dict[Primitive, LinearizationRule] = {}
LEFT: dict[Primitive, LinearizationRule] = {}
RIGHT: dict[Primitive, LinearizationRule] = {}
TABLES = {((0,), 1): ONE, ((0, 1), 2): BOTH, ((0,), 2): LEFT, ((1,), 2): RIGHT}

_new = object.__new__
_DOUBLE = numpy.dtype(float)
_NUMBER = array_type((), _DOUBLE)


class FastTracer(JVPTracer):
    """A value of a `FastJVP`. Its operators record known operations, and call the general ones for others."""

    __slots__ = ()


def _is_double(x: Value) -> bool:
    return type(x) is numpy.float64 or type(x) is float or (type(x) is numpy.ndarray and x.dtype is _DOUBLE)


class FastJVP(JVP):
    """Forward mode on top of a `Linearize` that records one equation for each operation."""

    def __init__(self, below: Any, outer: Interpreter | None = None):
        Interpreter.__init__(self, below, outer)  # `super` takes as long as the rest
        self.on_arrays = below.below is EVALUATE  # whether no value is sharded, or a tracer of an interpreter below
        self.equations = below.equations

    def owns(self, x: Any) -> bool:
        return type(x) is FastTracer and x.interpreter is self

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if self.scope is not None:  # operands in a body come by `ranks.bind`, which has unwrapped Python numbers
            return self.interpret(primitive, args, params)
        out = None
        if len(args) == 2:
            out = self.linearize_binary(primitive, *args, params)
        elif len(args) == 1:
            out = self.linearize_unary(primitive, *args, params)
        return Interpreter.process(self, primitive, args, params) if out is None else out

    def linearize_unary(self, primitive: Primitive, x: Value, params: dict) -> Value | None:
        """Apply a known operation to a plain array with a tangent. Return None if it is unknown, or raises an error."""
        if not self.on_arrays:
            return None
        if type(x) is WeakTracer:
            x = x.value
        rule = ONE.get(primitive)
        if rule is None or type(x) is not FastTracer or x.interpreter is not self:
            return None
        a = x.primal
        if NARROW and has_narrow((a,)):
            return None
        try:
            out = rule.run(a, **params) if params else rule.run(a)
            type_ = _NUMBER if type(out) is numpy.float64 else array_type(out.shape, out.dtype)
        except (AttributeError, TypeError, ValueError):
            return None  # the general path raises it, with the operands' types
        if rule.operation is None:
            return out if rule.is_zero else self.same_tangent(primitive, out, type_, x.tangent, (x,), params)
        equation, tracer = _new(LinearEquation), _new(FastTracer)  # the constructors would take as long as all the rest
        equation.primitive, equation.type, equation.params = rule.operation, type_, params
        equation.inputs = rule.pick_inputs((type_, out, a, x.tangent))
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, equation
        self.equations.append(equation)
        return tracer

    def linearize_binary(self, primitive: Primitive, x: Value, y: Value, params: dict) -> Value | None:
        """Apply a known operation to two operands, one of which may be without a tangent: see `linearize_unary`."""
        if not self.on_arrays:
            return None
        weak, other_tangent = False, None
        if type(x) is WeakTracer:
            x, weak = x.value, True
        if type(y) is WeakTracer:
            y, weak = y.value, True
        if type(x) is FastTracer and x.interpreter is self:
            a, tangent = x.primal, x.tangent
            if type(y) is FastTracer and y.interpreter is self:
                rule, b, other_tangent = BOTH.get(primitive), y.primal, y.tangent
            elif type(y) in PLAIN:
                rule, b = LEFT.get(primitive), y
            else:
                return None
        elif type(x) in PLAIN and type(y) is FastTracer and y.interpreter is self:
            rule, a, b, tangent = RIGHT.get(primitive), x, y.primal, y.tangent
        else:
            return None
        if rule is None or (NARROW and has_narrow((a, b))):
            return None
        if weak and not (_is_double(a) and _is_double(b)):  # NumPy promotes
            return None
        try:
            out = rule.run(a, b, **params) if params else rule.run(a, b)
            if type(out) is complex:  # of a Python complex number and a real NumPy scalar
                out = numpy.complex128(out)
            type_ = _NUMBER if type(out) is numpy.float64 else array_type(out.shape, out.dtype)
        except (AttributeError, TypeError, ValueError):
            return None
        if rule.operation is None:
            return out if rule.is_zero else self.same_tangent(primitive, out, type_, tangent, (x, y), params)
        equation, tracer = _new(LinearEquation), _new(FastTracer)
        equation.primitive, equation.type, equation.params = rule.operation, type_, params
        equation.inputs = rule.pick_inputs((type_, out, a, b, tangent, other_tangent))
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, equation
        self.equations.append(equation)
        return tracer

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        active = tuple([i for i, x in enumerate(args) if type(x) is FastTracer and x.interpreter is self])
        rule = linearization_rule(primitive, active, len(args)) if active and not primitive.is_higher_order else None
        if rule is None or rule.is_zero:
            out = super().interpret(primitive, args, params)
        else:
            out = self.record(rule, primitive, args, active, params)
        if self.on_arrays:
            results = out if primitive.multiple_results else (out,)
            primals = [x.primal if type(x) is FastTracer else x for x in (*args, *results)]
            # A shard_map's operands may get sharded cotangents, and so may those of an operation on sharded arrays.
            on_ranks = primitive.is_higher_order and primitive.body_scope(params) is not None
            self.on_arrays = not (on_ranks or any(isinstance(x, Tracer) for x in primals))
            if self.on_arrays and rule is not None and (active, len(args)) in TABLES:
                TABLES[active, len(args)][primitive] = rule
        return out

    def record(
        self, rule: LinearizationRule, primitive: Primitive, args: Sequence[Value], active: Sequence[int], params: dict
    ) -> JVPTracer:
        """Run an operation, and record its derivative; one on sharded arrays is a `shard_map` of it."""
        primals = [x.primal if type(x) is FastTracer and x.interpreter is self else x for x in args]
        if not PLAIN.issuperset(map(type, primals)):
            primals = list(map(as_plain_operand, primals))
            sharded = ranks.dispatch(self, primitive, args, params) if self.scope is None else None
            if sharded is not None:
                return sharded
        out = primitive.apply(self.below.below, primals, params)
        type_, source, tangents = typeof(out), self.below.source(), [args[i].tangent for i in active]
        if rule.operation is None:
            return self.same_tangent(primitive, out, type_, tangents[0], args, params)
        equation = LinearEquation(type_) if source is None else LocatedEquation(type_)
        if source is not None:
            equation.source = source
        equation.inputs = rule.pick_inputs((type_, out, *primals, *tangents))
        if type(self.below) is not Linearize:  # in a checkpoint, values have names
            equation.inputs = [a if isinstance(a, Var) else self.below.atom(a) for a in equation.inputs]
        equation.primitive, equation.params = rule.operation, params
        self.equations.append(equation)
        return FastTracer(self, out, equation)

    def same_tangent(
        self, primitive: Primitive, out: Value, type_: ShapedArray, tangent: Var, args: Sequence[Value], params: dict
    ) -> Value:
        """Return a sum with one active operand: its tangent is the operand's, unless the types differ."""
        if tangent.type is type_ or tangent.type == type_:
            return FastTracer(self, out, tangent)
        with running(self.below):
            return self.join(out, primitive.tangent(out, *self.split(args), params))

    def split(self, args: Sequence[Value]) -> tuple[list[Value], list[Value | None]]:
        primals = [x.primal if self.owns(x) else x for x in args]
        return primals, [RecordedTracer(self.below, x.tangent) if self.owns(x) else None for x in args]

    def join(self, primal: Value, tangent: Value | None) -> Value:
        # A tangent that is not a variable on the tape does not depend on its inputs. It is linear in them, so zero.
        return FastTracer(self, primal, tangent.variable) if self.below.owns(tangent) else primal


def _array_ufunc(self: FastTracer, ufunc: numpy.ufunc, method: str, x: Value, *more: Value, **kwargs: Any) -> Value:
    try:
        trace, out = self.interpreter, None
        if method == "__call__" and not kwargs and current_interpreter() is trace:
            if not more:
                out = trace.linearize_unary(OPERATIONS.get(ufunc), x, {})
            elif len(more) == 1:
                primitive = linalg.matmul_p if ufunc is numpy.matmul else OPERATIONS.get(ufunc)
                out = trace.linearize_binary(primitive, x, more[0], {})
        return _general_ufunc(self, ufunc, method, x, *more, **kwargs) if out is None else out
    except BaseException as error:
        trim_traceback(error)
        raise


def _otherwise(general: Callable) -> Callable[[Callable], Callable]:
    """Decorate a method, which gets the trace as well: call the `general` one if it returns None."""

    def decorate(quick: Callable) -> Callable:
        def method(x: FastTracer, *args: Any) -> Any:
            try:
                trace = x.interpreter
                out = quick(trace, x, *args) if current_interpreter() is trace else None
                return general(x, *args) if out is None else out
            except BaseException as error:
                trim_traceback(error)
                raise

        return method

    return decorate


#: Reductions, which most losses end with, over all axes.
REDUCTIONS = {numpy.sum: sum_p, numpy.mean: reduction.mean_p}


@_otherwise(Tracer.__array_function__)
def _array_function(trace: FastJVP, x: Value, function: Callable, types: Any, args: tuple, kwargs: dict) -> Value:
    primitive = REDUCTIONS.get(function)
    if primitive is None or kwargs or len(args) > 1 or args[0] is not x or not trace.on_arrays:  # x may be in a list
        return None
    return trace.linearize_unary(primitive, x, {"axes": tuple(range(x.primal.ndim))})


@_otherwise(Tracer.__pow__)
def _power(trace: FastJVP, x: Value, y: Value) -> Value:
    return trace.linearize_unary(elementwise.square.primitive, x, {}) if type(y) is int and y == 2 else None


_general_ufunc: Callable = Tracer.__array_ufunc__
FastTracer.__array_ufunc__, FastTracer.__array_function__, FastTracer.__pow__ = _array_ufunc, _array_function, _power


def _attach(name: str, general: Callable, primitive: Primitive) -> None:
    """Give `FastTracer` an operator, and the one with reversed operands, in place of the `general` ones of tracers."""
    if primitive.impl.nin == 1:
        setattr(FastTracer, name, _otherwise(general)(lambda trace, x: trace.linearize_unary(primitive, x, {})))
        return

    def binary(x: FastTracer, y: Value) -> Value:  # as `_otherwise` does, but faster
        try:
            trace = x.interpreter
            out = trace.linearize_binary(primitive, x, y, {}) if current_interpreter() is trace else None
            return general(x, y) if out is None else out
        except BaseException as error:
            trim_traceback(error)
            raise

    setattr(FastTracer, name, binary)
    if reverse := getattr(Tracer, f"__r{name[2:]}", None):
        quick = _otherwise(reverse)(lambda trace, y, x: trace.linearize_binary(primitive, x, y, {}))
        setattr(FastTracer, f"__r{name[2:]}", quick)


for _name, _operator in [*vars(Tracer).items()]:
    if _name.startswith("__") and hasattr(_operator, "primitive"):
        _attach(_name, _operator, _operator.primitive)
_attach("__matmul__", Tracer.__matmul__, linalg.matmul_p)


def linearize_flat(
    f: Callable, primals: Sequence[Value], active: Sequence[bool], origin: tuple[str, str] | None = None
) -> tuple[list[Value], Tape]:
    """`minidiff.core.reverse.linearize_flat`, by a `FastJVP`."""
    recorder = Linearize(current_interpreter())
    trace = FastJVP(recorder)
    recorder.origin = trace.origin = origin
    recorder.below.watch_sweep(trace)
    args = []
    for p, is_active in zip(primals, active):
        if is_active:
            tangent, value, p = _new(Var), p, _new(FastTracer)
            tangent.type = _NUMBER if type(value) is numpy.float64 else typeof(value)
            p.interpreter, p.primal, p.tangent = trace, value, tangent
            trace.on_arrays = trace.on_arrays and not isinstance(value, Tracer)
            recorder.inputs.append(tangent)
        args.append(p)
    try:  # as `with running(trace)`, but faster, and an interrupt cannot leave `trace` current
        set_interpreter(trace)
        results = f(*args)
    finally:
        set_interpreter(recorder.below)
        trace.end()
        recorder.end()
    outs: list[Value] = []
    out_tangents: list[Atom | None] = []
    for x in results:
        has_tangent = trace.owns(x)
        outs.append(x.primal if has_tangent else x)
        out_tangents.append(x.tangent if has_tangent else None)
    return outs, (ArrayTape if trace.on_arrays else Tape)(recorder.inputs, recorder.equations, out_tangents)
