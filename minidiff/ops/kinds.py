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

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals, **params)
        n = len(primals) if self.linear_operands is None else self.linear_operands
        if all(t is None for t in tangents[:n]):
            return out, None
        moved = [zeros_like(p) if t is None else t for p, t in zip(primals[:n], tangents)]
        return out, self.bind(*moved, *primals[n:], **params)

    def transpose(self, ct, operands, params):
        others = [] if self.linear_operands is None else operands[self.linear_operands :]
        if any(isinstance(x, ShapedArray) for x in others):  # an index, say, that depends on what must be linear
            return super().transpose(ct, others, params)
        cts = self.transpose_rule(ct, operands, **params)
        return cts + [None] * (len(operands) - len(cts))

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Multilinear(Primitive):
    """Linear in each operand separately: `transpose_rules[i](ct, operands, **params)` for operand i."""

    def __init__(self, name, impl, shape_rule, transpose_rules: Sequence[Callable | None], batch_rule):
        super().__init__(name, impl, shape_rule)
        self.transpose_rules = transpose_rules
        self.batch_rule = batch_rule

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals, **params)
        terms = [
            self.bind(*primals[:i], t, *primals[i + 1 :], **params) for i, t in enumerate(tangents) if t is not None
        ]
        return out, add_all(terms)

    def transpose(self, ct, operands, params):
        linear = [isinstance(x, ShapedArray) for x in operands]
        if sum(linear) != 1 or self.transpose_rules[linear.index(True)] is None:
            return super().transpose(ct, operands, params)
        return [rule(ct, operands, **params) if yes else None for yes, rule in zip(linear, self.transpose_rules)]

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Elementwise(Primitive):
    """Applied number by number, with NumPy's broadcasting.

    `derivatives[i](out, *operands)` is the derivative with respect to operand i; None where it is zero
    everywhere (comparisons, `sign`, …).
    """

    def __init__(self, name: str, impl: Callable, derivatives: Sequence[Callable | None]):
        super().__init__(name, impl, functools.partial(elementwise_shape, impl))
        self.derivatives = derivatives

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals)
        terms = [
            spread(ops.elementwise.multiply(derivative(out, *primals), t), out)
            for derivative, t in zip(self.derivatives, tangents)
            if t is not None and derivative is not None
        ]
        return out, add_all(terms)

    def batch(self, args, batched, params):
        return bind_aligned(self, args, batched)


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
    shape = ct.shape
    if shape != operand.shape:
        extra = len(shape) - len(operand.shape)
        stretched = [i + extra for i, n in enumerate(operand.shape) if n == 1 and shape[i + extra] != 1]
        axes = (*range(extra), *stretched)
        ct = ops.reduction.sum_p.bind(ct, axes=axes) if axes else ct
        if ct.shape != operand.shape:
            ct = ops.shape.reshape_p.bind(ct, shape=operand.shape)
    return ops.elementwise.convert(ct, operand.dtype)


def spread(tangent: Value, out: Value) -> Value:
    """A tangent of one operand of a broadcasting sum, as a tangent of the result `out`."""
    if tangent.shape != out.shape:
        tangent = ops.shape.broadcast_to_p.bind(tangent, shape=out.shape)
    return ops.elementwise.convert(tangent, out.dtype)
