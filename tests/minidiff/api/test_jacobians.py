"""Jacobians, Hessians, and their products with vectors, by differences; `derivatives.md` has those of trees."""

import numpy as np

import minidiff as md
from minidiff.checks.numerical import central_difference
from tests.checks.samples import each

X = np.array([0.3, -0.7, 1.1])
BOTH = each("jacobian", [md.jacfwd, md.jacrev])


def scalar(x):
    return np.sin(x[0] * x[1]) + x[2] ** 3 * x[0]


FUNCTIONS = {
    "vector to vector": (lambda x: np.sin(x) * x[0], X),
    "vector to scalar": (lambda x: np.prod(np.array([2.0, 3.0])) * (x @ x), X),
    "scalar to matrix": (lambda x: x * np.arange(6.0).reshape(2, 3), np.float64(0.4)),
    "matrix to matrix": (lambda x: x.T @ x, np.arange(6.0).reshape(2, 3)),
    "constant": (lambda x: np.ones(2), X),
    "empty": (lambda x: x[:0], X),
    "of nothing": (lambda x: x.sum() + np.ones(2), np.ones((0, 2))),
    "gradient": (md.grad(scalar), X),
    "gradient of a jacobian": (md.grad(lambda x: (md.jacrev(lambda x: np.sin(x) * x[0])(x) ** 2).sum()), X),
}


@BOTH
@each("name", FUNCTIONS)
def test_jacobians(name, jacobian):
    f, x = FUNCTIONS[name]
    actual = jacobian(f)(x)
    assert np.shape(actual) == np.shape(f(x)) + np.shape(x)
    if actual.size:
        np.testing.assert_allclose(actual, central_difference(f, x), atol=1e-7)
        np.testing.assert_allclose(md.jit(jacobian(f))(x), actual, 1e-12, 1e-12)
        np.testing.assert_allclose(md.vmap(jacobian(f))(np.stack([x, x])), np.stack([actual] * 2), 1e-12, 1e-12)


def test_hvp_is_the_hessian_times_a_vector():
    v, h = np.array([1.0, 2.0, -1.0]), md.hessian(scalar)(X)
    np.testing.assert_allclose(h, central_difference(md.grad(scalar), X), atol=1e-8)
    np.testing.assert_allclose(md.hvp(scalar, (X,), (v,)), h @ v)
