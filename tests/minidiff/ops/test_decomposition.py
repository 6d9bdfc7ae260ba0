"""numpy.linalg: what a table of smooth points cannot say."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from tests.checks.samples import each

LA: Any = np.linalg
X = np.array([[2.0, 1.0], [0.5, 3.0]])


def adjoint(x: Any) -> Any:
    return np.conjugate(np.swapaxes(x, -1, -2))


def draw(seed: int, is_complex: bool, *shape: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((2, *shape))
    return numbers[0] + 1j * numbers[1] if is_complex else numbers[0]


# ---------------------------------------------------------------- together again


def _of_hermitian(x: Any) -> Any:
    return x + adjoint(x)


def _positive(x: Any) -> Any:
    return x @ adjoint(x) + np.eye(x.shape[-1])


def _cholesky(x: Any) -> Any:
    factor = LA.cholesky(x)
    return factor @ adjoint(factor)


def _eigh(x: Any) -> Any:
    w, v = LA.eigh(x)
    return v * w[..., None, :] @ adjoint(v)


def _eig(x: Any) -> Any:
    w, v = LA.eig(x)
    return v * w[..., None, :] @ LA.inv(v)


def _svd(x: Any, full: bool) -> Any:
    u, s, vh = LA.svd(x, full_matrices=full)
    k = s.shape[-1]
    return u[..., :k] * s[..., None, :] @ vh[..., :k, :]


def _qr(x: Any, mode: str) -> Any:
    q, r = LA.qr(x, mode)
    return q @ r


SQUARE, WIDE, TALL, STACK = (3, 3), (2, 4), (4, 2), (2, 3, 3)
PARTS: dict[str, tuple[Callable, Callable, list]] = {
    "cholesky": (_positive, _cholesky, [SQUARE, STACK]),
    "eigh": (_of_hermitian, _eigh, [SQUARE, STACK]),
    "eig": (lambda x: x, _eig, [SQUARE, STACK]),
    "svd": (lambda x: x, lambda x: _svd(x, False), [SQUARE, STACK, WIDE, TALL]),
    "full svd": (lambda x: x, lambda x: _svd(x, True), [WIDE, TALL]),
    "qr": (lambda x: x, lambda x: _qr(x, "reduced"), [SQUARE, STACK, WIDE, TALL]),
    "complete qr": (lambda x: x, lambda x: _qr(x, "complete"), [TALL]),
}


@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), is_complex=st.booleans())
def test_decompositions_move_as_the_whole(name, data, seed, is_complex):
    make, again, shapes = PARTS[name]
    shape = data.draw(st.sampled_from(shapes))
    x, t = draw(seed, is_complex, *shape), draw(seed + 1, is_complex, *shape)
    whole, expected = md.jvp(make, (x,), (t,))
    value, moved = md.jvp(again, (whole,), (expected,))
    scale = max(1.0, np.abs(expected).max()) * max(LA.cond(LA.eig(whole)[1]).max() if name == "eig" else 1.0, 1.0)
    np.testing.assert_allclose(value, whole, atol=1e-8 * scale)
    np.testing.assert_allclose(moved, expected, atol=1e-7 * scale**2)


@each("is_complex", [False, True])
@each("f", [lambda x: LA.svd(x)[0], lambda x: LA.svd(x)[2], lambda x: LA.qr(x, "complete")[0]], ids=["u", "vh", "q"])
@each("shape", [(3, 3), (5, 2), (2, 4)])
def test_unitary_matrices_stay_unitary(f, shape, is_complex):
    x, t = draw(0, is_complex, *shape), draw(1, is_complex, *shape)
    moved = md.jvp(lambda x: adjoint(f(x)) @ f(x), (x,), (t,))[1]
    np.testing.assert_allclose(moved, np.zeros_like(moved), atol=1e-10)


def test_vectors_move_at_right_angles_to_themselves():
    x, t = draw(0, True, 3, 3), draw(1, True, 3, 3)
    for f in (LA.eig, lambda x: LA.eigh(x + adjoint(x))):
        v, dv = md.jvp(lambda x, f=f: f(x).eigenvectors, (x,), (t,))
        np.testing.assert_allclose((np.conj(v) * dv).sum(0), np.zeros(3), atol=1e-12)


# ---------------------------------------------------------------- results


def test_eigenvalues_of_general_matrices_are_complex():
    assert LA.eigvals(X).dtype.kind in "fc"  # NumPy looks at the values
    w, v = md.jvp(LA.eig, (X,), (X,))[0]
    assert (w.dtype, v.dtype, md.vjp(LA.eigvals, X.astype("f4"))[0].dtype) == (complex, complex, np.complex64)


@each("shape", [(4, 2), (2, 2), (2, 4)])
@each("right", [(), (3,)])
def test_least_squares(shape, right):
    a, b = draw(0, False, *shape), draw(1, False, shape[0], *right)
    for actual, number in zip(md.jvp(LA.lstsq, (a, b), (a, b))[0], LA.lstsq(a, b), strict=True):
        np.testing.assert_allclose(actual, number, atol=1e-12)


# ---------------------------------------------------------------- where derivatives need a word


@each("f", [LA.cholesky, lambda x: LA.eigh(x)[1] ** 2 @ np.arange(2.0), lambda x: LA.eigvalsh(x)])
def test_the_derivative_at_hermitian_matrices_is_hermitian(f):
    (ct,) = md.vjp(f, _positive(X))[1](np.ones_like(f(X)))
    np.testing.assert_allclose(ct, ct.T)


@each("f", [lambda x: LA.norm(x, "nuc"), lambda x: LA.svd(x)[1].sum(), lambda x: LA.norm(x, 2)])
def test_singular_values_that_are_0(f):
    assert np.isfinite(md.grad(f)(np.diag([2.0, 0.0]))).all()
    assert all(np.isfinite(t).all() for t in md.jvp(LA.svd, (np.zeros((2, 1)),), (np.ones((2, 1)),))[1])


@each("x", [np.zeros(2), np.zeros((2, 2), complex)])
@each("ord", [None, 2, 1, 3, np.inf])
def test_the_norm_of_zero_has_derivative_zero(ord, x):
    assert not md.grad(lambda x: LA.norm(x.ravel(), ord))(x).any()


def product_of_permutations(x: Any) -> Any:
    """The determinant by its definition."""
    terms = itertools.permutations(range(x.shape[-1]))
    return sum(round(LA.det(np.eye(len(p))[list(p)])) * math.prod(x[i, j] for i, j in enumerate(p)) for p in terms)


SINGULAR = {
    "zeros": np.zeros((3, 3)),
    "rank 1": np.outer([1.0, 2.0, -1.0], [0.5, 1.0, 3.0]),
    "rank 2": draw(3, False, 3, 2) @ draw(4, False, 2, 3),
    "complex": draw(3, True, 3, 2) @ draw(4, True, 2, 3),
    "nearly singular": np.diag([1.0, 1e-7, 1e-15]),
    "regular": draw(5, False, 3, 3),
    "four rows": draw(3, False, 4, 2) @ draw(4, False, 2, 4),
    "one row": np.zeros((1, 1)),
}


@each("name", SINGULAR)
def test_the_determinant_is_a_polynomial(name):
    x = SINGULAR[name]
    directions = [draw(k, x.dtype.kind == "c", *x.shape) for k in range(3)]

    def derivative(f, order):
        for t in directions[:order]:
            f = functools.partial(lambda f, t, x: md.jvp(f, (x,), (t,))[1], f, t)
        return md.vjp(f, x)[1](np.ones((), x.dtype)[()])[0]

    for order in range(4 if len(x) < 4 else 3):
        actual, expected = (derivative(f, order) for f in (LA.det, product_of_permutations))
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_hessians_of_determinants():
    stack = np.stack([SINGULAR["zeros"], SINGULAR["rank 2"], SINGULAR["regular"]])
    expected = np.stack([md.hessian(product_of_permutations)(x) for x in stack])
    for hessian in (md.hessian(LA.det), md.jit(md.hessian(LA.det)), md.jacrev(md.grad(LA.det))):
        np.testing.assert_allclose(np.stack([hessian(x) for x in stack]), expected, atol=1e-12)
    np.testing.assert_allclose(md.vmap(md.hessian(LA.det))(stack), expected, atol=1e-12)
    assert np.isnan(md.grad(LA.det)(np.full((2, 2), np.nan))).all()


# ---------------------------------------------------------------- where there is a value, but no derivative

FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(LA, name) for name in ("det", "slogdet", "inv", "pinv", "eig", "eigh", "eigvals", "eigvalsh")},
    **{name: getattr(LA, name) for name in ("svd", "svdvals", "qr", "cholesky", "matrix_rank", "cond", "norm")},
    **{f"norm {p}": lambda x, p=p: LA.norm(x, p) for p in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)},
    **{f"cond {p}": lambda x, p=p: LA.cond(x, p) for p in ("fro", 1, -1, 2, -2, np.inf, -np.inf)},
    **{f"rows {p}": lambda x, p=p: LA.norm(x, p, axis=-1) for p in (0, 1, 2, 3, -1, np.inf, -np.inf)},
    **{f"qr {mode}": lambda x, mode=mode: LA.qr(x, mode) for mode in ("complete", "r")},
    **{f"power {n}": lambda x, n=n: LA.matrix_power(x, n) for n in (-1, 0, 3)},
    "svd of few": lambda x: LA.svd(x, full_matrices=False),
    "solve": lambda x: LA.solve(x, np.ones((x.shape[-1], 2))),
    "lstsq": lambda x: LA.lstsq(x, np.ones(x.shape[-2]))[::2],  # residuals are of another shape for dependent columns
}

MATRICES = {
    **{f"zeros {shape}": np.zeros(shape) for shape in ((1, 1), (2, 2), (3, 2), (2, 3), (0, 0), (0, 2), (2, 0))},
    **{f"ones {shape}": np.ones(shape) for shape in ((1, 1), (2, 2), (3, 2), (2, 3))},
    "of rank 2": np.array([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]]),
    "nilpotent": np.array([[0.0, 1], [0, 0]]),
    "a row of numbers beside 0": np.outer(np.arange(3.0), np.arange(1.0, 3.0)),
    "nearly singular": np.diag([1.0, 2.0**-40]),
    "a column of zeros": np.array([[1.0, 0], [2, 0], [3, 0]]),
    "a stack": np.stack([np.zeros((2, 2)), np.diag([2.0, 3.0])]),
    "an empty stack": np.zeros((0, 2, 2)),
    "NaN": np.full((2, 2), np.nan),
    "complex zeros": np.zeros((2, 2), complex),
    "complex ones": np.ones((2, 2), complex),
}


def tangent_of_integers(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), md.values.dtypes.float0)


def parts(out: Any) -> list:
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name", FUNCTIONS)
@each("matrix", MATRICES)
def test_what_has_a_value_has_derivatives_that_run(name, matrix):
    x = MATRICES[matrix]
    f = lambda x: parts(FUNCTIONS[name](x))  # noqa: E731
    try:
        expected = f(x)
    except (LA.LinAlgError, ValueError):
        return
    try:
        result, tangents = md.jvp(f, (x,), (np.ones_like(x),))
    except LA.LinAlgError:  # of NaN, some LAPACKs find singular values and no singular vectors
        assert matrix == "NaN"
        return
    pull = md.vjp(f, x)[1]
    cotangents = [np.ones_like(y) if np.asarray(y).dtype.kind in "fc" else tangent_of_integers(y) for y in result]
    assert [np.shape(t) for t in (*tangents, *pull(cotangents))] == [*map(np.shape, expected), x.shape]
    for results in (result, [y[0] for y in md.vmap(f)(x[None])]):
        for y, z in zip(results, expected, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_derivatives_at_singular_matrices_are_nan_and_others_of_a_stack_are_not():
    gradient = md.vmap(md.grad(lambda x: LA.slogdet(x)[1]))(MATRICES["a stack"])
    assert np.isnan(gradient[0]).all()
    np.testing.assert_allclose(gradient[1], np.diag([1 / 2, 1 / 3]))
    r = md.jvp(lambda x: LA.qr(x, "r"), (np.zeros((2, 2)),), (np.ones((2, 2)),))[1]
    assert np.isnan(r).any()
    assert LA.cond(np.ones((2, 2)), 1) == md.jit(LA.cond, static_argnums=1)(np.ones((2, 2)), 1) == np.inf


def test_solutions_are_not_linear_in_the_matrix():
    with pytest.raises(TypeError):
        md.linear_transpose(lambda a: np.linalg.solve(a, np.ones(2)), np.eye(2))(np.ones(2))
