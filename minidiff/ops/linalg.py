"""Products of matrices."""

from __future__ import annotations

import math

import numpy

from minidiff.core import ShapedArray, Value, implements, typeof
from minidiff.ops.elementwise import multiply
from minidiff.ops.kinds import Multilinear, match
from minidiff.ops.shape import moveaxis, reshape, swapaxes


def _matmul_shape(x: ShapedArray, y: ShapedArray):
    batch = numpy.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return (*batch, x.shape[-2], y.shape[-1]), numpy.result_type(x.dtype, y.dtype)


def _matmul_batch(primitive, args, batched):
    rank = max(len(x.shape) - b for x, b in zip(args, batched))

    def pad(x, b):  # the batch axis first, then as many axes as the other has
        missing = rank - (len(x.shape) - b)
        return reshape(x, (x.shape[0],) + (1,) * missing + tuple(x.shape[1:])) if b and missing else x

    return primitive.bind(*map(pad, args, batched))


#: The product of matrices of two or more dimensions, whose leading dimensions broadcast.
matmul_p = Multilinear(
    "matmul",
    numpy.matmul,
    _matmul_shape,
    (
        lambda ct, operands: match(matmul_p.bind(ct, swapaxes(operands[1], -1, -2)), operands[0]),
        lambda ct, operands: match(matmul_p.bind(swapaxes(operands[0], -1, -2), ct), operands[1]),
    ),
    _matmul_batch,
)


@implements(numpy.matmul)
def matmul(x: Value, y: Value) -> Value:
    """`numpy.matmul`: `x @ y`, with vectors on either side."""
    tx, ty = typeof(x), typeof(y)
    if not tx.ndim or not ty.ndim:
        raise ValueError(f"matmul: operands need one dimension at least, got {tx} and {ty}")
    if tx.shape[-1] != ty.shape[max(-2, -ty.ndim)]:
        raise ValueError(f"matmul: inner dimensions differ in {tx} @ {ty}")
    if any(n != m and 1 not in (n, m) for n, m in zip(tx.shape[-3::-1], ty.shape[-3::-1])):
        raise ValueError(f"matmul: leading dimensions differ in {tx} @ {ty}")
    z = matmul_p.bind(
        reshape(x, (1, *tx.shape)) if tx.ndim == 1 else x, reshape(y, (*ty.shape, 1)) if ty.ndim == 1 else y
    )
    shape = z.shape
    if ty.ndim == 1:
        shape = shape[:-1]
    if tx.ndim == 1:
        shape = shape[:-2] + shape[-1:] if ty.ndim > 1 else shape[:-1]
    return reshape(z, shape)


@implements(numpy.dot)
def dot(x: Value, y: Value) -> Value:
    """`numpy.dot`: the last axis of x against the last but one of y (its only one, if y is a vector)."""
    tx, ty = typeof(x), typeof(y)
    if not tx.ndim or not ty.ndim:
        return multiply(x, y)
    if tx.ndim <= 2 and ty.ndim <= 2:
        return matmul(x, y)
    if tx.shape[-1] != ty.shape[max(-2, -ty.ndim)]:
        raise ValueError(f"dot: inner dimensions differ in dot({tx}, {ty})")
    y = moveaxis(y, max(-2, -ty.ndim), 0)
    rows, columns = tx.shape[:-1], y.shape[1:]  # multiplied out below, not -1: the inner dimension may be 0
    product = matmul(reshape(x, (math.prod(rows), tx.shape[-1])), reshape(y, (y.shape[0], math.prod(columns))))
    return reshape(product, (*rows, *columns))
