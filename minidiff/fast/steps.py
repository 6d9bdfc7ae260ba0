"""What is here for speed alone. Without it everything still works: a test runs the core's tests so.

Under `grad` of plain arrays, an operation takes about as long as its NumPy function if Python does little beside it.
So the forward sweep records an operation whose derivative has a known form as one step, without the rules in between
(`RecordedSteps`); the backward sweep calls a compiled function for such a step (`walk_back`), which is made from its
derivative rule when the operation is declared (`compiled_cotangent`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.forward import JVPTracer
from minidiff.core.interpreter import EVALUATE, Interpreter
from minidiff.core.operation import Primitive
from minidiff.core.staging import scalar_tapes
from minidiff.core.tape import Equation, Step, Tape
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray, Var, array_type, typeof
from minidiff.diagnostics.location import transposes
from minidiff.inputs.dtypes import NARROW, PLAIN, converted
from minidiff.inputs.half import has_narrow

# ---------------------------------------------------------------- the forward sweep


def active_key(active: Sequence[bool]) -> int:
    """Encode which operands are active as a key of `Primitive.recorded`."""
    key = 1
    for yes in reversed(active):
        key = 2 * key + yes
    return key


class Recording:
    """How the derivative of an operation is recorded on a linear tape.

    It is recorded as `operation`. `keep` picks its operands out of
    `(type of the result, result, *operands, *names of tangents)`.
    """

    __slots__ = ("operation", "keep")

    def __init__(self, operation: Primitive, keep: Callable):
        self.operation = operation
        self.keep = keep


_new = object.__new__


class RecordedSteps(Interpreter):
    """A forward sweep that records an operation on plain arrays as one step of known form.

    Nearly all operations have one or two operands, which are plain values or this sweep's tracers, and a derivative
    with a known `Recording`.
    """

    def __init__(self, below: Any, outer: Interpreter | None = None):
        super().__init__(below, outer)
        self.on_arrays = below.below is EVALUATE  # whether no value is sharded, or a tracer of an interpreter below
        self.equations = below.equations

    def interpret(self, primitive, args, params):
        out = super().interpret(primitive, args, params)
        if self.on_arrays:
            found = out if primitive.multiple_results else (out,)
            primals = [x.primal if type(x) is JVPTracer else x for x in found]
            # A shard_map's operands may get sharded cotangents.
            self.on_arrays = not (primitive.binds_axes or any(isinstance(x, Tracer) for x in primals))
        return out

    def process(self, primitive, args, params):
        recorded, other, forms = None, None, primitive.recorded
        try:
            if len(args) == 2 and self.on_arrays:
                x, y = args
                if type(x) is not JVPTracer or x.interpreter is not self:
                    if type(x) in PLAIN and type(y) is JVPTracer and y.interpreter is self:
                        recorded, a, b, name = forms.get(0b110), x, y.primal, y.tangent
                elif type(y) is JVPTracer and y.interpreter is self:
                    recorded, a, b, name, other = forms.get(0b111), x.primal, y.primal, x.tangent, y.tangent
                elif type(y) in PLAIN:
                    recorded, a, b, name = forms.get(0b101), x.primal, y, x.tangent
                if NARROW and recorded is not None and has_narrow((a, b)):
                    recorded = None
                elif recorded is not None:
                    out = primitive.run(a, b, **params) if params else primitive.run(a, b)
                    if type(out) is complex:  # of a Python complex number and a real NumPy scalar
                        out = numpy.complex128(out)
                    type_ = array_type(out.shape, out.dtype)
                    inputs = recorded.keep((type_, out, a, b, name, other))
            elif len(args) == 1 and self.on_arrays:
                (x,) = args
                if type(x) is JVPTracer and x.interpreter is self:
                    recorded, a, name = forms.get(0b11), x.primal, x.tangent
                if NARROW and recorded is not None and has_narrow((a,)):
                    recorded = None
                elif recorded is not None:
                    out = primitive.run(a, **params) if params else primitive.run(a)
                    type_ = array_type(out.shape, out.dtype)
                    inputs = recorded.keep((type_, out, a, name))
        except (AttributeError, TypeError, ValueError):
            recorded = None  # the general path raises the error, with the operands' types
        if recorded is None:
            return super().process(primitive, args, params)
        step, tracer = _new(Step), _new(JVPTracer)  # the constructors would take as long as all the rest
        step.primitive, step.type, step.inputs, step.params = recorded.operation, type_, inputs, params
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, step
        self.equations.append(step)
        return tracer


# ---------------------------------------------------------------- the backward sweep


@transposes
def walk_back(equations: Sequence[Equation], cotangents: Any, transpose_equation: Callable, consume: bool) -> None:
    """Transpose equations on plain arrays, from the last: by compiled functions where there are some."""
    known = cotangents.known
    for eqn in reversed(equations):
        primitive, inputs = eqn.primitive, eqn.inputs
        pulls = primitive.pulls
        if pulls is None or (NARROW and has_narrow([eqn.outputs[0].type])):
            transpose_equation(eqn, cotangents, consume)
            continue
        if consume:
            eqn.inputs = ()
        name = eqn if type(eqn) is Step else eqn.outputs[0]
        out_ct = known.pop(name, None)
        if out_ct is None:
            continue
        i, type_, params = primitive.count, name.type, eqn.params
        for pull in pulls:
            a, ct = inputs[i], out_ct
            i += 1
            if not isinstance(a, Var):  # a constant zero tangent
                continue
            if pull is not None:
                ct = pull(ct, *inputs, **params) if params else pull(ct, *inputs)
            t = a.type
            if t is not type_ and (ct.shape != t.shape or ct.dtype is not t.dtype):
                ct = match_arrays(ct, t)
            if a in known:
                cotangents.add(a, ct)
            else:
                known[a] = ct


def match_arrays(ct: numpy.ndarray, operand: ShapedArray) -> numpy.ndarray:
    """Sum and cast a cotangent to an operand's type, as `match` in `minidiff/ops/base.py`."""
    shape, wide = operand.shape, ct.shape
    if wide != shape:
        axes = stretched(wide, shape)
        if axes == (0,) and len(wide) == 2 and wide[0] <= 4096 and ct.dtype.char in "dfDF":
            ct = _ones(wide[0], ct.dtype).dot(ct)  # takes half the time and is as accurate: a column is summed in order
        elif axes:
            ct = numpy.add.reduce(ct, axis=axes)
        if ct.shape != shape:
            ct = ct.reshape(shape)
    return ct if ct.dtype is operand.dtype else converted(ct, operand.dtype)


@functools.lru_cache(maxsize=64)
def _ones(n: int, dtype: numpy.dtype) -> numpy.ndarray:
    return numpy.ones(n, dtype)


@functools.lru_cache(maxsize=4096)
def stretched(wide: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of `wide` along which broadcasting repeats an array of `shape`."""
    sizes = (1,) * (len(wide) - len(shape)) + shape
    return tuple([i for i, (n, m) in enumerate(zip(sizes, wide)) if n != m])


# ---------------------------------------------------------------- compiled cotangents


def compiled_cotangent(primitive: Any, i: int, count: int, tangents: int) -> Callable | None:
    """Compile an elementwise primitive's cotangent in operand i to one function.

    Return None where the rule has cases (real or complex, a literal or a value) or parameters.
    """
    numbers = {2 + j: 1.0 + 0.123 * (j + 1) for j in range(count) if j != i}

    def rule(*args):
        ct, out, *operands = args
        return primitive.cotangent(i, ct, out, operands, typeof(operands[i]), {})

    def rule_of_numbers(*args):
        return rule(*[numbers.get(k, x) for k, x in enumerate(args)])

    functions: dict[str, Any] = {}
    names = {repr(number): f"x{k}" for k, number in numbers.items()}
    tapes = scalar_tapes(rule, 2 + count)
    sources = {_expression(tape, functions, {}) for tape in tapes}
    sources |= {_expression(tape, functions, names) for tape in scalar_tapes(rule_of_numbers, 2 + count)[:1]}
    if len(sources) != 1 or None in sources:
        return None
    source, arguments = sources.pop(), [f"x{k}" for k in range(2 + count)]
    frugal = _expression(tapes[0], functions, {}, whole=3 if count == 1 else 2)
    source = f"{frugal} if x0.shape else {source}" if ":=" in frugal else source
    arguments += [f"t{k}" for k in range(tangents)]
    place = f"{__file__}: a cotangent of {primitive.name}"  # tracebacks and warnings then name a file of the library
    return eval(compile(f"lambda {', '.join(arguments)}: {source}", place, "eval"), functions)


_SIGNS = {numpy.add: " + ", numpy.subtract: " - ", numpy.multiply: " * ", numpy.divide: " / "}


def _expression(tape: Tape, functions: dict[str, Any], names: dict[str, str], whole: int = 0) -> str | None:
    """The result of a tape as one Python expression of x0, x1, …

    The functions that it calls are added to `functions`.

    A constant whose text is in `names` is replaced by that name. The first `whole` arguments have the shape of the
    result, and so do values computed from them: their buffers are reused once they have been read.
    """
    texts = {v: f"x{k}" for k, v in enumerate(tape.inputs)}
    wide: set[Var] = set(tape.inputs[:whole])
    made: set[Var] = set()
    for k, eqn in enumerate(tape.equations):
        uses = sum(a is v for e in tape.equations for a in e.inputs for v in eqn.outputs)
        if eqn.params or eqn.primitive.impl is None or uses > 1:
            return None
        functions[eqn.primitive.name] = impl = eqn.primitive.impl
        sign = _SIGNS.get(impl)
        arguments = [texts[a] if a in texts else names.get(repr(a), repr(a)) for a in eqn.inputs]
        if "d" * len(arguments) + "->d" in getattr(impl, "types", ()):
            free = [i for i, a in enumerate(eqn.inputs) if a in made and a.type == eqn.outputs[0].type]
            if free:
                arguments[free[0]] = f"(y{k} := {arguments[free[0]]})"
                arguments.append(f"y{k}")
                sign = None
        if not wide.isdisjoint(eqn.inputs):
            wide.update(eqn.outputs)
            made.update(eqn.outputs)
        texts[eqn.outputs[0]] = (
            f"{eqn.primitive.name}({', '.join(arguments)})" if sign is None else f"({sign.join(arguments)})"
        )
    (result,) = tape.outputs
    return texts.get(result)
