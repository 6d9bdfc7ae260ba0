"""Differences: what they give, how wrong they are, and where they are least wrong."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.checks.numerical import backward_difference, central_difference, errors, forward_difference
from tests.minidiff.refusals import refusals

SCHEMES = (forward_difference, backward_difference, central_difference)


def test_the_formulas():
    assert [scheme(lambda x: x * x, 3.0, 0.5) for scheme in SCHEMES] == [6.5, 5.5, 6.0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gradient_has_the_shape_of_the_argument(scheme):
    def f(p):
        return np.sum(np.sin(p["w"]) * p["n"]) + p["b"] ** 2

    p = {"w": np.linspace(0, 1, 6).reshape(2, 3), "b": 2.0, "n": 3, "none": np.ones((0, 2))}
    actual = scheme(f, p)
    exact = md.grad(lambda q: f({**p, **q}))({k: p[k] for k in ("w", "b")})
    assert md.tree.map(np.shape, actual) == md.tree.map(np.shape, p)
    for key in exact:
        np.testing.assert_allclose(actual[key], exact[key], atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_partial_derivatives_of_an_array(scheme):
    x = np.linspace(0.5, 1.0, 6).reshape(2, 3)
    actual = scheme(lambda x: np.sin(x)[0], x)
    assert actual.shape == (3, 2, 3)
    rows = [md.vjp(lambda x: np.sin(x)[0], x)[1](row)[0] for row in np.eye(3)]
    np.testing.assert_allclose(actual, rows, atol=1e-6)
    assert scheme(np.sin, np.ones((0, 2))).shape == (0, 2, 0, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_along_a_direction(scheme):
    def f(p, x):
        return {"out": np.tanh(x @ p), "x": x}

    args, direction = (np.ones((3, 2)) / 3, np.arange(3.0)), (np.eye(3, 2), np.ones(3))
    actual, exact = scheme(lambda a: f(*a), args, direction=direction), md.jvp(f, args, direction)[1]
    assert actual.keys() == exact.keys()
    for key in exact:
        np.testing.assert_allclose(actual[key], exact[key], atol=1e-6)


def test_complex_numbers():
    z = np.array([1.0 + 2.0j, 0.5j])
    real = central_difference(lambda z: np.sum(z.real**2 + 3 * z.imag), z)
    np.testing.assert_allclose(real, 2 * z.real - 3j, atol=1e-8)
    np.testing.assert_allclose(np.diag(central_difference(np.exp, z)), np.exp(z), atol=1e-8)


def test_the_precision_of_the_argument_gives_the_step():
    x = np.float32(1.0)
    assert abs(central_difference(np.exp, x) - np.e) < 1e-3
    assert forward_difference(np.exp, x).dtype == np.float32


def test_errors_fall_with_the_step_until_round_off():
    e = errors(np.exp, 1.0)
    truncated = (e.steps < 1e-1) & (e.steps > 1e-3)
    for name, order in (("forward", 1), ("backward", 1), ("central", 2)):
        actual = getattr(e, name)
        assert actual.shape == e.steps.shape
        slope = numpy.polyfit(numpy.log(e.steps[truncated]), numpy.log(actual[truncated]), 1)[0]
        assert slope == pytest.approx(order, abs=0.05)
        assert actual[-1] > 1e-3 > 1e-7 > actual.min()  # at the smallest step nothing is left
        assert 1e-2 < e.best[name] / e.optimal[name] < 1e2
    assert e.central.min() < e.forward.min() / 10


def test_errors_of_trees_and_directions():
    p = {"w": np.arange(3.0), "n": 2}
    e = errors(lambda p: np.sum(np.sin(p["w"]) * p["n"]), p, steps=[1e-2, 1e-4])
    assert list(e.steps) == [1e-2, 1e-4] and e.central[1] < e.central[0] / 1000
    along = errors(lambda p: p["w"] ** 2, p, steps=[0.5], direction={"w": np.array([0.0, 0.0, 2.0]), "n": 0})
    assert along.forward == pytest.approx(0.5 * 4)


def test_of_a_straight_line_any_step_will_do():
    e = errors(lambda x: 3 * x, 1.0, steps=[0.5, 1e-15])
    assert e.forward[0] == 0.0 and e.optimal["forward"] == float("inf")


test_wrong_use = refusals(
    [
        (lambda: errors(np.sin, 3), TypeError, r"no argument carries a derivative \(i64\[\]\)"),
        (lambda: errors(np.sin, 3.0, direction=[1.0]), ValueError, "the direction has the structure"),
        (lambda: central_difference(lambda x: (x, x), 1.0), TypeError, "for several arrays, pass a direction"),
    ]
)


def test_the_best_step_is_finite_and_positive_where_a_term_is_0():
    for f, x in ((np.sin, 0.0), (np.sin, numpy.pi), (np.exp, 1.0), (np.cos, 0.5), (lambda x: x**3 + x, 0.0)):
        result = errors(f, x)
        for scheme, step in result.optimal.items():
            size = getattr(result, scheme)
            assert 1e-12 < step < 1e-2
            assert size[numpy.argmin(abs(result.steps - step))] <= max(numpy.median(size), 1e-15)
    assert errors(lambda x: 3.0 * x, 1.0).optimal["central"] == numpy.inf  # no truncation error at all
