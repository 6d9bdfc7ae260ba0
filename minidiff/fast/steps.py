"""Forward mode that records each operation as one step of known form, without the rules in between.

Nearly all operations under `grad` have one or two operands, which are plain arrays or values with a tangent, and a
derivative that is one equation on the linear tape (`recording_of`). On plain arrays such an operation takes little more
time than its NumPy function. A tangent is the step itself: an equation that is its own variable.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.forward import JVP, JVPTracer
from minidiff.core.interpreter import EVALUATE, Interpreter, become, current_interpreter, running
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Atom, Equation, RecordedTracer, Tape
from minidiff.core.tracer import OPERATIONS, Tracer, Value, WeakTracer
from minidiff.core.types import ShapedArray, Var, array_type, as_plain_operand, typeof
from minidiff.diagnostics.location import Location
from minidiff.diagnostics.tracebacks import prepare_to_leave
from minidiff.ops import elementwise
from minidiff.ops.base import Differentiable, Linear, differential_of
from minidiff.values.dtypes import NARROW, PLAIN
from minidiff.values.half import has_narrow


class RecordedStep(Var):
    """An equation with one result that is also its own output variable."""

    __slots__ = ("primitive", "inputs", "params")
    primitive: Primitive
    inputs: Sequence[Atom]
    params: dict

    source: Location | None = None
    bodies, settings = Equation.bodies, Equation.settings

    @property
    def outputs(self) -> tuple[Var]:
        return (self,)


class LocatedStep(RecordedStep):
    """A step that keeps its source line, for the tape of a program."""

    __slots__ = ("source",)


class ArrayTape(Tape):
    """A linear tape whose values, and those of its tangents, are plain arrays."""


# ---------------------------------------------------------------- what is recorded


class Recording:
    """How an operation is run, and its derivative recorded.

    It is recorded as `operation`. `keep` picks its operands out of
    `(type of the result, result, *operands, *names of tangents)`. Without an operation, the tangent of the result is
    zero if `is_zero`; else it is that of the operand, if both have one type.
    """

    __slots__ = ("run", "operation", "keep", "is_zero")

    def __init__(self, run: Callable, operation: Primitive | None, kept: Sequence[int] = (0,), is_zero: bool = False):
        self.run = run
        self.operation = operation
        self.keep: Callable = operator.itemgetter(*kept if len(kept) > 1 else [slice(kept[0], kept[0] + 1)])
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
def recording_of(primitive: Primitive, active: tuple[int, ...], count: int) -> Recording | None:
    """How an operation on `count` operands is recorded if these are active; None if not as one equation."""
    if primitive.multiple_results or type(primitive).jvp is not Primitive.jvp:
        return None
    run, tangent, first = RUN.get(primitive, primitive.impl), type(primitive).tangent, 2 + count
    if tangent is Differentiable.tangent:
        derivative = differential_of(primitive, active, count)
        if derivative is None:
            return Recording(run, None, is_zero=True)
        values = [1 + j if j in derivative.reads else 0 for j in range(1 + count)]
        return Recording(run, derivative, [*values, *[first + active.index(i) for i in derivative.active]])
    if tangent is elementwise.Sum.tangent and len(active) == 1:
        return Recording(run, None) if primitive.signs[active[0]] > 0 else None
    linear = {Linear.tangent: getattr(primitive, "linear_operands", None) or count, elementwise.Sum.tangent: 2}
    n = linear.get(tangent)
    if active != tuple(range(n or 0)) or not active:
        return None
    return Recording(run, primitive, [*range(first, first + n), *range(2 + n, first)])


# ---------------------------------------------------------------- the forward sweep

#: The recordings of operations that have run on plain arrays, by which operands are active.
ONE: dict[Primitive, Recording] = {}
BOTH: dict[Primitive, Recording] = {}
LEFT: dict[Primitive, Recording] = {}
RIGHT: dict[Primitive, Recording] = {}
TABLES = {((0,), 1): ONE, ((0, 1), 2): BOTH, ((0,), 2): LEFT, ((1,), 2): RIGHT}

_new = object.__new__
_DOUBLE = numpy.dtype(float)
_NUMBER = array_type((), _DOUBLE)


class StepTracer(JVPTracer):
    """A value of a `Sweep`. Its operators record a known operation themselves, and call the general ones for others."""

    __slots__ = ()


def _is_double(x: Value) -> bool:
    return type(x) is numpy.float64 or type(x) is float or (type(x) is numpy.ndarray and x.dtype is _DOUBLE)


class Sweep(JVP):
    """Forward mode on top of a `Linearize` that records steps."""

    def __init__(self, below: Any, outer: Interpreter | None = None):
        Interpreter.__init__(self, below, outer)  # `super` takes as long as the rest
        self.on_arrays = below.below is EVALUATE  # whether no value is sharded, or a tracer of an interpreter below
        self.equations = below.equations

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        out = None
        if len(args) == 2:
            out = self.two(primitive, *args, params)
        elif len(args) == 1:
            out = self.one(primitive, *args, params)
        return Interpreter.process(self, primitive, args, params) if out is None else out

    def one(self, primitive: Primitive, x: Value, params: dict) -> Value | None:
        """Apply a known operation to a plain array with a tangent. None if it is not known, or raises an error."""
        if not self.on_arrays:
            return None
        if type(x) is WeakTracer:
            x = x.value
        form = ONE.get(primitive)
        if form is None or type(x) is not StepTracer or x.interpreter is not self:
            return None
        a = x.primal
        if NARROW and has_narrow((a,)):
            return None
        try:
            out = form.run(a, **params) if params else form.run(a)
            type_ = _NUMBER if type(out) is numpy.float64 else array_type(out.shape, out.dtype)
        except (AttributeError, TypeError, ValueError):
            return None  # the general path raises it, with the operands' types
        if form.operation is None:
            return out if form.is_zero else self.same_tangent(primitive, out, type_, x.tangent, (x,), params)
        step, tracer = _new(RecordedStep), _new(StepTracer)  # the constructors would take as long as all the rest
        step.primitive, step.type, step.params = form.operation, type_, params
        step.inputs = form.keep((type_, out, a, x.tangent))
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, step
        self.equations.append(step)
        return tracer

    def two(self, primitive: Primitive, x: Value, y: Value, params: dict) -> Value | None:
        """As `one`, of two operands, one of which may be without a tangent."""
        if not self.on_arrays:
            return None
        weak, other = False, None
        if type(x) is WeakTracer:
            x, weak = x.value, True
        if type(y) is WeakTracer:
            y, weak = y.value, True
        if type(x) is StepTracer and x.interpreter is self:
            a, name = x.primal, x.tangent
            if type(y) is StepTracer and y.interpreter is self:
                form, b, other = BOTH.get(primitive), y.primal, y.tangent
            elif type(y) in PLAIN:
                form, b = LEFT.get(primitive), y
            else:
                return None
        elif type(x) in PLAIN and type(y) is StepTracer and y.interpreter is self:
            form, a, b, name = RIGHT.get(primitive), x, y.primal, y.tangent
        else:
            return None
        if form is None or (NARROW and has_narrow((a, b))):
            return None
        if weak and not (_is_double(a) and _is_double(b)):  # NumPy promotes
            return None
        try:
            out = form.run(a, b, **params) if params else form.run(a, b)
            if type(out) is complex:  # of a Python complex number and a real NumPy scalar
                out = numpy.complex128(out)
            type_ = _NUMBER if type(out) is numpy.float64 else array_type(out.shape, out.dtype)
        except (AttributeError, TypeError, ValueError):
            return None
        if form.operation is None:
            return out if form.is_zero else self.same_tangent(primitive, out, type_, name, (x, y), params)
        step, tracer = _new(RecordedStep), _new(StepTracer)
        step.primitive, step.type, step.params = form.operation, type_, params
        step.inputs = form.keep((type_, out, a, b, name, other))
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, step
        self.equations.append(step)
        return tracer

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        mine = [type(x) is StepTracer and x.interpreter is self for x in args]
        active = tuple([i for i, yes in enumerate(mine) if yes])
        form = recording_of(primitive, active, len(args)) if active and not primitive.is_higher_order else None
        if form is None or form.is_zero:
            out = super().interpret(primitive, args, params)
            found = out if primitive.multiple_results else (out,)
        else:
            out = self.record(form, primitive, args, mine, params)
            found = (out,)
        if self.on_arrays:
            primals = [x.primal if type(x) is StepTracer else x for x in found]
            # A shard_map's operands may get sharded cotangents.
            on_ranks = primitive.is_higher_order and primitive.body_scope(params) is not None
            self.on_arrays = not (on_ranks or any(isinstance(x, Tracer) for x in primals))
            if self.on_arrays and form is not None and (active, len(args)) in TABLES:
                TABLES[active, len(args)][primitive] = form
        return out

    def record(
        self, form: Recording, primitive: Primitive, args: Sequence[Value], mine: Sequence[bool], params: dict
    ) -> JVPTracer:
        """Run an operation, and record its derivative as a step; one on sharded arrays is a `shard_map` of it."""
        primals = [x.primal if yes else x for x, yes in zip(args, mine)]
        if not PLAIN.issuperset(map(type, primals)):
            primals = list(map(as_plain_operand, primals))
            sharded = ranks.dispatch(self, primitive, args, params)
            if sharded is not None:
                return sharded
        out = primitive.apply(self.below.below, primals, params)
        type_, source = typeof(out), self.below.source()
        names = [x.tangent for x, yes in zip(args, mine) if yes]
        if form.operation is None:
            return self.same_tangent(primitive, out, type_, names[0], args, params)
        step = RecordedStep(type_)
        if source is not None:
            step = LocatedStep(type_)
            step.source = source
        step.inputs = form.keep((type_, out, *primals, *names))
        if type(self.below) is not Linearize:  # in a checkpoint, values have names
            step.inputs = [a if isinstance(a, Var) else self.below.atom(a) for a in step.inputs]
        step.primitive, step.params = form.operation, params
        self.equations.append(step)
        return StepTracer(self, out, step)

    def same_tangent(
        self, primitive: Primitive, out: Value, type_: ShapedArray, name: Var, args: Sequence[Value], params: dict
    ) -> Value:
        """The result of a sum with one active operand: its tangent is the operand's, unless the types differ."""
        if name.type is type_ or name.type == type_:
            return StepTracer(self, out, name)
        with running(self.below):
            return self.join(out, primitive.tangent(out, *self.split(args), params))

    def split(self, args: Sequence[Value]) -> tuple[list[Value], list[Value | None]]:
        mine = [type(x) is StepTracer and x.interpreter is self for x in args]
        primals = [x.primal if yes else x for x, yes in zip(args, mine)]
        return primals, [RecordedTracer(self.below, x.tangent) if yes else None for x, yes in zip(args, mine)]

    def join(self, primal: Value, tangent: Value | None) -> Value:
        # A tangent that is not a variable on the tape does not depend on its inputs. It is linear in them, so zero.
        return StepTracer(self, primal, tangent.variable) if self.below.owns(tangent) else primal


def _array_ufunc(self: StepTracer, ufunc: numpy.ufunc, method: str, x: Value, *others: Value, **kwargs: Any) -> Value:
    try:
        sweep, out = self.interpreter, None
        if method == "__call__" and not kwargs and current_interpreter() is sweep:
            if not others:
                out = sweep.one(OPERATIONS.get(ufunc), x, {})
            elif len(others) == 1:
                out = sweep.two(OPERATIONS.get(ufunc), x, others[0], {})
        return _general_ufunc(self, ufunc, method, x, *others, **kwargs) if out is None else out
    except BaseException as error:
        prepare_to_leave(error)
        raise


_general_ufunc: Callable = Tracer.__array_ufunc__
StepTracer.__array_ufunc__ = _array_ufunc


def _attach(name: str, general: Callable, primitive: Primitive) -> None:
    """Give `StepTracer` an operator, and the one with reversed operands, in place of the `general` ones of tracers."""

    def unary(x: StepTracer) -> Value:
        try:
            sweep = x.interpreter
            out = sweep.one(primitive, x, {}) if current_interpreter() is sweep else None
            return general(x) if out is None else out
        except BaseException as error:
            prepare_to_leave(error)
            raise

    def binary(x: StepTracer, y: Value) -> Value:
        try:
            sweep = x.interpreter
            out = sweep.two(primitive, x, y, {}) if current_interpreter() is sweep else None
            return general(x, y) if out is None else out
        except BaseException as error:
            prepare_to_leave(error)
            raise

    def reverse(y: StepTracer, x: Value) -> Value:
        try:
            sweep = y.interpreter
            out = sweep.two(primitive, x, y, {}) if current_interpreter() is sweep else None
            return general(x, y) if out is None else out
        except BaseException as error:
            prepare_to_leave(error)
            raise

    setattr(StepTracer, name, unary if primitive.impl.nin == 1 else binary)
    if hasattr(Tracer, f"__r{name[2:]}"):
        setattr(StepTracer, f"__r{name[2:]}", reverse)


for _name, _operator in [*vars(Tracer).items()]:
    if _name.startswith("__") and hasattr(_operator, "primitive"):
        _attach(_name, _operator, _operator.primitive)


def linearize_flat(
    f: Callable, primals: Sequence[Value], active: Sequence[bool], origin: tuple[str, str] | None = None
) -> tuple[list[Value], Tape]:
    """`minidiff.core.reverse.linearize_flat`, by a `Sweep`."""
    recorder = Linearize(current_interpreter())
    sweep = Sweep(recorder)
    recorder.origin = sweep.origin = origin
    recorder.below.watch_sweep(sweep)
    args = []
    for p, yes in zip(primals, active):
        if yes:
            name, value, p = _new(Var), p, _new(StepTracer)
            name.type = _NUMBER if type(value) is numpy.float64 else typeof(value)
            p.interpreter, p.primal, p.tangent = sweep, value, name
            sweep.on_arrays = sweep.on_arrays and not isinstance(value, Tracer)
            recorder.inputs.append(name)
        args.append(p)
    try:  # as `with running(sweep)`, but faster, and an interrupt cannot leave `sweep` current
        become(sweep)
        results = f(*args)
    finally:
        become(recorder.below)
        sweep.end()
        recorder.end()
    outs, out_names = [], []
    for x in results:
        mine = type(x) is StepTracer and x.interpreter is sweep
        outs.append(x.primal if mine else x)
        out_names.append(x.tangent if mine else None)
    return outs, (ArrayTape if sweep.on_arrays else Tape)(recorder.inputs, recorder.equations, out_names)
