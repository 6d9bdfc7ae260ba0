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

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.diagnostics.other_libraries import module_getattr
from minidiff.diagnostics.tracebacks import hide_frames_of
from minidiff.inputs.arguments import normalize_axis
from minidiff.ops.base import bind_aligned, convert
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels, dimension_labels
from minidiff.ops.discrete import Discrete
from minidiff.ops.indexing import take
from minidiff.ops.special import CHUNK, erfc_p, ndtri_p
from minidiff.values.dtypes import check_real_float, dtype_name, finfo

__all__ = [
    *("Block", "bernoulli", "bits", "categorical", "fold_in", "key", "normal", "permutation", "randint", "split"),
    *("truncated_normal", "uniform"),
]
__dir__ = functools.partial(sorted, __all__)

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
    lead = numpy.broadcast_shapes(*map(numpy.shape, (k0, k1, first)))
    counters = numpy.broadcast_to(first, lead)
    for n, stride in zip(sizes, strides):
        counters = numpy.add.outer(counters, numpy.arange(n, dtype=numpy.uint64) * numpy.uint64(stride))
    out, keys = numpy.empty(counters.shape, numpy.uint64), [_of_each(k, lead, counters.shape) for k in (k0, k1)]
    counters, flat, word = counters.reshape(-1), out.reshape(-1), numpy.uint64(32)
    for i in range(0, flat.size, CHUNK):
        part = slice(i, i + CHUNK)
        x, own = counters[part], [k if k.size == 1 else k[part] for k in keys]
        high, low = threefry2x32(*own, (x >> word).astype(numpy.uint32), x.astype(numpy.uint32))
        flat[part] = (high.astype(numpy.uint64) << word) | low
    return out[()]


def _of_each(k: Any, lead: tuple[int, ...], shape: tuple[int, ...]) -> numpy.ndarray:
    """One word of the key of each number in a draw of this shape, flat; a single one if all keys are the same."""
    if numpy.size(k) == 1:
        return numpy.reshape(k, 1)
    own = numpy.broadcast_to(k, lead)
    return numpy.broadcast_to(own.reshape(*lead, *[1] * (len(shape) - len(lead))), shape).reshape(-1)


def _random_bits_shape(k0, k1, first, sizes, strides):
    return (*numpy.broadcast_shapes(k0.shape, k1.shape, first.shape), *sizes), numpy.dtype(numpy.uint64)


def _random_bits_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Batches of keys may be split: each part draws its own numbers."""
    lead = outs[0].shape[: outs[0].ndim - len(params["sizes"])]
    return Dimensions(tuple(broadcast_labels(t.shape, lead) for t in types), dimension_labels(outs))


#: Hash the counters `first + i @ strides`, for all indices i below `sizes`, by the key with the words k0 and k1: u64 of
#: shape `sizes`. Batches of the three operands broadcast, and come first in the result.
random_bits_p = Discrete(
    "random_bits",
    _random_bits_impl,
    _random_bits_shape,
    bind_aligned,
    fits=lambda k0, k1, first, sizes, strides: len(sizes) == len(strides),
    sharding=_random_bits_dimensions,
)

# ---------------------------------------------------------------- shapes and blocks


@dataclass(frozen=True)
class Block:
    """A block of a larger draw: an array of this `shape`, which begins at index `starts` of a draw of shape `whole`.

    Functions take it in place of a shape. The starts may be traced, and may differ from rank to rank:
    `spmd.local_block` makes the block of a rank from a partition spec. Raises ValueError for a block that is not inside
    the whole.

    >>> import minidiff as md
    >>> key = md.random.key(0)
    >>> md.random.bits(key, (3, 4))[1:, 2:] == md.random.bits(key, Block((2, 2), (1, 2), (3, 4)))
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
    """The shape that a draw has."""
    if isinstance(shape, Block):
        return shape.shape
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, (tuple, list)) else (operator.index(shape),)
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: a shape has no negative sizes, got {sizes}")
    return sizes


def _check_broadcasts(name: str, shape: Any, **operands: Any) -> None:
    """Raise ValueError unless the operands broadcast to the shape of the draw."""
    sizes = _sizes(name, shape)
    for what, x in operands.items():
        own = typeof(x).shape
        if len(own) > len(sizes) or any(n not in (1, m) for n, m in zip(own[::-1], sizes[::-1])):
            raise ValueError(f"{name}: {what}, {typeof(x)}, does not broadcast to the shape {sizes}")


# ---------------------------------------------------------------- keys


def _random_bits(name: str, key: Any, shape: Any, first: Any = 0) -> Value:
    """Random bits u64 of a shape, or of a block; the counter of the first is `first`."""
    k0, k1 = _words_of(name, key)
    sizes = _sizes(name, shape)
    whole = shape.whole if isinstance(shape, Block) else sizes
    strides = tuple(math.prod(whole[d + 1 :]) for d in range(len(whole)))
    if isinstance(shape, Block):
        for start, stride in zip(shape.starts, strides):
            first = first + start * stride
    return random_bits_p.bind(k0, k1, _as_unsigned(first), sizes=sizes, strides=strides)


def _words_of(name: str, key: Any) -> tuple[Value, Value]:
    """The two words of a key, checked."""
    is_array = isinstance(key, (numpy.ndarray, Tracer))
    if is_array and typeof(key).shape == (2,) and typeof(key).dtype == numpy.uint32:
        return key[0], key[1]
    stacked = is_array and typeof(key).dtype == numpy.uint32 and typeof(key).shape[-1:] == (2,)
    raise TypeError(
        f"{name}: a key is an array u32[2], got {typeof(key) if is_array else repr(key)}: "
        + ("call it on each key of the stack, by vmap" if stacked else "make one by md.random.key(seed)")
    )


def _as_unsigned(x: Any) -> Value:
    """An integer as u64, modulo 2**64."""
    return numpy.uint64(x % 2**64) if isinstance(x, int) else convert(x, numpy.uint64)


def _words(x: Value) -> Value:
    """Split u64[...] into keys u32[..., 2]."""
    return numpy.stack([convert(numpy.right_shift(x, numpy.uint64(32)), numpy.uint32), convert(x, numpy.uint32)], -1)


def _integer(name: str, what: str, x: Any) -> Value:
    """Check that `x` is one integer, and return it as u64."""
    if isinstance(x, (int, numpy.integer, numpy.ndarray, Tracer)) and not isinstance(x, bool):
        t = None if isinstance(x, int) else typeof(x)
        if t is None and not -(2**63) <= x < 2**64:
            raise ValueError(f"{name}: {what} has 64 bits, got {x}")
        if t is None or (t.shape == () and t.dtype.kind in "iu"):
            return _as_unsigned(x)
    shown = typeof(x) if isinstance(x, (numpy.ndarray, Tracer)) else repr(x)
    raise TypeError(f"{name}: {what} is one integer, got {shown}")


def key(seed: Any) -> Value:
    """Make a key u32[2] from an integer, which may be traced.

    >>> key(42)
    array([ 0, 42], dtype=uint32)
    """
    return _words(_integer("key", "the seed", seed))


def split(key: Value, num: Shape = 2) -> Value:
    """Make `num` keys from one, stacked: u32[num, 2]; `num` may also be a shape.

    Use the new keys in place of the old one.

    >>> import minidiff as md
    >>> first, second = split(md.random.key(0))
    >>> first, second
    (array([1797259609, 2579123966], dtype=uint32), array([ 928981903, 3453687069], dtype=uint32))
    """
    return _words(_random_bits("split", key, num))


def fold_in(key: Value, data: Any) -> Value:
    """Make a key from a key and an integer, such as the number of a layer, of a step, or of a rank.

    It is key number `data` of `split(key, num)`, for any larger num. Integers (Python's, NumPy's or traced) count
    modulo 2**64: -1 is 2**64 - 1. Raises ValueError for an integer of more than 64 bits, TypeError for anything else.

    >>> import minidiff as md
    >>> bool((fold_in(md.random.key(0), 1) == split(md.random.key(0))[1]).all())
    True
    """
    return _words(_random_bits("fold_in", key, (), _integer("fold_in", "the data", data)))


# ---------------------------------------------------------------- draws


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
    drawn = _random_bits("bits", key, shape)
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
    drawn = numpy.right_shift(_random_bits("uniform", key, shape), numpy.uint64(64 - digits))
    unit = convert(drawn, dtype) * dtype.type(2.0**-digits)
    if type(minval) is type(maxval) is float and (minval, maxval) == (0.0, 1.0):
        return unit
    _check_broadcasts("uniform", shape, minval=minval, maxval=maxval)
    minval, maxval = convert(minval, dtype), convert(maxval, dtype)
    return unit * (maxval - minval) + minval


def _inside_unit(name: str, key: Value, shape: Shape) -> Value:
    """Numbers in (0, 1), without the end points, in double precision."""
    drawn = numpy.right_shift(_random_bits(name, key, shape), numpy.uint64(12))
    return (convert(drawn, float) + 0.5) * 2.0**-52


def normal(key: Value, shape: Shape = (), dtype: Any = float) -> Value:
    """Draw from the standard normal distribution: compute its quantiles at uniform numbers.

    >>> import minidiff as md
    >>> normal(md.random.key(0), 3).round(3)
    array([-0.206, -0.785,  1.816])
    """
    dtype = check_real_float("normal: the dtype is one", dtype)
    return convert(ndtri_p.bind(_inside_unit("normal", key, shape)), dtype)


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
    _check_broadcasts("truncated_normal", shape, lower=lower, upper=upper)
    if not any(isinstance(x, Tracer) for x in (lower, upper)) and numpy.any(numpy.greater(lower, upper)):
        raise ValueError(f"truncated_normal: [{lower}, {upper}] is not an interval: lower is above upper")
    lower, upper = convert(lower, float), convert(upper, float)
    # In the upper tail, probabilities are close to 1 and have few digits: draw in the lower tail.
    flip = numpy.greater(lower, 0)
    low, high = numpy.where(flip, -upper, lower), numpy.where(flip, -lower, upper)
    below, up_to = (0.5 * erfc_p.bind(x * -math.sqrt(0.5)) for x in (low, high))
    unit = _inside_unit("truncated_normal", key, shape)
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
    _check_broadcasts("randint", shape, minval=minval, maxval=maxval)
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
    first, end = _as_unsigned(minval), _as_unsigned(maxval)
    offset = numpy.remainder(_random_bits("randint", key, shape), numpy.subtract(end, first))
    return convert(numpy.add(first, offset), dtype)  # modulo 2**64; the operators of NumPy's scalars would warn


def bernoulli(key: Value, p: Value = 0.5, shape: Shape | None = None) -> Value:
    """Draw booleans that are True with probability `p`.

    `p` broadcasts to the shape, which by default is its own. Raises ValueError if it does not broadcast.

    >>> import minidiff as md
    >>> bernoulli(md.random.key(0), 0.25, 4)
    array([False,  True, False, False])
    """
    shape = typeof(p).shape if shape is None else shape
    _check_broadcasts("bernoulli", shape, p=p)
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
    return take(x, numpy.argsort(_random_bits("permutation", key, t.shape[axis])), axis)


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
    sizes = _sizes("categorical", shape)
    _check_broadcasts("categorical", sizes, logits=ShapedArray(batch, t.dtype))
    place, n = len(sizes) + 1 + axis, t.shape[axis]

    def with_axis(x: tuple, entry: int) -> tuple:
        return (*x[:place], entry, *x[place:])

    if isinstance(shape, Block):
        each: Any = Block(with_axis(sizes, n), with_axis(shape.starts, 0), with_axis(shape.whole, n))
    else:
        each = with_axis(sizes, n)
    return numpy.argmax(logits - numpy.log(-numpy.log(_inside_unit("categorical", key, each))), axis)


hide_frames_of(globals(), __all__)

if not TYPE_CHECKING:  # a type checker would infer from it that every name exists
    __getattr__ = module_getattr(__name__)
