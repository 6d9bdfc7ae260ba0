"""Differences: what they give, how wrong they are, and where they are least wrong."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.checks.numerical import backward_difference, central_difference, errors, forward_difference
from tests.checks.samples import each

SCHEMES = (forward_difference, backward_difference, central_difference)
W = {"w": np.linspace(0, 1, 6).reshape(2, 3), "b": 2.0, "n": 3, "none": np.ones((0, 2))}
POINT = (np.ones((3, 2)) / 3, np.arange(3.0))
Z = np.array([1.0 + 2.0j, 0.5j])


def of_parameters(p):
    return np.sum(np.sin(p["w"]) * p["n"]) + p["b"] ** 2


#: Functions, arguments, and the derivative by the rules.
EXACT = [
    (of_parameters, W, {k: md.grad(lambda x, k=k: of_parameters({**W, k: x}))(W[k]) for k in "wb"}),
    (lambda x: np.sin(x)[0], W["w"] + 0.5, md.jacobian(lambda x: np.sin(x)[0])(W["w"] + 0.5)),
    (np.sin, np.ones((0, 2)), np.ones((0, 2, 0, 2))),
    (lambda z: np.sum(z.real**2 + 3 * z.imag), Z, 2 * Z.real - 3j),
    (np.exp, Z, np.diag(np.exp(Z))),
    (np.exp, np.float32(1.0), np.float32(np.e)),
]


@each("scheme", SCHEMES)
@each("f, x, expected", EXACT)
def test_derivatives(scheme, f, x, expected):
    actual = scheme(f, x)
    if isinstance(x, dict):
        assert md.tree.map(np.shape, actual) == md.tree.map(np.shape, x)
        actual = {k: actual[k] for k in expected}
    for y, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert np.shape(y) == np.shape(e) and np.asarray(y).dtype == np.asarray(e).dtype
        np.testing.assert_allclose(y, e, atol=1e-3 if y.dtype == "f4" else 1e-6)  # the dtype gives the step


@each("scheme", SCHEMES)
def test_along_a_direction(scheme):
    f, direction = lambda p, x: {"out": np.tanh(x @ p), "x": x}, (np.eye(3, 2), np.ones(3))
    actual, exact = scheme(lambda a: f(*a), POINT, direction=direction), md.jvp(f, POINT, direction)[1]
    assert actual.keys() == exact.keys()
    for key in exact:
        np.testing.assert_allclose(actual[key], exact[key], atol=1e-6)


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
    """Any step will do for what is linear."""
    p, along = {"w": np.arange(3.0), "n": 2}, {"w": np.array([0.0, 0.0, 2.0]), "n": 0}
    e = errors(lambda p: np.sum(np.sin(p["w"]) * p["n"]), p, steps=[1e-2, 1e-4])
    assert list(e.steps) == [1e-2, 1e-4] and e.central[1] < e.central[0] / 1000
    assert errors(lambda p: p["w"] ** 2, p, steps=[0.5], direction=along).forward == pytest.approx(0.5 * 4)
    e = errors(lambda x: 3 * x, 1.0, steps=[0.5, 1e-15])
    assert e.forward[0] == 0.0 and e.optimal["forward"] == float("inf")
