"""Symbolic differentiation: a formula in, the formula of its derivative out.

    python -m spmd.examples.three_ways.symbolic

The program prints the number of operations in the formulas of the logistic map, l(1) = x, l(n+1) = 4 l(n) (1 - l(n)),
and of their derivatives, beside those of programs with names for intermediate results.

Operators are overloaded, and NumPy's functions call the methods of the same names, so a program that runs on the
formula `x` builds its own formula:

>>> x, y = name("x"), name("y")
>>> f = numpy.log(x) + x * y - numpy.sin(y)
>>> print(derivative(f, "x"))
(((1 / x) + ((1 * y) + (x * 0))) - (cos(y) * 0))
>>> print(simplified(derivative(f, "x")))
((1 / x) + y)
>>> float(evaluate(derivative(f, "x"), x=2.0, y=5.0))
5.5

A formula is a tree, and has no names for its parts. The product rule writes both factors twice, so formulas swell:
those of the logistic map have 3 (2^(n-1) - 1) operations, and their derivatives 9 (n-1) 2^(n-2). `program_text` gives
each distinct part a name, which undoes the swell; but a formula still has no branches, and no loops.

Source: J. Grabmeier, E. Kaltofen, V. Weispfenning, "Computer algebra handbook", 2003; A. G. Baydin et al., "Automatic
differentiation in machine learning: a survey", 2018, section 2.2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

OPERATORS: dict[str, Callable] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
FUNCTIONS: dict[str, Callable] = {f: getattr(numpy, f) for f in ("sin", "cos", "exp", "log", "sqrt", "tanh")}


class Expression:
    """A number, a name, or an operation on formulas."""

    def __init__(self, operation: str, *parts: Any) -> None:
        self.operation = operation
        self.parts = parts

    def __add__(self, other: Any) -> Expression:
        return apply("+", self, other)

    def __radd__(self, other: Any) -> Expression:
        return apply("+", other, self)

    def __sub__(self, other: Any) -> Expression:
        return apply("-", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return apply("-", other, self)

    def __mul__(self, other: Any) -> Expression:
        return apply("*", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return apply("*", other, self)

    def __truediv__(self, other: Any) -> Expression:
        return apply("/", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return apply("/", other, self)

    def __pow__(self, other: Any) -> Expression:
        return apply("**", self, other)

    def __rpow__(self, other: Any) -> Expression:
        return apply("**", other, self)

    def __neg__(self) -> Expression:
        return apply("-", 0, self)

    def sin(self) -> Expression:
        return apply("sin", self)

    def cos(self) -> Expression:
        return apply("cos", self)

    def exp(self) -> Expression:
        return apply("exp", self)

    def log(self) -> Expression:
        return apply("log", self)

    def sqrt(self) -> Expression:
        return apply("sqrt", self)

    def tanh(self) -> Expression:
        return apply("tanh", self)

    def __str__(self) -> str:
        """Return the formula, with parentheses around each operation."""
        if self.operation in ("number", "name"):
            return str(self.parts[0])
        texts = [str(part) for part in self.parts]
        if self.operation in FUNCTIONS:
            return f"{self.operation}({texts[0]})"
        return f"({texts[0]} {self.operation} {texts[1]})"


def name(letters: str) -> Any:
    """Return the expression of a name, which Python's operators and NumPy's functions take."""
    return Expression("name", letters)


def formula(x: Any) -> Expression:
    """Return a number as a formula, and a formula unchanged."""
    return x if isinstance(x, Expression) else Expression("number", x)


def apply(operation: str, *parts: Any) -> Expression:
    """Return an operation on expressions and numbers."""
    return Expression(operation, *map(formula, parts))


def is_operation(e: Expression) -> bool:
    return e.operation not in ("number", "name")


def derivative(e: Expression, of: str = "x") -> Any:
    """Return the derivative of a formula with respect to a name, by the rules of calculus, not simplified."""
    if not is_operation(e):
        return formula(int(e.operation == "name" and e.parts[0] == of))
    a, b = (*e.parts, formula(0))[:2]  # a function has one operand
    da = derivative(a, of)
    match e.operation:
        case "+":
            return da + derivative(b, of)
        case "-":
            return da - derivative(b, of)
        case "*":
            return da * b + a * derivative(b, of)
        case "/":
            return (da * b - a * derivative(b, of)) / (b * b)
        case "**" if b.operation == "number":
            return b * a ** (b.parts[0] - 1) * da
        case "**":
            return e * (derivative(b, of) * numpy.log(a) + b * da / a)
        case "sin":
            return numpy.cos(a) * da
        case "cos":
            return -numpy.sin(a) * da
        case "exp":
            return e * da
        case "log":
            return da / a
        case "sqrt":
            return da / (2 * e)
        case "tanh":
            return (1 - e * e) * da
    raise ValueError(f"there is no rule for {e.operation!r}")


def simplified(e: Expression) -> Expression:
    """Return a formula without zeros and ones, and with numbers computed."""
    if not is_operation(e):
        return e
    parts = [simplified(part) for part in e.parts]
    numbers = [part.parts[0] if part.operation == "number" else None for part in parts]
    if None not in numbers:
        return formula(evaluate(Expression(e.operation, *parts)))
    match (e.operation, *numbers):
        case ("*" | "/", 0, _) | ("*", _, 0):
            return formula(0)
        case ("**", _, 0):
            return formula(1)
        case ("+", 0, _) | ("*", 1, _):
            return parts[1]
        case ("+" | "-", _, 0) | ("*" | "/" | "**", _, 1):
            return parts[0]
    return Expression(e.operation, *parts)


def evaluate(e: Expression, **values: Any) -> Any:
    """Return the value of a formula at values of its names: floats, fractions or arrays."""
    if e.operation == "number":
        return e.parts[0]
    if e.operation == "name":
        return values[e.parts[0]]
    return {**OPERATORS, **FUNCTIONS}[e.operation](*(evaluate(part, **values) for part in e.parts))


def size(e: Expression) -> int:
    """Return the number of operations that a formula writes down."""
    return 1 + sum(map(size, e.parts)) if is_operation(e) else 0


def program_lines(e: Expression) -> tuple[list[str], str]:
    """Return an assignment for each distinct operation of a formula, and the name or number of its value."""
    names: dict[tuple, str] = {}

    def visit(e: Expression) -> str:
        if not is_operation(e):
            return str(e)
        key = (e.operation, *map(visit, e.parts))
        return names.setdefault(key, f"t{len(names) + 1}")

    result = visit(e)
    calls = [f"np.{f}({a[0]})" if f in FUNCTIONS else f"{a[0]} {f} {a[1]}" for f, *a in names]
    return [f"{t} = {call}" for t, call in zip(names.values(), calls)], result


def program_text(e: Expression, *parameters: str) -> str:
    """Return a formula as a Python function, in which equal parts are computed once.

    >>> print(program_text(derivative(name("x") * name("x"), "x"), "x"))
    def f(x):
        t1 = 1 * x
        t2 = x * 1
        t3 = t1 + t2
        return t3
    """
    lines, result = program_lines(e)
    return "\n    ".join([f"def f({', '.join(parameters)}):", *lines, f"return {result}"])


def logistic(x: Any, n: int) -> Any:
    """Return the n-th iterate of the logistic map."""
    y = x
    for _ in range(n - 1):
        y = 4 * y * (1 - y)
    return y


def swell(program: Callable[[Any, int], Any], ns: Sequence[int]) -> dict[str, list[int]]:
    """Return the numbers of operations of a program's formulas, of their derivatives, and of these as programs."""
    formulas = [program(name("x"), n) for n in ns]
    first = [derivative(e) for e in formulas]
    short = [simplified(d) for d in first]
    return {
        "formula": [size(e) for e in formulas],
        "derivative": [size(d) for d in first],
        "derivative, simplified": [size(d) for d in short],
        "second derivative, simplified": [size(simplified(derivative(d))) for d in short],
        "derivative with names": [len(program_lines(d)[0]) for d in short],
    }


def main(argv: Sequence[str] | None = None) -> None:
    ns = range(2, 8)
    print("operations of the logistic map, n =    " + "".join(f"{n:7}" for n in ns))
    for kind, counts in swell(logistic, ns).items():
        print(f"{kind:39}" + "".join(f"{count:7,}" for count in counts))


if __name__ == "__main__":
    main()
