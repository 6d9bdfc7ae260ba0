"""Taylor mode: push the coefficients of a power series through a function together with its value.

A value is a series x(t) = x₀ + x₁ t + x₂ t² + …; x₀ is the value itself. Coefficients of a result follow from

- a linear operation: the operation on each coefficient;
- a product: the sum of the products of coefficients whose orders add up to k;
- all others: their derivative. y = f(x) has y' = f'(x) x', so k yₖ is coefficient k - 1 of the series f'(x(t)) x'(t),
  and the derivative rule of the operation computes that one, applied to series.

The rule may use y itself, as that of exp does, or an operation that it comes from, as cos comes from sin. So series
inside a rule are lazy: each coefficient is computed when it is asked for, from earlier ones, and equal operations in a
rule are one. A function thus gets the recurrence that textbooks derive for it: exp, sin with cos, tan, log, erf, ….

Source: Griewank and Walther, "Evaluating derivatives" (2008), chapter 13; Bettencourt, Johnson and Duvenaud,
"Taylor-mode automatic differentiation for higher-order derivatives in JAX" (2019).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.control_flow.bodies import Call
from minidiff.control_flow.cond import Cond, cond, cond_p, switch
from minidiff.control_flow.custom_rules import CustomPrimitive
from minidiff.control_flow.loops import Scan, scan
from minidiff.control_flow.while_loop import While, while_loop
from minidiff.core.forward import JVP, push_forward
from minidiff.core.interpreter import Interpreter, current_interpreter, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.tape import tapes_of
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, as_plain_operand, typeof, zeros_like
from minidiff.ops.base import General, Linear, Multilinear, add_all
from minidiff.ops.elementwise import Sum, divide, multiply, negative, power, subtract
from minidiff.values.dtypes import PLAIN, is_differentiable
from minidiff.values.lists import split_list

Coefficient = Value | None  # None is zero


class Series:
    """The coefficients of a value: those that were asked for, and `compute(k)`, which returns the others."""

    def __init__(self, coefficients: list[Coefficient], compute: Callable[[int], Coefficient] = lambda k: None):
        self.coefficients = coefficients
        self.compute = compute

    def __getitem__(self, k: int) -> Coefficient:
        while len(self.coefficients) <= k:
            self.coefficients.append(self.compute(len(self.coefficients)))
        return self.coefficients[k]


class JetTracer(Tracer):
    """A value with a series; its coefficients are values of the interpreter below."""

    __slots__ = ("series",)

    def __init__(self, interpreter: Jet, series: Series):
        self.interpreter = interpreter
        self.series = series

    @property
    def type(self) -> ShapedArray:
        return typeof(self.series[0])

    def concrete(self, use: str) -> Any:
        self.check_alive()
        value = self.series[0]
        return value.concrete(use) if isinstance(value, Tracer) else value

    def __repr__(self) -> str:
        return repr(self.series[0])


class Jet(Interpreter):
    """Apply each operation to series, up to an order."""

    name = "a Taylor series"

    def __init__(self, below: Interpreter, order: int, outer: Jet | None = None):
        super().__init__(below, outer)
        self.order = order
        self.lazy: dict | None = None  # the operations in the rules of the one that is being computed

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if not any(map(self.owns, args)):
            return primitive.apply(self.below, args, params)
        if primitive.is_higher_order:
            return apply_body(self, primitive, args, params)
        args = [x if type(x) in PLAIN else as_plain_operand(x) for x in args]
        outs = self.computed(lambda: self.apply_operation(primitive, args, params))
        return outs if primitive.multiple_results else outs[0]

    def owns(self, x: Value) -> bool:
        return type(x) is JetTracer and x.interpreter is self

    def series_of(self, x: Value) -> Series:
        return x.series if self.owns(x) else Series([x])

    def join(self, series: Series) -> Value:
        return JetTracer(self, series) if is_differentiable(typeof(series[0]).dtype) else series[0]

    def coefficients_of(self, x: Value) -> list[Coefficient]:
        series = self.series_of(x)
        return [series[k] for k in range(self.order + 1)]

    def computed(self, apply: Callable[[], list[Value]]) -> list[Value]:
        """Return the values that a function returns, with all coefficients unless a rule of another operation asks."""
        if self.lazy is not None:
            return apply()
        self.lazy = {}
        try:
            outs = apply()
            for k, x in itertools.product(range(1, self.order + 1), filter(self.owns, outs)):
                x.series[k]
        finally:
            self.lazy = None
        return outs

    def lift_outer(self, x: Any) -> Value:
        return self.join(Series([c if c is None else self.below.lift(c) for c in self.outer.coefficients_of(x)]))

    # ------------------------------------------------ operations

    def apply_operation(self, primitive: Primitive, args: Sequence[Value], params: dict) -> list[Value]:
        """Return the values of an operation's results, whose coefficients are computed when they are asked for."""
        assert self.lazy is not None
        key = primitive, tuple(map(_identity, args)), tuple((k, _identity(v)) for k, v in params.items())
        if key in self.lazy:
            return self.lazy[key][0]
        operands = list(map(self.series_of, args))
        with running(self.below):
            out = primitive.bind(*[x[0] for x in operands], **params)
        results = [Series([x]) for x in (out if primitive.multiple_results else [out])]
        outs = list(map(self.join, results))
        active = {i for i, x in enumerate(args) if self.owns(x)}
        compute = recurrence(primitive, active, operands, results, params)
        if compute is None:
            compute = self.from_derivative(args, lambda ts: derivative_of(primitive, outs, args, ts, params))
        self.define(results, compute)
        self.lazy[key] = outs, args, params  # which live as long as their ids are keys
        return outs

    def define(self, results: Sequence[Series], compute: Callable[[int], Sequence[Coefficient]]) -> None:
        """Let series compute their coefficients k by a function of k, which returns those of all of them."""

        def all_at(k: int) -> Sequence[Coefficient]:
            with running(self.below):
                return compute(k)

        cached = functools.cache(all_at)
        for n, series in enumerate(results):
            series.compute = functools.partial(lambda n, k: cached(k)[n], n)

    def from_derivative(
        self, args: Sequence[Value], derivative: Callable[[list[Value | None]], Sequence[Value | None]]
    ) -> Callable[[int], Sequence[Coefficient]]:
        """Return the function that computes coefficients k from those of the derivative, k - 1.

        `derivative(tangents)` maps the derivatives of the operands along t to those of the results.
        """

        @functools.cache
        def slopes() -> list[Series | None]:
            with running(self):
                tangents = [self.slope(x) if self.owns(x) else None for x in args]
                return [None if t is None else self.series_of(t) for t in derivative(tangents)]

        def compute(k: int) -> list[Coefficient]:
            coefficients = [None if series is None else series[k - 1] for series in slopes()]
            return [None if c is None else divide(c, k) for c in coefficients]

        return compute

    def slope(self, x: JetTracer) -> Value:
        """Return the derivative of a value along t, whose coefficient k is k + 1 times coefficient k + 1."""
        with running(self.below):
            first = x.series[1]
            series = Series([zeros_like(x.series[0]) if first is None else first])
        self.define([series], lambda k: [None if (c := x.series[k + 1]) is None else multiply(c, k + 1)])
        return JetTracer(self, series)


def _identity(x: Any) -> Any:
    """Return a key that tells an operand or a parameter from others."""
    if isinstance(x, tuple):
        return tuple(map(_identity, x))
    return (type(x), x) if isinstance(x, (int, float, str)) else id(x)


# ---------------------------------------------------------------- the rules


def derivative_of(
    primitive: Primitive, outs: list[Value], args: Sequence[Value], tangents: list[Value | None], params: dict
) -> Sequence[Value | None]:
    """Return the derivatives of an operation's results by its rule."""
    if type(primitive).jvp is not Primitive.jvp:  # it computes the results together with their derivatives
        t = primitive.jvp(args, tangents, params)[1]
    else:
        t = primitive.tangent(outs if primitive.multiple_results else outs[0], args, tangents, params)
    if t is None:
        return [None] * len(outs)
    return t if primitive.multiple_results else [t]


def recurrence(
    primitive: Primitive, active: set[int], operands: list[Series], results: list[Series], params: dict
) -> Callable[[int], Sequence[Coefficient]] | None:
    """Return the function that computes coefficients k of linear operations and products; None for all others."""
    values = [x[0] for x in operands]
    if is_linear(primitive, active, len(operands)):
        outs = [x[0] for x in results]
        out = outs if primitive.multiple_results else outs[0]

        def compute(k: int) -> Sequence[Coefficient]:
            coefficients = [x[k] for x in operands]
            if all(c is None for c in coefficients):
                return [None] * len(outs)
            c = primitive.tangent(out, values, coefficients, params)
            return c if primitive.multiple_results else [c]

        return compute
    if primitive is divide.primitive:
        return lambda k: [quotient(operands[0], operands[1], results[0], k)]
    if primitive is power.primitive and active == {0} and not _is_natural(values[1]):
        return lambda k: [power_coefficient(operands[0], values[1], results[0], k)]
    if isinstance(primitive, Multilinear) and all(primitive.transpose_rules[i] is not None for i in active):
        return lambda k: [product(primitive, operands, sorted(active), k, params)]
    return None


def is_linear(primitive: Primitive, active: set[int], count: int) -> bool:
    """Return whether an operation is linear in the active ones of its operands together."""
    if isinstance(primitive, (Linear, Sum)):
        return True
    if isinstance(primitive, Multilinear):
        return len(active) == 1 and primitive.is_linear_in(active, count)
    return isinstance(primitive, General) and 0 not in active and primitive.is_linear_in({*range(1, count)}, count)


def product(primitive: Primitive, operands: list[Series], active: list[int], k: int, params: dict) -> Coefficient:
    """Return coefficient k of a product: the sum over orders of its factors that add up to k."""
    terms = []
    for orders in _compositions(k, len(active)):
        factors = dict(zip(active, (operands[i][n] for i, n in zip(active, orders))))
        if not any(x is None for x in factors.values()):
            terms.append(primitive.bind(*[factors.get(i, x[0]) for i, x in enumerate(operands)], **params))
    return add_all(terms)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of that many natural numbers with this sum."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *others) for others in _compositions(total - first, parts - 1))


def quotient(x: Series, y: Series, out: Series, k: int) -> Coefficient:
    """Return coefficient k of out = x / y, from x = out y."""
    terms = [multiply(c, d) for j in range(1, k + 1) if (c := y[j]) is not None and (d := out[k - j]) is not None]
    total = add_all(terms)
    if total is None:
        return None if x[k] is None else divide(x[k], y[0])
    return divide(negative(total) if x[k] is None else subtract(x[k], total), y[0])


def power_coefficient(x: Series, p: Value, out: Series, k: int) -> Coefficient:
    """Return coefficient k of out = x ** p, from x out' = p x' out."""
    terms = [
        multiply(subtract(multiply(p, j), k - j), multiply(c, d))
        for j in range(1, k + 1)
        if (c := x[j]) is not None and (d := out[k - j]) is not None
    ]
    total = add_all(terms)
    return total if total is None else divide(total, multiply(x[0], k))


def _is_natural(p: Value) -> bool:
    """Return whether an exponent may be a natural number, so that the base may be 0."""
    return isinstance(p, Tracer) or bool(numpy.all((numpy.asarray(p) >= 0) & (numpy.asarray(p) % 1 == 0)))


# ---------------------------------------------------------------- operations with bodies


def push_series(
    f: Callable, coefficients: Sequence[Sequence[Coefficient]], order: int, outer: Jet | None = None
) -> list[list[Coefficient]]:
    """Apply a function of leaves to series, under the current interpreter; return the coefficients of the results."""
    jet = Jet(current_interpreter(), order, outer)
    with transforming(jet):
        outs = f(*[jet.join(Series(list(x))) for x in coefficients])
    return list(map(jet.coefficients_of, outs))


def apply_body(jet: Jet, primitive: Primitive, args: Sequence[Value], params: dict) -> list[Value]:
    """Apply an operation with a body to series."""
    if jet.lazy is None and (outs := _push_body(jet, primitive, list(map(jet.coefficients_of, args)), params)):
        return [jet.join(Series(list(x))) for x in outs]
    if isinstance(primitive, Call) and not isinstance(primitive, CustomPrimitive):
        with running(jet):
            return params["body"](*args)
    return jet.computed(lambda: _by_rule(jet, primitive, args, params))


def _push_body(
    jet: Jet, primitive: Primitive, operands: list[list[Coefficient]], params: dict
) -> Sequence[Sequence[Coefficient]] | None:
    """Apply an operation whose body takes and returns all coefficients; return None for other operations."""
    with running(jet.below):
        if isinstance(primitive, Scan):
            return _scan(operands, params, jet.order)
        if isinstance(primitive, While):
            return _while_loop(operands, params, jet.order)
        if isinstance(primitive, Cond):
            return _cond(primitive, operands, params, jet.order)
        push = lambda f, blocks: list(map(_instantiate, push_series(f, blocks, jet.order, jet)))  # noqa: E731
        return ranks.push_body(primitive, list(map(_instantiate, operands)), params, push)


def _by_rule(jet: Jet, primitive: Primitive, args: Sequence[Value], params: dict) -> list[Value]:
    """Apply an operation by its rule of forward mode, which runs on series."""
    with running(jet.below):
        results = [Series([x]) for x in primitive.bind(*[jet.series_of(x)[0] for x in args], **params)]

    def derivative(tangents: list[Value | None]) -> list[Value | None]:
        return push_forward(lambda *xs: primitive.bind(*xs, **params), args, tangents, JVP(jet))[1]

    jet.define(results, jet.from_derivative(args, derivative))
    return list(map(jet.join, results))


def _instantiate(coefficients: Sequence[Coefficient]) -> list[Value]:
    """Replace zeros by arrays, as the carries of a loop need; an integer has one coefficient."""
    value, *others = coefficients
    if not is_differentiable(typeof(value).dtype):
        return [value]
    return [value, *[zeros_like(value) if c is None else c for c in others]]


def _scan(operands: list[list[Coefficient]], params: dict, order: int) -> list[list[Coefficient]]:
    consts, carry, xs = split_list(operands, params["consts"], params["carry"])

    def step(carry: list, xs: list) -> tuple[list, list]:
        outs = push_series(params["body"].apply, [*consts, *carry, *xs], order)
        carry, ys = split_list(list(map(_instantiate, outs)), len(carry))
        return carry, ys

    init, elements = list(map(_instantiate, carry)), list(map(_instantiate, xs))
    last, ys = scan(step, init, elements, params["length"], params["reverse"])
    return [*last, *ys]


def _while_loop(operands: list[list[Coefficient]], params: dict, order: int) -> list[list[Coefficient]]:
    cond_consts, body_consts, carry = split_list(operands, params["cond_consts"], params["body_consts"])
    values = lambda xs: [x[0] for x in xs]  # noqa: E731

    def step(carry: list) -> list:
        return list(map(_instantiate, push_series(params["body"].apply, [*body_consts, *carry], order)))

    test = lambda carry: params["cond"].apply(*values(cond_consts), *values(carry))[0]  # noqa: E731
    return while_loop(test, step, list(map(_instantiate, carry)))


def _cond(primitive: Cond, operands: list[list[Coefficient]], params: dict, order: int) -> list[list[Coefficient]]:
    selector, *others = operands
    branches = [
        lambda tape=tape: list(map(_instantiate, push_series(tape.apply, others, order))) for tape in tapes_of(params)
    ]
    return cond(selector[0], *branches) if primitive is cond_p else switch(selector[0], branches)
