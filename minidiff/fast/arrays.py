"""The backward pass over plain arrays: by compiled cotangents, and sums that are added up in place.

A cotangent of an elementwise operation is compiled to one Python expression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core import reverse
from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.reverse import transpose_equation
from minidiff.core.tape import Atom, ConsumedEquations, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.location import transposes
from minidiff.fast.steps import ArrayTape, LinearEquation
from minidiff.ops import elementwise, linalg, reduction, shape
from minidiff.ops.base import (
    Differentiable,
    Differential,
    broadcast_array,
    broadcast_axes,
    broadcast_to_p,
    reduced_shape,
    reshape_p,
    scalar_tapes,
    sum_p,
)
from minidiff.values.dtypes import NARROW, convert_array, has_narrow

# ---------------------------------------------------------------- cotangents of plain arrays


def _negate(ct: numpy.ndarray, *names: Any) -> numpy.ndarray:
    return -ct


def _repeat(ct: numpy.ndarray, operand: Var, axes: tuple[int, ...], keepdims: bool = False) -> numpy.ndarray:
    """Broadcast the cotangent of a sum of plain arrays: see `broadcast_back`."""
    if not keepdims and axes != tuple(range(len(axes))):
        ct = ct.reshape(reduced_shape(operand.type, axes, True))
    return broadcast_array(ct, operand.type.shape)


def _repeat_mean(ct: numpy.ndarray, operand: Var, axes: tuple[int, ...], keepdims: bool = False) -> numpy.ndarray:
    return _repeat(ct / reduction.size_along(operand.type, axes), operand, axes, keepdims)


def _left_factor(ct: numpy.ndarray, out: Any, x: Any, y: numpy.ndarray, dx: Any, dy: Any = None) -> numpy.ndarray:
    return ct.dot(y.T) if ct.ndim == 2 == y.ndim else linalg.matmul_p.transpose_rules[0](ct, (dx.type, y))


def _right_factor(ct: numpy.ndarray, out: Any, x: numpy.ndarray, y: Any, *names: Any) -> numpy.ndarray:
    return x.T.dot(ct) if ct.ndim == 2 == x.ndim else linalg.matmul_p.transpose_rules[1](ct, (x, names[-1].type))


#: Operation that is linear in each operand -> for each operand a function `(ct, result, *operands, *tangents)`.
FACTORS: dict[Primitive, Sequence[Callable]] = {linalg.matmul_p: (_left_factor, _right_factor)}


class _Rules(dict[Primitive, Any]):
    """For each linear operation, a sequence of functions, or None if there are none for plain arrays.

    There is a function `(ct, *operands, **params)` for each linear operand. Its result, summed over the broadcast axes
    and converted, is the operand's cotangent. It gets the linear operands as variables with a type. None in place of a
    function means that the result is `ct` itself. The functions of a derivative are compiled on first use.
    """

    def __missing__(self, primitive: Primitive) -> Sequence[Callable | None] | None:
        rules: list = [None]
        if isinstance(primitive, Differential) and primitive.of in FACTORS:
            rules = [FACTORS[primitive.of][i] for i in primitive.active]
        elif isinstance(primitive, Differential) and isinstance(primitive.of, elementwise.WITH_FACTORS):
            count, tangents = primitive.count - 1, len(primitive.active)
            rules = [compile_cotangent(primitive.of, i, count, tangents) for i in primitive.active]
        self[primitive] = None if None in rules else rules
        return self[primitive]


VJP_RULES = _Rules(
    {
        elementwise.add.primitive: (None, None),
        elementwise.subtract.primitive: (None, _negate),
        elementwise.negative.primitive: (_negate,),
        elementwise.copy.primitive: (None,),
        broadcast_to_p: (None,),
        reshape_p: (lambda ct, operand, shape: ct.reshape(operand.type.shape),),
        shape.transpose_p: (lambda ct, operand, axes: ct.transpose(shape.inverse_permutation(axes)),),
        sum_p: (_repeat,),
        reduction.mean_p: (_repeat_mean,),
    }
)


# ---------------------------------------------------------------- compiled cotangents


def compile_cotangent(primitive: Differentiable, i: int, count: int, tangents: int) -> Callable | None:
    """Compile an elementwise primitive's cotangent in operand i to one function.

    Return None where the rule has cases (real or complex, a literal or a value), parameters, or conversions of a dtype.
    """
    numbers = {2 + j: 1.0 + 0.123 * (j + 1) for j in range(count) if j != i}

    def rule(*args):
        ct, out, *operands = args
        return primitive.cotangent(i, ct, out, operands, typeof(operands[i]), {})

    def rule_of_numbers(*args):
        return rule(*[numbers.get(k, x) for k, x in enumerate(args)])

    functions: dict[str, Any] = {}
    names = {repr(number): f"x{k}" for k, number in numbers.items()}
    tapes = scalar_tapes(rule, 2 + count, (float, numpy.float32, complex))
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
    """Return the result of a tape as one Python expression of x0, x1, …

    The functions that it calls are added to `functions`.

    A constant whose text is in `names` is replaced by that name. The first `whole` arguments have the shape of the
    result, and so do values computed from them: their buffers are reused once they have been read.
    """
    texts = {v: f"x{k}" for k, v in enumerate(tape.inputs)}
    whole_size: set[Var] = set(tape.inputs[:whole])
    computed: set[Var] = set()
    for k, eqn in enumerate(tape.equations):
        uses = sum(a is v for e in tape.equations for a in e.inputs for v in eqn.outputs)
        if eqn.params or eqn.primitive.impl is None or uses > 1:
            return None
        impl = eqn.primitive.impl
        name = next((n for n, f in functions.items() if f is impl), f"f{len(functions)}")
        functions[name] = impl
        sign = _SIGNS.get(impl)
        arguments = [texts[a] if a in texts else names.get(repr(a), repr(a)) for a in eqn.inputs]
        if "d" * len(arguments) + "->d" in getattr(impl, "types", ()):
            free = [i for i, a in enumerate(eqn.inputs) if a in computed and a.type == eqn.outputs[0].type]
            if free:
                arguments[free[0]] = f"(_y{k} := {arguments[free[0]]})"  # y0 and y1 are functions
                arguments.append(f"_y{k}")
                sign = None
        if not whole_size.isdisjoint(eqn.inputs):
            whole_size.update(eqn.outputs)
            computed.update(eqn.outputs)
        texts[eqn.outputs[0]] = f"{name}({', '.join(arguments)})" if sign is None else f"({sign.join(arguments)})"
    (result,) = tape.outputs
    return texts.get(result)


# ---------------------------------------------------------------- the backward pass


class CotangentSums:
    """Cotangents of variables, at first of results; those that are sums computed here are added to in place."""

    def __init__(self, outputs: Sequence[Atom | None], cts: Sequence[Value | None]):
        self.cotangents: dict[Var, Value] = {}
        self.owned: set[Var] = set()
        self.on_arrays = True  # whether no cotangent of a result is traced, or sharded
        for a, ct in zip(outputs, cts):
            if isinstance(ct, Tracer):
                self.on_arrays = False
            elif ct is not None and isinstance(a, Var):
                self.add(a, ct)

    def add(self, a: Atom, ct: Value) -> None:
        cotangents, owned = self.cotangents, self.owned
        if a not in cotangents:
            cotangents[a] = ct
        elif a in owned and type(ct) is numpy.ndarray:
            numpy.add(cotangents[a], ct, out=cotangents[a])
        else:
            cotangents[a] = total = cotangents[a] + ct
            if type(total) is numpy.ndarray and total.dtype == a.type.dtype:
                owned.add(a)
            else:
                owned.discard(a)

    def add_all(self, atoms: Sequence[Atom], cts: Sequence[Value | None]) -> None:
        for a, ct in zip(atoms, cts):
            if ct is not None and isinstance(a, Var):
                self.add(a, ct)


@transposes
def backward_pass(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """`minidiff.core.reverse.backward_pass`, of plain arrays by compiled functions where there are some."""
    if type(tape) is not ArrayTape or current_interpreter() is not EVALUATE:
        return reverse.backward_pass(tape, cts)
    sums = CotangentSums(tape.outputs, cts)
    if not sums.on_arrays:
        return reverse.backward_pass(tape, cts)
    cotangents, owned = sums.cotangents, sums.owned
    once = type(tape.equations) is ConsumedEquations
    for equation in list.__reversed__(tape.equations):
        primitive, inputs = equation.primitive, equation.inputs
        rules = VJP_RULES[primitive]
        if rules is None or (NARROW and has_narrow([equation.outputs[0].type])):
            sums.add_all(inputs, transpose_equation(equation, cotangents))
            rules = None
        if once:
            equation.inputs = ()
        if rules is None:
            continue
        variable = equation if type(equation) is LinearEquation else equation.outputs[0]
        out_ct = cotangents.pop(variable, None)
        if out_ct is None:
            continue
        if owned:
            owned.discard(variable)  # which would keep the equation
        i, type_, params = -len(rules), variable.type, equation.params
        for rule in rules:
            a, ct = inputs[i], out_ct
            i += 1
            if not isinstance(a, Var):  # a constant zero tangent
                continue
            if rule is not None:
                ct = rule(ct, *inputs, **params) if params else rule(ct, *inputs)
            if (t := a.type) is not type_ and (ct.shape != t.shape or ct.dtype is not t.dtype):
                ct = unbroadcast_array(ct, t)
            if a in cotangents:
                out_ct = out_ct if i else None  # which the last rule has read: freed before a sum is allocated
                sums.add(a, ct)
            else:
                cotangents[a] = ct
    return list(map(cotangents.get, tape.inputs))


def unbroadcast_array(ct: numpy.ndarray, operand: ShapedArray) -> numpy.ndarray:
    """Sum and cast a cotangent to an operand's type: `minidiff.ops.base.unbroadcast` of plain arrays."""
    shape, ct_shape = operand.shape, ct.shape
    if ct_shape != shape:
        axes = broadcast_axes(ct_shape, shape)
        if axes == (0,) and len(ct_shape) == 2 and ct_shape[0] <= 4096 and ct.dtype.char in "dfDF":
            # This takes half the time, and is as accurate: a column is summed in order.
            ct = _ones(ct_shape[0], ct.dtype).dot(ct)
        elif axes:
            ct = numpy.add.reduce(ct, axis=axes)
        if ct.shape != shape:
            ct = ct.reshape(shape)
    return ct if ct.dtype is operand.dtype else convert_array(ct, operand.dtype)


@functools.lru_cache(maxsize=64)
def _ones(n: int, dtype: numpy.dtype) -> numpy.ndarray:
    return numpy.ones(n, dtype)
