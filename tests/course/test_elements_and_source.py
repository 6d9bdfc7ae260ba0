"""The library of elements, and the source transformation of the course: the derivatives of ten programs."""

import math
import re

import numpy as np
import pytest

import minidiff as md
from spmd.examples.three_ways import elements, forward_elements
from spmd.examples.three_ways.elements import Element, gradient
from spmd.examples.three_ways.source import adjoint, adjoint_text


def product(x, y):
    return x * y + np.sin(x) - y / x


def nested(x, y):
    return np.log(np.exp(x) + np.exp(y)) * np.sqrt(x**2 + y**2)


def twice(x, y):
    z = x * y
    z = z * z - x
    z *= y
    return z


def branch(x, y):
    if x > y:
        z = x * np.cos(y)
    elif y > 100.0:
        z = y
    else:
        z = -y / (1.0 + x)
        x = z * x
    return z + x


def powers(x, y):
    total = 0.0
    for k in range(1, 5):
        total = total * x + k * y
    return total


def loops(x, y):
    total = x
    for i in range(3):
        for j in range(i + 1):
            if (i + j) % 2 == 0:
                total = total + np.tanh(total * y) * j
            else:
                total -= i * x
    return total * i


def newton(x, y):
    z = 1.0
    steps = 0
    while abs(z * z - x) > 1e-12 and steps < 50:
        z = 0.5 * (z + x / z)
        steps += 1
    return z * y


def fibonacci(x, y):
    a, b = x, y
    for _ in range(6):
        a, b = b, a + b * x
    return a * b


def square(z):
    return z * z


def hypotenuse(x, y):
    return np.sqrt(square(x) + square(y))


def calls(x, y):
    z = hypotenuse(x, y)
    z = z * hypotenuse(z, square(y))
    return z**-1.5


PROGRAMS = [product, nested, twice, branch, powers, loops, newton, fibonacci, hypotenuse, calls]


class Operand:
    """An element, or a pair of value and tangent: operators, and functions of NumPy, call `call` by their names."""

    def __init__(self, call, value):
        self.call, self.value = call, value

    def apply(self, name, *operands):
        return Operand(self.call, self.call(name, *(getattr(x, "value", x) for x in operands)))

    def __abs__(self):
        return abs(self.value[0])

    def __gt__(self, other):
        return self.value[0] > (other.value[0] if isinstance(other, Operand) else other)

    def __pow__(self, n):
        return self * self if n == 2 else (n * self.log()).exp()


for operator, name in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div"}.items():
    setattr(Operand, f"__{operator}__", lambda self, other, name=name: self.apply(name, self, other))
    setattr(Operand, f"__r{operator}__", lambda self, other, name=name: self.apply(name, other, self))
Operand.__neg__ = lambda self: self.apply("neg", self)
for name in ("sin", "cos", "exp", "log", "sqrt", "tanh"):
    setattr(Operand, name, lambda self, name=name: self.apply(name, self))


def element_on_tape(name, *operands):
    return getattr(elements, f"ad_{name}")(*operands)


def element_with_tangent(name, *operands):
    pairs = [x if isinstance(x, tuple) else (x, 0.0) for x in operands]
    return getattr(forward_elements, f"ad_{name}")(*(value for value, _ in pairs), *(row for _, row in pairs))


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_elements_in_both_modes(f):
    for x, y in (0.4, 2.1), (1.3, 0.7):
        value, expected = md.value_and_grad(f, (0, 1))(x, y)
        inputs = Element(x), Element(y)
        out = f(*(Operand(element_on_tape, z) for z in inputs)).value
        forward, tangent = f(*(Operand(element_with_tangent, pair) for pair in zip((x, y), np.eye(2)))).value
        assert np.allclose([out.value, forward], value, rtol=1e-13)
        assert np.allclose([gradient(out, inputs), tangent], expected, rtol=1e-12, atol=1e-14)


def test_a_jacobian_of_elements():
    def f(x, y, dx, dy):
        return [forward_elements.ad_div(x, y, dx, dy), forward_elements.ad_cos(y, dy)]

    values, rows = forward_elements.jacobian(f, 2.0, 3.0)
    assert np.allclose(values, [2 / 3, math.cos(3.0)])
    assert np.allclose(rows, [[1 / 3, -2 / 9], [0, -math.sin(3.0)]])


def test_names_of_programs_and_adjoints_differ():
    def f(d_x, stack, d):
        d2_x = d_x * stack
        for _ in range(2):
            d = d * d2_x
        return d

    assert np.allclose(adjoint(f)(2.0, 3.0, 1.5)[1], md.grad(f, (0, 1, 2))(2.0, 3.0, 1.5))
    cotangents = adjoint(adjoint(f))(2.0, 3.0, 1.5, 1.0, (0.0, (1.0, 0.0, 0.0)))[1]
    assert np.allclose(cotangents[:3], md.hessian(f, (0, 1, 2))(2.0, 3.0, 1.5)[0])


def test_the_text_is_a_program():
    """It runs without this library: it needs NumPy alone."""
    scope = {"np": np, "square": square}
    exec(adjoint_text(hypotenuse), scope)
    value, cotangents = scope["hypotenuse_adjoint"](3.0, 4.0)
    assert np.allclose([value, *cotangents], [5.0, 0.6, 0.8])


def reused_variable(x):
    i = x
    y = i * x
    for i in range(3):
        y = y + i * x
    z = i * y
    for i in range(2):
        z = z * x + i * y
    return z * i


def inner_product(x, y):
    z = x * y - np.exp(x)
    return np.dot(z, y) + np.sum(x * x)


def two_results(x, y):
    return x * y, np.sin(x)


def test_more_programs():
    assert np.allclose(adjoint(reused_variable)(1.2)[1], md.grad(reused_variable)(1.2))
    x, y = np.array([1.0, 2.0, 3.0]), np.array([0.5, -1.0, 2.0])
    assert np.allclose(adjoint(inner_product)(x, y)[1], md.grad(inner_product, (0, 1))(x, y))
    assert np.allclose(adjoint(two_results)(2.0, 3.0, (1.0, 10.0))[1], (3.0 + 10.0 * math.cos(2.0), 2.0))


def calls_in_loop(x, y):
    for _ in range(2):
        x = square(x) * y
    return x + y


def early(x, y):
    if x > y:
        return x * np.sin(y)
    if x * y > 100.0:
        return x
    z = x * y
    return z * z * y


def root(x, y):
    z = x
    for _ in range(50):
        z = 0.5 * (z + x / z)
        if abs(z * z - x) < 1e-13:
            return z * y
    return z


def jumpy(x, y):
    total = 0.0
    for i in range(5):
        if i == 1:
            continue
        for j in range(4):
            if j > i:
                break
            total = total + x * np.sin(y * (i + j))
            if total > 50.0:
                return total * x
        total = total * y
    return total


def power(x, n):
    if n < 1.0:
        return 1.0
    return x * power(x, n - 1)


def recursive(x, y):
    return power(x, 4) * y + power(y, 2)


def horner(x, y):
    cs = [x, y, x * y, 2.0]
    cs[1] = cs[1] * cs[0]
    cs.append(np.sin(x))
    total = 0.0
    for c in cs:
        total = total * x + c
    return total / cs[-1]


def path(x, y):
    zs = [0.0] * 4
    for i in range(4):
        zs[i] = x * y + i
        if i > 0:
            zs[i] = zs[i] * zs[i - 1]
        ws = [np.tanh(z) for z in zs]
    return ws[3] * ws[1] + (zs[2] if x > y else zs[1])


def until(x, y):
    while True:
        x = x * y + 0.01 * x
        if x < 0.5:
            return x * x
        y = y * 0.9


def loop_with_else(x, y):
    for _ in range(3):
        if x > 1.0:
            break
        x = x * y + 0.2
    else:
        x = x * x
    return x * y


LONGER = [calls_in_loop, early, root, jumpy, recursive, horner, path, until, loop_with_else]


@pytest.mark.parametrize("f", [*PROGRAMS, *LONGER], ids=lambda f: f.__name__)
def test_adjoints_to_third_order(f):
    """The language has all that an adjoint has: derivatives are those of `md`."""
    first = adjoint(f)
    for x, y in [(0.4, 1.1)] * (f is not until) + [(1.3, 0.7)]:
        value, gradient = md.value_and_grad(f, (0, 1))(x, y)
        result, cotangents = first(x, y)
        assert np.isclose(result, value, rtol=1e-12) and np.allclose(cotangents, gradient, rtol=1e-11, atol=1e-13)
    second, hessian = adjoint(first), md.hessian(f, (0, 1))
    for k, direction in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        _, cotangents = second(x, y, 1.0, (0.0, direction))
        expected = [*hessian(x, y)[k], gradient[k]]  # in x, in y, and in the first cotangent
        assert np.allclose(cotangents, [float(c) for c in expected], rtol=1e-9, atol=1e-11)
    zeros = (0.0, (0.0, 0.0))
    _, cotangents = adjoint(second)(x, y, 1.0, (0.0, (1.0, 0.0)), (zeros, (1.0, 0.0, 0.0)))
    expected = md.grad(lambda x, y: hessian(x, y)[0][0], (0, 1))(x, y)
    assert np.allclose(cotangents[:2], [float(d) for d in expected], rtol=1e-8, atol=1e-10)


def mlp(A, x):
    h = np.tanh(A @ x)
    z = A.T @ h
    return np.sum(z * z) + x @ z


def mats(A, B):
    C = A @ B
    v = np.sin(C) @ B.T
    return np.sum(v @ A * C) * np.sum(A)


def rows(A, x):
    return np.dot(x @ A, x) / np.sum(x)


@pytest.mark.parametrize("f, ranks", [(mlp, (2, 1)), (mats, (2, 2)), (rows, (2, 1))], ids=["mlp", "mats", "rows"])
def test_matrices(f, ranks):
    rng = np.random.default_rng(0)
    args, directions = ([rng.normal(size=(3,) * rank) for rank in ranks] for _ in range(2))
    first = adjoint(f)
    second = adjoint(first)
    for actual, expected in zip(first(*args)[1], md.grad(f, (0, 1))(*args)):
        assert np.allclose(actual, expected)

    def along(*args):
        return md.jvp(md.grad(f, (0, 1)), args, tuple(directions))[1]

    for actual, expected in zip(second(*args, 1.0, (0.0, tuple(directions)))[1], along(*args)):
        assert np.allclose(actual, expected)
    weights = (0.0, tuple(map(np.zeros_like, directions))), (*directions, 0.0)
    third = adjoint(second)(*args, 1.0, (0.0, tuple(directions)), weights)[1]
    curvature = md.grad(lambda *args: sum(np.sum(v * w) for v, w in zip(along(*args), directions)), (0, 1))
    for actual, expected in zip(third, curvature(*args)):
        assert np.allclose(actual, expected)


def weighted(xs: list, y):
    total = 0.0
    for x in xs:
        if x > 4.0:
            break
        total = total + x * x * y
    xs[0] = total
    return total * xs[0] if len(xs) > 2 else total


def test_lists_of_inputs():
    _, (d_xs, d_y) = adjoint(weighted)([1.0, 2.0, 3.0, 5.0], 0.5)
    expected = md.grad(lambda x, y: (np.sum(x * x) * y) ** 2, (0, 1))(np.array([1.0, 2.0, 3.0]), 0.5)
    assert np.allclose(d_xs, [*expected[0], 0.0]) and np.isclose(d_y, expected[1])


def whole_list(x):
    xs = [x, x]
    return square(xs)


def part(x):
    xs = [x, x, x]
    xs[1:] = x
    return xs[0]


def with_statement(x):
    with np.errstate(all="ignore"):
        x = x * x
    return x


def falls_off(x):
    if x > 0:
        return x


def tried(x):
    try:
        x = x * x
    finally:
        x = x + 1
    return x


def subscript(x):
    return x[0]


def keyword(x):
    return np.sum(x, axis=0)


def unknown(x):
    return np.fft.fft(x)


def nothing(x):
    x = x * x


@pytest.mark.parametrize(
    "f, message",
    [
        (tried, "this statement cannot be transformed"),
        (falls_off, "the last statement must return a value"),
        (part, "1:: a list is used by its entries"),
        (with_statement, "this statement cannot be transformed"),
        (whole_list, "xs: a list is used by its entries"),
        (subscript, "this expression cannot be transformed"),
        (keyword, "this expression cannot be transformed"),
        (unknown, "np.fft.fft is neither in RULES nor a function of this language"),
        (nothing, "the last statement must return a value"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_not_in_the_language(f, message):
    with pytest.raises(SyntaxError, match=rf"(?s)^{f.__name__}, line .*{re.escape(message)}"):
        adjoint(f)
