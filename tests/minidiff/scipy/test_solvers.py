"""Solvers: SciPy's numbers, derivatives of every argument against differences, transformations, and errors."""

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize

import minidiff as md
import spmd
from collectives import psum
from minidiff.checks.testing import check_grads
from minidiff.scipy import integrate, optimize
from spmd import P

TIMES = np.array([0.0, 0.5, 1.2, 2.0])
Y0 = np.array([1.0, 0.3])
FINE = {"rtol": 1e-11, "atol": 1e-11}


def rates(y, t, a, b):
    return np.stack([a * y[1] + 0.1 * np.sin(t), -b * y[0]])


def test_odeint_is_scipys():
    for times in (TIMES, TIMES[::-1]):
        expected = scipy.integrate.odeint(rates, Y0, times, (1.0, 2.0))
        np.testing.assert_allclose(integrate.odeint(rates, Y0, times, (1.0, 2.0)), expected, rtol=1e-12)
        np.testing.assert_allclose(
            integrate.odeint(lambda t, y: rates(y, t, 1.0, 2.0), Y0, times, tfirst=True), expected, rtol=1e-12
        )


@pytest.mark.parametrize("method", ["odeint", "RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA"])
def test_solvers_stop_where_a_solution_grows_without_bound(method):
    def end(rate, sign):  # y = 1 / (1 - t), which no solver can follow past t = 1
        if method == "odeint":
            return integrate.odeint(lambda y, t: sign * rate * y * y, np.ones(1), sign * np.array([0.0, 0.5, 2.0, 3.0]))
        return integrate.solve_ivp(lambda t, y: sign * rate * y * y, (0.0, 2.0 * sign), np.ones(1), method).y

    pattern = r"stopped at t = -?(1|1\.0\d*|0\.99\d*), where its last step was .*e-"
    for f in (lambda: end(1.0, -1), lambda: md.jit(md.grad(lambda rate: end(rate, 1).sum()))(1.0)):
        with np.errstate(over="ignore", invalid="ignore"), pytest.raises(RuntimeError, match=pattern):
            f()


@pytest.mark.parametrize("method", ["RK45", "DOP853", "Radau", "LSODA"])
def test_solve_ivp_is_scipys(method):
    f = lambda t, y: rates(y, t, 1.0, 2.0)  # noqa: E731
    actual = integrate.solve_ivp(f, (0.0, 2.0), Y0, method, TIMES)
    expected = scipy.integrate.solve_ivp(f, (0.0, 2.0), Y0, method, TIMES)
    np.testing.assert_allclose(actual.y, expected.y, rtol=1e-9)
    np.testing.assert_array_equal(actual.t, expected.t)


def test_derivatives_of_states():
    check_grads(lambda *args: integrate.odeint(rates, *args[:2], args[2:], **FINE), (Y0, TIMES, 1.0, 2.0))
    check_grads(lambda y, t: integrate.odeint(rates, y, t, (1.0, 2.0), **FINE), (Y0, TIMES[::-1]), order=1)
    f = lambda t, y, a: rates(y, t, a, 2.0)  # noqa: E731
    check_grads(lambda y, a: integrate.solve_ivp(f, (0, 2.0), y, "DOP853", args=(a,), **FINE).y, (Y0, 1.0), order=1)


def test_the_right_hand_side_may_close_over_traced_values():
    def end(a):
        return integrate.odeint(lambda y, t: rates(y, t, a, a * a), Y0, TIMES, **FINE)[-1]

    check_grads(end, (1.3,), order=1)
    batch = np.array([1.3, 1.5])
    check_grads(md.vmap(end), (batch,), order=1)
    compiled = md.jit(md.vmap(md.grad(lambda a: end(a).sum())))
    np.testing.assert_allclose(compiled(batch), [md.grad(lambda a: end(a).sum())(a) for a in batch], rtol=1e-8)
    powers = md.vmap(lambda n: integrate.odeint(lambda y, t: -y * n, Y0, TIMES)[-1])(np.array([1, 2]))
    np.testing.assert_allclose(powers, Y0 * np.exp(-2.0 * np.array([[1], [2]])), rtol=1e-6)


def test_a_solver_that_fails_raises_an_error():
    with pytest.raises(RuntimeError, match=r"odeint stopped at t = .*: Excess work"):
        integrate.odeint(lambda y, t: -y, np.ones(1), np.array([0.0, 2.0]), mxstep=1)


# ---------------------------------------------------------------- optimize


def equations(x, a, b):
    return np.stack([x[0] ** 3 + x[1] - a, x[1] ** 2 * x[0] - b + 0.1 * x[0]])


def valley(x, a):
    return (x[1] - x[0] ** 2) ** 2 * 10 + (a - x[0]) ** 2 + 0.1 * np.exp(x[1])


def solution(a, b):
    return optimize.root(equations, np.ones(2), (a, b), tol=1e-13).x


def test_root():
    found = optimize.root(equations, np.ones(2), (2.0, 1.0))
    np.testing.assert_allclose(found.x, scipy.optimize.root(equations, np.ones(2), (2.0, 1.0)).x, rtol=1e-7)
    np.testing.assert_allclose(found.fun, 0, atol=1e-10)
    assert found.success
    check_grads(solution, (2.0, 1.0))
    check_grads(md.vmap(solution), (np.array([2.0, 2.1]), np.array([1.0, 0.9])), order=1)
    for jacobian in (md.jacfwd, md.jacrev):
        np.testing.assert_allclose(md.jit(jacobian(solution))(2.0, 1.0), md.jacfwd(solution)(2.0, 1.0))
    closure = lambda a: optimize.root(lambda x: equations(x, 2 * a, a * a), np.ones(2), tol=1e-13)  # noqa: E731
    check_grads(lambda a: closure(a).x, (1.0,))
    np.testing.assert_allclose(md.jacrev(lambda a: closure(a).fun)(1.0), 0, atol=1e-9)  # it stays 0


def test_a_root_that_is_not_found_is_no_success():
    found = md.jit(lambda a: optimize.root(lambda x: x * x + a, np.ones(1)))(1.0)
    assert not found.success


def test_minimize():
    minimum = lambda a: optimize.minimize(valley, np.ones(2), (a,), tol=1e-10)  # noqa: E731
    expected = scipy.optimize.minimize(valley, np.ones(2), (1.2,), tol=1e-10).x
    np.testing.assert_allclose(minimum(1.2).x, expected, atol=1e-5)
    check_grads(lambda a: minimum(a).x, (1.2,), order=1, rtol=1e-4)
    check_grads(lambda a: minimum(a).fun, (1.2,), order=1, rtol=1e-4)
    a = np.array([1.1, 1.2])
    found = md.jit(md.vmap(md.grad(lambda a: minimum(a).fun)))(a)
    np.testing.assert_allclose(found, [2 * (a - minimum(a).x[0]) for a in a], rtol=1e-5)  # the envelope theorem


def test_errors():
    with pytest.raises(ValueError, match=r"x0 must be a vector, as for SciPy, got f64\[2,2\]"):
        optimize.root(lambda x: x, np.ones((2, 2)))
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")

    def mapped(body):
        return spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(np.arange(4.0))

    with pytest.raises(TypeError, match="must not communicate, but it calls psum"):
        mapped(lambda x: optimize.root(lambda z: psum(z, "i") - x, x).x)
    outside = mapped(lambda x: (lambda total: optimize.root(lambda z: z - total, x).x)(psum(x, "i")))
    np.testing.assert_allclose(outside.gather(), [2.0, 4.0, 2.0, 4.0])


@pytest.mark.parametrize("find", [optimize.root, optimize.minimize])
def test_the_derivative_is_not_an_argument(find):
    """SciPy's users give it; the message is not that of a call inside."""
    with pytest.raises(TypeError, match=f"{find.__name__}: the derivative of fun is computed here; leave out jac="):
        find(lambda x: x @ x, np.ones(1), jac=lambda x: 2 * x)
