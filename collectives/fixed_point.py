"""Floating-point numbers as integers of several words, which add without rounding, and back, rounded once.

A float is an integer times a power of two. Let `2**bottom` divide all addends, and let all be smaller than `2**top`:
their `window`. Then each is an integer of `top - bottom` bits, which is cut into words of `width` bits:

    x = 2**bottom * (words[0] + words[1] * 2**width + words[2] * 2**(2*width) + ...),   |words[j]| < 2**width

`to_words` cuts off the leading bits, the remainder is again a float, and so is every digit: nothing is rounded. Sums of
words are sums of int64. With N addends and `width = 61 - N.bit_length()`, the sum of a word is less than 2**61, so none
overflows. Integers add associatively: in any order and any grouping, of ranks or of blocks, the sums of the words are
the same integers, and they stand for the exact sum. `from_words` propagates carries, takes the 62 leading bits of the
result, and rounds once, to nearest, ties to even. (Bits further down matter only as "there are some", which the last of
the 62 records.) So the result is the float nearest to the exact sum. As there is only one, it depends on nothing else.
In particular it does not depend on the window, which may be that of a larger set of numbers.

The least `guard` bits of the first word count addends that are -0.0: a sum is -0.0 if all of them are, as in IEEE 754.
An integer has no infinity: `special_values` adds these and NaN as floats.

Sources: J. Demmel, H. D. Nguyen, "Parallel Reproducible Summation", 2015; W. Ahrens, J. Demmel, H. D. Nguyen,
"Algorithms for Efficient Reproducible Floating Point Summation", 2020 (bins of fixed exponents, of which they keep
the largest few; here a window has as many as it needs); U. Kulisch, "Computer Arithmetic and Validity", 2008.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

LEADING = 62  # bits from which a result is rounded; with a sign and a bit for carries they are an int64
PART = 2**14  # elements that are converted together
LEAST = -1074  # the logarithm of the least float64


class Grid(NamedTuple):
    """The grid by which numbers are cut: into `words` words of `width` bits; the least `guard` bits are zero."""

    bottom: int
    words: int
    width: int
    guard: int

    @staticmethod
    def of(top: int, bottom: int, addends: int) -> Grid:
        guard = addends.bit_length()
        bottom, width = max(bottom, LEAST) - guard, LEADING - 1 - guard
        return Grid(bottom, max(1, -(-(top - bottom) // width)), width, guard)


def window_of(x: numpy.ndarray, precision: int) -> list[int]:
    """Return top and -bottom of numbers of this precision, and whether some are not finite; ranks take the maximum."""
    sizes = numpy.abs(x)
    is_special = not numpy.isfinite(sizes.max(initial=0.0))
    sizes = numpy.where(numpy.isfinite(sizes), sizes, 0.0) if is_special else sizes
    least = sizes.min(initial=numpy.inf, where=sizes > 0)
    if least == numpy.inf:
        return [LEAST, LEAST, is_special]
    top, bottom = numpy.frexp([sizes.max(), least])[1].tolist()
    return [top, precision - bottom, is_special]


def to_words(x: numpy.ndarray, grid: Grid) -> numpy.ndarray:
    """Return the words of numbers, of zero for those that are not finite, along a last axis; the least first."""
    words = numpy.empty((*x.shape, grid.words), numpy.int64)
    remainder = numpy.where(numpy.isfinite(x), x, 0.0)
    for j in reversed(range(grid.words)):
        exponent = grid.bottom + j * grid.width
        words[..., j] = digit = numpy.trunc(_scale(remainder, -exponent))
        remainder = remainder - _scale(digit, exponent)
    words[..., 0] += numpy.signbit(x) & (x == 0)
    return words


def from_words(words: numpy.ndarray, grid: Grid, addends: int, precision: int) -> numpy.ndarray:
    """Return the numbers of this precision nearest to sums of so many addends, as float64, from sums of words."""
    digits = list(numpy.moveaxis(words, -1, 0).copy())
    zeros = digits[0] & _mask(grid.guard)
    digits[0] -= zeros
    _carry(digits, grid.width)
    sign = 1 - 2 * (digits[-1] < 0)
    digits = [sign * digit for digit in digits]
    _carry(digits, grid.width)
    bits, exponent = _leading_bits(digits, grid)
    lost = numpy.maximum(_bit_length(bits) - precision, 0)
    half, remainder = (numpy.int64(1) << lost) >> 1, bits & _mask(lost)
    is_up = (remainder > half) | ((remainder == half) & (lost > 0) & ((bits >> lost) & 1 == 1))
    sign = numpy.where((zeros == addends) & (addends > 0), -1, sign)
    return numpy.ldexp(sign * ((bits >> lost) + is_up).astype(float), (exponent + lost).astype(numpy.int32))


def in_parts(f: Callable, x: numpy.ndarray, last: int, *args: Any) -> numpy.ndarray:
    """Return `f(x, *args)` of each element, or row along the `last` axes: part by part, each of which fits a cache."""
    shape, row = x.shape[: x.ndim - last], x.shape[x.ndim - last :]
    flat = x.reshape((-1, *row))
    out = numpy.concatenate([f(flat[k : k + PART], *args) for k in range(0, len(flat) or 1, PART)])
    return out.reshape((*shape, *out.shape[1:]))


def _leading_bits(digits: list[numpy.ndarray], grid: Grid) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the leading bits of non-negative numbers, and their exponents; the last bit is 1 if a further one is."""
    bits = rest = numpy.zeros_like(digits[0])
    exponent, room = bits + grid.bottom, bits + LEADING
    for digit in reversed(digits):
        length = grid.width + (bits == 0) * (_bit_length(digit) - grid.width)
        lost = length - numpy.minimum(length, room)
        bits, rest = (bits << (length - lost)) | (digit >> lost), rest | (digit & _mask(lost))
        exponent, room = exponent + lost, room - length + lost
    return bits | (rest != 0), exponent


def _carry(digits: list[numpy.ndarray], width: int) -> None:
    """Propagate carries: all digits but the last, which has the sign, become non-negative."""
    for j in range(len(digits) - 1):
        digits[j + 1] = digits[j + 1] + (digits[j] >> width)
        digits[j] = digits[j] & _mask(width)


def _bit_length(n: numpy.ndarray) -> numpy.ndarray:
    """Return the numbers of bits of integers. Without its second bit, no float of one is the next power of two."""
    return numpy.frexp((n & ~(n >> 1)).astype(float))[1].astype(numpy.int64)


def _mask(bits: Any) -> Any:
    return (numpy.int64(1) << bits) - 1


def _scale(x: numpy.ndarray, exponent: int) -> numpy.ndarray:
    """Return `x * 2**exponent`, which is a float, or less than 1; in two steps, since the power may not be a float."""
    return x * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)
