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
def test_gradients_are_those_of_the_dense_matrix_at_its_places(name):
    product, x = PRODUCTS[name]
    of_values, of_x = md.grad(lambda v, x: np.sum(np.sin(product(C._replace(values=v), x))), (0, 1))(C.values, x)
    dense, dense_x = md.grad(lambda a, x: np.sum(np.sin(product(a, x))), (0, 1))(DENSE, x)
    numpy.testing.assert_allclose(of_values, dense[C.rows, C.columns], rtol=1e-12)
    numpy.testing.assert_allclose(of_x, dense_x, rtol=1e-12)


def test_transposed_triplets():
    for y, expected in ((C.T @ Y, DENSE.T @ Y), (X @ C.T, X @ DENSE.T), (C.T.toarray(), DENSE.T)):
        numpy.testing.assert_allclose(y, expected, rtol=1e-12)


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
