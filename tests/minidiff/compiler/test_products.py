"""Sums of products of small matrices: as accurate as NumPy's, for any memory order, in place where nobody is left."""

import warnings

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import native
from minidiff.compiler.products import DEPTH, PLACE, ROW_BYTES, add_product

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite: pip install '.[compiled]'")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """All kernels of these tests go into a directory of their own."""
    monkeypatch.setenv("MINIDIFF_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))


def matrix(rng, m, n, dtype, order):
    """A random matrix: its rows or columns adjacent, every other one, backwards, or one of them repeated."""
    x = rng.normal(size=(2 * m, 2 * n)).astype(dtype)
    return {
        "rows": lambda: x[:m, :n].copy(),
        "columns": lambda: x[:m, :n].copy("F"),
        "part": lambda: x[::2, n:],
        "steps": lambda: x[m:, ::2],
        "backwards": lambda: x[m - 1 :: -1, n - 1 :: -1],
        "repeated": lambda: numpy.broadcast_to(x[:1, :n], (m, n)),
        "unaligned": lambda: unaligned(x[:m, :n]),
    }[order]()


def unaligned(x):
    memory = numpy.empty(x.nbytes + 1, numpy.uint8)
    found = memory[1:].view(x.dtype).reshape(x.shape)
    found[:] = x
    return found


ORDERS = ["rows", "columns", "part", "steps", "backwards", "repeated", "unaligned"]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.integers(1, 40),
    st.one_of(st.integers(1, 40), st.integers(250, 600)),
    st.one_of(st.just(0), st.integers(1, 100)),
    st.integers(1, 3),
    st.sampled_from(["float32", "float64"]),
    st.tuples(
        st.sampled_from(ORDERS), st.sampled_from(ORDERS), st.sampled_from([o for o in ORDERS if o != "repeated"])
    ),
    st.integers(0, 99),
)
def test_the_sum_is_as_accurate_as_numpys(m, k, more, blocks, dtype, orders, seed):
    rng, dtype = numpy.random.default_rng(seed), numpy.dtype(dtype)
    n = blocks * ROW_BYTES // dtype.itemsize
    terms = [k] if not more or k + more > DEPTH else [k, more]
    factors = [matrix(rng, *s, dtype, order) for t in terms for s, order in zip(((m, t), (t, n)), orders)]
    c = matrix(rng, m, n, dtype, orders[2])
    products = [a.astype("g") @ b for a, b in zip(factors[::2], factors[1::2])]
    sizes = [abs(a).astype("g") @ abs(b) for a, b in zip(factors[::2], factors[1::2])]
    exact = c + sum(products)
    bound = (sum(terms) + 2) * numpy.finfo(dtype).eps * (abs(c) + sum(sizes))
    before = [x.copy() for x in factors]
    found = add_product(c, *factors)
    assert found is c
    assert (abs(found - exact) <= bound).all()
    for x, y in zip(factors, before, strict=True):
        numpy.testing.assert_array_equal(x, y)


def test_rows_beyond_those_copied_at_once():
    rng = numpy.random.default_rng(0)
    for m in (PLACE // DEPTH + 1, 3 * PLACE // DEPTH):
        a, b, c = rng.normal(size=(m, DEPTH + 9)), rng.normal(size=(DEPTH + 9, 32)), rng.normal(size=(m, 32))
        numpy.testing.assert_allclose(add_product(c.copy(), a, b), c + a @ b, rtol=1e-12, atol=1e-12)


def test_swapped_bytes():
    a = numpy.arange(16.0).reshape(1, 16).astype(">f8")
    c = add_product(numpy.zeros((16, 16), ">f8"), a.T, a)
    numpy.testing.assert_array_equal(c, a.T @ a)


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf])
def test_what_is_not_finite_reaches_its_row_or_column_and_warns_as_numpy(value):
    rng = numpy.random.default_rng(0)
    a, b, c = rng.normal(size=(17, 300)), rng.normal(size=(300, 32)), rng.normal(size=(17, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rows that a tile repeats warn of nothing
        add_product(c.copy(), a, b)
        for x, i, j in ((a, 16, 299), (b, 299, 31)):
            x[i, j] = value
            numpy.testing.assert_array_equal(numpy.isfinite(add_product(c.copy(), a, b)), numpy.isfinite(c + a @ b))
            x[i, j] = 0.5
    a[0], b[:, 0] = 1e300, 1e300
    with pytest.warns(RuntimeWarning, match="overflow encountered in matmul"):
        add_product(c, a, b)


# ---------------------------------------------------------------- in programs

a, b = numpy.random.default_rng(0).normal(size=(2, 32, 32))


def added(f, *args, **options):
    """How often the program of a function adds products, and how often in place."""
    source = md.jit(f, **options).source(*args)
    return source.count("add_product"), source.count("add_product_in_place(")


def test_a_product_that_is_only_added_is_added_in_place():
    f = lambda a, b: np.cos(b) + b @ a - (a @ a + np.sin(b))  # noqa: E731
    assert added(f, a, b) == (2, 2)
    numpy.testing.assert_allclose(md.jit(f)(a, b), f(a, b), rtol=1e-12, atol=1e-12)
    assert "add_product of float64, pairs: 1" in md.jit(f).llvm(a, b)
    assert added(f, a, b, kernels=False) == (0, 0)
    assert added(lambda a, b: (c := a @ b, np.sin(a) + c), a, b) == (0, 0)  # the product is a result


def test_two_products_are_added_in_one_step():
    for f, lines in (
        (lambda a, b: a @ b + b @ a, ["sum_products(a, b, b, a)"]),
        (lambda a, b: np.sin(a) + a @ b + b @ a, ["add_product_in_place(c, a, b, b, a)"]),
        (lambda a, b: a @ b + b @ a + a @ a + b @ b, ["sum_products(a, b, b, a)", "_in_place(c, a, a, b, b)"]),
        (lambda a, b: (c := a @ b, c + b @ a), ["a @ b", "add_product(c, b, a)"]),  # the first one is a result
        (lambda a, b: ((c := np.sin(a) + a @ b) + b @ a) * c, ["_in_place(c, a, b)", "add_product(d, b, a)"]),
    ):
        source = md.jit(f).source(a, b)
        assert source.count("product") + source.count("@") == len(lines)
        assert all(line in source for line in lines), source
        found, expected = md.tree.leaves(md.jit(f)(a, b)), md.tree.leaves(f(a, b))
        for x, y in zip(found, expected, strict=True):
            numpy.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    assert "add_product of float64, pairs: 2" in md.jit(lambda a, b: a @ b + b @ a).llvm(a, b)
    x, y = numpy.ones((16, DEPTH)), numpy.ones((DEPTH, 16))
    assert added(lambda x, y, b: x @ y + b @ b, x, y, a[:16, :16].copy())[0] == 1  # too many terms for one panel


def test_what_others_need_stays():
    for f, in_place in (
        (lambda a, b: a + a @ b, 0),  # the user's array
        (lambda a, b: (c := a * 2, c + a @ b), 0),  # a result
        (lambda a, b: (c := a * 2) + c @ b, 0),  # a factor
        (lambda a, b: (c := a * 2) + a @ c.T, 0),  # a view of it is one
        (lambda a, b: a * 2 + a @ b, 1),
    ):
        assert added(f, a, b) == (1, in_place)
        given = a.copy(), b.copy()
        found, expected = (md.tree.leaves(g(*given)) for g in (md.jit(f), f))
        for x, y in zip(found, expected, strict=True):
            numpy.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
        numpy.testing.assert_array_equal(given, (a, b))


@pytest.mark.parametrize(
    "sizes", [((8, 32), (32, 32)), ((32, 8), (8, 32)), ((32, 32), (32, 20)), ((64, 2048), (2048, 16))]
)
def test_other_sizes_are_numpys(sizes):
    x, y = map(numpy.ones, sizes)
    assert added(lambda x, y: np.sin(x @ y) + x @ (y + 1), x, y) == (0, 0)


def test_other_types_are_numpys():
    for x, y in ((a + 1j, b), (a.astype("f4"), b), (a.astype(int), b.astype(int)), (numpy.stack([a, b]), b), (a, b[0])):
        f = lambda x, y: x @ y + x @ (y + 1)  # noqa: E731
        assert added(f, x, y) == (0, 0)
        numpy.testing.assert_allclose(md.jit(f)(x, y), f(x, y), rtol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_the_gradient_of_a_recurrent_network(scanned):
    def loss(w, xs):
        u, v = w
        step = lambda h, x: (np.tanh(x @ u + h @ v), None)  # noqa: E731
        h = numpy.zeros((16, 32))
        if scanned:
            h, _ = md.scan(step, h, xs)
        else:
            for x in xs:
                h, _ = step(h, x)
        return np.sum(h * h)

    w, xs = (a / 4, b / 4), numpy.random.default_rng(1).normal(size=(5, 16, 32))
    gradient = md.grad(loss)
    assert added(gradient, w, xs)[0] > 0
    for x, y in zip(md.jit(gradient)(w, xs), gradient(w, xs), strict=True):
        numpy.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    md.testing.check_grads(md.jit(lambda w: loss(w, xs)), (w,), order=1)
