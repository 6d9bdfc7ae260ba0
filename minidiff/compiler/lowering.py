"""Operations as instructions: how each elementwise operation is written in LLVM's intermediate representation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.compiler import ir
from minidiff.compiler.ir import Code, Value, constant, convert, select
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops import base, elementwise, special

#: A function that writes an operation, and the dtypes to which its operands are converted first.
Lowering = tuple[Callable[..., Value], Sequence[numpy.dtype]]

#: The dtypes that loops compute with.
DTYPES = frozenset(map(numpy.dtype, ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")))


def _is_bool(x: Value) -> bool:
    return x.dtype.kind == "b"


def _is_nan(x: Value) -> Value:
    return x != x if x.dtype.kind == "f" else constant(x.code, False, numpy.dtype(bool))


def _maximum(x: Value, y: Value) -> Value:
    return select(~(x < y) if y.is_number else (x >= y) | _is_nan(x), x, y)


def _minimum(x: Value, y: Value) -> Value:
    return select(~(x > y) if y.is_number else (x <= y) | _is_nan(x), x, y)


def _sign(x: Value) -> Value:
    signed = select(x > 0, 1, select(x < 0, x.constant(-1), 0) if x.dtype.kind != "u" else x.constant(0))
    return select(_is_nan(x), x, signed) if x.dtype.kind == "f" else signed


def _truth(x: Value) -> Value:
    return convert(x, numpy.dtype(bool))


def _shift(x: Value, y: Value, shifted: Callable, beyond: Callable) -> Value:
    """Return a shift by less than the number of bits, or the result of a larger one."""
    unsigned = convert(y, numpy.dtype(f"u{y.dtype.itemsize}"))
    fits = unsigned < 8 * x.dtype.itemsize
    return select(fits, shifted(x, select(fits, y, 0)), beyond(x))


def _power(x: Value, y: Value) -> Value:
    if y.text == x.constant(2.0).text:
        return x * x
    return FUNCTIONS["power"](x, y)


def _power_of_one_exponent(x: Value, y: Value) -> Value:
    """Return the power, or the root that NumPy takes for the exponent 0.5: NaN at -inf, and -0.0 at -0.0."""
    is_half = y == 0.5
    return select(is_half, ir.sqrt(select(is_half, x, 1.0)), _power(x, y))


@functools.cache
def _takes_roots() -> bool:
    """Return True if this NumPy takes roots for powers with one exponent."""
    with numpy.errstate(invalid="ignore"):
        return bool(numpy.isnan(numpy.power(numpy.full(2, -numpy.inf), 0.5)[0]))


def _larger(x: Value, y: Value) -> Value:
    return select(x > y, x.constant(1.0), select(x >= y, x.constant(0.5), 0.0))


def _logaddexp(x: Value, y: Value) -> Value:
    most, apart = select(x > y, x, y), abs(x - y)
    total = most + FUNCTIONS["log1p"](FUNCTIONS["exp"](-apart))
    return select(x == y, x + math.log(2), total)


#: Ufunc -> the value of its result, from operands of the dtypes that it computes with, integers and bools included.
_ON_NUMBERS: dict[numpy.ufunc, Callable[..., Value]] = {
    numpy.add: lambda x, y: x | y if _is_bool(x) else x + y,
    numpy.subtract: lambda x, y: x - y,
    numpy.multiply: lambda x, y: x & y if _is_bool(x) else x * y,
    numpy.negative: lambda x: -x,
    numpy.absolute: lambda x: x if _is_bool(x) else abs(x),
    numpy.square: lambda x: x & x if _is_bool(x) else x * x,
    numpy.sign: _sign,
    numpy.maximum: lambda x, y: x | y if _is_bool(x) else _maximum(x, y),
    numpy.minimum: lambda x, y: x & y if _is_bool(x) else _minimum(x, y),
    numpy.fmax: lambda x, y: x | y if _is_bool(x) else select((x >= y) | _is_nan(y), x, y),
    numpy.fmin: lambda x, y: x & y if _is_bool(x) else select((x <= y) | _is_nan(y), x, y),
    numpy.equal: lambda x, y: x == y,
    numpy.not_equal: lambda x, y: x != y,
    numpy.less: lambda x, y: x < y,
    numpy.less_equal: lambda x, y: x <= y,
    numpy.greater: lambda x, y: x > y,
    numpy.greater_equal: lambda x, y: x >= y,
    numpy.logical_and: lambda x, y: _truth(x) & _truth(y),
    numpy.logical_or: lambda x, y: _truth(x) | _truth(y),
    numpy.logical_xor: lambda x, y: _truth(x) ^ _truth(y),
    numpy.logical_not: lambda x: ~_truth(x),
    numpy.bitwise_and: lambda x, y: x & y,
    numpy.bitwise_or: lambda x, y: x | y,
    numpy.bitwise_xor: lambda x, y: x ^ y,
    numpy.invert: lambda x: ~x,
    numpy.left_shift: lambda x, y: _shift(x, y, lambda a, b: a << b, lambda a: a.constant(0)),
    numpy.right_shift: lambda x, y: _shift(
        x, y, lambda a, b: a >> b, lambda a: select(a < 0, a.constant(-1), 0) if a.dtype.kind == "i" else a.constant(0)
    ),
}

#: The same for ufuncs that are written for floating-point numbers only.
_ON_FLOATS: dict[numpy.ufunc, Callable[..., Value]] = {
    **{getattr(numpy, name): f for name, f in FUNCTIONS.items() if hasattr(numpy, name)},
    numpy.divide: lambda x, y: x / y,
    numpy.fabs: abs,
    numpy.sqrt: ir.sqrt,
    numpy.power: _power,
    numpy.copysign: ir.copysign,
    numpy.floor: ir.floor,
    numpy.ceil: ir.ceil,
    numpy.trunc: ir.trunc,
    numpy.rint: ir.rint,
    numpy.isnan: _is_nan,
    numpy.isinf: lambda x: abs(x) == math.inf,
    numpy.isfinite: lambda x: abs(x) < math.inf,
    numpy.signbit: lambda x: ir.bits(x) < 0,
    numpy.reciprocal: lambda x: 1.0 / x,
    numpy.logaddexp: _logaddexp,
}

#: Operations that are not NumPy's functions, from operands of the result's dtype.
_OURS: dict[Primitive, Callable[..., Value]] = {
    elementwise.larger.primitive: _larger,
    elementwise.difference.primitive: lambda x, y: select(x == y, x.constant(0), x - y),
    elementwise.over.primitive: lambda x, y: select(y == 0, x.constant(0), x / select(y == 0, y.constant(1), y)),
    elementwise.root_operation(2).primitive: ir.sqrt,
    elementwise.stop_gradient.primitive: lambda x: x,
}
_OURS |= {p: FUNCTIONS[p.name] for p in (elementwise.sigmoid.primitive, special.erf_p, special.erfc_p)}


def lower_equation(code: Code, eqn: Equation, values: dict[Var, Value]) -> Value:
    """Write an equation's operation; `values` has its operands."""
    lowering = lowering_of(eqn)
    assert lowering is not None
    write, dtypes = lowering
    operands = [
        convert(values[a], d) if isinstance(a, Var) else constant(code, d.type(a), d)
        for a, d in zip(eqn.inputs, dtypes)
    ]
    return convert(write(*operands), eqn.outputs[0].type.dtype)


def lowering_of(eqn: Equation) -> Lowering | None:
    """Return how an equation is written, and the dtypes to which operands are converted first; None if it is not."""
    primitive = eqn.primitive
    if len(eqn.outputs) != 1 or not eqn.inputs or any(isinstance(a, (ShapedArray, Tracer)) for a in eqn.inputs):
        return None  # a traced constant is a sharded array
    out = eqn.outputs[0].type.dtype
    dtypes = [a.type.dtype if isinstance(a, Var) else numpy.asarray(a).dtype for a in eqn.inputs]
    if out not in DTYPES or not DTYPES.issuperset(dtypes):
        return None
    if primitive is elementwise.where_p:
        return select, (numpy.dtype(bool), out, out)
    if primitive in (base.convert_p, base.discrete_convert_p):
        lossy = dtypes[0].kind == "f" and out.kind in "iu"  # NumPy warns of numbers that an integer cannot hold
        return None if lossy else (lambda x: x, dtypes)
    if primitive in _OURS:
        return (_OURS[primitive], [out] * len(dtypes)) if out.kind == "f" else None
    if eqn.params or not isinstance(primitive.impl, numpy.ufunc):
        return None
    return _lowering_of_ufunc(primitive.impl, eqn.inputs, out)


def _lowering_of_ufunc(ufunc: numpy.ufunc, inputs: Sequence[Atom], out: numpy.dtype) -> Lowering | None:
    write = _ON_NUMBERS.get(ufunc) or _ON_FLOATS.get(ufunc)
    if write is None:
        return None
    types: list[Any] = [
        a.type.dtype if isinstance(a, Var) else type(a) if type(a) in (int, float) else numpy.asarray(a).dtype
        for a in inputs
    ]
    try:
        *dtypes, result = ufunc.resolve_dtypes((*types, None))
    except (TypeError, OverflowError):
        return None
    if result != out or not DTYPES.issuperset(dtypes) or len({*dtypes}) > 1:
        return None
    if dtypes[0].kind != "f" and ufunc not in _ON_NUMBERS:
        return None
    if ufunc is numpy.power and _takes_roots():
        x, y = map(typeof, inputs)
        if y.size == 1 and (x.size > 1 or not y.shape):
            return _power_of_one_exponent, dtypes
    return write, dtypes
