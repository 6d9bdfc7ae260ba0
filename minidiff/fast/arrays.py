"""The backward pass over plain arrays: by compiled cotangents, and sums that are added up in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core import reverse
from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.reverse import transpose_equation
from minidiff.core.tape import Atom, Once, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var
from minidiff.diagnostics.location import transposes
from minidiff.fast.cotangents import compile_cotangent
from minidiff.fast.steps import ArrayTape, RecordedStep
from minidiff.ops import elementwise, linalg, reduction, shape
from minidiff.ops.base import (
    Differential,
    broadcast_array,
    broadcast_axes,
    broadcast_to_p,
    reduced_shape,
    reshape_p,
    sum_p,
)
from minidiff.values.dtypes import NARROW, convert_array
from minidiff.values.half import has_narrow

# ---------------------------------------------------------------- cotangents of plain arrays


def _negated(ct: numpy.ndarray, *names: Any) -> numpy.ndarray:
    return -ct


def _repeated(ct: numpy.ndarray, name: Any, axes: tuple[int, ...], keepdims: bool = False) -> numpy.ndarray:
    """`broadcast_back` of plain arrays."""
    if not keepdims and axes != tuple(range(len(axes))):
        ct = ct.reshape(reduced_shape(name.type, axes, True))
    return broadcast_array(ct, name.type.shape)


def _mean(ct: numpy.ndarray, name: Any, axes: tuple[int, ...], keepdims: bool = False) -> numpy.ndarray:
    return _repeated(ct / reduction.size_along(name.type, axes), name, axes, keepdims)


#: Linear operation -> for each linear operand a function `(ct, *operands, **params)`. Its result, summed over the
#: broadcast axes and converted, is the operand's cotangent. It gets the linear operands as names with a type. None
#: means that the result is `ct` itself.
PULLS: dict[Primitive, Sequence[Callable | None] | None] = {
    elementwise.add.primitive: (None, None),
    elementwise.subtract.primitive: (None, _negated),
    elementwise.negative.primitive: (_negated,),
    elementwise.copy.primitive: (None,),
    broadcast_to_p: (None,),
    reshape_p: (lambda ct, name, shape: ct.reshape(name.type.shape),),
    shape.transpose_p: (lambda ct, name, axes: ct.transpose(shape.inverse_permutation(axes)),),
    sum_p: (_repeated,),
    reduction.mean_p: (_mean,),
}


def _left_factor(ct: numpy.ndarray, out: Any, x: Any, y: numpy.ndarray, dx: Any, dy: Any = None) -> numpy.ndarray:
    return ct.dot(y.T) if ct.ndim == 2 == y.ndim else linalg.matmul_p.transpose_rules[0](ct, (dx.type, y))


def _right_factor(ct: numpy.ndarray, out: Any, x: numpy.ndarray, y: Any, *names: Any) -> numpy.ndarray:
    return x.T.dot(ct) if ct.ndim == 2 == x.ndim else linalg.matmul_p.transpose_rules[1](ct, (x, names[-1].type))


#: Operation that is linear in each operand -> for each operand a function `(ct, result, *operands, *tangents)`.
FACTORS: dict[Primitive, Sequence[Callable]] = {linalg.matmul_p: (_left_factor, _right_factor)}


def pulls_of(primitive: Primitive) -> Sequence[Callable | None] | None:
    """The row of an operation in `PULLS`; that of a derivative is made on first use."""
    if primitive not in PULLS:
        pulls: list = [None]
        if isinstance(primitive, Differential) and primitive.of in FACTORS:
            pulls = [FACTORS[primitive.of][i] for i in primitive.active]
        elif isinstance(primitive, Differential) and isinstance(primitive.of, elementwise.WITH_FACTORS):
            count, tangents = primitive.count - 1, len(primitive.active)
            pulls = [compile_cotangent(primitive.of, i, count, tangents) for i in primitive.active]
        PULLS[primitive] = None if None in pulls else pulls
    return PULLS[primitive]


# ---------------------------------------------------------------- the walk


class Sums:
    """Cotangents of variables; those that are sums made here are added to in place."""

    def __init__(self) -> None:
        self.known: dict[Var, Value] = {}
        self.owned: set[Var] = set()

    def add(self, a: Atom, ct: Value) -> None:
        known, owned = self.known, self.owned
        if a not in known:
            known[a] = ct
        elif a in owned and type(ct) is numpy.ndarray:
            numpy.add(known[a], ct, out=known[a])
        else:
            known[a] = total = known[a] + ct
            if type(total) is numpy.ndarray and total.dtype == a.type.dtype:
                owned.add(a)
            else:
                owned.discard(a)


@transposes
def backward_pass(tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
    """`minidiff.core.reverse.backward_pass`, of plain arrays by compiled functions where there are some."""
    if type(tape) is not ArrayTape or current_interpreter() is not EVALUATE:
        return reverse.backward_pass(tape, cts)
    sums = Sums()
    known, owned = sums.known, sums.owned
    for a, ct in zip(tape.outputs, cts):
        if isinstance(ct, Tracer):
            return reverse.backward_pass(tape, cts)
        if ct is not None and a is not None:
            sums.add(a, ct)
    once = type(tape.equations) is Once
    for equation in list.__reversed__(tape.equations):
        primitive, inputs = equation.primitive, equation.inputs
        try:
            pulls = PULLS[primitive]
        except KeyError:
            pulls = pulls_of(primitive)
        if pulls is None or (NARROW and has_narrow([equation.outputs[0].type])):
            for a, ct in zip(inputs, transpose_equation(equation, known)):
                if ct is not None and isinstance(a, Var):
                    sums.add(a, ct)
            if once:
                equation.inputs = ()
            continue
        if once:
            equation.inputs = ()
        name = equation if type(equation) is RecordedStep else equation.outputs[0]
        out_ct = known.pop(name, None)
        if out_ct is None:
            continue
        if owned:
            owned.discard(name)  # which would keep the step
        i, type_, params = -len(pulls), name.type, equation.params
        for pull in pulls:
            a, ct = inputs[i], out_ct
            i += 1
            if not isinstance(a, Var):  # a constant zero tangent
                continue
            if pull is not None:
                ct = pull(ct, *inputs, **params) if params else pull(ct, *inputs)
            t = a.type
            if t is not type_ and (ct.shape != t.shape or ct.dtype is not t.dtype):
                ct = unbroadcast_array(ct, t)
            if a in known:
                sums.add(a, ct)
            else:
                known[a] = ct
    return list(map(known.get, tape.inputs))


def unbroadcast_array(ct: numpy.ndarray, operand: ShapedArray) -> numpy.ndarray:
    """Sum and cast a cotangent to an operand's type, as `unbroadcast` in `minidiff/ops/base.py`."""
    shape, wide = operand.shape, ct.shape
    if wide != shape:
        axes = broadcast_axes(wide, shape)
        if axes == (0,) and len(wide) == 2 and wide[0] <= 4096 and ct.dtype.char in "dfDF":
            ct = _ones(wide[0], ct.dtype).dot(ct)  # takes half the time and is as accurate: a column is summed in order
        elif axes:
            ct = numpy.add.reduce(ct, axis=axes)
        if ct.shape != shape:
            ct = ct.reshape(shape)
    return ct if ct.dtype is operand.dtype else convert_array(ct, operand.dtype)


@functools.lru_cache(maxsize=64)
def _ones(n: int, dtype: numpy.dtype) -> numpy.ndarray:
    return numpy.ones(n, dtype)
