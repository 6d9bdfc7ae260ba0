"""The kinds of operation, and the rules that each kind supplies.

=========== ============================ ============================ ================================
kind        the author writes            forward mode                 reverse mode
=========== ============================ ============================ ================================
linear      a transpose                  the operation on tangents    the transpose
multilinear a transpose for each operand the sum over operands, one   the transpose in the operand
                                         replaced by its tangent      that carries the tangent
elementwise a derivative per operand     derivative x tangent         derivative x cotangent
other       a jvp written in operations  as written                   the transpose of what it recorded
=========== ============================ ============================ ================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import ops  # its families are looked up when a rule runs: they are made of these kinds
from minidiff.core import Primitive, ShapedArray, Value, is_scalar_constant, typeof


class Linear(Primitive):
    """Linear in its first `linear_operands` operands together (in all, by default); the rest are indices and such.

    `transpose_rule(ct, operands, **params)` returns a list: a cotangent for each linear operand.
    `batch_rule(primitive, args, batched, **params)` applies it along a leading axis.
    """

    def __init__(self, name, impl, shape_rule, transpose_rule, batch_rule, linear_operands: int | None = None):
        super().__init__(name, impl, shape_rule)
        self.transpose_rule = transpose_rule
        self.batch_rule = batch_rule
        self.linear_operands = linear_operands

    def tangent(self, out, primals, tangents, params):
        n = len(primals) if self.linear_operands is None else self.linear_operands
        if all(t is None for t in tangents[:n]):
            return None
        moved = [zeros_like(p) if t is None else t for p, t in zip(primals[:n], tangents)]
        return self.bind(*moved, *primals[n:], **params)

    def linearized(self, out, type, primals, active, names, params):
        n = len(primals) if self.linear_operands is None else self.linear_operands
        return (self, [*names, *primals[n:]], params) if len(active) == n and active[-1] == n - 1 else None

    def transpose(self, ct, operands, params):
        if self.linear_operands is None:
            return self.transpose_rule(ct, operands, **params)
        others = operands[self.linear_operands :]
        if any(isinstance(x, ShapedArray) for x in others):  # an index, say, that depends on what must be linear
            return super().transpose(ct, others, params)
        return self.transpose_rule(ct, operands, **params) + [None] * len(others)

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Differentiable(Primitive):
    """Differentiable in each operand separately: the sum over operands, of the derivative in each times its tangent.

    `reads(i, count)` says which of `(out, *operands)`, `count` operands, the derivative in operand i is computed from;
    `term(i, t, out, primals, params)` applies that derivative to a tangent of the operand;
    `cotangent(i, ct, out, primals, type, params)` applies its transpose to a cotangent of the result, where `type`
    is that of the operand. Both give None for a derivative that is zero everywhere.
    """

    def __init__(self, name: str, impl: Callable, shape_rule: Callable):
        super().__init__(name, impl, shape_rule)
        self._differentials: dict[tuple[tuple[int, ...], int], Differential | None] = {}

    def tangent(self, out, primals, tangents, params):
        terms = [self.term(i, t, out, primals, params) for i, t in enumerate(tangents) if t is not None]
        return add_all([term for term in terms if term is not None])

    def linearized(self, out, type, primals, active, names, params):
        key = (*active, len(primals))
        try:
            differential = self._differentials[key]
        except KeyError:
            differential = self._differentials[key] = self._differential(tuple(active), len(primals))
        if differential is None:
            return None
        inputs = [x if read else None for x, read in zip((out, *primals), differential.reads)]
        return differential, inputs + names, {"out": type, "params": params}

    def _differential(self, active: tuple[int, ...], count: int) -> Differential | None:
        reads = [self.reads(i, count) for i in active]
        if all(r is None for r in reads):
            return None
        return Differential(self, active, [any(r and j in r for r in reads) for j in range(1 + count)])


class Differential(Primitive):
    """The derivative of an operation at given values, in those of its operands that are `active`, as one operation.

    Its operands are the result and the operands of that operation (None for those it does not read), then tangents. It
    stands on the tapes of linear parts only: applied or transposed it is the operations that the derivative is made of.
    """

    lifts_operands = False

    def __init__(self, of: Differentiable, active: tuple[int, ...], reads: list[bool]):
        super().__init__(f"d_{of.name}")
        self.of = of
        self.active = active
        self.reads = reads
        self.nothing = [None] * len(reads)

    def bind(self, *operands: Value, out: ShapedArray, params: dict) -> Value:
        result, *primals = operands[: len(self.reads)]
        result = out if result is None else result  # a result that is not read, is known by its type
        tangents = operands[len(self.reads) :]
        terms = [self.of.term(i, t, result, primals, params) for i, t in zip(self.active, tangents)]
        return add_all([term for term in terms if term is not None])

    def transpose(self, ct, operands, params):
        result, count = operands[0], len(self.reads)
        result, primals = params["out"] if result is None else result, operands[1:count]
        cotangent, of = self.of.cotangent, params["params"]
        if len(self.active) == 1:
            return [*self.nothing, cotangent(self.active[0], ct, result, primals, operands[count], of)]
        types = operands[count:]
        return [*self.nothing, *[cotangent(i, ct, result, primals, t, of) for i, t in zip(self.active, types)]]

    def typecheck(self, types, params):
        return [params["out"]]


class Multilinear(Differentiable):
    """Linear in each operand separately: `transpose_rules[i](ct, operands, **params)` for operand i."""

    def __init__(self, name, impl, shape_rule, transpose_rules: Sequence[Callable | None], batch_rule):
        super().__init__(name, impl, shape_rule)
        self.transpose_rules = transpose_rules
        self.batch_rule = batch_rule

    def reads(self, i, count):
        return tuple(j + 1 for j in range(count) if j != i)

    def term(self, i, t, out, primals, params):
        return self.bind(*primals[:i], t, *primals[i + 1 :], **params)

    def cotangent(self, i, ct, out, primals, type, params):
        return self.transpose_rules[i](ct, [*primals[:i], type, *primals[i + 1 :]], **params)

    def transpose(self, ct, operands, params):
        linear = [i for i, x in enumerate(operands) if isinstance(x, ShapedArray)]
        if len(linear) != 1 or self.transpose_rules[linear[0]] is None:
            return super().transpose(ct, operands, params)
        (i,) = linear
        return [self.transpose_rules[i](ct, operands, **params) if j == i else None for j in range(len(operands))]

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Elementwise(Differentiable):
    """Applied number by number, with NumPy's broadcasting.

    `derivatives[i](out, *operands)` is the derivative with respect to operand i; None where it is zero
    everywhere (comparisons, `sign`, …).
    """

    def __init__(self, name: str, impl: Callable, derivatives: Sequence[Callable | None]):
        super().__init__(name, impl, functools.partial(elementwise_shape, impl))
        self.derivatives = derivatives

    def reads(self, i, count):
        return _arguments_read(self.derivatives[i], 1 + count) if self.derivatives[i] else None

    def term(self, i, t, out, primals, params):
        derivative = self.derivatives[i]
        return derivative and spread(ops.elementwise.multiply(derivative(out, *primals), t), out)

    def cotangent(self, i, ct, out, primals, type, params):
        derivative = self.derivatives[i]
        return derivative and match(ops.elementwise.multiply(ct, derivative(out, *primals)), type)

    def batch(self, args, batched, params):
        return bind_aligned(self, args, batched)


def _arguments_read(rule: Callable, count: int) -> tuple[int, ...]:
    """Which of its arguments a derivative is computed from: those that its own tape uses, real or complex."""
    from minidiff.staging import make_tape  # staging stands above the operations

    read: set[int] = set()
    for dtype in (float, complex):
        try:
            tape = make_tape(lambda *xs: rule(*xs))(*[ShapedArray((), dtype)] * count)
        except TypeError:  # not a function of complex numbers
            continue
        used = {id(a) for atoms in (*(e.inputs for e in tape.equations), tape.outputs) for a in atoms}
        read.update(i for i, v in enumerate(tape.inputs) if id(v) in used)
    return tuple(sorted(read))


# ---------------------------------------------------------------- elementwise shapes


def elementwise_shape(impl: Callable, *types: Any) -> tuple[tuple[int, ...], numpy.dtype]:
    """Shape by broadcasting, dtype by NumPy's own promotion (a Python number promotes weakly)."""
    shapes = {t.shape for t in types if type(t) is ShapedArray}
    try:
        shape = shapes.pop() if len(shapes) == 1 else numpy.broadcast_shapes(*shapes)
    except ValueError:
        name = getattr(impl, "__name__", str(impl))
        raise ValueError(f"{name}: shapes {' and '.join(map(str, shapes))} cannot be broadcast together") from None
    return shape, _result_dtype(impl, *[t.dtype if type(t) is ShapedArray else type(t) for t in types])


@functools.cache
def _result_dtype(impl: Callable, *dtypes: Any) -> numpy.dtype:
    operands = [numpy.ones(1, d) if isinstance(d, numpy.dtype) else d(1) for d in dtypes]
    with numpy.errstate(all="ignore"):
        return numpy.asarray(impl(*operands)).dtype


def align(args: Sequence[Value], batched: Sequence[bool]) -> list[Value]:
    """Operands whose batch axis comes first, reshaped so that broadcasting still matches the rest from the right."""
    ranks = [0 if is_scalar_constant(x) else numpy.ndim(x) - b for x, b in zip(args, batched)]
    rank = max(ranks)
    return [
        x.reshape((x.shape[0],) + (1,) * (rank - r) + tuple(x.shape[1:])) if b and r < rank else x
        for x, b, r in zip(args, batched, ranks)
    ]


def bind_aligned(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """The batching rule of everything that broadcasts as elementwise operations do."""
    return primitive.bind(*align(args, batched), **params)


# ---------------------------------------------------------------- what the rules share


def zeros_like(x: Value) -> numpy.ndarray:
    """A constant zero of the shape and dtype of `x` (or of a type)."""
    t = typeof(x)
    return numpy.zeros(t.shape, t.dtype)


def add_all(terms: Sequence[Value]) -> Value | None:
    """The sum of tangents or cotangents; None, a zero, if there are none."""
    return functools.reduce(ops.elementwise.add, terms) if terms else None


def match(ct: Value, operand: ShapedArray) -> Value:
    """A cotangent of the result of broadcasting and promoting an operand, as a cotangent of the operand."""
    shape = operand.shape
    if ct.shape != shape:
        extra = len(ct.shape) - len(shape)
        stretched = [i + extra for i, n in enumerate(shape) if n == 1 and ct.shape[i + extra] != 1]
        axes = (*range(extra), *stretched)
        ct = ops.reduction.sum_p.bind(ct, axes=axes) if axes else ct
        if ct.shape != shape:
            ct = ops.shape.reshape_p.bind(ct, shape=shape)
    return ct if ct.dtype is operand.dtype else ops.elementwise.convert(ct, operand.dtype)


def spread(tangent: Value, out: Value) -> Value:
    """A tangent of one operand of a broadcasting sum, as a tangent of the result `out`."""
    if tangent.shape != out.shape:
        tangent = ops.shape.broadcast_to_p.bind(tangent, shape=out.shape)
    return ops.elementwise.convert(tangent, out.dtype)
