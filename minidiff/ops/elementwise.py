"""Arithmetic, comparisons, and functions applied number by number.

To add one, add a line at the end: the NumPy function, and its derivative as a function of the result
and the operands. It then works in forward and reverse mode, to any order, vectorised and on ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy

from minidiff.core import EVALUATE, Primitive, ShapedArray, Value, _state, implements, is_differentiable, typeof
from minidiff.ops.kinds import Elementwise, Linear, Multilinear, bind_aligned, elementwise_shape, match, spread

# ---------------------------------------------------------------- how they are declared


_NO_PARAMS: dict = {}


def function_of(numpy_function: Callable, primitive: Primitive) -> Callable:
    """What users call: the operation as a function of its operands, standing for `numpy_function` on tracers."""

    direct = isinstance(numpy_function, numpy.ufunc)  # NumPy hands traced values back

    def function(*operands: Value) -> Value:
        interpreter = _state.interpreter
        if interpreter is EVALUATE and direct:
            return numpy_function(*operands)
        if interpreter.scope is None:
            return interpreter.process(primitive, operands, _NO_PARAMS)
        return primitive.bind(*operands)

    function.__name__ = function.__qualname__ = numpy_function.__name__
    function.__doc__ = f"`numpy.{numpy_function.__name__}`, differentiable."
    return implements(numpy_function)(function)


def elementwise(numpy_function: Callable, *derivatives: Callable | None) -> Callable:
    """Declare an elementwise operation by its NumPy function and its derivative in each operand.

    `derivatives[i](out, *operands)` is the derivative in operand i, None where that is zero everywhere.
    """
    return function_of(numpy_function, Elementwise(numpy_function.__name__, numpy_function, derivatives))


class Product(Multilinear):
    """Linear in each operand separately, number by number."""

    broadcasts = True


def multilinear(numpy_function: Callable, *transposes: Callable | None, kind: type = Product) -> Callable:
    """Declare an elementwise operation that is linear in each operand, by its transpose in each."""
    shape_rule = functools.partial(elementwise_shape, numpy_function)
    return function_of(
        numpy_function, kind(numpy_function.__name__, numpy_function, shape_rule, transposes, bind_aligned)
    )


# ---------------------------------------------------------------- linear and multilinear


class Sum(Primitive):
    """`add` and `subtract`: linear in both operands together, so no missing tangent is made a zero."""

    def __init__(self, numpy_function: Callable, *signs: int):
        shape_rule = functools.partial(elementwise_shape, numpy_function)
        super().__init__(numpy_function.__name__, numpy_function, shape_rule)
        self.signs = signs

    def tangent(self, out, primals, tangents, params):
        x, y = tangents
        if x is not None and y is not None:
            return self.bind(x, y)
        return spread(x if y is None else y if self.signs[1] > 0 else negative(y), out)

    def linearized(self, out, type, primals, active, names, params):
        if len(active) == 2:
            return self, names, params
        return names[0] if names[0].type == type and self.signs[active[0]] > 0 else None

    def transpose(self, ct, operands, params):
        return [
            match(ct if sign > 0 else negative(ct), x) if isinstance(x, ShapedArray) else None
            for x, sign in zip(operands, self.signs)
        ]

    def batch(self, args, batched, params):
        return bind_aligned(self, args, batched)


class Divide(Product):
    """Linear in the numerator; in the denominator, d(x/y) = -(x/y)/y dy."""

    def reads(self, i, count):
        return {0, 2} if i else {2}

    def term(self, i, t, out, primals, params):
        y = primals[1]
        return multiply(negative(divide(out, y)), t) if i else divide(t, y)

    def cotangent(self, i, ct, out, primals, type, params):
        y = primals[1]
        return match(multiply(ct, negative(divide(out, y))) if i else divide(ct, y), type)


class Convert(Linear):
    """A change of dtype; between dtypes that carry derivatives, a linear one."""

    def tangent(self, out, primals, tangents, params):
        return super().tangent(out, primals, tangents, params) if is_differentiable(params["dtype"]) else None

    def linearized(self, out, type, primals, active, names, params):
        return (
            super().linearized(out, type, primals, active, names, params)
            if is_differentiable(params["dtype"])
            else None
        )

    def transpose(self, ct, operands, params):
        if is_differentiable(params["dtype"]):
            return super().transpose(ct, operands, params)
        return Primitive.transpose(self, ct, operands, params)  # rounding to integers is not linear


def _convert_impl(x: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    if isinstance(x, (bool, int, float, complex)):
        x = numpy.asarray(x)
    return (numpy.real(x) if x.dtype.kind == "c" and dtype.kind != "c" else x).astype(dtype)


convert_p = Convert(
    "convert",
    _convert_impl,
    lambda x, dtype: (x.shape, dtype),
    lambda ct, operands, dtype: [convert(ct, operands[0].dtype)],
    bind_aligned,
)


def convert(x: Value, dtype: Any) -> Value:
    """`x` with another dtype (`astype`); from complex to real it is the real part."""
    # A Python number has no dtype, and None will not do for one: NumPy reads it as float64.
    return x if hasattr(x, "dtype") and x.dtype == dtype else convert_p.bind(x, dtype=numpy.dtype(dtype))


add = function_of(numpy.add, Sum(numpy.add, 1, 1))
subtract = function_of(numpy.subtract, Sum(numpy.subtract, 1, -1))
negative = function_of(
    numpy.negative,
    Linear(
        "negative",
        numpy.negative,
        functools.partial(elementwise_shape, numpy.negative),
        lambda ct, operands: [negative(ct)],
        bind_aligned,
    ),
)
multiply = multilinear(
    numpy.multiply,
    lambda ct, operands: match(multiply(ct, operands[1]), operands[0]),
    lambda ct, operands: match(multiply(operands[0], ct), operands[1]),
)
divide = multilinear(numpy.divide, lambda ct, operands: match(divide(ct, operands[1]), operands[0]), None, kind=Divide)


class Where(Primitive):
    """`where(condition, x, y)`: linear in x and y together."""

    def tangent(self, out, primals, tangents, params):
        condition, (_, tx, ty) = primals[0], tangents
        if tx is None and ty is None:
            return None
        return spread(self.bind(condition, 0.0 if tx is None else tx, 0.0 if ty is None else ty), out)

    def transpose(self, ct, operands, params):
        condition, x, y = operands
        if isinstance(condition, ShapedArray):
            return super().transpose(ct, [condition], params)
        return [
            None,
            match(self.bind(condition, ct, 0.0), x) if isinstance(x, ShapedArray) else None,
            match(self.bind(condition, 0.0, ct), y) if isinstance(y, ShapedArray) else None,
        ]

    def batch(self, args, batched, params):
        return bind_aligned(self, args, batched)


where_p = Where("where", numpy.where, functools.partial(elementwise_shape, numpy.where))


@implements(numpy.where)
def where(condition: Value, x: Value, y: Value) -> Value:
    """`numpy.where(condition, x, y)`, differentiable in x and y."""
    return where_p.bind(condition, x, y)


# ---------------------------------------------------------------- functions, by their derivatives

exp = elementwise(numpy.exp, lambda out, x: out)
log = elementwise(numpy.log, lambda out, x: 1 / x)
sqrt = elementwise(numpy.sqrt, lambda out, x: 0.5 / out)
sin = elementwise(numpy.sin, lambda out, x: cos(x))
cos = elementwise(numpy.cos, lambda out, x: -sin(x))
tanh = elementwise(numpy.tanh, lambda out, x: 1 - out * out)
square = elementwise(numpy.square, lambda out, x: 2 * x)
absolute = elementwise(numpy.absolute, lambda out, x: _direction(out, x))
power = elementwise(
    numpy.power,
    lambda out, x, y: y * power(x, where(equal(y, 0), 1, y - 1)),  # y = 0: a constant, also at x = 0
    lambda out, x, y: out * log(where(greater(x, 0), x, 1)),  # x = 0: out is 0 there, and so is the derivative
)
maximum = elementwise(
    numpy.maximum, lambda out, x, y: _share(x, y, greater, out), lambda out, x, y: _share(y, x, greater, out)
)
minimum = elementwise(
    numpy.minimum, lambda out, x, y: _share(x, y, less, out), lambda out, x, y: _share(y, x, less, out)
)


def _share(x: Value, y: Value, wins: Callable, out: Value) -> Value:
    """The part of a maximum's derivative that is x's: 1 where x wins, 1/2 at a tie, else 0."""
    return convert(where(wins(x, y), 1.0, where(equal(x, y), 0.5, 0.0)), out.dtype)


def _direction(out: Value, x: Value) -> Value:
    """The derivative of |x|: its sign; of a complex x the conjugate of x/|x|, of which the real part will be taken."""
    return divide(out, where(equal(x, 0), 1, x)) if typeof(x).dtype.kind == "c" else sign(x)


sign = elementwise(numpy.sign, None)
floor = elementwise(numpy.floor, None)
ceil = elementwise(numpy.ceil, None)
floor_divide = elementwise(numpy.floor_divide, None, None)
remainder = elementwise(numpy.remainder, lambda out, x, y: 1.0, lambda out, x, y: -floor_divide(x, y))
isfinite = elementwise(numpy.isfinite, None)
isnan = elementwise(numpy.isnan, None)

equal = elementwise(numpy.equal, None, None)
not_equal = elementwise(numpy.not_equal, None, None)
less = elementwise(numpy.less, None, None)
less_equal = elementwise(numpy.less_equal, None, None)
greater = elementwise(numpy.greater, None, None)
greater_equal = elementwise(numpy.greater_equal, None, None)

logical_and = elementwise(numpy.logical_and, None, None)
logical_or = elementwise(numpy.logical_or, None, None)
logical_not = elementwise(numpy.logical_not, None)
