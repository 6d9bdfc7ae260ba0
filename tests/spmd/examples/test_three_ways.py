"""The modules of three ways to differentiate: formulas that swell, elements, and adjoints as source."""

import numpy as np
import pytest

import minidiff as md
from spmd.examples.three_ways.symbolic import derivative, evaluate, name, program_text, simplified

FORMULAS = {
    "the text's": lambda x, y: np.log(x) + x * y - np.sin(y),
    "quotients": lambda x, y: (2 - x) / (x * y + 1) - 3 / y,
    "powers": lambda x, y: x**3 + x**y + 2.0**x - (-y) ** 2 + (x / y) ** 0.5,
    "functions": lambda x, y: np.exp(-x * y) * np.tanh(x) + np.sqrt(1 + np.cos(y)),
}


@pytest.mark.parametrize("f", FORMULAS.values(), ids=FORMULAS)
def test_derivatives_of_formulas(f):
    at = {"x": 1.3, "y": 0.7}
    e = f(name("x"), name("y"))
    assert np.isclose(evaluate(e, **at), f(**at), rtol=1e-14)
    hessian = md.hessian(f, (0, 1))(*at.values())
    for i, (of, expected) in enumerate(zip("xy", md.grad(f, (0, 1))(*at.values()))):
        first = derivative(e, of)
        for d in (first, simplified(first)):
            assert np.isclose(evaluate(d, **at), expected, rtol=1e-12)
            scope = {"np": np}
            exec(program_text(d, "x", "y"), scope)
            assert np.isclose(scope["f"](**at), expected, rtol=1e-12)
            for j, other in enumerate("xy"):
                assert np.isclose(evaluate(derivative(d, other), **at), hessian[i][j], rtol=1e-10)
