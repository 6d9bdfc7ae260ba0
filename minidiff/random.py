"""Random numbers that are functions of a key, with the API of `jax.random`.

There is no generator with a state. A function draws the same numbers from the same key, wherever it runs: under `jit`,
`vmap` and `scan`, on one rank or many. `split` and `fold_in` make new keys; use each key once.

Number k of a draw is a hash of key and k, and of nothing else. So a rank can draw its block of a large array without
the rest: pass a `Block` as the shape. The hash is Threefry-2x32 with 20 rounds, as in JAX. It needs only additions,
rotations and exclusive ors of 32-bit words, which NumPy computes for many keys and counters at once.
(`numpy.random.Philox` is faster for one stream, but needs an object for each key, and a block of an array consists of
many pieces of a stream.) Keys, `split` and `bits` equal those of JAX.

A key is a plain array u32[2], with a type like any other. In the body of a `shard_map`, a key that is the same on all
ranks draws the same numbers on all of them. `fold_in(key, axis_index('i'))` varies along `i`, and so do its draws.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.other_libraries import finish_module
from minidiff.inputs.arguments import normalize_axis
from minidiff.inputs.key_reuse import use_key
from minidiff.ops.base import Discrete, Elementwise, bind_aligned, convert
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels, dimension_labels
from minidiff.ops.elementwise import stop_gradient
from minidiff.ops.indexing import take
from minidiff.ops.special import CHUNK, erfc_p, integrate, ndtri_p, of_numbers, quantiles
from minidiff.values.dtypes import check_real_float, dtype_name, finfo

__all__ = [
    "Block", "bernoulli", "beta", "bits", "categorical", "choice", "clone", "dirichlet", "exponential", "fold_in",
    "gamma", "gumbel", "key", "laplace", "loggamma", "multivariate_normal", "normal", "orthogonal", "permutation",
    "poisson", "rademacher", "randint", "split", "truncated_normal", "uniform",
]  # fmt: skip

# ---------------------------------------------------------------- the hash


def threefry2x32(
    k0: numpy.ndarray, k1: numpy.ndarray, x0: numpy.ndarray, x1: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Hash counters (x0, x1) by keys (k0, k1), all u32[n]; keys may be u32[1]. It overwrites the counters.

    >>> [f'{x:08x}' for (x,) in threefry2x32(*numpy.zeros((4, 1), numpy.uint32))]
    ['6b200159', '99ba4efe']
    """
    keys = k0, k1, k0 ^ k1 ^ numpy.uint32(0x1BD11BDA)
    x0 += keys[0]
    x1 += keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 += x1
            high = x1 >> numpy.uint32(32 - r)
            x1 <<= numpy.uint32(r)
            x1 |= high
            x1 ^= x0
        x0 += keys[(i + 1) % 3]
        x1 += keys[(i + 2) % 3]
        x1 += numpy.uint32(i + 1)
    return x0, x1


def _random_bits_impl(k0, k1, first, sizes, strides):
    shapes = [numpy.shape(x) for x in (k0, k1, first)]
    lead = numpy.broadcast_shapes(*shapes) if any(shapes) else ()  # these calls take longer than a small draw's hash
    counters = numpy.broadcast_to(first, lead) if lead else numpy.asarray(first)
    for n, stride in zip(sizes, strides):
        counters = numpy.add.outer(counters, numpy.arange(n, dtype=numpy.uint64) * numpy.uint64(stride))
    out, keys = numpy.empty(counters.shape, numpy.uint64), [_of_each(k, lead, counters.shape) for k in (k0, k1)]
    counters, flat, word = counters.reshape(-1), out.reshape(-1), numpy.uint64(32)
    for i in range(0, flat.size, CHUNK):
        part = slice(i, i + CHUNK)
        x, chunk_keys = counters[part], [k if k.size == 1 else k[part] for k in keys]
        high, low = threefry2x32(*chunk_keys, (x >> word).astype(numpy.uint32), x.astype(numpy.uint32))
        flat[part] = (high.astype(numpy.uint64) << word) | low
    return out[()]


def _of_each(k: Any, lead: tuple[int, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """Return one word of the key of each number in a draw of this shape, flat; or of the single key of all."""
    if numpy.size(k) == 1:
        return numpy.reshape(k, 1)
    keys = numpy.broadcast_to(k, lead)
    return numpy.broadcast_to(keys.reshape(*lead, *[1] * (len(shape) - len(lead))), shape).reshape(-1)


def _random_bits_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Batches of keys may be split: each part draws its own numbers."""
    lead = outs[0].shape[: outs[0].ndim - len(params["sizes"])]
    return Dimensions(tuple(broadcast_labels(t.shape, lead) for t in types), dimension_labels(outs))


#: Hash the counters `first + i @ strides`, for all indices i below `sizes`, by the key with the words k0 and k1: u64 of
#: shape `sizes`. Batches of the three operands broadcast, and come first in the result.
random_bits_p = Discrete(
    "random_bits",
    _random_bits_impl,
    lambda k0, k1, first, sizes, strides: (
        (*numpy.broadcast_shapes(k0.shape, k1.shape, first.shape), *sizes),
        numpy.dtype(numpy.uint64),
    ),
    bind_aligned,
    fits=lambda k0, k1, first, sizes, strides: len(sizes) == len(strides),
    sharding=_random_bits_dimensions,
)

# ---------------------------------------------------------------- shapes and blocks


@dataclass(frozen=True)
class Block:
    """A block of a larger draw, in place of a shape.

    `spmd.local_block` makes the block of a rank from a partition spec.

    Args:
        shape: the shape of the block.
        starts: the index of the whole at which it begins. Starts may be traced, and may differ from rank to rank.
        whole: the shape of the larger draw.

    Raises:
        ValueError: for a block that is not inside the whole.

    >>> import minidiff as md
    >>> key = md.random.key(0)
    >>> whole = md.random.bits(md.random.clone(key), (3, 4))
    >>> md.random.bits(key, Block((2, 2), (1, 2), (3, 4))) == whole[1:, 2:]
    array([[ True,  True],
           [ True,  True]])
    """

    shape: tuple[int, ...]
    starts: tuple[Any, ...]
    whole: tuple[int, ...]

    def __post_init__(self) -> None:
        inside = len(self.shape) == len(self.starts) == len(self.whole) and all(
            n <= m and (isinstance(i, Tracer) or 0 <= i <= m - n)
            for n, i, m in zip(self.shape, self.starts, self.whole)
        )
        if not inside:
            raise ValueError(f"{self} is not inside a draw of shape {self.whole}")


Shape = int | Sequence[int] | Block


def _sizes(name: str, shape: Any) -> tuple[int, ...]:
    """Return the shape that a draw has."""
    if isinstance(shape, Block):
        return shape.shape
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, (tuple, list)) else (operator.index(shape),)
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: sizes must be at least 0, got the shape {sizes}")
    return sizes


def _check_broadcasts(name: str, shape: Any, **operands: Any) -> None:
    """Raise ValueError unless the operands broadcast to the shape of the draw."""
    sizes = _sizes(name, shape)
    for operand, x in operands.items():
        shape_of_x = typeof(x).shape
        if len(shape_of_x) > len(sizes) or any(n not in (1, m) for n, m in zip(shape_of_x[::-1], sizes[::-1])):
            raise ValueError(f"{name}: {operand}, {typeof(x)}, does not broadcast to the shape {sizes}")


def _shape_for(name: str, shape: Any, **operands: Any) -> Any:
    """Return the shape of a draw, to which the operands broadcast; by default, theirs."""
    shape = numpy.broadcast_shapes(*[typeof(x).shape for x in operands.values()]) if shape is None else shape
    _check_broadcasts(name, shape, **operands)
    return shape


def _with_axis(shape: Any, axis: int, n: int) -> Any:
    """Return the shape of a draw, with one more axis of n numbers at `axis`; a block has all of these."""
    if isinstance(shape, Block):
        return Block(*[(*x[:axis], k, *x[axis:]) for x, k in zip(vars(shape).values(), (n, 0, n))])
    sizes = _sizes("shape", shape)
    return (*sizes[:axis], n, *sizes[axis:])


# ---------------------------------------------------------------- keys


def _random_bits(name: str, key: Any, shape: Any, first: Any = 0) -> Value:
    """Return random bits u64 of a shape, or of a block; the counter of the first is `first`."""
    k0, k1 = _words_of(name, key)
    sizes = _sizes(name, shape)
    whole = shape.whole if isinstance(shape, Block) else sizes
    if name != "fold_in":
        use_key(name, key, whole if isinstance(shape, Block) else None)
    strides = tuple(math.prod(whole[d + 1 :]) for d in range(len(whole)))
    if isinstance(shape, Block):
        for start, stride in zip(shape.starts, strides):
            first = first + start * stride
    return random_bits_p.bind(k0, k1, _as_unsigned(first), sizes=sizes, strides=strides)


def _words_of(name: str, key: Any) -> tuple[Value, Value]:
    """Return the two words of a key, checked."""
    is_array = isinstance(key, (numpy.ndarray, Tracer))
    if is_array and typeof(key).shape == (2,) and typeof(key).dtype == numpy.uint32:
        return key[0], key[1]
    stacked = is_array and typeof(key).dtype == numpy.uint32 and typeof(key).shape[-1:] == (2,)
    raise TypeError(
        f"{name}: a key must be an array u32[2], got {typeof(key) if is_array else repr(key)}: "
        + ("for a stack of keys, use vmap" if stacked else "make one with md.random.key(seed)")
    )


def _as_unsigned(x: Any) -> Value:
    """Return an integer as u64, modulo 2**64."""
    return numpy.uint64(x % 2**64) if isinstance(x, int) else convert(x, numpy.uint64)


def _words(x: Value) -> Value:
    """Split u64[...] into keys u32[..., 2]."""
    return numpy.stack([convert(numpy.right_shift(x, numpy.uint64(32)), numpy.uint32), convert(x, numpy.uint32)], -1)


def _integer(name: str, noun: str, x: Any) -> Value:
    """Check that `x` is one integer, and return it as u64."""
    if isinstance(x, (int, numpy.integer, numpy.ndarray, Tracer)) and not isinstance(x, bool):
        t = None if isinstance(x, int) else typeof(x)
        if t is None and not -(2**63) <= x < 2**64:
            raise ValueError(f"{name}: {noun} must fit in 64 bits, got {x}")
        if t is None or (t.shape == () and t.dtype.kind in "iu"):
            return _as_unsigned(x)
    shown = typeof(x) if isinstance(x, (numpy.ndarray, Tracer)) else repr(x)
    raise TypeError(f"{name}: {noun} must be one integer, got {shown}")


def key(seed: Any) -> Value:
    """Make a key u32[2] from an integer, which may be traced.

    Args:
        seed: an integer of at most 64 bits, which may be traced.

    Returns:
        A key, u32[2].

    Raises:
        TypeError: for a seed that is not one integer.
        ValueError: for an integer of more than 64 bits.

    >>> key(42)
    array([ 0, 42], dtype=uint32)
    """
    return _words(_integer("key", "the seed", seed))


def split(key: Value, num: Shape = 2) -> Value:
    """Make `num` keys from one, stacked: u32[num, 2]; `num` may also be a shape.

    Use the new keys in place of the old one.

    Args:
        key: a key, u32[2].
        num: the number of keys, or a shape.

    Returns:
        Keys, u32[num, 2].

    >>> import minidiff as md
    >>> first, second = split(md.random.key(0))
    >>> first, second
    (array([1797259609, 2579123966], dtype=uint32), array([ 928981903, 3453687069], dtype=uint32))
    """
    return _words(_random_bits("split", key, num))


def fold_in(key: Value, data: Any) -> Value:
    """Make a key from a key and an integer, such as the number of a layer, of a step, or of a rank.

    It is key number `data` of `split(key, num)`, for any larger num.

    Args:
        key: a key, u32[2].
        data: an integer of at most 64 bits, of Python, of NumPy or traced, modulo 2**64: -1 is 2**64 - 1.

    Returns:
        A key, u32[2].

    Raises:
        TypeError: for data that is not one integer.
        ValueError: for an integer of more than 64 bits.

    >>> import minidiff as md
    >>> bool((fold_in(md.random.key(0), 1) == split(md.random.key(0))[1]).all())
    True
    """
    return _words(_random_bits("fold_in", key, (), _integer("fold_in", "the data", data)))


def clone(key: Value) -> Value:
    """Return a key, or a stack of keys, with the same value, to draw the same numbers again on purpose.

    Two draws from one key raise a `KeyReuseWarning`, since that is mostly a mistake.

    Args:
        key: a key, u32[2], or a stack of keys.

    Returns:
        An array like `key`, which counts as another key.

    >>> import minidiff as md
    >>> key = md.random.key(0)
    >>> bool(md.random.normal(clone(key)) == md.random.normal(key))
    True
    """
    return numpy.positive(key)


# ---------------------------------------------------------------- draws


def bits(key: Value, shape: Shape = (), dtype: Any = numpy.uint64) -> Value:
    """Draw unsigned integers, from all values of their dtype.

    Args:
        key: a key, u32[2].
        shape: the shape of the draw, its length, or a `Block` of a larger draw.
        dtype: a dtype of unsigned integers.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not one of unsigned integers.

    >>> import minidiff as md
    >>> bits(md.random.key(0), 2, 'uint8')
    array([167, 146], dtype=uint8)
    """
    dtype = numpy.dtype(dtype)
    if dtype.kind != "u":
        raise TypeError(f"bits: the dtype must be unsigned, got {dtype_name(dtype)}; for signed integers, use randint")
    drawn = _random_bits("bits", key, shape)
    if dtype.itemsize == 8:
        return drawn
    return convert(numpy.bitwise_xor(drawn, numpy.right_shift(drawn, numpy.uint64(32))), dtype)


def uniform(key: Value, shape: Shape = (), dtype: Any = float, minval: Value = 0.0, maxval: Value = 1.0) -> Value:
    """Draw numbers in [minval, maxval).

    The numbers are drawn from evenly spaced numbers in [0, 1), with the precision of the dtype, and scaled to the
    bounds. A number that scaling rounds to maxval is replaced by the next one below it. Differentiable in the bounds.

    Args:
        key: a key, u32[2].
        shape: the shape of the draw, its length, or a `Block` of a larger draw.
        dtype: a real floating-point dtype.
        minval: the least number; it broadcasts to the shape.
        maxval: the bound of the numbers; it broadcasts to the shape.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not real and floating-point.
        ValueError: for bounds that do not broadcast to the shape.

    >>> import minidiff as md
    >>> uniform(md.random.key(0), 3).round(3)
    array([0.418, 0.216, 0.965])
    """
    dtype = check_real_float("uniform: the dtype must be one", dtype)
    digits = min(finfo(dtype).nmant + 1, 64)
    drawn = numpy.right_shift(_random_bits("uniform", key, shape), numpy.uint64(64 - digits))
    unit = convert(drawn, dtype) * dtype.type(2.0**-digits)
    if type(minval) is type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return unit
    _check_broadcasts("uniform", shape, minval=minval, maxval=maxval)
    minval, maxval = convert(minval, dtype), convert(maxval, dtype)
    with numpy.errstate(over="ignore"):
        width = maxval - minval
    halves = unit * maxval + (1 - unit) * minval  # of an interval so wide that its width overflows
    drawn = numpy.where(numpy.isfinite(width), unit * width + minval, halves)
    last = numpy.nextafter(maxval, minval)
    beyond = numpy.where(numpy.greater(minval, maxval), numpy.less(drawn, last), numpy.greater(drawn, last))
    return numpy.where(beyond, last, drawn)


def _inside_unit(name: str, key: Value, shape: Shape) -> Value:
    """Return numbers in (0, 1), without the end points, in double precision."""
    drawn = numpy.right_shift(_random_bits(name, key, shape), numpy.uint64(12))
    return (convert(drawn, float) + 0.5) * 2.0**-52


def normal(key: Value, shape: Shape = (), dtype: Any = float) -> Value:
    """Draw from the standard normal distribution: compute its quantiles at uniform numbers.

    Args:
        key: a key, u32[2].
        shape: the shape of the draw, its length, or a `Block` of a larger draw.
        dtype: a real floating-point dtype.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not real and floating-point.

    >>> import minidiff as md
    >>> normal(md.random.key(0), 3).round(3)
    array([-0.206, -0.785,  1.816])
    """
    dtype = check_real_float("normal: the dtype must be one", dtype)
    return convert(ndtri_p.bind(_inside_unit("normal", key, shape)), dtype)


def truncated_normal(key: Value, lower: Value, upper: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the standard normal distribution, given that the number is in [lower, upper].

    The bounds may be infinite, and far in a tail. NaN bounds draw NaN. Differentiable in the bounds.

    Args:
        key: a key, u32[2].
        lower: the lower bound.
        upper: the upper bound.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.
        dtype: a real floating-point dtype.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not real and floating-point.
        ValueError: if a lower bound is above the upper one (if bounds are traced, the draw is NaN), or they do not
            broadcast.

    >>> import minidiff as md
    >>> truncated_normal(md.random.key(0), 2.0, numpy.inf, 3).round(3)
    array([2.345, 2.581, 2.015])
    """
    dtype = check_real_float("truncated_normal: the dtype must be one", dtype)
    shape = _shape_for("truncated_normal", shape, lower=lower, upper=upper)
    if not any(isinstance(x, Tracer) for x in (lower, upper)) and numpy.any(numpy.greater(lower, upper)):
        raise ValueError(f"truncated_normal: lower must not be above upper, got {lower} and {upper}")
    lower, upper = convert(lower, float), convert(upper, float)
    # In the upper tail, probabilities are close to 1 and have few digits: draw in the lower tail.
    flip = numpy.greater(lower, 0)
    low, high = numpy.where(flip, -upper, lower), numpy.where(flip, -lower, upper)
    unit, far = _inside_unit("truncated_normal", key, shape), numpy.less(high, -30)
    below, up_to = (0.5 * erfc_p.bind(numpy.where(far, 0.0, x) * -math.sqrt(0.5)) for x in (low, high))
    drawn = ndtri_p.bind(below + unit * (up_to - below))
    if isinstance(far, Tracer) or numpy.any(far):
        first, end = numpy.where(far, numpy.minimum(-high, 1e300), 30.0), numpy.where(far, -low, 31.0)
        drawn = numpy.where(far, -_far_in_tail(unit, first, end), drawn)
    drawn = numpy.clip(drawn, low, high)
    drawn = numpy.where(numpy.less_equal(low, high), drawn, numpy.nan)
    return convert(numpy.where(flip, -drawn, drawn), dtype)


def _far_in_tail(unit: Value, first: Value, end: Value) -> Value:
    """Normal numbers t in [first, end], where first is at least 30: unit is the share of numbers beyond t.

    Probabilities that would underflow are ratios to that of numbers beyond `first`.
    """
    end = numpy.minimum(end, first + 30.0)  # beyond it there is nothing
    ratio = -0.5 * (end - first) * (end + first) + numpy.log(_mills_ratio(end) / _mills_ratio(first))
    return tail_quantile_p.bind(first, -numpy.log1p((1 - unit) * numpy.expm1(ratio)))


def _mills_ratio(x: Value) -> Value:
    """Return the probability of normal numbers beyond x >= 30, divided by the density at x: the asymptotic series."""
    inverse, total = 1 / x, 1.0
    for k in range(17, 0, -2):
        total = 1 - k * inverse * inverse * total
    return total * inverse


def _tail_quantile(first: Any, w: Any) -> numpy.ndarray:
    """Return the number beyond which normal numbers are exp(w) times as rare as beyond `first`: Newton's method."""
    first, w = numpy.asarray(first, float), numpy.asarray(w, float)
    step = 2 * w / (first + numpy.hypot(first, numpy.sqrt(2 * w)))
    for _ in range(3):
        ratios = _mills_ratio(first), _mills_ratio(first + step)
        step = step - (step * (first + 0.5 * step) - numpy.log(ratios[1] / ratios[0]) - w) * ratios[1]
    return (first + step)[()]


tail_quantile_p = Elementwise(
    "tail_quantile",
    _tail_quantile,
    (lambda out, x, w: _mills_ratio(out) / _mills_ratio(x), lambda out, x, w: _mills_ratio(out)),
)


def randint(key: Value, shape: Shape, minval: Value, maxval: Value, dtype: Any = int) -> Value:
    """Draw integers in [minval, maxval).

    Probabilities are equal up to a relative error of (maxval - minval) / 2**64.

    Args:
        key: a key, u32[2].
        shape: the shape of the draw, its length, or a `Block` of a larger draw.
        minval: the least integer; it broadcasts to the shape.
        maxval: the bound of the integers; it broadcasts to the shape.
        dtype: a dtype of integers.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for bounds or a dtype that are not integers.
        ValueError: for bounds that have no number between them, or do not fit the dtype (traced bounds are not
            checked).

    >>> import minidiff as md
    >>> randint(md.random.key(0), 5, 0, 10)
    array([0, 7, 9, 6, 0])
    """
    dtype = numpy.dtype(dtype)
    if dtype.kind not in "iu":
        raise TypeError(f"randint: the dtype must be one of integers, got {dtype_name(dtype)}")
    _check_broadcasts("randint", shape, minval=minval, maxval=maxval)
    for x in (minval, maxval):
        if typeof(x).dtype.kind not in "iu":
            raise TypeError(f"randint: the bounds must be integers, got {typeof(x)}")
    if not any(isinstance(x, Tracer) for x in (minval, maxval)):
        low, high = (numpy.asarray(x, object) for x in (minval, maxval))
        limits = numpy.iinfo(dtype)
        if not (numpy.all(low < high) and numpy.all(low >= limits.min) and numpy.all(high <= limits.max + 1)):
            raise ValueError(
                f"randint: [{minval}, {maxval}) is not an interval of integers of dtype {dtype_name(dtype)}"
            )
    first, end = _as_unsigned(minval), _as_unsigned(maxval)
    offset = numpy.remainder(_random_bits("randint", key, shape), numpy.subtract(end, first))
    return convert(numpy.add(first, offset), dtype)  # modulo 2**64; the operators of NumPy's scalars would warn


def bernoulli(key: Value, p: Value = 0.5, shape: Shape | None = None) -> Value:
    """Draw booleans that are True with probability `p`.

    Args:
        key: a key, u32[2].
        p: the probability of True.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.

    Returns:
        Booleans of the shape.

    Raises:
        ValueError: if p does not broadcast to the shape.

    >>> import minidiff as md
    >>> bernoulli(md.random.key(0), 0.25, 4)
    array([False,  True, False, False])
    """
    return numpy.less(uniform(key, _shape_for("bernoulli", shape, p=p)), p)


def permutation(key: Value, x: Any, axis: int = 0) -> Value:
    """Permute an array along an axis, or the integers below `x`.

    Args:
        key: a key, u32[2].
        x: an array, or a number n for the integers below n.
        axis: the axis along which x is permuted.

    Returns:
        An array like x.

    Raises:
        TypeError: for a scalar that is traced.

    >>> import minidiff as md
    >>> permutation(md.random.key(0), 5)
    array([1, 0, 4, 3, 2])
    >>> permutation(md.random.key(0), numpy.eye(3, dtype=int), axis=1)
    array([[0, 1, 0],
           [1, 0, 0],
           [0, 0, 1]])
    """
    x, axis = _elements("permutation", x, axis)
    return take(x, numpy.argsort(_random_bits("permutation", key, typeof(x).shape[axis])), axis)


def _elements(name: str, x: Any, axis: int) -> tuple[Value, int]:
    """Return the array that `x` is, or the integers below it, and an axis."""
    x = numpy.arange(operator.index(x)) if isinstance(x, (int, numpy.integer)) else x
    t = typeof(x)
    if not t.shape:
        raise TypeError(f"{name}: x must be an array with an axis, or a Python integer; got {t}")
    return x, normalize_axis(axis, t.ndim, name)


def categorical(key: Value, logits: Value, axis: int = -1, shape: Shape | None = None) -> Value:
    """Draw indices along an axis with probabilities `softmax(logits, axis)`.

    The index is that of the largest sum of a logit and a number from the Gumbel distribution.

    Args:
        key: a key, u32[2].
        logits: logarithms of probabilities, up to a constant.
        axis: the axis of the logits along which indices are drawn.
        shape: the shape of the draw, or a `Block`; None is the shape of the logits without the axis, which broadcasts
            to it.

    Returns:
        Integers of the shape.

    Raises:
        ValueError: if the logits do not broadcast to the shape.

    >>> import minidiff as md
    >>> categorical(md.random.key(0), numpy.log([0.1, 0.9]), shape=8)
    array([1, 0, 1, 1, 1, 0, 1, 1])
    """
    t = typeof(logits)
    axis = normalize_axis(axis, t.ndim, "categorical") - t.ndim  # counted from the end
    batch = t.shape[:axis] + t.shape[t.ndim + axis + 1 :]
    shape = batch if shape is None else shape
    sizes = _sizes("categorical", shape)
    _check_broadcasts("categorical", sizes, logits=ShapedArray(batch, t.dtype))
    each = _with_axis(shape, len(sizes) + 1 + axis, t.shape[axis])
    return numpy.argmax(logits - numpy.log(-numpy.log(_inside_unit("categorical", key, each))), axis)


# ---------------------------------------------------------------- distributions


def _by_quantiles(name: str, of: str, quantiles: Callable[[Value], Value], shown: str) -> Callable[..., Value]:
    def draw(key: Value, shape: Shape = (), dtype: Any = float) -> Value:
        """Draw from the {of}: compute its quantiles at uniform numbers.

        Args:
            key: a key, u32[2].
            shape: the shape of the draw, its length, or a `Block` of a larger draw.
            dtype: a real floating-point dtype.

        Returns:
            An array of the shape and dtype.

        Raises:
            TypeError: for a dtype that is not real and floating-point.

        >>> import minidiff as md
        >>> md.random.{name}(md.random.key(0), 3).round(3)
        array([{shown}])
        """
        real = check_real_float(f"{name}: the dtype must be one", dtype)
        return convert(quantiles(_inside_unit(name, key, shape)), real)

    draw.__name__ = draw.__qualname__ = name
    draw.__doc__ = str(draw.__doc__).format(name=name, of=of, shown=shown)
    return draw


def _laplace_quantiles(u: Value) -> Value:
    return -numpy.sign(u - 0.5) * numpy.log(1 - 2 * abs(u - 0.5))


exponential = _by_quantiles(
    "exponential", "exponential distribution of mean 1", lambda u: -numpy.log(u), "0.871, 1.531, 0.035"
)
gumbel = _by_quantiles("gumbel", "Gumbel distribution", lambda u: -numpy.log(-numpy.log(u)), " 0.138, -0.426,  3.344")
laplace = _by_quantiles("laplace", "Laplace distribution of scale 1", _laplace_quantiles, "-0.178, -0.838,  2.668")


def rademacher(key: Value, shape: Shape = (), dtype: Any = int) -> Value:
    """Draw 1 or -1, with equal probabilities.

    Args:
        key: a key, u32[2].
        shape: the shape of the draw, its length, or a `Block` of a larger draw.
        dtype: the dtype of the numbers.

    Returns:
        An array of the shape and dtype.

    >>> import minidiff as md
    >>> rademacher(md.random.key(0), 5)
    array([ 1,  1, -1, -1, -1])
    """
    return convert(2 * convert(bernoulli(key, 0.5, shape), int) - 1, dtype)


# By rejection: an operation takes the seed of each number, 64 random bits, and its parameter. A seed begins a stream of
# uniform numbers, from which proposals are made until one is accepted. So a number depends on its own seed alone, the
# operation is elementwise, and no loop has a length that differs from rank to rank.


def _stream(seeds: numpy.ndarray, attempt: int, number: int) -> numpy.ndarray:
    """Return a uniform number in (0, 1) for each of the seeds u64[n]."""
    k0, k1 = (seeds >> numpy.uint64(32)).astype(numpy.uint32), seeds.astype(numpy.uint32)
    high, low = threefry2x32(k0, k1, numpy.full_like(k0, attempt), numpy.full_like(k0, number))
    return (
        ((high.astype(numpy.uint64) << numpy.uint64(20)) | (low >> numpy.uint32(12))).astype(float) + 0.5
    ) * 2.0**-52


def _until_accepted(attempt: Callable, seeds: numpy.ndarray, parameter: numpy.ndarray) -> numpy.ndarray:
    """Return, for each seed, the first number that `attempt(u, v, parameter)` accepts; NaN for NaN."""
    out, todo, times = numpy.full(parameter.shape, numpy.nan), numpy.flatnonzero(parameter == parameter), 0
    with numpy.errstate(all="ignore"):
        while todo.size:
            x, accepted = attempt(*[_stream(seeds[todo], times, k) for k in (0, 1)], parameter[todo])
            out[todo[accepted]] = x[accepted]
            todo, times = todo[~accepted], times + 1
    return out


def _each_seed(name: str, f: Callable, slope: Callable | None) -> Elementwise:
    """Return the operation that `f` is on flat arrays of seeds and of a parameter; its derivative in the parameter."""

    def impl(seeds: Any, parameter: Any) -> numpy.ndarray:
        seeds, parameter = numpy.broadcast_arrays(numpy.asarray(seeds, numpy.uint64), numpy.asarray(parameter, float))
        return f(seeds.ravel(), parameter.ravel()).reshape(parameter.shape)[()]

    return Elementwise(name, impl, (None, slope))


def _marsaglia_tsang(u: numpy.ndarray, v: numpy.ndarray, a: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Source: Marsaglia and Tsang, "A simple method for generating gamma variables". The logarithm, for a >= 1."""
    z, d = quantiles(u), a - 1 / 3
    log_cube = 3 * numpy.log1p(z / numpy.sqrt(9 * d))  # NaN, which is not accepted, if it is not positive
    return numpy.log(d) + log_cube, numpy.log(v) < 0.5 * z * z + d * (1 - numpy.exp(log_cube) + log_cube)


def _log_gammas(seeds: numpy.ndarray, a: numpy.ndarray) -> numpy.ndarray:
    """Draw logarithms of gamma numbers; for a < 1 those of a + 1, times the power 1 / a of a uniform number."""
    small = a < 1
    out = _until_accepted(_marsaglia_tsang, seeds, numpy.where((a > 0) & (a < numpy.inf), a + small, numpy.nan))
    with numpy.errstate(over="ignore"):  # a logarithm below all numbers is the least one: beta divides by their sum
        powers = numpy.log(_stream(seeds[small], 0, 2)) / a[small]
    out[small] = numpy.maximum(out[small] + powers, -numpy.finfo(float).max)
    return out


def _slope_of_log_gammas(out: Value, seeds: Value, a: Value) -> Value:
    """Return the derivative of the logarithm of a draw x in `a`, at a constant probability of smaller ones.

    That is -(dP/da) / (dP/dx) of the distribution function P, an integral over the logarithms of the numbers below the
    draw; where the draw is above a, over those above it. On that side the integrand decays. Source: Figurnov, Mohamed
    and Mnih, "Implicit reparameterization gradients".
    """
    x, a = numpy.exp(out)[..., None], numpy.expand_dims(a, -1)
    above = x >= a
    side = numpy.where(above, 1.0, -1.0)

    def integrand(z):
        y = numpy.where(above, numpy.log1p(z), z)  # the distance from the logarithm of the draw
        powers = numpy.where(above, (a - 1) * y - x * z, -a * y - x * numpy.expm1(-y))
        return (out[..., None] + side * y - _digamma(a)) * numpy.exp(powers) * side

    return integrate(integrand, stop_gradient(abs(x - a) + numpy.sqrt(x)))[..., 0]


def _digamma(x: Value) -> Value:
    """Return the derivative of log(gamma(x)) for positive x: the asymptotic series at x + 6."""
    shifted, total = x + 6.0, -sum(1 / (x + float(k)) for k in range(6))
    z = 1 / (shifted * shifted)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * 691 / 32760)))))
    return total + numpy.log(shifted) - 0.5 / shifted - series


def _poissons(seeds: numpy.ndarray, rates: numpy.ndarray) -> numpy.ndarray:
    """Draw by quantiles for rates below 10, by transformed rejection for others; -1 for a rate that is not one."""
    low = (rates >= 0) & (rates < 10)
    out = _until_accepted(_hormann, seeds, numpy.where((rates >= 10) & (rates < 2.0**62), rates, numpy.nan))
    u, rate, k = _stream(seeds[low], 0, 0), rates[low], numpy.zeros(low.sum())
    term = up_to = numpy.exp(-rate)
    while (more := (u > up_to) & (term > 0)).any():  # terms end at 0 where rounding leaves u above all sums
        k = k + more
        term = term * rate / numpy.maximum(k, 1) if k.size else term
        up_to = up_to + more * term
    out[low] = k
    return numpy.where(numpy.isnan(out), -1, out)


def _hormann(u: numpy.ndarray, v: numpy.ndarray, rate: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Propose Poisson numbers from uniform u and v, and return which to accept.

    Source: Hörmann, "The transformed rejection method for generating Poisson random variables", algorithm PTRS.
    """
    b = 0.931 + 2.53 * numpy.sqrt(rate)
    a, u = -0.059 + 0.02483 * b, u - 0.5
    side = 0.5 - abs(u)
    k = numpy.floor((2 * a / side + b) * u + rate + 0.43)
    accepted = (side >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2))
    test = numpy.flatnonzero(~accepted & (k >= 0) & ((side >= 0.013) | (v <= side)))
    a, b, side, v, n, rate = (z[test] for z in (a, b, side, v, k, rate))
    height = numpy.log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (side * side) + b))
    accepted[test] = height <= n * numpy.log(rate) - rate - _log_factorial(n)
    return k, accepted


_log_factorial = of_numbers(lambda n: math.lgamma(n + 1))

#: The logarithm of a number from the gamma distribution of shape a, and a number from the Poisson distribution.
log_gamma_draw_p = _each_seed("log_gamma_draw", _log_gammas, _slope_of_log_gammas)
poisson_draw_p = _each_seed("poisson_draw", _poissons, None)


def _draw_each(name: str, operation: Elementwise, key: Value, shape: Any, least: float, **parameter: Value) -> Value:
    """Check the parameter, unless it is traced, and draw numbers by it."""
    (x,), shape = parameter.values(), _shape_for(name, shape, **parameter)
    if not isinstance(x, Tracer) and not numpy.all(numpy.greater_equal(x, least)):
        raise ValueError(f"{name}: {next(iter(parameter))} must be {'positive' if least else 'at least 0'}, got {x}")
    return operation.bind(_random_bits(name, key, shape), convert(x, float))


def _log_gamma(name: str, key: Value, shape: Any, **parameter: Value) -> Value:
    return _draw_each(name, log_gamma_draw_p, key, shape, math.ulp(0.0), **parameter)


def loggamma(key: Value, a: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw the logarithm of a number from the gamma distribution of shape `a`: the number may be too small for a dtype.

    Differentiable in `a`, to any order.

    Args:
        key: a key, u32[2].
        a: the positive shape of the distribution.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.
        dtype: a real floating-point dtype.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not real and floating-point.
        ValueError: for an `a` that is not positive (if it is traced, the draw is NaN), or does not broadcast.

    >>> import minidiff as md
    >>> loggamma(md.random.key(0), 0.001, 3).round(1)
    array([ -412.6,  -310.1, -1545.5])
    """
    real = check_real_float("loggamma: the dtype must be one", dtype)
    return convert(_log_gamma("loggamma", key, shape, a=a), real)


def gamma(key: Value, a: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the gamma distribution of shape `a` and scale 1; see `loggamma`.

    Differentiable in `a`, to any order; see `loggamma`.

    Args:
        key: a key, u32[2].
        a: the positive shape of the distribution.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.
        dtype: a real floating-point dtype.

    Returns:
        An array of the shape and dtype.

    >>> import minidiff as md
    >>> gamma(md.random.key(0), numpy.array([0.5, 2.0, 100.0])).round(3)
    array([  2.012,   0.433, 103.616])
    """
    return convert(numpy.exp(_log_gamma("gamma", key, shape, a=a)), check_real_float("gamma: dtype must be one", dtype))


def beta(key: Value, a: Value, b: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw from the beta distribution: x / (x + y), of gamma numbers x and y of shapes `a` and `b`; see `loggamma`.

    Differentiable in `a` and `b`; see `loggamma`.

    Args:
        key: a key, u32[2].
        a: the first positive parameter.
        b: the second positive parameter.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.
        dtype: a real floating-point dtype.

    Returns:
        An array of the shape and dtype.

    >>> import minidiff as md
    >>> beta(md.random.key(0), 2.0, numpy.array([0.5, 8.0])).round(3)
    array([0.497, 0.164])
    """
    shape, (one, two) = _shape_for("beta", shape, a=a, b=b), split(key)
    x, y = _log_gamma("beta", one, shape, a=a), _log_gamma("beta", two, shape, b=b)
    return convert(numpy.exp(x - numpy.logaddexp(x, y)), check_real_float("beta: the dtype must be one", dtype))


def dirichlet(key: Value, alpha: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw vectors [..., k] of positive numbers with sum 1 from the Dirichlet distribution of `alpha` [..., k].

    Differentiable in `alpha`; see `loggamma`.

    Args:
        key: a key, u32[2].
        alpha: positive parameters [..., k].
        shape: the shape of the draw without k, or a `Block`; None is that of the leading axes of `alpha`.
        dtype: a real floating-point dtype.

    Returns:
        Vectors [..., k].

    Raises:
        ValueError: for an `alpha` without axes.

    >>> import minidiff as md
    >>> dirichlet(md.random.key(0), numpy.array([1.0, 2.0, 5.0]), 2).round(3)
    array([[0.38 , 0.045, 0.575],
           [0.151, 0.263, 0.586]])
    """
    t = typeof(alpha)
    if not t.shape:
        raise ValueError(f"dirichlet: alpha must have an axis of parameters, got {t}")
    shape = t.shape[:-1] if shape is None else shape
    x = _log_gamma("dirichlet", key, _with_axis(shape, len(_sizes("dirichlet", shape)), t.shape[-1]), alpha=alpha)
    x = numpy.exp(x - numpy.max(x, -1, keepdims=True))
    return convert(x / numpy.sum(x, -1, keepdims=True), check_real_float("dirichlet: the dtype must be one", dtype))


def poisson(key: Value, lam: Value, shape: Shape | None = None, dtype: Any = int) -> Value:
    """Draw counts from the Poisson distribution of mean `lam`, which broadcasts to the shape, by default its own.

    Args:
        key: a key, u32[2].
        lam: the mean, at least 0.
        shape: the shape of the draw, or a `Block`; None is the shape of the parameters.
        dtype: a dtype of integers.

    Returns:
        An array of the shape and dtype.

    Raises:
        TypeError: for a dtype that is not of integers.
        ValueError: for a mean below 0; if it is traced, the draw is -1.

    >>> import minidiff as md
    >>> poisson(md.random.key(0), numpy.array([0.1, 3.0, 1e6]))
    array([      1,       1, 1000439])
    """
    if numpy.dtype(dtype).kind not in "iu":
        raise TypeError(f"poisson: the dtype must be one of integers, got {dtype_name(numpy.dtype(dtype))}")
    return convert(_draw_each("poisson", poisson_draw_p, key, shape, 0, lam=lam), dtype)


def multivariate_normal(key: Value, mean: Value, cov: Value, shape: Shape | None = None, dtype: Any = float) -> Value:
    """Draw vectors [..., n] from the normal distribution of a mean [..., n] and a covariance matrix [..., n, n].

    A vector is the mean plus the Cholesky factor times standard normal numbers.

    Args:
        key: a key, u32[2].
        mean: the mean [..., n].
        cov: the covariance matrix [..., n, n].
        shape: the shape of the draw without n, or a `Block`; None is that of the leading axes.
        dtype: a real floating-point dtype.

    Returns:
        Vectors [..., n].

    Raises:
        LinAlgError: for a matrix that is not positive definite.
        ValueError: for a mean and a matrix that do not fit.

    >>> import minidiff as md
    >>> multivariate_normal(md.random.key(0), numpy.zeros(2), numpy.array([[1.0, 0.9], [0.9, 1.0]]), 2).round(3)
    array([[-0.206, -0.527],
           [ 1.816,  1.716]])
    """
    real, m, c = check_real_float("multivariate_normal: the dtype must be one", dtype), typeof(mean), typeof(cov)
    if not m.shape or c.shape[-2:] != (m.shape[-1], m.shape[-1]):
        raise ValueError(f"multivariate_normal: the shapes must be mean [..., n] and cov [..., n, n], got {m} and {c}")
    shape = numpy.broadcast_shapes(m.shape[:-1], c.shape[:-2]) if shape is None else shape
    each = _with_axis(shape, len(_sizes("multivariate_normal", shape)), m.shape[-1])
    _check_broadcasts("multivariate_normal", each, mean=mean)
    return convert(mean + numpy.einsum("...ij,...j->...i", numpy.linalg.cholesky(cov), normal(key, each)), real)


def orthogonal(key: Value, n: int, shape: Shape = (), dtype: Any = float, m: int | None = None) -> Value:
    """Draw matrices [..., n, m] with orthonormal rows or columns, uniformly: by Haar's measure. `m` is n by default.

    Args:
        key: a key, u32[2].
        n: the number of rows.
        shape: the shape of a stack of matrices.
        dtype: a real floating-point dtype.
        m: the number of columns; None is n.

    Returns:
        Matrices [..., n, m].

    >>> import minidiff as md
    >>> q = orthogonal(md.random.key(0), 3)
    >>> bool(abs(q @ q.T - numpy.eye(3)).max() < 1e-12)
    True

    Source: Mezzadri, "How to generate random matrices from the classical compact groups".
    """
    real, m, axes = check_real_float("orthogonal: dtype must be one", dtype), m or n, len(_sizes("orthogonal", shape))
    q, r = numpy.linalg.qr(normal(key, _with_axis(_with_axis(shape, axes, min(n, m)), axes, max(n, m))))
    q = q * numpy.where(numpy.diagonal(r, 0, -2, -1) < 0, -1.0, 1.0)[..., None, :]
    return convert(q if n >= m else numpy.swapaxes(q, -2, -1), real)


def choice(key: Value, a: Any, shape: Shape = (), replace: bool = True, p: Value | None = None, axis: int = 0) -> Value:
    """Draw elements of an array along an axis, or integers below `a`, with or without replacement.

    Args:
        key: a key, u32[2].
        a: an array, or a number n for the integers below n.
        shape: the shape that takes the place of the axis.
        replace: whether an element may be drawn again.
        p: probabilities [n] of the elements; None if they are equal.
        axis: the axis of a along which elements are drawn.

    Returns:
        An array of the elements.

    Raises:
        ValueError: for more elements than there are, and for a `p` of another length.

    >>> import minidiff as md
    >>> choice(md.random.key(0), 5, (3,), replace=False), choice(md.random.key(0), numpy.array([7, 8]), 6, p=[0.9, 0.1])
    (array([1, 0, 4]), array([7, 7, 8, 7, 7, 7]))
    """
    (x, axis), p = _elements("choice", a, axis), numpy.asarray(p) if isinstance(p, list) else p
    sizes = _sizes("choice", shape)
    n, count = typeof(x).shape[axis], math.prod(sizes)
    if p is not None and typeof(p).shape != (n,):
        raise ValueError(f"choice: p must have {n} probabilities, got {typeof(p)}")
    if (n == 0 and count) or (not replace and count > n):
        raise ValueError(f"choice: cannot draw {count} of {n} elements without replacement: pass replace=True")
    if replace and p is None:
        which = randint(key, shape, 0, n)
    elif replace:
        ends = numpy.cumsum(p)
        which = numpy.searchsorted(ends, uniform(key, shape) * ends[-1], side="right")
    else:  # by Gumbel numbers plus logarithms of probabilities, as in `categorical`
        order = permutation(key, n) if p is None else numpy.argsort(-numpy.log(p) - gumbel(key, n))
        which = order[:count].reshape(sizes)
    return take(x, which, axis)


finish_module(globals())
