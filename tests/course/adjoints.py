"""Derivatives in two and more ways: by elements in both modes, by adjoints of a source to third order, and by `md`."""

import numpy as np

import minidiff as md
from spmd.examples.three_ways import elements, forward_elements
from spmd.examples.three_ways.elements import Element
from spmd.examples.three_ways.source import adjoint

POINTS = (0.4, 1.1), (1.3, 0.7)


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

    def __lt__(self, other):
        return self.value[0] < other

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


def by_elements(f, x, y):
    """Value and gradient on a tape of elements, and by elements with tangents."""
    inputs = Element(x), Element(y)
    out = f(*(Operand(element_on_tape, z) for z in inputs)).value
    forward, tangent = f(*(Operand(element_with_tangent, pair) for pair in zip((x, y), np.eye(2)))).value
    return (out.value, elements.gradient(out, inputs)), (forward, tangent)


def derivatives(f, points=POINTS):
    """Print gradients of a function of two numbers, which all ways agree on; further derivatives agree, too."""
    first = adjoint(f)
    for x, y in points:
        value, gradient = md.value_and_grad(f, (0, 1))(x, y)
        for actual, partial in (first(x, y), *by_elements(f, x, y)):
            assert np.isclose(actual, value, rtol=1e-12) and np.allclose(partial, gradient, rtol=1e-11, atol=1e-13)
        print(f"{x}, {y}: {gradient[0]:.4f}, {gradient[1]:.4f}")
    second, hessian = adjoint(first), md.hessian(f, (0, 1))
    for k, direction in enumerate([(1.0, 0.0), (0.0, 1.0)]):
        _, cotangents = second(x, y, 1.0, (0.0, direction))
        expected = [*hessian(x, y)[k], gradient[k]]  # in x, in y, and in the first cotangent
        assert np.allclose(cotangents, [float(c) for c in expected], rtol=1e-9, atol=1e-11)
    zeros = (0.0, (0.0, 0.0))
    _, cotangents = adjoint(second)(x, y, 1.0, (0.0, (1.0, 0.0)), (zeros, (1.0, 0.0, 0.0)))
    expected = md.grad(lambda x, y: hessian(x, y)[0][0], (0, 1))(x, y)
    assert np.allclose(cotangents[:2], [float(d) for d in expected], rtol=1e-8, atol=1e-10)


def matrix_derivatives(f, *ranks):
    """Print the sum of each gradient of a function of two arrays of 3 or 3 × 3; derivatives agree to third order."""
    rng = np.random.default_rng(0)
    args, directions = ([rng.normal(size=(3,) * rank) for rank in ranks] for _ in range(2))

    def along(*args):
        return md.jvp(md.grad(f, (0, 1)), args, tuple(directions))[1]

    first = adjoint(f)
    second = adjoint(first)
    weights = (0.0, tuple(map(np.zeros_like, directions))), (*directions, 0.0)
    curvature = md.grad(lambda *args: sum(np.sum(v * w) for v, w in zip(along(*args), directions)), (0, 1))
    for actual, expected in (
        (first(*args)[1], md.grad(f, (0, 1))(*args)),
        (second(*args, 1.0, (0.0, tuple(directions)))[1], along(*args)),
        (adjoint(second)(*args, 1.0, (0.0, tuple(directions)), weights)[1], curvature(*args)),
    ):
        assert all(map(np.allclose, actual, expected))
    print(*(f"{np.sum(ct):.4f}" for ct in first(*args)[1]))
