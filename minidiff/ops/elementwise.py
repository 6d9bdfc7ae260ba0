"""Arithmetic, comparisons, and other elementwise functions.

To add one, add a line: the NumPy function, and its derivative as a function of the result and the operands. It then
works in forward and reverse mode, to any order, under vmap and on ranks. The line may be in any module, and the
function may be any elementwise function of NumPy arrays:

>>> import minidiff as md, numpy as np
>>> def softsign(x):
...     return x / (1 + abs(x))
>>> softsign = elementwise(softsign, lambda out, x: (1 - abs(out)) ** 2)
>>> float(md.grad(softsign)(1.0))
0.25
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy

from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value, implements, unwrap_weak
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.location import warn_here
from minidiff.errors.tracebacks import trim_traceback
from minidiff.ops.arrays import lists_as_arrays
from minidiff.ops.base import (
    Elementwise,
    General,
    Linear,
    Multilinear,
    Promoting,
    broadcast_tangent,
    convert,
    defers_to,
    unbroadcast,
)
from minidiff.values.dtypes import NARROW, has_narrow

# ---------------------------------------------------------------- declaring operations


class ElementwiseFunction(Protocol):
    """A function that binds a primitive."""

    primitive: Any
    __name__: str
    __qualname__: str

    def __call__(self, *operands: Any) -> Any: ...


def function_of(primitive: Primitive) -> ElementwiseFunction:
    """Return the function that users call: it binds the primitive to its operands."""

    ufunc = primitive.impl if isinstance(primitive.impl, numpy.ufunc) else None

    def call(*operands: Value) -> Value:
        interpreter = current_interpreter()
        try:
            # NumPy passes traced values back to us.
            if interpreter is EVALUATE and ufunc is not None and not (NARROW and has_narrow(operands)):
                return ufunc(*operands)
            try:
                if interpreter.scope is None:
                    return interpreter.process(primitive, operands, {})
                return primitive.bind(*operands)
            except (AttributeError, TypeError):
                if any(map(defers_to, operands)):
                    return NotImplemented
                arrays = lists_as_arrays(operands)
                if arrays is None:
                    raise
            return function(*arrays)
        except BaseException as error:
            trim_traceback(error)
            raise

    function: Any = call
    function.primitive = primitive
    function.__name__ = function.__qualname__ = primitive.name
    function.__doc__ = f"`numpy.{primitive.name}`, differentiable."
    return function


def elementwise(numpy_function: Callable, *derivatives: Callable | None) -> ElementwiseFunction:
    """Declare an elementwise operation by a NumPy function and its derivatives.

    `derivatives[i](out, *operands)` is the derivative in operand i, or None where it is zero everywhere. For a
    complex operand it is the complex derivative; if the result is real, it is the number d such that Re(d * t) is the
    derivative in the direction t.
    """
    primitive = Elementwise(numpy_function.__name__, numpy_function, derivatives)
    return implements(numpy_function)(function_of(primitive))


def discrete(ufunc: numpy.ufunc) -> ElementwiseFunction:
    """Declare an elementwise operation with discrete or piecewise constant results."""
    return elementwise(ufunc, *[None] * ufunc.nin)


class LinearElementwise(Promoting, Linear):
    """An elementwise primitive that is linear in its operand."""


class Product(Promoting, Multilinear):
    """An elementwise primitive that is linear in each operand separately."""


def multilinear(
    numpy_function: Callable, *transposes: Callable | None, kind: type = Product, **traits: Any
) -> ElementwiseFunction:
    """Declare an elementwise multilinear operation, with a transpose per operand."""
    primitive = kind(numpy_function.__name__, numpy_function, transposes, **traits)
    return implements(numpy_function)(function_of(primitive))


def linear(numpy_function: Callable, transpose: Callable, **traits: Any) -> ElementwiseFunction:
    """Declare a linear elementwise operation by its `transpose(ct, operand)`."""
    rule = lambda ct, operands: [transpose(ct, operands[0])]  # noqa: E731
    primitive = LinearElementwise(numpy_function.__name__, numpy_function, rule, **traits)
    return implements(numpy_function)(function_of(primitive))


# ---------------------------------------------------------------- linear and multilinear


class Sum(Promoting):
    """`add` and `subtract`, linear in both operands; missing tangents are skipped."""

    def __init__(self, name: str, impl: Callable, *signs: int, **traits: Any):  # the first sign is 1
        super().__init__(name, impl, **traits)
        self.signs = signs

    def is_linear_in(self, positions, count):
        return positions == {0, 1}

    def tangent(self, out, primals, tangents, params):
        x, y = tangents
        if x is not None and y is not None:
            return self.bind(x, y)
        return broadcast_tangent(x if y is None else y if self.signs[1] > 0 else negative(y), out)

    def transpose(self, ct, operands, params):
        x, y = operands
        return [
            unbroadcast(ct, x) if type(x) is ShapedArray else None,
            unbroadcast(ct if self.signs[1] > 0 else negative(ct), y) if type(y) is ShapedArray else None,
        ]


class Divide(Product):
    """Division: linear in the numerator; in the denominator, d(x/y) = -(x/y)/y dy."""

    def residuals(self, i, count):
        return {0, 2} if i else {2}

    def term(self, i, t, out, primals, params):
        y = primals[1]
        return multiply(negative(divide(out, y)), t) if i else divide(t, y)

    def cotangent(self, i, ct, out, primals, type, params):
        y = primals[1]
        return unbroadcast(multiply(ct, negative(divide(out, y))) if i else divide(ct, y), type)


add = implements(numpy.add)(function_of(Sum("add", numpy.add, 1, 1, commutes=())))
subtract = implements(numpy.subtract)(function_of(Sum("subtract", numpy.subtract, 1, -1)))
negative = linear(numpy.negative, lambda ct, x: negative(ct))
deg2rad = linear(numpy.deg2rad, lambda ct, x: deg2rad(ct))
rad2deg = linear(numpy.rad2deg, lambda ct, x: rad2deg(ct))
radians = linear(numpy.radians, lambda ct, x: radians(ct))
degrees = linear(numpy.degrees, lambda ct, x: degrees(ct))
# These transposes follow from the pairing of cotangents and tangents, Re(sum(ct * t)).
real = linear(numpy.real, lambda ct, x: convert(ct, x.dtype), shares_memory=True)
imag = linear(numpy.imag, lambda ct, x: convert(multiply(ct, -1j), x.dtype), shares_memory=True)
#: A copy of x. Distributed arrays are never written into, so they are not copied.
_copied = lambda x: x.copy() if isinstance(x, numpy.ndarray) else x  # noqa: E731
copy = function_of(LinearElementwise("copy", _copied, lambda ct, operands: [ct]))
conjugate = linear(numpy.conjugate, lambda ct, x: conjugate(ct))
multiply = multilinear(
    numpy.multiply,
    lambda ct, operands: unbroadcast(multiply(ct, operands[1]), operands[0]),
    lambda ct, operands: unbroadcast(multiply(operands[0], ct), operands[1]),
    commutes=(),
)
divide = multilinear(
    numpy.divide, lambda ct, operands: unbroadcast(divide(ct, operands[1]), operands[0]), None, kind=Divide
)
ldexp = multilinear(numpy.ldexp, lambda ct, operands: unbroadcast(ldexp(ct, operands[1]), operands[0]), None)


#: The kinds of operations whose derivatives are elementwise, too.
WITH_FACTORS = (Elementwise, Product)


class Where(Promoting, General):
    """`where(condition, x, y)`, linear in x and y together."""


def _where_tangent(out, primals, tangents, params):
    condition, (_, tx, ty) = primals[0], tangents
    if tx is None and ty is None:
        return None
    return broadcast_tangent(where_p.bind(condition, 0.0 if tx is None else tx, 0.0 if ty is None else ty), out)


def _where_transpose(ct, operands):
    condition, x, y = operands
    return [
        unbroadcast(where_p.bind(condition, ct, 0.0), x) if isinstance(x, ShapedArray) else None,
        unbroadcast(where_p.bind(condition, 0.0, ct), y) if isinstance(y, ShapedArray) else None,
    ]


def _where_impl(condition: numpy.ndarray, x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    out = numpy.where(condition, x, y)
    return out if out.ndim else out[()]  # a scalar, as from all other operations


where_p = Where("where", _where_impl, _where_tangent, transpose_rule=_where_transpose)


@implements(numpy.where)
def where(condition: Value, x: Value = None, y: Value = None) -> Any:
    """`numpy.where`, differentiable in x and y; without these, `numpy.nonzero`."""
    if x is None and y is None:
        return numpy.nonzero(condition.concrete("np.where of a condition alone"))
    if x is None or y is None:
        raise ValueError("where: either both or neither of x and y should be given")
    return where_p.bind(unwrap_weak(condition), x, y)  # the condition's dtype does not take part in promotion


# ---------------------------------------------------------------- operations used by derivative rules


def difference_of(x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """x - y for arrays, where an infinity minus itself is 0."""
    with numpy.errstate(invalid="ignore"):
        return numpy.where(numpy.equal(x, y), 0, numpy.subtract(x, y))


def _larger(x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    dtype = numpy.result_type(x, y)
    return 0.5 * numpy.add(numpy.greater(x, y), numpy.greater_equal(x, y), dtype=dtype)


def sigmoid_of(x: numpy.ndarray) -> numpy.ndarray:
    """1 / (1 + exp(-x)) for an array."""
    small = numpy.exp(-numpy.fabs(x))  # at most 1: nothing overflows, and both tails are accurate
    return numpy.where(numpy.less(x, 0), small, 1) / (1 + small)


difference = function_of(Sum("difference", difference_of, 1, -1))

#: The derivative of maximum(x, y) in x: 1 where x is larger than y, 1/2 at a tie, else 0.
larger = function_of(Elementwise("larger", _larger, (None, None)))

sigmoid = function_of(Elementwise("sigmoid", sigmoid_of, (lambda out, x: out * (1 - out),)))

#: x, treated as a constant by differentiation.
stop_gradient = function_of(
    Elementwise(
        "stop_gradient",
        lambda x: x if hasattr(x, "dtype") else numpy.asarray(x)[()],
        (None,),
        shares_memory=True,
        is_linear_in=lambda positions, count: True,  # an unreduced value stays one
    )
)


def safe_denominator(x: Value) -> Value:
    """Return x with zeros replaced by 1: a denominator of quotients whose numerator is 0 there."""
    return where(equal(x, 0), 1, x)


def _over_impl(x: numpy.ndarray, r: numpy.ndarray) -> numpy.ndarray:
    zero = numpy.equal(r, 0)
    return numpy.where(zero, 0, x / numpy.where(zero, 1, r))[()] if zero.any() else numpy.divide(x, r)


def _reciprocal_or_nan(r: numpy.ndarray) -> numpy.ndarray:
    zero = numpy.equal(r, 0)
    if zero.any():
        warn_here(
            "the first derivative of a norm, std, hypot, arctan2 or a complex number's abs at 0 is a convention, 0. "
            "This derivative of it is NaN. A square without the root is smooth: np.sum(x * x) for norm(x) ** 2, "
            "np.var for std ** 2, x * x + y * y for hypot ** 2, z.real ** 2 + z.imag ** 2 for abs(z) ** 2",
            RuntimeWarning,
        )
    return numpy.where(zero, numpy.nan, 1 / numpy.where(zero, 1, r))[()]


_reciprocal = function_of(Elementwise("reciprocal_or_nan", _reciprocal_or_nan, (lambda out, r: -out * out,)))

_OVER_RULES = (lambda out, x, r: _reciprocal(r), lambda out, x, r: -out * _reciprocal(r))

#: x / r, and 0 where r is 0: derivatives that are 0 by convention. The derivative of that is NaN there, with a warning.
over = function_of(Elementwise("over", _over_impl, _OVER_RULES))


def _direction_impl(z: numpy.ndarray, r: numpy.ndarray) -> numpy.ndarray:
    infinite = numpy.isinf(r)
    if not infinite.any():
        return _over_impl(z, r)
    return numpy.where(infinite, numpy.sign(z), _over_impl(z, numpy.where(infinite, numpy.nan, r)))[()]


#: z / r of a complex number and its absolute value, which is NumPy's sign also where they are infinite.
direction = function_of(Elementwise("direction", _direction_impl, _OVER_RULES))


@functools.cache
def root_operation(n: float) -> ElementwiseFunction:
    """Return the operation of the n-th root."""
    if n == 2:
        return function_of(Elementwise("root", numpy.sqrt, (lambda out, x: over(0.5, out),)))
    return function_of(Elementwise(f"root_{n}", lambda x: x ** (1 / n), (lambda out, x: over(out, n * x),)))


def safe_root(x: Value, n: float = 2) -> Value:
    """Return the n-th root; its derivative at 0 is taken to be 0, the middle subgradient of a norm."""
    return root_operation(n)(x)


@functools.cache
def real_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """Return the dtype of the real part of an array."""
    return numpy.zeros(1, dtype).real.dtype


# ---------------------------------------------------------------- functions, by their derivatives

_LOG2, _LOG10 = math.log(2), math.log(10)

exp = elementwise(numpy.exp, lambda out, x: out)
exp2 = elementwise(numpy.exp2, lambda out, x: _LOG2 * out)
expm1 = elementwise(numpy.expm1, lambda out, x: exp(x))  # not out + 1, which is 0 where x is far below 0
log = elementwise(numpy.log, lambda out, x: 1 / x)
log2 = elementwise(numpy.log2, lambda out, x: 1 / _LOG2 / x)
log10 = elementwise(numpy.log10, lambda out, x: 1 / _LOG10 / x)
log1p = elementwise(numpy.log1p, lambda out, x: 1 / (1 + x))
logaddexp = elementwise(
    numpy.logaddexp, lambda out, x, y: sigmoid(difference(x, y)), lambda out, x, y: sigmoid(difference(y, x))
)
logaddexp2 = elementwise(
    numpy.logaddexp2,
    lambda out, x, y: sigmoid(_LOG2 * difference(x, y)),
    lambda out, x, y: sigmoid(_LOG2 * difference(y, x)),
)

sqrt = elementwise(numpy.sqrt, lambda out, x: 0.5 / out)
cbrt = elementwise(numpy.cbrt, lambda out, x: 1 / (3 * out * out))
square = elementwise(numpy.square, lambda out, x: 2 * x)
reciprocal = elementwise(numpy.reciprocal, lambda out, x: -out * out)
power = elementwise(
    numpy.power,
    lambda out, x, y: _power_in_base(x, y),
    # Where x is 0, out is 0, and so is the derivative. NumPy's logarithm of int8 is a float16.
    lambda out, x, y: out * log(where(equal(x, 0), out.dtype.type(1), x)),
)

sin = elementwise(numpy.sin, lambda out, x: cos(x))
cos = elementwise(numpy.cos, lambda out, x: -sin(x))
tan = elementwise(numpy.tan, lambda out, x: 1 + out * out)
arcsin = elementwise(numpy.arcsin, lambda out, x: 1 / sqrt((1 - x) * (1 + x)))
arccos = elementwise(numpy.arccos, lambda out, x: -1 / sqrt((1 - x) * (1 + x)))
arctan = elementwise(numpy.arctan, lambda out, x: 1 / (1 + x * x))
sinh = elementwise(numpy.sinh, lambda out, x: cosh(x))
cosh = elementwise(numpy.cosh, lambda out, x: sinh(x))
tanh = elementwise(numpy.tanh, lambda out, x: 1 - out * out)
arcsinh = elementwise(numpy.arcsinh, lambda out, x: 1 / sqrt(1 + x * x))
arccosh = elementwise(numpy.arccosh, lambda out, x: 1 / (sqrt(x - 1) * sqrt(x + 1)))  # one root has another cut
arctanh = elementwise(numpy.arctanh, lambda out, x: 1 / ((1 - x) * (1 + x)))
arctan2 = elementwise(
    numpy.arctan2, lambda out, y, x: _over_square(x, hypot(x, y)), lambda out, y, x: -_over_square(y, hypot(x, y))
)
hypot = elementwise(numpy.hypot, lambda out, x, y: over(x, out), lambda out, x, y: over(y, out))

# For complex x the derivative is conj(x)/|x|: see `elementwise`.
absolute = elementwise(numpy.absolute, lambda out, x: over(out, x) if x.dtype.kind == "c" else sign(x))
fabs = elementwise(numpy.fabs, lambda out, x: sign(x))
copysign = elementwise(numpy.copysign, lambda out, x, y: sign(x) * copysign(absolute(sign(x)), y), None)
heaviside = elementwise(numpy.heaviside, None, lambda out, x, y: equal(x, 0))
nextafter = elementwise(numpy.nextafter, lambda out, x, y: 1.0, None)
maximum = elementwise(numpy.maximum, lambda out, x, y: larger(x, y), lambda out, x, y: larger(y, x))
minimum = elementwise(numpy.minimum, lambda out, x, y: larger(y, x), lambda out, x, y: larger(x, y))
fmax = elementwise(
    numpy.fmax,
    lambda out, x, y: where(isnan(y), 1, larger(x, y)),
    lambda out, x, y: where(isnan(x), 1, larger(y, x)),
)
fmin = elementwise(
    numpy.fmin,
    lambda out, x, y: where(isnan(y), 1, larger(y, x)),
    lambda out, x, y: where(isnan(x), 1, larger(x, y)),
)
remainder = elementwise(numpy.remainder, lambda out, x, y: 1.0, lambda out, x, y: -floor_divide(x, y))
fmod = elementwise(numpy.fmod, lambda out, x, y: 1.0, lambda out, x, y: rint((out - x) / y))


def _power_in_base(x: Value, y: Value) -> Value:
    """Return the derivative of x**y in x: it is 0 where y is 0, even where x is 0."""
    if type(y) in (int, float):  # a literal exponent, the most common case
        return 0.0 if y == 0 else y * x if y == 2 else y * power(x, y - 1)
    if typeof(y).dtype.kind == "u":  # 0 - 1 would wrap to the largest integer
        return y * power(x, safe_denominator(y) - 1)
    return y * power(where(logical_and(equal(x, 0), equal(y, 0)), 1, x), y - 1)


def _over_square(x: Value, r: Value) -> Value:
    """x / r², or 0 where r is 0, computed without r², which might overflow."""
    return over(over(x, r), r)


# ---------------------------------------------------------------- functions with a known n-th derivative


@functools.cache
def nth_derivative(name: str, impl: Callable, n: int) -> Elementwise:
    """Return the operation of a function's n-th derivative; its derivative is the next one.

    `impl(n, x)` computes the n-th derivative of arrays.
    """
    return Elementwise(
        f"{name}_{n}" if n else name,
        functools.partial(impl, n),
        (lambda out, x: nth_derivative(name, impl, n + 1).bind(x),),
    )


def _sinc(n: int, x: numpy.ndarray) -> numpy.ndarray:
    if n == 0:
        return numpy.sinc(x)
    u = numpy.pi * x
    near = numpy.abs(u) < 3
    series = 0.0  # in u^j, where j has the parity of n
    for j in reversed(range(n % 2, 32, 2)):
        series = series * (u * u) + (-1) ** ((n + j) // 2) / ((n + j + 1) * math.factorial(j))
    far = numpy.where(near, 3, u)
    y = numpy.sin(far) / far
    for m in range(1, n + 1):  # the m-th derivative of u * sinc(u) = sin(u)
        y = (numpy.sin(far + m * (numpy.pi / 2)) - m * y) / far
    return numpy.pi**n * numpy.where(near, series * u ** (n % 2), y)


def _i0(n: int, x: numpy.ndarray) -> numpy.ndarray:
    if n == 0:
        return numpy.i0(x)[()]
    x = numpy.asarray(x)
    # The mean of cos(t)^n exp(x cos(t)) over a circle; 64 points are enough for every x that does not overflow.
    nodes = numpy.cos((numpy.arange(64) + 0.5) * (numpy.pi / 128)).astype(x.dtype)
    even_or_odd = numpy.sinh if n % 2 else numpy.cosh
    return even_or_odd(x[..., None] * nodes) @ nodes**n / 64


sinc = implements(numpy.sinc)(function_of(nth_derivative("sinc", _sinc, 0)))
i0 = implements(numpy.i0)(function_of(nth_derivative("i0", _i0, 0)))


# ---------------------------------------------------------------- piecewise constant functions


sign_p = Elementwise("sign", numpy.sign, (None,))


@implements(numpy.sign)
def sign(x: Value) -> Value:
    """`numpy.sign`: -1, 0 or 1; x/|x| for a complex number."""
    return direction(x, absolute(x)) if typeof(x).dtype.kind == "c" else sign_p.bind(x)


floor = discrete(numpy.floor)
ceil = discrete(numpy.ceil)
trunc = discrete(numpy.trunc)
rint = discrete(numpy.rint)
floor_divide = discrete(numpy.floor_divide)
spacing = discrete(numpy.spacing)

isfinite = discrete(numpy.isfinite)
isinf = discrete(numpy.isinf)
isnan = discrete(numpy.isnan)
signbit = discrete(numpy.signbit)

equal = discrete(numpy.equal)
not_equal = discrete(numpy.not_equal)
less = discrete(numpy.less)
less_equal = discrete(numpy.less_equal)
greater = discrete(numpy.greater)
greater_equal = discrete(numpy.greater_equal)

logical_and = discrete(numpy.logical_and)
logical_or = discrete(numpy.logical_or)
logical_xor = discrete(numpy.logical_xor)
logical_not = discrete(numpy.logical_not)

bitwise_and = discrete(numpy.bitwise_and)
bitwise_or = discrete(numpy.bitwise_or)
bitwise_xor = discrete(numpy.bitwise_xor)
bitwise_count = discrete(numpy.bitwise_count)
invert = discrete(numpy.invert)
left_shift = discrete(numpy.left_shift)
right_shift = discrete(numpy.right_shift)
gcd = discrete(numpy.gcd)
lcm = discrete(numpy.lcm)
