"""Mathematical functions of kernels, each by reducing its argument to a small range, and a polynomial there.

A function writes the instructions for one element (`ir.py`), without branches: what depends on a condition is computed
both ways, and selected. So LLVM can compute several elements at once. The coefficients are those of nearly minimax
polynomials on the range that is stated; the functions of float32 that have no shorter ones are computed in float64.

Errors are at most 2 units in the last place. NaN, infinities, signed zeros and subnormal numbers give what NumPy gives.
Where a function has no value, or overflows, the kernel says so (`warn_where`), and NumPy warns of it; arguments for
which this would take much longer, such as sin(1e300), are left to NumPy (`leave_to_numpy`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy

from minidiff.compiler.ir import (
    Value,
    bits,
    convert,
    copysign,
    floor,
    fma,
    from_bits,
    horner,
    leave_to_numpy,
    muladd,
    polynomial,
    select,
    warn_where,
)


class FloatFormat(NamedTuple):
    """The differences of float64 and float32: how numbers are laid out, and the polynomials that are long enough."""

    digits: int  # of the significand, without the leading one
    bias: int  # of the exponent
    ln2: tuple[float, float]  # the first part has trailing zeros: its products with exponents are exact
    exp: tuple[float, ...]  # (exp(r) - 1 - r) / r², |r| <= ln(2) / 2
    tanh: tuple[float, ...]  # (tanh(r) / r - 1) / r² in r², |r| <= 0.2558
    log: tuple[float, ...]  # (log((1 + s) / (1 - s)) / s - 2) / s² in s², |s| <= (sqrt(2) - 1) / (sqrt(2) + 1)
    sin: tuple[float, ...]  # (sin(r) / r - 1) / r² in r², |r| <= pi / 4
    cos: tuple[float, ...]  # (cos(r) - 1 + r² / 2) / r⁴ in r²
    erf: tuple[float, ...]  # erf(x) / x - 1 in x², |x| <= 1
    erfc: tuple[float, ...]  # ((1 + 2x) exp(x²) erfc(x) - 1) / w in 2w - 1, w = x / (x + c), x >= 0
    erfc_range: tuple[float, float]  # c, and an x with erfc(x) = 0


FORMATS = {
    numpy.dtype("f8"): FloatFormat(
        digits=52,
        bias=1023,
        ln2=(0.6931471803691238, 1.9082149292705877e-10),
        exp=(
            *(0.5000000000000001, 0.16666666666666669, 0.04166666666662413, 0.008333333333330062),
            *(0.0013888888917213717, 0.00019841269863053618, 2.4801521295954376e-05, 2.7557268459997064e-06),
            *(2.7620088445409746e-07, 2.510038549551032e-08),
        ),
        tanh=(
            *(-0.3333333333333261, 0.13333333333050326, -0.05396825359334722, 0.02186946496648511),
            *(-0.00886244151357325, 0.003577367908213764, -0.0013121555570808133),
        ),
        log=(
            *(0.666666666666667, 0.399999999998992, 0.2857142862611452, 0.22222211112104948),
            *(0.1818289077802613, 0.15331666676597175, 0.146171283998073),
        ),
        sin=(
            *(-0.16666666666666666, 0.008333333333330945, -0.00019841269836753166, 2.7557316099748184e-06),
            *(-2.5051131260640362e-08, 1.5918087200100518e-10),
        ),
        cos=(
            *(0.041666666666666664, -0.0013888888888887395, 2.4801587298762304e-05, -2.7557317269975503e-07),
            *(2.0876145902833164e-09, -1.1382606091400289e-11),
        ),
        erf=(
            *(0.1283791670955126, -0.3761263890318375, 0.11283791670954879, -0.026866170645076792),
            *(0.0052239776248180145, -0.000854832698083379, 0.0001205533111164271, -1.4925595266831182e-05),
            *(1.6461000484121368e-06, -1.6350312701054695e-07, 1.4659775274047436e-08, -1.1372848856791674e-09),
            *(5.957176147748911e-11,),
        ),
        erfc=(
            *(0.4950302264023282, -0.7722528936190728, 0.7173393312372881, -0.4903243439645919),
            *(0.25236656217730696, -0.09206858953267794, 0.018147422979890655, 0.002149871159914084),
            *(-0.0025249620823451476, 0.00037471270517065453, 0.00023538203572644322, -8.52953002166571e-05),
            *(-2.3033429344650698e-05, 1.425467418214612e-05, 2.9461284311182195e-06, -2.2963883942168305e-06),
            *(-5.317588392585133e-07, 3.465641363213015e-07, 1.0873017178176848e-07, -3.6264503368365845e-08),
            *(-1.5447071547884196e-08,),
        ),
        erfc_range=(3.25, 27.3),
    ),
    numpy.dtype("f4"): FloatFormat(
        digits=23,
        bias=127,
        ln2=(0.693115234375, 3.1946184945309415e-05),
        exp=(0.5, 0.16666576989698775, 0.041666554617204574, 0.008363179052722578, 0.0013926183587713494),
        tanh=(-0.3333322726374979, 0.13323417958836298, -0.051318944199707034),
        log=(0.6666666655426973, 0.40000122025712326, 0.2855079973020907, 0.23331040834029354),
        sin=(-0.1666666666385192, 0.008333331873400462, -0.00019840086027941126, 2.724983408581523e-06),
        cos=(0.04166666666431839, -0.0013888887670923714, 2.4800599786719477e-05, -2.7300882653907253e-07),
        erf=(
            *(0.12837916572671226, -0.37612625824212476, 0.11283585148326251, -0.02685381192310444),
            *(0.005188327663230054, -0.0008010193435093642, 7.853860750072931e-05),
        ),
        erfc=(
            *(0.5235944331366571, -0.7772668353282914, 0.6079560503433783, -0.3045228481183948),
            *(0.0851624129265975, 0.0007314278612162595, -0.009495905939937852, 0.0013256632044724547),
            *(0.001054604426330948,),
        ),
        erfc_range=(2.625, 10.1),
    ),
}

Function = Callable[..., Value]


def _in_double(f: Function) -> Function:
    """A function whose float32 version is that of float64, rounded."""

    @functools.wraps(f)
    def computed(*operands: Value) -> Value:
        double = numpy.dtype("f8")
        return convert(f(*[convert(x, double) for x in operands]), operands[0].dtype)

    return computed


# ---------------------------------------------------------------- powers of two


def _round(x: Value) -> tuple[Value, Value]:
    """The nearest integer, as a floating-point number and as an integer, if |x| is at most 2²⁰.

    Adding 1.5 · 2⁵² (2²³ in float32) leaves no bits for a fraction: the last bits of the sum are the integer.
    """
    magic = 1.5 * 2.0 ** FORMATS[x.dtype].digits
    shifted = x + magic
    return shifted - magic, bits(shifted) - bits(x.constant(magic))


def _as_float(n: Value, dtype: numpy.dtype) -> Value:
    """A small integer as a floating-point number: the inverse of `_round`."""
    magic = n.constant(1.5 * 2.0 ** FORMATS[dtype].digits, dtype)
    return from_bits(n + bits(magic)) - magic


def _power_of_two(n: Value) -> Value:
    """2ⁿ, from its bits, for integers n that are exponents of normal numbers."""
    form = FORMATS[numpy.dtype(f"f{n.dtype.itemsize}")]
    return from_bits((n + form.bias) << form.digits)


def _times_power_of_two(x: Value, n: Value) -> Value:
    """x · 2ⁿ in two steps, so that it overflows or becomes subnormal only if the result does."""
    half = n >> 1
    return x * _power_of_two(half) * _power_of_two(n - half)


def _clamp(x: Value, least: float, most: float) -> Value:
    """x between two bounds; NaN stays NaN."""
    return select(x < least, least, select(x > most, most, x))


# ---------------------------------------------------------------- exp and what follows from it


def _exp_parts(x: Value, low: Value | None = None) -> tuple[Value, Value, Value]:
    """Return e, its rounding error, and n, with exp(x + low) = (1 + e) · 2ⁿ.

    x = n ln(2) + r, and e = exp(r) - 1 by a polynomial.
    """
    form = FORMATS[x.dtype]
    k, n = _round(x * (1 / math.log(2)))
    high = muladd(-k, k.constant(form.ln2[0]), x)  # exact
    rest = -k * form.ln2[1] if low is None else low - k * form.ln2[1]
    r = high + rest
    rest = muladd(r * r, polynomial(r, *form.exp), rest)
    e = high + rest
    return e, (high - e) + rest, n


def _exp_range(x: Value) -> Value:
    """x, or a bound beyond which exp(x) and exp(x) / 2 overflow, or are 0."""
    most = 89.5 if x.dtype.itemsize == 4 else 711.0
    return _clamp(x, -1.2 * most, most)


def exp(x: Value) -> Value:
    """The exponential function."""
    e, _, n = _exp_parts(_exp_range(x))
    return _times_power_of_two(1 + e, n)


def expm1(x: Value) -> Value:
    """exp(x) - 1 = (e + (1 - 2⁻ⁿ)) 2ⁿ, which is accurate near 0, where n = 0."""
    least = -25.0 if x.dtype.itemsize == 4 else -45.0
    bounded = select(x < least, least, _exp_range(x))
    e, e_low, n = _exp_parts(bounded)
    inverse = select(n > 60, 0.0, _power_of_two(-select(n > 60, 60, n)))
    total, lost = _two_sum(1 - inverse, e)
    # Where x is 0, or so small that its square vanishes, the result is x, with its sign.
    return select(abs(x) < 1e-20, x, _times_power_of_two(total + (lost + e_low), n))


def sigmoid(x: Value) -> Value:
    """1 / (1 + q) for x >= 0, and q / (1 + q) else, with q = exp(-|x|): accurate in both tails."""
    most = 107.0 if x.dtype.itemsize == 4 else 853.0
    e, e_low, n = _exp_parts(select(abs(x) > most, -most, -abs(x)))
    high = 1 + e
    low = (e - (high - 1)) + e_low
    q, left = _times_power_of_two(high, n), x < 0.0
    y = select(left, q, 1.0) / (1 + q)
    return muladd(y, select(left, low * (2 - high), 0.0), y)


def tanh(x: Value) -> Value:
    """With |x| = n ln(2) / 2 + r, p = 2⁻ⁿ and u = tanh(r): 1 - p + p ((3 - p) u - (1 - p)) / (1 + p + (1 - p) u).

    That is (q - 1) / (q + 1) for q = exp(2|x|) = 2ⁿ (1 + u) / (1 - u), with small terms added last. A larger r for a
    smaller n, which is 0 up to tanh(x) = 1/4, leaves fewer rounding errors.
    """
    form, most = FORMATS[x.dtype], 10.0 if x.dtype.itemsize == 4 else 20.0
    size = select(abs(x) > most, most, abs(x))
    k, n = _round(muladd(size, size.constant(2 / math.log(2)), -0.237))
    r = muladd(-k, k.constant(form.ln2[1] / 2), muladd(-k, k.constant(form.ln2[0] / 2), size))
    square = r * r
    u = muladd(r * square, horner(square, *form.tanh), r)
    p = _power_of_two(-n)
    near = 1 - p
    return copysign(muladd(p, muladd(2 + near, u, -near) / muladd(near, u, 2 - near), near), x)


# ---------------------------------------------------------------- logarithms


def _mantissa(x: Value) -> tuple[Value, Value]:
    """m from sqrt(1/2) to sqrt(2), and the integer k, with x = m · 2ᵏ, for positive normal numbers."""
    form = FORMATS[x.dtype]
    k = (bits(x) - bits(x.constant(math.sqrt(0.5)))) >> form.digits
    return from_bits(bits(x) - (k << form.digits)), k


def _normal(x: Value) -> tuple[Value, Value]:
    """A positive number scaled to be normal, and the exponent by which it was."""
    form = FORMATS[x.dtype]
    small = x < 2.0 ** (1 - form.bias)
    by = form.digits + 2
    return select(small, x * 2.0**by, x), select(small, bits(x).constant(-by), 0)


def _log_of_mantissa(f: Value) -> Value:
    """log(1 + f) - f, for 1 + f from sqrt(1/2) to sqrt(2): by s = f / (2 + f), for which 1 + f = (1 + s) / (1 - s)."""
    s = f / (2 + f)
    z, half_square = s * s, 0.5 * f * f
    return s * (half_square + z * polynomial(z, *FORMATS[f.dtype].log)) - half_square


def _log_parts(x: Value) -> tuple[Value, Value, Value]:
    """k as a number, f, and log(1 + f) - f, with x = (1 + f) · 2ᵏ."""
    normal, by = _normal(x)
    m, k = _mantissa(normal)
    f = m - 1
    return _as_float(k + by, x.dtype), f, _log_of_mantissa(f)


def _at_edges(x: Value, y: Value) -> Value:
    """A logarithm at 0, at infinity, and of negative numbers, where it is -inf, inf and NaN."""
    warn_where(x <= 0.0)
    edge = select(x == 0.0, -math.inf, select(x < 0.0, x.constant(math.nan), x))
    return select((x > 0.0) & (x < math.inf), y, edge)


def log(x: Value) -> Value:
    """The natural logarithm: log(m) + k ln(2)."""
    k, f, rest = _log_parts(x)
    high, low = FORMATS[x.dtype].ln2
    return _at_edges(x, k * high + (f + muladd(k, low, rest)))


def log1p(x: Value) -> Value:
    """log(1 + x): that of the rounded sum u, corrected by what the rounding lost, divided by u."""
    form = FORMATS[x.dtype]
    u = 1 + x
    big = abs(x) > 1.0
    lost = select(big, 1 - (u - x), x - (u - 1))
    m, k = _mantissa(select(u > 0.0, select(u < math.inf, u, 1.0), 1.0))
    same = k == 0
    f = select(same, x, m - 1)
    correction = select(same, 0.0, lost / select(same, 1.0, u))
    number = _as_float(k, x.dtype)
    y = number * form.ln2[0] + (f + (_log_of_mantissa(f) + muladd(number, form.ln2[1], correction)))
    return select(x == 0.0, x, _at_edges(u, y))


# ---------------------------------------------------------------- angles


def _reduce_angle(x: Value) -> tuple[Value, Value, Value]:
    """Return r, its rounding error, and n, with x = n π/2 + r and |r| <= π/4.

    π/2 is taken in three parts. The products of n with the first two are exact.
    """
    if x.dtype.itemsize == 4:  # in float64, where the reduced angle has enough digits
        r, _, n = _reduce_angle(convert(x, numpy.dtype("f8")))
        short = convert(r, x.dtype)
        return short, convert(r - convert(short, r.dtype), x.dtype), convert(n, numpy.dtype("i4"))
    leave_to_numpy(abs(x) > 1e6)
    k, n = _round(select(abs(x) > 1e6, 0.0, x) * (2 / math.pi))
    first, second, third = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
    r, product = x - k * first, k * second
    high = r - product
    back = high - r
    lost = (r - (high - back)) - (product + back)
    low = lost - k * third
    reduced = high + low
    return reduced, (high - reduced) + low, n


def _sin_of_reduced(r: Value, low: Value) -> Value:
    z = r * r
    cube = z * r
    tail = polynomial(z, *FORMATS[r.dtype].sin[1:])
    rest = (z * (0.5 * low - cube * tail) - low) - cube * FORMATS[r.dtype].sin[0]
    return r - rest


def _cos_of_reduced(r: Value, low: Value) -> Value:
    z = r * r
    half = 0.5 * z
    w = 1 - half
    rest = ((1 - w) - half) + (z * (z * polynomial(z, *FORMATS[r.dtype].cos)) - r * low)
    return w + rest


def sin(x: Value) -> Value:
    """The sine: of the reduced angle the sine or the cosine, with a sign."""
    r, low, n = _reduce_angle(x)
    y = select((n & 1) == 0, _sin_of_reduced(r, low), _cos_of_reduced(r, low))
    return select(x == 0.0, x, select((n & 2) == 0, y, -y))


def cos(x: Value) -> Value:
    """The cosine."""
    r, low, n = _reduce_angle(x)
    y = select((n & 1) == 0, _cos_of_reduced(r, low), _sin_of_reduced(r, low))
    return select(((n + 1) & 2) == 0, y, -y)


# ---------------------------------------------------------------- powers

#: (log((1 + s) / (1 - s)) / s - 2 - 2/3 s²) / s⁴ in s².
LOG_REST = (
    *(0.4, 0.2857142857142937, 0.222222222216545, 0.1818181833570672),
    *(0.1538459492898411, 0.133348065173055, 0.11706187519978793, 0.11723689023649227),
)


def _log_in_two_parts(x: Value) -> tuple[Value, Value]:
    """Return log(x) as a sum of two numbers, with a relative error of about 2⁻⁶⁵, for positive x."""
    normal, by = _normal(x)
    m, n = _mantissa(normal)
    k = _as_float(n + by, x.dtype)
    f, d = m - 1, m + 1
    d_low = m - (d - 1)
    s = f / d
    s_low = (fma(-s, d, f) - s * d_low) / d
    z = s * s
    z_low = fma(s, s, -z) + 2 * s * s_low
    w = z * polynomial(z, *LOG_REST)
    p = w + 2 / 3
    p_low = (2 / 3 - p + w) + 3.700743415417188e-17  # 2/3 has more digits than a number
    cube = s * z
    cube_low = fma(s, z, -cube) + (s * z_low + s_low * z)
    t = cube * p
    t_low = fma(cube, p, -t) + (cube * p_low + cube_low * p)
    high, low = FORMATS[x.dtype].ln2
    total, lost = _two_sum(k * high, 2 * s)
    total, more = _two_sum(total, t)
    rest = lost + (more + (2 * s_low + (t_low + k * low)))
    return _two_sum(total, rest)


def _two_sum(x: Value, y: Value) -> tuple[Value, Value]:
    """A rounded sum, and what the rounding lost."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


@_in_double
def power(x: Value, y: Value) -> Value:
    """|x|ʸ = exp(y log|x|), with a logarithm of 65 digits, since y may be large; and the sign of x if y is odd."""
    size = abs(x)
    plain = (size > 0.0) & (size < math.inf)
    high, low = _log_in_two_parts(select(plain, size, 1.0))
    bounded = _clamp(y, -1e300, 1e300)
    product = bounded * high
    lost = fma(bounded, high, -product) + bounded * low
    inside = abs(product) < 760.0
    e, _, n = _exp_parts(_exp_range(product), select(inside, lost, 0.0))
    result = _times_power_of_two(1 + e, n)
    grows = (y > 0.0) == (size > 1.0)
    at_infinity = select(size == 1.0, 1.0, select(grows, x.constant(math.inf), 0.0))
    result = select(plain & (abs(y) < math.inf), result, at_infinity)
    whole = floor(y) == y
    half = y * 0.5
    odd = whole & (floor(half) != half) & (abs(y) < math.inf)
    negative = bits(x) < 0
    warn_where(((x == 0.0) & (y < 0.0)) | (abs(y) == math.inf))
    without_value = (x < 0.0) & ~whole & (size < math.inf)
    warn_where(without_value)
    result = select(negative & odd, -result, result)
    result = select(without_value, x.constant(math.nan), result)
    result = select((x != x) | (y != y), x + y, result)
    return select((y == 0.0) | (x == 1.0), 1.0, result)


# ---------------------------------------------------------------- the error function


def _erfc_of_positive(x: Value) -> Value:
    """erfc(x) for x >= 0: a smooth function of w, which maps all such x to less than 1, times exp(-x²) / (1 + 2x)."""
    form = FORMATS[x.dtype]
    middle, most = form.erfc_range
    x = select(x > most, most, x)
    w = x / (x + middle)
    rest = w * horner(2 * w - 1, *form.erfc)
    smooth, whole = 1 + rest, muladd(x, x.constant(2.0), 1)
    q = smooth / whole
    smooth_low, whole_low = (1 - smooth) + rest, muladd(x, x.constant(2.0), 1 - whole)
    inverse = q * muladd(smooth, smooth.constant(-0.78), 1.78)  # of `whole`, to two digits
    q_low = muladd(-q, whole_low, fma(-q, whole, smooth) + smooth_low) * inverse
    square = x * x
    e, _, n = _exp_parts(-square, -fma(x, x, -square))
    return _times_power_of_two(q + muladd(q, e, q_low), n)


def erf(x: Value) -> Value:
    """The error function: x times a polynomial up to 1, and 1 - erfc(x) beyond."""
    size, is_small = abs(x), abs(x) < 1.0
    small = select(is_small, size, 0.0)  # others could overflow
    near = small + small * horner(small * small, *FORMATS[x.dtype].erf)
    return copysign(select(is_small, near, 1 - _erfc_of_positive(size)), x)


def erfc(x: Value) -> Value:
    """1 - erf(x), which is 2 - erfc(-x)."""
    y = _erfc_of_positive(abs(x))
    return select(x < 0.0, 2 - y, y)


#: The functions, by the names that NumPy has for them.
FUNCTIONS: dict[str, Function] = {
    f.__name__: f for f in (exp, expm1, sigmoid, tanh, log, log1p, sin, cos, power, erf, erfc)
}
