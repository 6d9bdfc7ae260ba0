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
from minidiff.core.operation import Primitive
from minidiff.core.python_numbers import WeakTracer, unwrap_weak
from minidiff.core.ranks import ranks
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Atom, Equation, RecordedTracer, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, array_type, typeof
from minidiff.diagnostics.location import Location
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
    that of the operand, if both have one type.
    """

    __slots__ = ("run", "operation", "keep")

    def __init__(self, run: Callable, operation: Primitive | None, kept: Sequence[int] = ()):
        self.run = run
        self.operation = operation
        if operation is None:
            self.keep: Callable = lambda values: None
        else:
            self.keep = (
                operator.itemgetter(*kept) if len(kept) > 1 else operator.itemgetter(slice(kept[0], kept[0] + 1))
            )


#: Python's operators use NumPy's scalar arithmetic, which is faster on single numbers than ufuncs.
RUN: dict[Primitive, Callable] = {
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
            return None
        values = [1 + j if j in derivative.reads else 0 for j in range(1 + count)]
        return Recording(run, derivative, [*values, *[first + active.index(i) for i in derivative.active]])
    if tangent is elementwise.Sum.tangent and len(active) == 1:
        return Recording(run, None) if primitive.signs[active[0]] > 0 else None
    linear = {Linear.tangent: getattr(primitive, "linear_operands", None) or count, elementwise.Sum.tangent: 2}
    n = linear.get(tangent)
    if active != tuple(range(n or 0)) or not active:
        return None
    return Recording(run, primitive, [*range(first, first + n), *range(2 + n, first)])


# ---------------------------------------------------------------- Python numbers


def _is_double(x: Value) -> bool:
    x = x.primal if type(x) is JVPTracer else x
    return type(x) in (float, numpy.float64) or (type(x) is numpy.ndarray and x.dtype is _DOUBLE)


def unwrap_doubles(args: Sequence[Value]) -> list[Value] | None:
    """The operands without the wrappers of traced Python numbers, if all are float64: then nothing is promoted.

    None if an operand has another dtype, or there is no such wrapper.
    """
    if WeakTracer not in map(type, args):
        return None
    plain = list(map(unwrap_weak, args))
    return plain if all(map(_is_double, plain)) else None


_DOUBLE = numpy.dtype(float)

# ---------------------------------------------------------------- the forward sweep

#: The recordings of operations that have run on plain arrays, by which operands are active.
ONE: dict[Primitive, Recording] = {}
BOTH: dict[Primitive, Recording] = {}
LEFT: dict[Primitive, Recording] = {}
RIGHT: dict[Primitive, Recording] = {}
TABLES = {((0,), 1): ONE, ((0, 1), 2): BOTH, ((0,), 2): LEFT, ((1,), 2): RIGHT}

_new = object.__new__


class Sweep(JVP):
    """Forward mode on top of a `Linearize` that records steps."""

    def __init__(self, below: Any, outer: Interpreter | None = None):
        super().__init__(below, outer)
        self.on_arrays = below.below is EVALUATE  # whether no value is sharded, or a tracer of an interpreter below
        self.equations = below.equations

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        form, other = None, None
        try:
            if len(args) == 2 and self.on_arrays:
                x, y = args
                if type(x) is not JVPTracer or x.interpreter is not self:
                    if type(x) in PLAIN and type(y) is JVPTracer and y.interpreter is self:
                        form, a, b, name = RIGHT.get(primitive), x, y.primal, y.tangent
                elif type(y) is JVPTracer and y.interpreter is self:
                    form, a, b, name, other = BOTH.get(primitive), x.primal, y.primal, x.tangent, y.tangent
                elif type(y) in PLAIN:
                    form, a, b, name = LEFT.get(primitive), x.primal, y, x.tangent
                if NARROW and form is not None and has_narrow((a, b)):
                    form = None
                elif form is not None:
                    out = form.run(a, b, **params) if params else form.run(a, b)
                    if type(out) is complex:  # of a Python complex number and a real NumPy scalar
                        out = numpy.complex128(out)
                    type_ = array_type(out.shape, out.dtype)
                    inputs = form.keep((type_, out, a, b, name, other))
            elif len(args) == 1 and self.on_arrays:
                (x,) = args
                if type(x) is JVPTracer and x.interpreter is self:
                    form, a, name = ONE.get(primitive), x.primal, x.tangent
                if NARROW and form is not None and has_narrow((a,)):
                    form = None
                elif form is not None:
                    out = form.run(a, **params) if params else form.run(a)
                    type_ = array_type(out.shape, out.dtype)
                    inputs = form.keep((type_, out, a, name))
        except (AttributeError, TypeError, ValueError):
            form = None  # the general path raises the error, with the operands' types
        if form is None:
            plain = unwrap_doubles(args)
            return super().process(primitive, args, params) if plain is None else self.process(primitive, plain, params)
        if inputs is None:
            primals, tangents = self.split(args)
            return self.same_tangent(primitive, out, type_, name, primals, tangents, params)
        step, tracer = _new(RecordedStep), _new(JVPTracer)  # the constructors would take as long as all the rest
        step.primitive, step.type, step.inputs, step.params = form.operation, type_, inputs, params
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, step
        self.equations.append(step)
        return tracer

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        mine = [type(x) is JVPTracer and x.interpreter is self for x in args]
        active = tuple([i for i, yes in enumerate(mine) if yes])
        form = recording_of(primitive, active, len(args)) if active and not primitive.is_higher_order else None
        if form is None:
            out = super().interpret(primitive, args, params)
            found = out if primitive.multiple_results else (out,)
        else:
            out = self.record(form, primitive, args, mine, params)
            found = (out,)
        if self.on_arrays:
            primals = [x.primal if type(x) is JVPTracer else x for x in found]
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
        if any(isinstance(x, Tracer) for x in primals):
            sharded = ranks.dispatch(self, primitive, args, params)
            if sharded is not None:
                return sharded
        out = primitive.apply(self.below.below, primals, params)
        type_, source = typeof(out), self.below.source()
        names = [x.tangent for x, yes in zip(args, mine) if yes]
        if form.operation is None:
            return self.same_tangent(primitive, out, type_, names[0], primals, self.split(args)[1], params)
        step = RecordedStep(type_)
        if source is not None:
            step = LocatedStep(type_)
            step.source = source
        step.inputs = form.keep((type_, out, *primals, *names))
        if type(self.below) is not Linearize:  # in a checkpoint, values have names
            step.inputs = [a if isinstance(a, Var) else self.below.atom(a) for a in step.inputs]
        step.primitive, step.params = form.operation, params
        self.equations.append(step)
        return JVPTracer(self, out, step)

    def same_tangent(
        self,
        primitive: Primitive,
        out: Value,
        type_: ShapedArray,
        name: Var,
        primals: Sequence[Value],
        tangents: Sequence[Value | None],
        params: dict,
    ) -> Value:
        """The result of a sum with one active operand: its tangent is the operand's, unless the types differ."""
        if name.type == type_:
            return JVPTracer(self, out, name)
        with running(self.below):
            return self.join(out, primitive.tangent(out, primals, tangents, params))

    def split(self, args: Sequence[Value]) -> tuple[list[Value], list[Value | None]]:
        primals, tangents = super().split(args)
        return primals, [None if t is None else RecordedTracer(self.below, t) for t in tangents]

    def join(self, primal: Value, tangent: Value | None) -> Value:
        # A tangent that is not a variable on the tape does not depend on its inputs. It is linear in them, so zero.
        return JVPTracer(self, primal, tangent.variable) if self.below.owns(tangent) else primal


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
            name = Var(array_type(p.shape, p.dtype) if type(p) is numpy.ndarray else typeof(p))
            sweep.on_arrays = sweep.on_arrays and not isinstance(p, Tracer)
            recorder.inputs.append(name)
            p = JVPTracer(sweep, p, name)
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
        mine = type(x) is JVPTracer and x.interpreter is sweep
        outs.append(x.primal if mine else x)
        out_names.append(x.tangent if mine else None)
    return outs, (ArrayTape if sweep.on_arrays else Tape)(recorder.inputs, recorder.equations, out_names)
