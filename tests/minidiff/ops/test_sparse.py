"""Products with sparse matrices: their results, derivatives, transposes and patterns are those of dense ones."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each

sparse = pytest.importorskip("scipy.sparse")
coo_array = md.scipy.sparse.coo_array

RNG = numpy.random.default_rng(0)
DENSE = numpy.where(RNG.random((5, 7)) < 0.4, RNG.normal(size=(5, 7)), 0.0)
X, XS, Y, YS = (RNG.normal(size=shape) for shape in ((7,), (7, 3), (5,), (3, 5)))
A = sparse.csr_array(DENSE)
C = coo_array(A)
FORMATS = [
    f"{name}_{kind}" for name in ("csr", "csc", "coo", "lil", "dok", "bsr", "dia") for kind in ("array", "matrix")
]

#: Products of a matrix, with the operand.
PRODUCTS = {
    "A @ x": (lambda a, x: a @ x, X),
    "A @ matrix": (lambda a, x: a @ x, XS),
    "x @ A": (lambda a, x: x @ a, Y),
    "matrix @ A": (lambda a, x: x @ a, YS),
    "matmul": (lambda a, x: np.matmul(a, x), X),
    "dot": (lambda a, x: np.dot(a, x), XS),
    "dot on the right": (lambda a, x: np.dot(x, a), Y),
}
NAMES = [*PRODUCTS]


@each("form", [*FORMATS, "triplets"])
@each("name", NAMES)
def test_results_are_those_of_the_dense_matrix(form, name):
    product, x = PRODUCTS[name]
    a = C if form == "triplets" else getattr(sparse, form)(DENSE)
    f = lambda x: product(a, x)  # noqa: E731
    out = md.jit(f)(x) if form == "triplets" else md.make_tape(f)(x)(x)[0]
    numpy.testing.assert_allclose(out, product(DENSE, x), rtol=1e-12)


@each("name", NAMES[:4])
def test_derivatives(name):
    """In x and in the values, to second order; the gradient of the values is that of the dense matrix at its places."""
    product, x = PRODUCTS[name]
    f = lambda v, x: np.sin(product(C._replace(values=v), x))  # noqa: E731
    md.testing.check_grads(f, (C.values, x), order=2, modes=("fwd", "rev"))
    md.testing.check_grads(lambda x: np.sin(product(A, x)), (x,), order=2, modes=("fwd", "rev"))
    of_values, of_x = md.grad(lambda v, x: np.sum(f(v, x)), argnums=(0, 1))(C.values, x)
    dense, dense_x = md.grad(lambda a, x: np.sum(np.sin(product(a, x))), argnums=(0, 1))(DENSE, x)
    numpy.testing.assert_allclose(of_values, dense[C.rows, C.columns], rtol=1e-12)
    numpy.testing.assert_allclose(of_x, dense_x, rtol=1e-12)


@each("name", NAMES[:4])
def test_transposes_by_the_inner_product(name):
    product, x = PRODUCTS[name]
    for f, u in ((lambda x: product(A, x), x), (lambda v: product(C._replace(values=v), x), C.values)):
        ct = RNG.normal(size=f(u).shape)
        (back,) = md.linear_transpose(f, u)(ct)
        numpy.testing.assert_allclose(np.sum(ct * f(u)), np.sum(back * u), rtol=1e-12)
    for y, expected in ((C.T @ Y, DENSE.T @ Y), (X @ C.T, X @ DENSE.T), (C.T.toarray(), DENSE.T)):
        numpy.testing.assert_allclose(y, expected, rtol=1e-12)


def test_vmap_of_vectors_and_of_values():
    numpy.testing.assert_allclose(md.vmap(lambda x: A @ x)(XS.T), XS.T @ DENSE.T, rtol=1e-12)
    values = RNG.normal(size=(4, len(C.values)))
    each_value = md.vmap(lambda v, x: C._replace(values=v) @ x, in_axes=(0, None))(values, X)
    expected = [sparse.coo_array((v, (C.rows, C.columns)), A.shape) @ X for v in values]
    numpy.testing.assert_allclose(each_value, expected, rtol=1e-12)


def test_the_pattern_is_the_matrix_itself():
    big = sparse.random_array(
        (6000, 5000), density=4e-4, rng=1, format="csr"
    )  # as a dense matrix, too large to look at
    assert (md.sparsity(lambda x: np.tanh(big @ x))(numpy.ones(5000)) != (big != 0)).nnz == 0
    assert (md.sparsity(lambda y: y @ big)(numpy.ones(6000)) != (big != 0).T).nnz == 0
    jacobian = md.sparse_jacobian(lambda x: big @ x)(numpy.ones(5000))
    assert abs(jacobian - big).max() < 1e-14


def test_dtypes_and_elements_at_the_same_place():
    twice = coo_array((numpy.array([1.0, 2.0, 4.0]), ([0, 0, 1], [1, 1, 0])))
    assert twice.shape == (2, 2)
    numpy.testing.assert_array_equal(twice.toarray(), [[0, 3], [4, 0]])
    numpy.testing.assert_array_equal(twice @ numpy.array([1.0, 10.0]), [30.0, 4.0])
    numpy.testing.assert_array_equal(coo_array(([], ([], [])), (2, 3)) @ numpy.ones(3), [0.0, 0.0])
    for dtype in (numpy.float32, numpy.complex128, int):
        a, x = sparse.csr_array(DENSE.astype(dtype)), XS.astype(dtype)
        out = md.jit(lambda x: a @ x)(x)  # noqa: B023
        assert out.dtype == (a @ x).dtype
        numpy.testing.assert_allclose(out, a @ x, rtol=1e-5)
    complex_values = C._replace(values=C.values + 1j)
    md.testing.check_grads(lambda x: complex_values @ x, (X + 1j * X[::-1],), order=1)


def test_jacobians_that_are_triplets_can_be_multiplied():
    f = lambda x: x[1:] * x[:-1]  # noqa: E731
    newton = lambda x, t: md.sparse_jacobian(f)(x) @ t  # noqa: E731
    numpy.testing.assert_allclose(md.jit(newton)(X, X), md.jvp(f, (X,), (X,))[1], rtol=1e-12)


@each("run", [md.make_tape, lambda f: md.grad(lambda x: np.sum(f(x)))])
@each("f, x", [(lambda x: A @ x, Y), (lambda x: x @ A, X), (lambda x: A @ x, XS[None])])
def test_shapes_that_do_not_fit(f, x, run):
    with pytest.raises(ValueError):
        run(f)(x)


def test_triplets_are_no_array():
    with pytest.raises(TypeError):
        md.make_tape(lambda x: x * C)(X)


def test_sharded_arrays_are_multiplied():
    """The columns of the dense operand may be split."""
    xs, loss = numpy.concatenate([XS, XS[:, :1]], 1), lambda x: np.sum(np.sin(A @ x))
    for spec in (P(), P(None, "i")):
        x = spmd.distribute(xs, mesh(2), spec)
        numpy.testing.assert_allclose(md.jit(md.grad(loss))(x), md.grad(loss)(xs), rtol=1e-12)
