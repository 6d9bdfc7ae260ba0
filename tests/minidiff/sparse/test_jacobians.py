"""Sparse Jacobians and Hessians against dense ones, also of random programs; `jacobians.md` shows matrices."""

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.samples import each

sparse = pytest.importorskip("scipy.sparse")

N = 12
X = np.random.default_rng(0).normal(size=N)
U = X.reshape(4, 3)
BAND = np.diag(np.ones(N)) + np.diag(np.full(N - 1, 2.0), 1) - np.diag(np.ones(N - 1), -1)


def laplacian(u):
    p = mnp.pad(u, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u


def arrow(x):
    return mnp.concatenate([mnp.sum(x**2)[None], x[1:] * x[0]])


def check_against_dense(f, x, hessian=False):
    """Compare with the dense matrix; return the coloring, and how many elements are zero but in the pattern."""
    sparse_f, dense_f = (md.sparse_hessian, md.hessian) if hessian else (md.sparse_jacobian, md.jacfwd)
    matrix, dense = sparse_f(f)(x), np.asarray(dense_f(f)(x)).reshape(-1, x.size)
    np.testing.assert_allclose(matrix.toarray(), dense, rtol=1e-9, atol=1e-9)
    pattern = md.sparsity(md.grad(f) if hessian else f)(x)
    assert pattern.dtype == bool and np.array_equal(pattern.indices, matrix.indices)
    return sparse_f(f).coloring(x), int((dense[pattern.toarray()] == 0).sum())


def wide(*shape):
    return np.linspace(0, 1, shape[0] * shape[1]).reshape(shape)


#: Functions, arguments, and numbers of products with the Jacobian, of whose pattern no element is zero.
JACOBIANS = [
    (lambda x: x[1:-1] ** 2 - x[2:] * x[:-2], X, 3),
    (lambda x: BAND @ x + x**3, X, 3),
    (lambda x: x @ BAND, X, 3),
    (arrow, X, 3),
    (lambda x: mnp.einsum("bij,bj->bi", np.ones((4, 3, 3)), mnp.sin(x.reshape(4, 3))), X, 3),
    (lambda x: mnp.sum(x**2), X, 1),
    (lambda x: mnp.floor(x), X, 0),
    (lambda x: mnp.where(np.arange(N) < 5, 0.0, x), X, 1),
    (lambda x: md.scipy.linalg.solve_triangular(np.tril(BAND), x, lower=True), X, N),
    (laplacian, wide(4, 3), 6),
    (laplacian, wide(1, 5), 3),
    (lambda u: laplacian(u) + mnp.exp(u), wide(9, 9), 7),
    (lambda x: md.scan(lambda c, t: (t, c * t), x[0], x)[1], X, None),
    (lambda x: md.scan(lambda c, t: (t, c * t), x[0], x, reverse=True)[1], X, None),
    (lambda x: md.fori_loop(0, 5, lambda i, c: c.at[i].add(x[i + 1] ** 2), mnp.asarray(x) * 1.0), X, None),
    (lambda x: md.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * mnp.roll(x, 1)), (0, x))[1], X, None),
    (md.checkpoint(lambda x: mnp.sin(x[1:]) * x[:-1]), X, None),
    (md.jit(lambda x: mnp.sin(x[1:]) * x[:-1]), X, None),
    (lambda x: md.vmap(lambda a: a[1:] * a[:-1])(x.reshape(4, 3)), X, None),
    (lambda x: mnp.asarray(x).at[np.array([0, 3, 3, 5])].add(x[:4] ** 2), X, None),
    (lambda x: mnp.cumsum(x[::2]), X, None),
    (
        lambda x: md.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x[::-1]), (0, x), max_steps=4)[1],
        X,
        None,
    ),
]
HESSIANS = [
    (lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(), X, 3),  # Rosenbrock
    (lambda x: (x[0] * x[1:] ** 2).sum() + (x**4).sum(), X, 2),
    (lambda x: (x**2).sum(), X, 1),
    (lambda x: mnp.sum(x) ** 2, X, N),
    (lambda u: (0.5 * u * laplacian(u) + mnp.exp(u)).sum(), U, 4),  # Bratu
]


@each("f, x, count", JACOBIANS + HESSIANS)
def test_numbers_of_products(f, x, count):
    hessian = any(f is g for g, *_ in HESSIANS)
    coloring, zeros = check_against_dense(f, x, hessian)
    assert count in (None, coloring.count) and zeros == 0


#: Functions of which the pattern may have zeros, and misses no element.
UNITED = [
    mnp.cumprod,
    lambda x: mnp.cumprod(x.reshape(3, 4), axis=1)[:, ::-1],
    lambda x: mnp.fft.irfft2(x.reshape(3, 4)),
    lambda x: mnp.fft.irfft(mnp.fft.fft(x)[:5] * np.array([1, 0, 1j, 0, 2])),
    lambda x: md.while_loop(lambda c: c.sum() < 99, lambda c: mnp.roll(c, 2) + c + 1, x, max_steps=9),
]


@each("f", UNITED)
def test_no_element_is_missed(f):
    check_against_dense(f, X)
    check_against_dense(lambda x: (f(x) ** 2).sum(), X, hessian=True)


def test_long_sums_are_not_elementwise(monkeypatch):
    """Their matrices would be too large to look for zeros."""
    monkeypatch.setattr("minidiff.sparse.pattern.LARGEST_MATRIX", 0)
    check_against_dense(mnp.cumsum, X)


def test_drawing_has_a_color_for_each_product():
    pytest.importorskip("graphviz")
    text = md.draw(md.sparse_jacobian(arrow))(np.ones(5)).source
    assert "3 products: 2 of columns, 1 of rows" in text
    with pytest.raises(ValueError):
        md.draw(md.sparse_jacobian(arrow))(np.ones(100))


# ---------------------------------------------------------------- random programs

STEPS = [
    lambda x, r: mnp.sin(x) * x,
    lambda x, r: mnp.roll(x, r.integers(-3, 4)) + x,
    lambda x, r: mnp.concatenate([x[3:], x[:3] ** 2]),
    lambda x, r: x[r.integers(0, N, N)],
    lambda x, r: x.at[r.integers(0, N, 4)].add(x[r.integers(0, N, 4)] ** 2),
    lambda x, r: x.at[r.integers(0, N, 4)].set(x[:4]),
    lambda x, r: mnp.where(r.random(N) < 0.5, x, mnp.roll(x, 1)),
    lambda x, r: x.reshape(4, 3).T.ravel() * 2,
    lambda x, r: mnp.repeat(x.reshape(4, 3).sum(1), 3) * x,
    lambda x, r: (x.reshape(4, 3) @ np.triu(np.ones((3, 3)))).ravel(),
    lambda x, r: (r.random((N, N)) < 0.15) * 1.0 @ x,
    lambda x, r: mnp.pad(x[1:-1] * x[2:], 1),
    lambda x, r: mnp.flip(x) * (np.arange(N) % 2),
    lambda x, r: mnp.convolve(x, np.array([1.0, 0.0, 2.0]), mode="same"),
    lambda x, r: mnp.cumsum(x.reshape(4, 3), axis=1).ravel(),
    lambda x, r: md.scan(lambda c, t: (t, c + t), x[0], x, reverse=bool(r.integers(2)))[1],
    lambda x, r: md.cond(x[0] > 0, lambda x: x * 2, lambda x: x - 1, x),
    lambda x, r: mnp.maximum(x, mnp.roll(x, 2)),
    lambda x, r: md.vmap(lambda row: row * row[0])(x.reshape(4, 3)).ravel(),
    lambda x, r: mnp.stack([x, x + 1]).max(0),
]


def random_program(seed):
    numbers = np.random.default_rng(seed).integers(0, len(STEPS), 4)

    def f(x):
        x = mnp.asarray(x)
        for n, step in enumerate(numbers):
            x = STEPS[step](x, np.random.default_rng([seed, n])) / 3
        return x

    return f


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 60), id="many")])
def test_random_programs_against_dense(seeds):
    for seed in seeds:
        f = random_program(seed)
        check_against_dense(f, X + 0.01 * seed)
        if seed % 5 == 0:
            check_against_dense(lambda x, f=f: (f(x) ** 2).sum(), X, hessian=True)
