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
from tests.checks.samples import check_raises, each

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


def relaxation(t, y, k):
    return -k * (y - np.cos(t))


@each("method", ["odeint", "RK45", "DOP853", "Radau", "BDF", "LSODA"])
@each("k", [1.0, 20.0, 100.0, 1000.0])
def test_reverse_mode_of_decaying_solutions(method, k):
    """Integrated backward, the state would grow as exp(k)."""
    if method in ("RK45", "DOP853") and k > 100:
        pytest.skip("many steps")
    tolerances = {"rtol": 1e-6, "atol": 1e-9}

    def loss(k, y0, t):
        if method == "odeint":
            return integrate.odeint(relaxation, y0, t, (k,), tfirst=True, **tolerances)[1:].sum()
        return integrate.solve_ivp(relaxation, (t[0], t[2]), y0, method, t[1:], (k,), **tolerances).y.sum()

    def right(k, t, s):  # the solution at t, which is 0 at s
        y = lambda t: k * (k * np.cos(t) + np.sin(t)) / (1 + k * k)  # noqa: E731
        return y(t) - np.exp(-k * (t - s)) * y(s)

    times = np.array([0.0, 0.6, 1.0])
    result = md.grad(loss, (0, 1, 2))(k, np.zeros(1), times)
    expected = md.grad(lambda k, t: right(k, t[1], t[0]) + right(k, t[2], t[0]), (0, 1))(k, times)
    of_y0 = np.exp(-k * times[1:]).sum()
    for x, y, atol in zip(result, (expected[0], of_y0, expected[1]), (1e-5 / k, 1e-5, 1e-6 * k)):  # of times: k * y
        np.testing.assert_allclose(np.squeeze(x), y, rtol=1e-5, atol=atol)


def robertson(t, y, p):
    slow, fast, faster = p[0] * y[0], p[1] * y[1] * y[2], p[2] * y[1] ** 2
    return np.stack([fast - slow, slow - fast - faster, faster])


@pytest.mark.parametrize("atol", [1e-10, np.array([1e-10, 1e-14, 1e-10])], ids=["number", "vector"])
@pytest.mark.parametrize("end", [40.0, 4e4])
def test_reverse_mode_of_robertson(end, atol):
    def last(p):
        return integrate.solve_ivp(robertson, (0, end), np.eye(3)[0], "BDF", args=(p,), rtol=1e-7, atol=atol).y[2, -1]

    p = np.array([0.04, 1e4, 3e7])
    np.testing.assert_allclose(p * md.grad(last)(p), p * md.jacfwd(last)(p), rtol=1e-5)


@each("mu, end, method, rtol", [(10.0, 20.0, "RK45", 1e-7), (10.0, 20.0, "BDF", 1e-7), (1000.0, 500.0, "LSODA", 1e-7)])
def test_reverse_mode_of_van_der_pol(mu, end, method, rtol):
    f = lambda t, y, mu: np.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])  # noqa: E731
    last = lambda mu: integrate.solve_ivp(f, (0, end), Y0, method, args=(mu,), rtol=rtol, atol=1e-10).y[0, -1]  # noqa: E731
    np.testing.assert_allclose(md.grad(last)(mu), md.jvp(last, (mu,), (1.0,))[1], rtol=1e-4)


def spin(t, y, p):  # p may be complex
    return -1j * np.stack([p[0] * y[0] + p[1] * np.cos(t) * y[1], p[1] * np.cos(t) * y[0] - p[0] * y[1]])


def test_all_cotangents_of_complex_states():
    """Also that of the first time, where SciPy's dense output over no time would be real."""
    w = np.array([[0.5 + 0.1j, 0.3 - 0.8j]])
    f = lambda y: np.sum(w * integrate.solve_ivp(lambda t, y: 0.7j * y, (0.0, 1.0), y, **FINE).y).real  # noqa: E731
    np.testing.assert_allclose(md.grad(f)(np.ones(1, complex)), w[:, 0] + w[:, 1] * np.exp(0.7j), rtol=1e-8)


@each("method", ["RK45", "DOP853", "BDF"])
@each("p", [np.array([0.5, 0.3]), np.array([0.5 - 0.1j, 0.3 + 0.2j])])
def test_complex_states(method, p):
    y0 = np.array([1.0, 0.5j])

    def probabilities(p, y0, t):
        ys = integrate.solve_ivp(spin, (0, 2), y0, method, t, (p,), rtol=1e-9, atol=1e-9).y
        return np.sum(np.abs(ys) ** 2 * np.array([[1.0], [2.0]]))

    args, tangents = (p, y0, np.array([1.0, 2.0])), (p * 0.3 + 0.1, y0 * 1j + 0.2, np.array([0.1, -0.2]))
    pushed = md.jvp(probabilities, args, tangents)[1]
    result = md.grad(probabilities, (0, 1, 2))(*args)
    assert [x.dtype for x in result] == [x.dtype for x in args]
    np.testing.assert_allclose(sum(np.sum(x * t).real for x, t in zip(result, tangents)), pushed, rtol=1e-6)


def test_each_operand_has_its_own_dtype():
    def loss(y0, t, a, b):
        f = lambda y, s: -y * a * np.abs(b[0]) + s  # noqa: E731
        return integrate.odeint(f, y0, t)[-1].sum()

    args = np.ones(2, np.float32), np.array([0.0, 1.0]), np.float32(0.5), (np.array([1 + 1j]),)
    result = md.grad(loss, (0, 1, 2, 3))(*args)
    assert [x.dtype for x in md.tree.leaves(result)] == [x.dtype for x in md.tree.leaves(args)]
    y, of_a = md.value_and_grad(
        lambda a: integrate.odeint(lambda y, t: -y * a, np.ones(1), np.array([0, 1, 2]))[-1, 0]
    )(0.5)
    np.testing.assert_allclose([y, of_a], [np.exp(-1), -2 * np.exp(-1)], rtol=1e-6)


def test_some_times_have_cotangents():
    f = lambda a, t: integrate.solve_ivp(lambda t, y: -a * y, (0.0, 3.0), np.ones(1), "DOP853", t, **FINE).y[0]  # noqa: E731
    t = np.array([1.0, 2.0, 3.0])
    jacobians = md.jacrev(f, (0, 1))(0.7, t)
    np.testing.assert_allclose(jacobians[0], -t * np.exp(-0.7 * t), rtol=1e-8)
    np.testing.assert_allclose(jacobians[1], np.diag(-0.7 * np.exp(-0.7 * t)), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(md.grad(lambda a: 0 * f(a, t).sum())(0.7), 0)


def test_second_derivatives_in_all_operands():
    def end(y0, t, a):
        return integrate.solve_ivp(lambda s, y: -a * y * y + s, (t[0], t[1]), y0, "DOP853", args=(), **FINE).y[0, -1]

    args = np.array([0.8]), np.array([0.1, 1.0]), 1.3
    by_reverse = md.jacrev(md.grad(end, (0, 1, 2)), (0, 1, 2))(*args)
    for both in (
        md.jacfwd(md.grad(end, (0, 1, 2)), (0, 1, 2))(*args),
        md.jacfwd(md.jacfwd(end, (0, 1, 2)), (0, 1, 2))(*args),
    ):
        for x, y in zip(md.tree.leaves(by_reverse), md.tree.leaves(both)):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_adjoints_in_bodies_and_loops():
    def end(a):
        return integrate.solve_ivp(lambda t, y: -a * y, (0.0, 1.0), np.ones(1), **FINE).y[0, -1]

    slope = lambda a: -np.exp(-a)  # noqa: E731
    a = np.array([0.5, 1.0, 1.5, 2.0])
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    mapped = spmd.shard_map(lambda a: md.vmap(md.grad(end))(a), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_allclose(mapped(a).gather(), slope(a), rtol=1e-8)
    whole = md.grad(lambda w: psum_of_ends(mesh, end)(w, a))(1.0)
    np.testing.assert_allclose(whole, (a * slope(a)).sum(), rtol=1e-8)
    scanned = md.jit(md.grad(lambda a: md.scan(lambda c, _: (c * end(a), None), 1.0, None, length=3)[0]))(0.5)
    np.testing.assert_allclose(scanned, 3 * np.exp(-1) * slope(0.5), rtol=1e-8)


def psum_of_ends(mesh, end):
    body = lambda w, a: psum(md.vmap(lambda a: end(w * a))(a).sum(), "i")  # noqa: E731
    return spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())


@each(
    "call, expected",
    [
        (lambda: integrate.solve_ivp(rates, (0, 1), Y0, events=len), "TypeError: solve_ivp: events= .*root"),
        (lambda: integrate.solve_ivp(rates, (0, 1), Y0, dense_output=True), "TypeError: dense_output= .* t_eval"),
        (lambda: integrate.solve_ivp(rates, (0, 1), Y0, "BDF", jac=len), "TypeError: jac= is not supported"),
        (lambda: integrate.odeint(rates, Y0, TIMES, full_output=True), "TypeError: odeint: full_output= "),
        (lambda: integrate.odeint(lambda y, t: 1j * y, Y0, TIMES), r"TypeError: f64\[2\], got c128\[2\]; .*astype"),
        (lambda: integrate.odeint(lambda y, t: y, Y0 + 0j, TIMES), r"TypeError: LSODA .* real .*c128\[2\]"),
        (lambda: integrate.solve_ivp(lambda t, y: y[:1], (0, 1), Y0), r"TypeError: f64\[2\], got f64\[1\]"),
    ],
)
def test_options_and_right_hand_sides_that_are_refused(call, expected):
    check_raises(call, expected)


def test_a_gradient_that_fails_names_the_users_call():
    @md.custom_jvp
    def decay(y, t):
        return -y

    decay.defjvps(lambda dy, out, y, t: dy * np.where(t < 0.5, np.nan, -1.0), None)
    loss = lambda a: integrate.solve_ivp(lambda t, y: a * decay(y, t), (0.0, 1.0), np.ones(1)).y[0, -1]  # noqa: E731
    for f in (md.grad(loss), md.jit(md.grad(loss))):
        with pytest.raises(RuntimeError, match=r"gradient of solve_ivp failed \(test_solvers.py:.* from t = 1 to 0"):
            f(1.0)


# ---------------------------------------------------------------- optimize


def equations(x, a, b):
    return np.stack([x[0] ** 3 + x[1] - a, x[1] ** 2 * x[0] - b + 0.1 * x[0]])


def valley(x, a):
    return (x[1] - x[0] ** 2) ** 2 * 10 + (a - x[0]) ** 2 + 0.1 * np.exp(x[1])


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


def test_a_root_that_is_not_found_is_no_success():
    result = md.jit(lambda a: optimize.root(lambda x: x * x + a, np.ones(1)))(1.0)
    assert not result.success


def test_minimize():
    minimum = lambda a: optimize.minimize(valley, np.ones(2), (a,), tol=1e-10)  # noqa: E731
    expected = scipy.optimize.minimize(valley, np.ones(2), (1.2,), tol=1e-10).x
    np.testing.assert_allclose(minimum(1.2).x, expected, atol=1e-5)
    check_grads(lambda a: minimum(a).x, (1.2,), order=1, rtol=1e-4)
    check_grads(lambda a: minimum(a).fun, (1.2,), order=1, rtol=1e-4)
    a = np.array([1.1, 1.2])
    result = md.jit(md.vmap(md.grad(lambda a: minimum(a).fun)))(a)
    np.testing.assert_allclose(result, [2 * (a - minimum(a).x[0]) for a in a], rtol=1e-5)  # the envelope theorem


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


def test_a_first_guess_may_be_a_tree():
    a, start = np.array([[1.0, 2.0], [3.0, 4.0]]), {"w": np.zeros((2, 2)), "b": 0.0}

    def root(a):
        f = lambda x: {"b": x["b"] - x["w"].sum(), "w": 2 * x["w"] - a * x["b"] - 1}  # noqa: E731
        return optimize.root(f, start, tol=1e-12)

    expected = 4 / (2 - a.sum())
    result = root(a)
    assert result.success and md.tree.structure(result.x) == md.tree.structure(result.fun) == md.tree.structure(start)
    np.testing.assert_allclose(result.x["b"], expected, rtol=1e-10)
    np.testing.assert_allclose(result.x["w"], (a * expected + 1) / 2, atol=1e-10)
    np.testing.assert_allclose(md.grad(lambda a: root(a).x["b"])(a), np.full((2, 2), expected**2 / 4), rtol=1e-8)

    def minimum(a):  # b is at a bound, and the sum of w is known
        f = lambda x, a: ((x["w"] - a) ** 2).sum() + (x["b"] - 3) ** 2  # noqa: E731
        fixed = {"type": "eq", "fun": lambda x: x["w"].sum() - 2}
        bounds = [(None, 1.0)] + [(None, None)] * 4  # in the order of the leaves
        return optimize.minimize(f, start, (a,), tol=1e-12, bounds=bounds, constraints=fixed).x

    np.testing.assert_allclose(minimum(a)["w"], a - 2, atol=1e-6)
    np.testing.assert_allclose(minimum(a)["b"], 1.0)
    expected = (np.eye(4) - 0.25).reshape(2, 2, 2, 2)
    np.testing.assert_allclose(md.jacrev(lambda a: minimum(a)["w"])(a), expected, atol=1e-6)
    for x0 in ([1.0, 2.0], (1.0, 2.0), np.ones(2)):  # numbers are a vector, as for SciPy
        np.testing.assert_allclose(optimize.root(lambda x: x * x - 4.0, x0).x, [2.0, 2.0])


@pytest.mark.parametrize("find", [optimize.root, optimize.minimize])
def test_the_derivative_is_not_an_argument(find):
    """SciPy's users give it; the message is not that of a call inside."""
    with pytest.raises(TypeError, match=f"{find.__name__}: jac= is not supported: the derivative is computed here"):
        find(lambda x: x @ x, np.ones(1), jac=lambda x: 2 * x)


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


@each("name", list(RESTRICTIONS))
@each("method", [None, "SLSQP"])
def test_minimize_with_bounds_and_constraints(name, method):
    def x(a):
        return optimize.minimize(bowl, np.array([0.5, 0.6, 0.4]), (a,), method, 1e-12, **RESTRICTIONS[name](a)).x

    a, step = np.array([1.5, 0.7, -3.0]), 1e-4
    expected = np.stack([(x(a + step * e) - x(a - step * e)) / (2 * step) for e in np.eye(3)], 1)
    for jacobian in (md.jacfwd, md.jacrev):
        np.testing.assert_allclose(jacobian(x)(a), expected, atol=2e-3)


def test_weakly_active_bounds_and_transformations():
    x = lambda a: optimize.minimize(lambda x: np.sum((x - a) ** 2), np.array([0.5]), bounds=[(0.0, 1.0)]).x[0]  # noqa: E731
    assert [float(md.grad(x)(a)) for a in (-1.0, 0.5, 1.0, 2.0)] == pytest.approx([0, 1, 1, 0])
    np.testing.assert_allclose(md.jit(md.vmap(md.grad(x)))(np.array([0.5, 2.0])), [1.0, 0.0], atol=1e-12)
    equal = lambda a: {"constraints": {"type": "eq", "fun": lambda x: x[0] * x[1] - a}}  # noqa: E731
    f = lambda x, a: np.sum((x - a) ** 4 + x**2)  # noqa: E731
    y = lambda a: optimize.minimize(f, np.array([0.5, 0.6]), (a,), tol=1e-13, **equal(a)).fun  # noqa: E731
    expected = (md.grad(y)(0.301) - md.grad(y)(0.299)) / 0.002
    np.testing.assert_allclose([md.grad(md.grad(y))(0.3), md.jacfwd(md.grad(y))(0.3)], expected, rtol=1e-4)


@each(
    "solve",
    [
        lambda a: optimize.minimize(lambda x: (x[0] + x[1] - a) ** 2, np.ones(2)).x,
        lambda a: optimize.root(lambda x: np.stack([x[0] - a, 2 * x[0] - 2 * a]), np.zeros(2)).x,
        lambda a: (
            optimize.minimize(
                lambda x: np.sum((x - a) ** 2),
                np.ones(2),
                constraints=[{"type": "eq", "fun": lambda x, k=k: k * (x[0] - x[1])} for k in (1, 2)],
            ).x
        ),
    ],
)
def test_solutions_without_a_derivative_are_nan_with_a_warning(solve):
    for derivative in (md.jacfwd, md.jacrev):
        with pytest.warns(RuntimeWarning, match="has no derivative, which is NaN") as warned:
            assert np.isnan(derivative(solve)(1.0)).all()
        assert warned[0].filename == __file__


@each(
    "options, expected",
    [
        ({"constraints": {"type": "eq", "fun": len, "jac": len}}, "TypeError: jac=, .* of a constraint"),
        ({"constraints": {"type": "le", "fun": len}}, "ValueError: 'eq' or 'ineq', got 'le'"),
        ({"bounds": scipy.optimize.Bounds(0, 1, keep_feasible=True)}, "TypeError: keep_feasible= of a constraint"),
    ],
)
def test_constraints_that_are_refused(options, expected):
    check_raises(lambda: optimize.minimize(lambda x: x @ x, np.ones(1), **options), expected)


@pytest.mark.parametrize(
    "bounds", [lambda u: [(0, u), (-u, None)], lambda u: scipy.optimize.Bounds(np.stack([0, -u]), u)]
)
def test_compiled_bounds_may_be_traced(bounds):
    distance = lambda x: ((x - np.array([2.0, -3.0])) ** 2).sum()  # noqa: E731
    f = lambda u: optimize.minimize(distance, np.zeros(2), bounds=bounds(u)).x  # noqa: E731
    for g in (f, md.jit(f)):
        np.testing.assert_allclose(g(0.5), [0.5, -0.5], rtol=1e-6)
        np.testing.assert_allclose(md.jacrev(g)(0.5), [1.0, -1.0], rtol=1e-6)


@pytest.mark.parametrize("transform", [md.grad, md.jit])
@pytest.mark.parametrize(
    "f",
    [
        lambda tol: optimize.root(lambda x: x, np.ones(1), tol=tol).x[0],
        lambda tol: optimize.minimize(lambda x: (x * x).sum(), np.ones(1), options={"gtol": tol}).x[0],
        lambda tol: integrate.odeint(lambda y, t: -y, np.ones(1), TIMES, rtol=tol)[0, 0],
    ],
)
def test_options_must_be_plain(transform, f):
    with pytest.raises(TypeError, match=r"(tol|options)= must be plain, .* got a traced value of type f64\[\]"):
        transform(f)(1e-6)
