"""Products with sparse matrices: results and derivatives are those of dense ones; `sparse_products.md` shows others."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import each

sparse = pytest.importorskip("scipy.sparse")

RNG = numpy.random.default_rng(0)
DENSE = numpy.where(RNG.random((5, 7)) < 0.4, RNG.normal(size=(5, 7)), 0.0)
X, XS, Y, YS = (RNG.normal(size=shape) for shape in ((7,), (7, 3), (5,), (3, 5)))
C = md.scipy.sparse.coo_array(sparse.csr_array(DENSE))
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


@each("form", [*FORMATS, "triplets"])
@each("name", PRODUCTS)
def test_results_are_those_of_the_dense_matrix(form, name):
    product, x = PRODUCTS[name]
    a = C if form == "triplets" else getattr(sparse, form)(DENSE)
    f = lambda x: product(a, x)  # noqa: E731
    out = md.jit(f)(x) if form == "triplets" else md.make_tape(f)(x)(x)[0]
    numpy.testing.assert_allclose(out, product(DENSE, x), rtol=1e-12)


@each("name", [*PRODUCTS][:4])
def test_gradients_are_those_of_the_dense_matrix_at_its_places(name):
    product, x = PRODUCTS[name]
    of_values, of_x = md.grad(lambda v, x: np.sum(np.sin(product(C._replace(values=v), x))), (0, 1))(C.values, x)
    dense, dense_x = md.grad(lambda a, x: np.sum(np.sin(product(a, x))), (0, 1))(DENSE, x)
    numpy.testing.assert_allclose(of_values, dense[C.rows, C.columns], rtol=1e-12)
    numpy.testing.assert_allclose(of_x, dense_x, rtol=1e-12)
