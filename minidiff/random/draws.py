"""Draws of uniform and normal numbers, integers, booleans and permutations."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.base import convert
from minidiff.ops.indexing import take
from minidiff.ops.special import erfc_p, ndtri_p
from minidiff.random.keys import Shape, as_unsigned, check_broadcasts, random_bits, sizes_of, with_axis
from minidiff.values.dtypes import check_real_float, dtype_name, finfo


def bits(key: Value, shape: Shape = (), dtype: Any = numpy.uint64) -> Value:
    """Random unsigned integers, from all values of their dtype.

    Raises TypeError for a dtype that is not one of unsigned integers.

    >>> import minidiff as md
    >>> bits(md.random.key(0), 2, 'uint8')
    array([167, 146], dtype=uint8)
    """
    dtype = numpy.dtype(dtype)
    if dtype.kind != "u":
        raise TypeError(f"bits: the dtype is one of unsigned integers, got {dtype_name(dtype)}; for others, randint")
    drawn = random_bits("bits", key, shape)
    if dtype.itemsize == 8:
        return drawn
    return convert(numpy.bitwise_xor(drawn, numpy.right_shift(drawn, numpy.uint64(32))), dtype)


def uniform(key: Value, shape: Shape = (), dtype: Any = float, minval: Value = 0.0, maxval: Value = 1.0) -> Value:
    """Draw numbers in [minval, maxval).

    The numbers are drawn from evenly spaced numbers in [0, 1), with the precision of the dtype, and scaled to the
    bounds, which broadcast to the shape. Scaling may round up to maxval. Differentiable in the bounds. Raises TypeError
    for a dtype that is not real and floating-point, ValueError if bounds do not broadcast.

    >>> import minidiff as md
    >>> uniform(md.random.key(0), 3).round(3)
    array([0.418, 0.216, 0.965])
    """
    dtype = check_real_float("uniform: the dtype is one", dtype)
    digits = min(finfo(dtype).nmant + 1, 64)
    drawn = numpy.right_shift(random_bits("uniform", key, shape), numpy.uint64(64 - digits))
    unit = convert(drawn, dtype) * dtype.type(2.0**-digits)
    if type(minval) is type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return unit
    check_broadcasts("uniform", shape, minval=minval, maxval=maxval)
    minval, maxval = convert(minval, dtype), convert(maxval, dtype)
    return unit * (maxval - minval) + minval


def inside_unit(name: str, key: Value, shape: Shape) -> Value:
    """Numbers in (0, 1), without the end points, in double precision."""
    drawn = numpy.right_shift(random_bits(name, key, shape), numpy.uint64(12))
    return (convert(drawn, float) + 0.5) * 2.0**-52


def normal(key: Value, shape: Shape = (), dtype: Any = float) -> Value:
    """Draw from the standard normal distribution: compute its quantiles at uniform numbers.

    >>> import minidiff as md
    >>> normal(md.random.key(0), 3).round(3)
    array([-0.206, -0.785,  1.816])
    """
    dtype = check_real_float("normal: the dtype is one", dtype)
    return convert(ndtri_p.bind(inside_unit("normal", key, shape)), dtype)


def truncated_normal(key: Value, lower: Value, upper: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the standard normal distribution, given that the number is in [lower, upper].

    The bounds broadcast to the shape, which by default is their own. They may be infinite. If they are equal, or both
    beyond 37 on one side, each number is a bound. Raises ValueError if a lower bound is above the upper one; if bounds
    are traced, draws NaN instead. NaN bounds draw NaN. Differentiable in the bounds.

    >>> import minidiff as md
    >>> truncated_normal(md.random.key(0), 2.0, numpy.inf, 3).round(3)
    array([2.345, 2.581, 2.015])
    """
    dtype = check_real_float("truncated_normal: the dtype is one", dtype)
    shape = numpy.broadcast_shapes(typeof(lower).shape, typeof(upper).shape) if shape is None else shape
    check_broadcasts("truncated_normal", shape, lower=lower, upper=upper)
    if not any(isinstance(x, Tracer) for x in (lower, upper)) and numpy.any(numpy.greater(lower, upper)):
        raise ValueError(f"truncated_normal: [{lower}, {upper}] is not an interval: lower is above upper")
    lower, upper = convert(lower, float), convert(upper, float)
    # In the upper tail, probabilities are close to 1 and have few digits: draw in the lower tail.
    flip = numpy.greater(lower, 0)
    low, high = numpy.where(flip, -upper, lower), numpy.where(flip, -lower, upper)
    below, up_to = (0.5 * erfc_p.bind(x * -math.sqrt(0.5)) for x in (low, high))
    unit = inside_unit("truncated_normal", key, shape)
    drawn = numpy.clip(ndtri_p.bind(below + unit * (up_to - below)), low, high)
    drawn = numpy.where(numpy.less_equal(low, high), drawn, numpy.nan)
    return convert(numpy.where(flip, -drawn, drawn), dtype)


def randint(key: Value, shape: Shape, minval: Value, maxval: Value, dtype: Any = int) -> Value:
    """Draw integers in [minval, maxval).

    The bounds broadcast to the shape. Probabilities are equal up to a relative error of (maxval - minval) / 2**64.
    Raises TypeError for bounds or a dtype that are not integers, and ValueError for bounds that have no number between
    them, or do not fit the dtype (traced bounds are not checked).

    >>> import minidiff as md
    >>> randint(md.random.key(0), 5, 0, 10)
    array([0, 7, 9, 6, 0])
    """
    dtype = numpy.dtype(dtype)
    if dtype.kind not in "iu":
        raise TypeError(f"randint: the dtype is one of integers, got {dtype_name(dtype)}")
    check_broadcasts("randint", shape, minval=minval, maxval=maxval)
    for x in (minval, maxval):
        if typeof(x).dtype.kind not in "iu":
            raise TypeError(f"randint: the bounds are integers, got {typeof(x)}")
    if not any(isinstance(x, Tracer) for x in (minval, maxval)):
        low, high = (numpy.asarray(x, object) for x in (minval, maxval))
        limits = numpy.iinfo(dtype)
        if not (numpy.all(low < high) and numpy.all(low >= limits.min) and numpy.all(high <= limits.max + 1)):
            raise ValueError(
                f"randint: [{minval}, {maxval}) is not an interval of integers of dtype {dtype_name(dtype)}"
            )
    first, end = as_unsigned(minval), as_unsigned(maxval)
    offset = numpy.remainder(random_bits("randint", key, shape), numpy.subtract(end, first))
    return convert(numpy.add(first, offset), dtype)  # modulo 2**64; the operators of NumPy's scalars would warn


def bernoulli(key: Value, p: Value = 0.5, shape: Shape | None = None) -> Value:
    """Draw booleans that are True with probability `p`.

    `p` broadcasts to the shape, which by default is its own. Raises ValueError if it does not broadcast.

    >>> import minidiff as md
    >>> bernoulli(md.random.key(0), 0.25, 4)
    array([False,  True, False, False])
    """
    shape = typeof(p).shape if shape is None else shape
    check_broadcasts("bernoulli", shape, p=p)
    return numpy.less(uniform(key, shape), p)


def permutation(key: Value, x: Any, axis: int = 0) -> Value:
    """Permute an array along an axis, or the integers below `x`.

    Raises TypeError for a scalar that is traced.

    >>> import minidiff as md
    >>> permutation(md.random.key(0), 5)
    array([1, 0, 4, 3, 2])
    >>> permutation(md.random.key(0), numpy.eye(3, dtype=int), axis=1)
    array([[0, 1, 0],
           [1, 0, 0],
           [0, 0, 1]])
    """
    if not isinstance(x, (numpy.ndarray, Tracer)):
        x = numpy.arange(operator.index(x))
    t = typeof(x)
    if not t.shape:
        raise TypeError(f"permutation: x is an array with an axis, or a number of integers that is known; got {t}")
    axis = normalize_axis(axis, t.ndim, "permutation")
    return take(x, numpy.argsort(random_bits("permutation", key, t.shape[axis])), axis)


def categorical(key: Value, logits: Value, axis: int = -1, shape: Shape | None = None) -> Value:
    """Draw indices along an axis with probabilities `softmax(logits, axis)`.

    The shape of the logits without the axis must broadcast to the shape, and is the default. The index is that of the
    largest sum of a logit and a number from the Gumbel distribution. Raises ValueError if the logits do not broadcast.

    >>> import minidiff as md
    >>> categorical(md.random.key(0), numpy.log([0.1, 0.9]), shape=8)
    array([1, 0, 1, 1, 1, 0, 1, 1])
    """
    t = typeof(logits)
    axis = normalize_axis(axis, t.ndim, "categorical") - t.ndim  # counted from the end
    batch = t.shape[:axis] + t.shape[t.ndim + axis + 1 :]
    shape = batch if shape is None else shape
    sizes = sizes_of("categorical", shape)
    check_broadcasts("categorical", sizes, logits=ShapedArray(batch, t.dtype))
    each = with_axis(shape, len(sizes) + 1 + axis, t.shape[axis])
    return numpy.argmax(logits - numpy.log(-numpy.log(inside_unit("categorical", key, each))), axis)
