"""Jacobians, Hessians, and their products with vectors."""

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


@BOTH
def test_trees_in_and_out(jacobian):
    def f(p, y):
        return {"a": p["w"] @ y, "b": (np.sin(p["b"]), y.sum() * p["b"])}

    p, y = {"w": np.arange(6.0).reshape(2, 3), "b": 2.0}, X
    first, both = jacobian(f)(p, y), jacobian(f, argnums=(1, 0))(p, y)
    of_w_and_b = {"w": (2, 3), "b": ()}
    assert md.tree.map(np.shape, first) == {"a": {"w": (2, 2, 3), "b": (2,)}, "b": (of_w_and_b, of_w_and_b)}
    np.testing.assert_array_equal(both["a"][0], p["w"])
    md.tree.map(np.testing.assert_array_equal, both["b"][1][1], first["b"][1])
    np.testing.assert_array_equal(jacobian(f, argnums=-1)(p, y)["a"], p["w"])


@BOTH
def test_f_runs_once_and_its_aux_passes_through(jacobian):
    runs = []
    actual, aux = jacobian(lambda x: (x**2, {"twice": 2 * x, "runs": runs.append(1) or "f"}), has_aux=True)(X)
    np.testing.assert_array_equal(actual, np.diag(2 * X))
    assert aux["runs"] == "f" and aux["twice"].tolist() == (2 * X).tolist() and len(runs) == 1


@BOTH
def test_dtypes(jacobian):
    z = X + 1j
    assert jacobian(np.sin)(X.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(jacobian(lambda z: z**2, holomorphic=True)(z), np.diag(2 * z))
    np.testing.assert_allclose(md.jacfwd(lambda x: x * 1j)(X), 1j * np.eye(3))


# ---------------------------------------------------------------- second derivatives


def test_hessians():
    h, aux = md.hessian(lambda x: (scalar(x), "aux"), has_aux=True)(X)
    np.testing.assert_allclose(h, central_difference(md.grad(scalar), X), atol=1e-8)
    assert aux == "aux"
    h = md.hessian(lambda p: p["a"] * (p["b"] @ p["b"]))({"a": 2.0, "b": X})
    assert md.tree.map(np.shape, h) == {"a": {"a": (), "b": (3,)}, "b": {"a": (3,), "b": (3, 3)}}
    np.testing.assert_allclose(h["b"]["b"], 4 * np.eye(3))
    h = md.hessian(lambda x, y: x * y**2, argnums=(0, 1))(2.0, 3.0)
    assert md.tree.map(float, h) == ((0.0, 6.0), (6.0, 4.0))


def test_hvp_is_the_hessian_times_a_vector():
    v = np.array([1.0, 2.0, -1.0])
    np.testing.assert_allclose(md.hvp(scalar, (X,), (v,)), md.hessian(scalar)(X) @ v)
    assert md.hvp(lambda x, y: x * y**2, (2.0, 3.0), (1.0, 10.0)) == (60.0, 46.0)
