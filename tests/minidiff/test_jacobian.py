"""Jacobians, Hessians, and their products with vectors."""

import numpy as np
import pytest

import minidiff as md
from tests.checks.samples import each

X = np.array([0.3, -0.7, 1.1])
BOTH = each("jacobian", [md.jacfwd, md.jacrev])


def one_by_one(f, x, eps=1e-6):
    """The Jacobian by central differences."""
    columns = []
    for i in np.ndindex(np.shape(x)):
        e = np.zeros(np.shape(x))
        e[i] = eps
        columns.append((f(x + e) - f(x - e)) / (2 * eps))
    return np.stack(columns, -1).reshape(np.shape(f(x)) + np.shape(x))


FUNCTIONS = {
    "vector to vector": (lambda x: np.sin(x) * x[0], X),
    "vector to scalar": (lambda x: np.prod(np.array([2.0, 3.0])) * (x @ x), X),
    "scalar to scalar": (np.sin, np.float64(0.4)),
    "scalar to matrix": (lambda x: x * np.arange(6.0).reshape(2, 3), np.float64(0.4)),
    "matrix to matrix": (lambda x: x.T @ x, np.arange(6.0).reshape(2, 3)),
    "constant": (lambda x: np.ones(2), X),
    "empty": (lambda x: x[:0], X),
    "of nothing": (lambda x: x.sum() + np.ones(2), np.ones((0, 2))),
}


@BOTH
@each("name", FUNCTIONS)
def test_jacobians(name, jacobian):
    f, x = FUNCTIONS[name]
    actual = jacobian(f)(x)
    assert np.shape(actual) == np.shape(f(x)) + np.shape(x)
    if actual.size:
        np.testing.assert_allclose(actual, one_by_one(f, x), atol=1e-8)


@BOTH
def test_trees_in_and_out(jacobian):
    def f(p, y):
        return {"a": p["w"] @ y, "b": (np.sin(p["b"]), y.sum() * p["b"])}

    p, y = {"w": np.arange(6.0).reshape(2, 3), "b": 2.0}, X
    first = jacobian(f)(p, y)
    assert md.tree.map(np.shape, first) == {
        "a": {"w": (2, 2, 3), "b": (2,)},
        "b": ({"w": (2, 3), "b": ()}, {"w": (2, 3), "b": ()}),
    }
    both = jacobian(f, argnums=(1, 0))(p, y)
    np.testing.assert_array_equal(both["a"][0], p["w"])
    md.tree.map(np.testing.assert_array_equal, md.tree.map(lambda x: x, both["b"][1][1]), first["b"][1])
    np.testing.assert_array_equal(jacobian(f, argnums=-1)(p, y)["a"], p["w"])


@BOTH
def test_what_comes_with_the_value_passes_through(jacobian):
    jacobian, aux = jacobian(lambda x: (x**2, {"twice": 2 * x, "name": "f"}), has_aux=True)(X)
    np.testing.assert_array_equal(jacobian, np.diag(2 * X))
    assert aux["name"] == "f" and aux["twice"].tolist() == (2 * X).tolist()


@BOTH
def test_dtypes_stay(jacobian):
    x = X.astype(np.float32)
    assert jacobian(np.sin)(x).dtype == np.float32


@BOTH
def test_jacobians_are_differentiable_vectorized_and_staged(jacobian):
    def f(x):
        return np.sin(x) * x[0]

    def g(x):
        return (jacobian(f)(x) ** 2).sum()

    np.testing.assert_allclose(md.grad(g)(X), one_by_one(g, X), atol=1e-7)
    xs = np.stack([X, 2 * X])
    np.testing.assert_allclose(md.vmap(jacobian(f))(xs), [jacobian(f)(x) for x in xs])
    tape = md.make_tape(jacobian(f))(X)
    tape.check()
    np.testing.assert_allclose(tape(X)[0], jacobian(f)(X))


@BOTH
def test_f_runs_once(jacobian):
    runs = []
    jacobian(lambda x: runs.append(1) or np.sin(x))(X)
    assert len(runs) == 1


def test_complex_jacobians():
    z = X + 1j
    for jacobian in (md.jacfwd, md.jacrev):
        np.testing.assert_allclose(jacobian(lambda z: z**2, holomorphic=True)(z), np.diag(2 * z))
        with pytest.raises(TypeError, match=r"argument 0 of <lambda> has type f64\[3\], which is not complex"):
            jacobian(lambda z: z**2, holomorphic=True)(X)
    np.testing.assert_allclose(md.jacfwd(lambda x: x * 1j)(X), 1j * np.eye(3))


@BOTH
def test_errors(jacobian):
    name = jacobian.__name__
    with pytest.raises(TypeError, match=rf"{name}: argument 1\['n'\] of <lambda> has type i64\[\].*\.astype\(float\)"):
        jacobian(lambda x, p: x * p["n"], argnums=(0, 1))(X, {"n": 3})
    with pytest.raises(TypeError, match=rf"{name}: the result\[1\] of <lambda> has type i64\[\]"):
        jacobian(lambda x: (x, np.argmax(x)))(X)


# ---------------------------------------------------------------- second derivatives


def scalar(x):
    return np.sin(x[0] * x[1]) + x[2] ** 3 * x[0]


def test_hessian():
    np.testing.assert_allclose(md.hessian(scalar)(X), one_by_one(md.grad(scalar), X), atol=1e-8)


def test_hessians_of_trees():
    def f(p):
        return p["a"] * (p["b"] @ p["b"])

    h = md.hessian(f)({"a": 2.0, "b": X})
    assert md.tree.map(np.shape, h) == {"a": {"a": (), "b": (3,)}, "b": {"a": (3,), "b": (3, 3)}}
    np.testing.assert_allclose(h["b"]["b"], 4 * np.eye(3))
    h = md.hessian(lambda x, y: x * y**2, argnums=(0, 1))(2.0, 3.0)
    assert md.tree.map(float, h) == ((0.0, 6.0), (6.0, 4.0))


def test_hessian_with_aux():
    h, aux = md.hessian(lambda x: (scalar(x), "aux"), has_aux=True)(X)
    np.testing.assert_allclose(h, md.hessian(scalar)(X))
    assert aux == "aux"


def test_hvp_is_the_hessian_times_a_vector():
    v = np.array([1.0, 2.0, -1.0])
    np.testing.assert_allclose(md.hvp(scalar, (X,), (v,)), md.hessian(scalar)(X) @ v)
    x, y = md.hvp(lambda x, y: x * y**2, (2.0, 3.0), (1.0, 10.0))
    assert (x, y) == (60.0, 46.0)
