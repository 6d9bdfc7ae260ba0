"""`root` and `minimize`: SciPy's solutions, and derivatives against differences; `optimize.md` shows others."""

import numpy as np
import pytest
import scipy.optimize

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy import optimize
from tests.checks.samples import each


def equations(x, a, b):
    return np.stack([x[0] ** 3 + x[1] - a, x[1] ** 2 * x[0] - b + 0.1 * x[0]])


def solution(a, b):
    return optimize.root(equations, np.ones(2), (a, b), tol=1e-13).x


def test_root():
    result = optimize.root(equations, np.ones(2), (2.0, 1.0))
    np.testing.assert_allclose(result.x, scipy.optimize.root(equations, np.ones(2), (2.0, 1.0)).x, rtol=1e-7)
    np.testing.assert_allclose(result.fun, 0, atol=1e-10)
    assert result.success
    check_grads(solution, (2.0, 1.0))
    check_grads(md.vmap(solution), (np.array([2.0, 2.1]), np.array([1.0, 0.9])), order=1)
    for jacobian in (md.jacfwd, md.jacrev):
        np.testing.assert_allclose(md.jit(jacobian(solution))(2.0, 1.0), md.jacfwd(solution)(2.0, 1.0))
    closure = lambda a: optimize.root(lambda x: equations(x, 2 * a, a * a), np.ones(2), tol=1e-13)  # noqa: E731
    check_grads(lambda a: closure(a).x, (1.0,))
    np.testing.assert_allclose(md.jacrev(lambda a: closure(a).fun)(1.0), 0, atol=1e-9)  # it stays 0


def test_minimize():
    valley = lambda x, a: (x[1] - x[0] ** 2) ** 2 * 10 + (a - x[0]) ** 2 + 0.1 * np.exp(x[1])  # noqa: E731
    minimum = lambda a: optimize.minimize(valley, np.ones(2), (a,), tol=1e-10)  # noqa: E731
    expected = scipy.optimize.minimize(valley, np.ones(2), (1.2,), tol=1e-10).x
    np.testing.assert_allclose(minimum(1.2).x, expected, atol=1e-5)
    check_grads(lambda a: minimum(a).x, (1.2,), order=1, rtol=1e-4)
    check_grads(lambda a: minimum(a).fun, (1.2,), order=1, rtol=1e-4)
    a = np.array([1.1, 1.2])
    result = md.jit(md.vmap(md.grad(lambda a: minimum(a).fun)))(a)
    np.testing.assert_allclose(result, [2 * (a - minimum(a).x[0]) for a in a], rtol=1e-5)  # the envelope theorem


# ---------------------------------------------------------------- bounds and constraints


def bowl(x, a):
    return np.sum((x - a) ** 2 * np.array([1.0, 2.0, 0.5])) + 0.3 * x[0] * x[1] + 0.1 * x[2] * x[1]


def disc(x, a):
    return 2 * a[0] - x[0] ** 2 - x[1] ** 2 - x[2] ** 2


RESTRICTIONS = {
    "bounds": lambda a: {"bounds": [(0.0, 1.0), (None, 1.5), (-1, None)]},
    "traced bounds": lambda a: {"bounds": [(0.0, a[0] / 4), (None, a[1]), (a[2] / 5, None)]},
    "Bounds": lambda a: {"bounds": scipy.optimize.Bounds(-a[0] / 9, a[0] / 4)},
    "equality": lambda a: {"constraints": {"type": "eq", "fun": disc, "args": (a,)}},
    "active inequality": lambda a: {"constraints": [{"type": "ineq", "fun": lambda x: disc(x, a)}]},
    "inactive": lambda a: {"constraints": {"type": "ineq", "fun": lambda x: disc(x, 10 * a)}, "bounds": [(-9, 9)] * 3},
    "both": lambda a: {"constraints": {"type": "ineq", "fun": lambda x: disc(x, a)}, "bounds": [(0.0, 0.9)] * 3},
    "linear": lambda a: {"constraints": scipy.optimize.LinearConstraint(np.stack([a, a * a]), -9.0, a[1])},
    "nonlinear": lambda a: {"constraints": scipy.optimize.NonlinearConstraint(lambda x: x * x, a[1] / 2, 1.0)},
}


@each("name, method", [*((name, None) for name in RESTRICTIONS), ("bounds", "SLSQP"), ("traced bounds", "SLSQP")])
def test_minimize_with_bounds_and_constraints(name, method):
    def x(a):
        return optimize.minimize(bowl, np.array([0.5, 0.6, 0.4]), (a,), method, 1e-12, **RESTRICTIONS[name](a)).x

    a, step = np.array([1.5, 0.7, -3.0]), np.array([1.0, -0.6, 0.8]) * 1e-4
    jacobian = md.jacfwd(x)(a)
    np.testing.assert_allclose(jacobian @ step, (x(a + step) - x(a - step)) / 2, atol=2e-7)
    np.testing.assert_allclose(md.jacrev(x)(a), jacobian, atol=1e-6)


def test_second_derivatives_with_a_constraint():
    equal = lambda a: {"constraints": {"type": "eq", "fun": lambda x: x[0] * x[1] - a}}  # noqa: E731
    f = lambda x, a: np.sum((x - a) ** 4 + x**2)  # noqa: E731
    y = lambda a: optimize.minimize(f, np.array([0.5, 0.6]), (a,), tol=1e-13, **equal(a)).fun  # noqa: E731
    expected = (md.grad(y)(0.301) - md.grad(y)(0.299)) / 0.002
    np.testing.assert_allclose([md.grad(md.grad(y))(0.3), md.jacfwd(md.grad(y))(0.3)], expected, rtol=1e-4)


def between(a):
    """A minimum with the same constraint twice."""
    twice = [{"type": "eq", "fun": lambda x, k=k: k * (x[0] - x[1])} for k in (1, 2)]
    return optimize.minimize(lambda x: np.sum((x - a) ** 2), np.ones(2), constraints=twice).x


@each(
    "solve",
    [
        lambda a: optimize.minimize(lambda x: (x[0] + x[1] - a) ** 2, np.ones(2)).x,
        lambda a: optimize.root(lambda x: np.stack([x[0] - a, 2 * x[0] - 2 * a]), np.zeros(2)).x,
        between,
    ],
)
@each("derivative", [md.jacfwd, md.jacrev])
def test_solutions_without_a_derivative_are_nan_with_a_warning(solve, derivative):
    with pytest.warns(RuntimeWarning, match="has no derivative, which is NaN") as warned:
        assert np.isnan(derivative(solve)(1.0)).all()
    assert warned[0].filename == __file__
