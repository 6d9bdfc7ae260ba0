"""The hash, shapes and blocks of draws, and keys."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from minidiff.ops.base import bind_aligned, convert
from minidiff.ops.dimensions import Dimensions, Types, broadcast_labels, dimension_labels
from minidiff.ops.discrete import Discrete
from minidiff.ops.special import CHUNK

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


def sizes_of(name: str, shape: Any) -> tuple[int, ...]:
    """The shape that a draw has."""
    if isinstance(shape, Block):
        return shape.shape
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, (tuple, list)) else (operator.index(shape),)
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: a shape has no negative sizes, got {sizes}")
    return sizes


def check_broadcasts(name: str, shape: Any, **operands: Any) -> None:
    """Raise ValueError unless the operands broadcast to the shape of the draw."""
    sizes = sizes_of(name, shape)
    for what, x in operands.items():
        own = typeof(x).shape
        if len(own) > len(sizes) or any(n not in (1, m) for n, m in zip(own[::-1], sizes[::-1])):
            raise ValueError(f"{name}: {what}, {typeof(x)}, does not broadcast to the shape {sizes}")


def with_axis(shape: Any, place: int, n: int) -> Any:
    """The shape of a draw, with one more axis of n numbers at `place`; a block has all of these."""
    if isinstance(shape, Block):
        sizes, starts, whole = ((*x[:place], k, *x[place:]) for x, k in zip(vars(shape).values(), (n, 0, n)))
        return Block(sizes, starts, whole)
    sizes = sizes_of("shape", shape)
    return (*sizes[:place], n, *sizes[place:])


# ---------------------------------------------------------------- keys


def random_bits(name: str, key: Any, shape: Any, first: Any = 0) -> Value:
    """Random bits u64 of a shape, or of a block; the counter of the first is `first`."""
    k0, k1 = _words_of(name, key)
    sizes = sizes_of(name, shape)
    whole = shape.whole if isinstance(shape, Block) else sizes
    strides = tuple(math.prod(whole[d + 1 :]) for d in range(len(whole)))
    if isinstance(shape, Block):
        for start, stride in zip(shape.starts, strides):
            first = first + start * stride
    return random_bits_p.bind(k0, k1, as_unsigned(first), sizes=sizes, strides=strides)


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


def as_unsigned(x: Any) -> Value:
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
            return as_unsigned(x)
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
    return _words(random_bits("split", key, num))


def fold_in(key: Value, data: Any) -> Value:
    """Make a key from a key and an integer, such as the number of a layer, of a step, or of a rank.

    It is key number `data` of `split(key, num)`, for any larger num. Integers (Python's, NumPy's or traced) count
    modulo 2**64: -1 is 2**64 - 1. Raises ValueError for an integer of more than 64 bits, TypeError for anything else.

    >>> import minidiff as md
    >>> bool((fold_in(md.random.key(0), 1) == split(md.random.key(0))[1]).all())
    True
    """
    return _words(random_bits("fold_in", key, (), _integer("fold_in", "the data", data)))
