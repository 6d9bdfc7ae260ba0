"""`odeint` and `solve_ivp`: SciPy's numbers, and derivatives by differences; `integrate.md` has known solutions."""

import numpy as np
import pytest
import scipy.integrate

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy import integrate
from tests.checks.samples import each

TIMES = np.array([0.0, 0.5, 1.2, 2.0])
Y0 = np.array([1.0, 0.3])
FINE = {"rtol": 1e-11, "atol": 1e-11}


def rates(y, t, a, b):
    return np.stack([a * y[1] + 0.1 * np.sin(t), -b * y[0]])


@each("times", [TIMES, TIMES[::-1]])
def test_odeint_is_scipys(times):
    expected = scipy.integrate.odeint(rates, Y0, times, (1.0, 2.0))
    np.testing.assert_allclose(integrate.odeint(rates, Y0, times, (1.0, 2.0)), expected, rtol=1e-12)
    first = integrate.odeint(lambda t, y: rates(y, t, 1.0, 2.0), Y0, times, tfirst=True)
    np.testing.assert_allclose(first, expected, rtol=1e-12)


@each("method", ["RK45", "DOP853", "Radau", "LSODA"])
def test_solve_ivp_is_scipys(method):
    f = lambda t, y: rates(y, t, 1.0, 2.0)  # noqa: E731
    actual, expected = (s.solve_ivp(f, (0.0, 2.0), Y0, method, TIMES) for s in (integrate, scipy.integrate))
    np.testing.assert_allclose(actual.y, expected.y, rtol=1e-9)
    np.testing.assert_array_equal(actual.t, expected.t)


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


def test_derivatives_of_states():
    check_grads(lambda *args: integrate.odeint(rates, *args[:2], args[2:], **FINE), (Y0, TIMES, 1.0, 2.0), order=1)
    check_grads(lambda y, t: integrate.odeint(rates, y, t, (1.0, 2.0), **FINE), (Y0, TIMES[::-1]), order=1)
    f = lambda t, y, a: rates(y, t, a, 2.0)  # noqa: E731
    check_grads(lambda y, a: integrate.solve_ivp(f, (0, 2.0), y, "DOP853", args=(a,), **FINE).y, (Y0, 1.0), order=1)


def test_the_right_hand_side_may_close_over_traced_values():
    end = lambda a: integrate.odeint(lambda y, t: rates(y, t, a, a * a), Y0, TIMES, **FINE)[-1]  # noqa: E731
    check_grads(end, (1.3,), order=1)
    batch = np.array([1.3, 1.5])
    slope = md.grad(lambda a: end(a).sum())
    np.testing.assert_allclose(md.jit(md.vmap(slope))(batch), list(map(slope, batch)), rtol=1e-8)
    powers = md.vmap(lambda n: integrate.odeint(lambda y, t: -y * n, Y0, TIMES)[-1])(np.array([1, 2]))
    np.testing.assert_allclose(powers, Y0 * np.exp(-2.0 * np.array([[1], [2]])), rtol=1e-6)


IMPLICIT = [(method, 1000.0) for method in ("odeint", "Radau", "BDF", "LSODA")]


@each("method, k", [("odeint", 1.0), ("RK45", 100.0), ("DOP853", 100.0), *IMPLICIT])
def test_reverse_mode_of_decaying_solutions(method, k):
    """Integrated backward, the state would grow as exp(k)."""
    tolerances = {"rtol": 1e-6, "atol": 1e-9}
    relaxation = lambda t, y, k: -k * (y - np.cos(t))  # noqa: E731

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


def van_der_pol(t, y, mu):
    return np.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


def end_of_robertson(p):
    atol = np.array([1e-10, 1e-14, 1e-10])
    return integrate.solve_ivp(robertson, (0, 40.0), np.eye(3)[0], "BDF", args=(p,), rtol=1e-7, atol=atol).y[2, -1]


def end_of_van_der_pol(end, method):
    options = {"method": method, "rtol": 1e-7, "atol": 1e-10}
    return lambda mu: integrate.solve_ivp(van_der_pol, (0, end), Y0, args=(mu,), **options).y[0, -1]


STIFF = {
    "robertson": (end_of_robertson, np.array([0.04, 1e4, 3e7]), 1e-5),
    "van der pol, BDF": (end_of_van_der_pol(5.0, "BDF"), 10.0, 1e-4),
    "van der pol, LSODA": (end_of_van_der_pol(500.0, "LSODA"), 1000.0, 1e-4),
}


@pytest.mark.parametrize("name", STIFF)
def test_both_modes_agree_for_stiff_equations(name):
    last, p, rtol = STIFF[name]
    np.testing.assert_allclose(p * md.grad(last)(p), p * md.jacfwd(last)(p), rtol=rtol)


@each("method, p", [("BDF", np.array([0.5, 0.3])), ("RK45", np.array([0.5 - 0.1j, 0.3 + 0.2j]))])
def test_complex_states(method, p):
    def spin(t, y, p):
        return -1j * np.stack([p[0] * y[0] + p[1] * np.cos(t) * y[1], p[1] * np.cos(t) * y[0] - p[0] * y[1]])

    def probabilities(p, y0, t):
        ys = integrate.solve_ivp(spin, (0, 2), y0, method, t, (p,), rtol=1e-9, atol=1e-9).y
        return np.sum(np.abs(ys) ** 2 * np.array([[1.0], [2.0]]))

    y0 = np.array([1.0, 0.5j])
    args, tangents = (p, y0, np.array([1.0, 2.0])), (p * 0.3 + 0.1, y0 * 1j + 0.2, np.array([0.1, -0.2]))
    pushed = md.jvp(probabilities, args, tangents)[1]
    result = md.grad(probabilities, (0, 1, 2))(*args)
    assert [x.dtype for x in result] == [x.dtype for x in args]
    np.testing.assert_allclose(sum(np.sum(x * t).real for x, t in zip(result, tangents)), pushed, rtol=1e-6)


def test_second_derivatives_in_all_operands():
    def end(y0, t, a):
        return integrate.solve_ivp(lambda s, y: -a * y * y + s, t, y0, "DOP853", rtol=1e-9, atol=1e-9).y[0, -1]

    args, all_of = (np.array([0.8]), np.array([0.1, 1.0]), 1.3), (0, 1, 2)
    by_reverse = md.jacrev(md.grad(end, all_of), all_of)(*args)
    for of in (md.jacfwd(md.grad(end, all_of), all_of), md.jacfwd(md.jacfwd(end, all_of), all_of)):
        for x, y in zip(md.tree.leaves(by_reverse), md.tree.leaves(of(*args))):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@each("run", [lambda f: f, md.jit])
def test_a_gradient_that_fails_names_the_users_call(run):
    decay = md.custom_jvp(lambda y, t: -y)
    decay.defjvps(lambda dy, out, y, t: dy * np.where(t < 0.5, np.nan, -1.0), None)
    loss = lambda a: integrate.solve_ivp(lambda t, y: a * decay(y, t), (0.0, 1.0), np.ones(1)).y[0, -1]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"gradient of solve_ivp failed \(test_integrate.py:.* from t = 1 to 0"):
        run(md.grad(loss))(1.0)
