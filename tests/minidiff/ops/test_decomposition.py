"""numpy.linalg: what a table of smooth points cannot say."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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


def scaled(v: Any, w: Any, u: Any) -> Any:
    k = w.shape[-1]
    return v[..., :k] * w[..., None, :] @ u[..., :k, :]


def positive(x: Any) -> Any:
    return x @ adjoint(x) + np.eye(x.shape[-1])


SQUARE, WIDE, TALL, STACK = (3, 3), (2, 4), (4, 2), (2, 3, 3)
#: What makes a matrix that is decomposed, the function that puts its parts together again, and shapes.
PARTS: dict[str, tuple[Callable, Callable, list]] = {
    "cholesky": (positive, lambda x: (lambda c: c @ adjoint(c))(LA.cholesky(x)), [SQUARE, STACK]),
    "eigh": (lambda x: x + adjoint(x), lambda x: (lambda w, v: scaled(v, w, adjoint(v)))(*LA.eigh(x)), [SQUARE, STACK]),
    "eig": (np.copy, lambda x: (lambda w, v: scaled(v, w, LA.inv(v)))(*LA.eig(x)), [SQUARE, STACK]),
    "svd": (np.copy, lambda x: scaled(*LA.svd(x, False)), [SQUARE, STACK, WIDE, TALL]),
    "full svd": (np.copy, lambda x: scaled(*LA.svd(x, True)), [WIDE, TALL]),
    "qr": (np.copy, lambda x: np.matmul(*LA.qr(x)), [SQUARE, STACK, WIDE, TALL]),
    "complete qr": (np.copy, lambda x: np.matmul(*LA.qr(x, "complete")), [TALL]),
}


@pytest.mark.parametrize("name", PARTS)
@each("is_complex", [False, True])
@each("seed", range(3))
def test_decompositions_move_as_the_whole(name, is_complex, seed):
    make, again, shapes = PARTS[name]
    for shape in shapes:
        x, t = draw(seed, is_complex, *shape), draw(seed + 10, is_complex, *shape)
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


def test_eigenvalues_of_general_matrices_are_complex():
    assert LA.eigvals(X).dtype.kind in "fc"  # NumPy looks at the values
    w, v = md.jvp(LA.eig, (X,), (X,))[0]
    assert (w.dtype, v.dtype, md.vjp(LA.eigvals, X.astype("f4"))[0].dtype) == (complex, complex, np.complex64)


# ---------------------------------------------------------------- where derivatives need a word


@each("f", [LA.cholesky, lambda x: LA.eigh(x)[1] ** 2 @ np.arange(2.0), lambda x: LA.eigvalsh(x)])
def test_the_derivative_at_hermitian_matrices_is_hermitian(f):
    (ct,) = md.vjp(f, positive(X))[1](np.ones_like(f(X)))
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


ZEROS, RANK2, REGULAR = np.zeros((3, 3)), draw(3, False, 3, 2) @ draw(4, False, 2, 3), draw(5, False, 3, 3)
SINGULAR = [
    *(ZEROS, RANK2, REGULAR, np.zeros((1, 1)), np.outer([1.0, 2.0, -1.0], [0.5, 1.0, 3.0])),
    *(np.diag([1.0, 1e-7, 1e-15]), draw(3, True, 3, 2) @ draw(4, True, 2, 3)),
    draw(3, False, 4, 2) @ draw(4, False, 2, 4),
]


@each("x", SINGULAR)
def test_the_determinant_is_a_polynomial(x):
    directions = [draw(k, x.dtype.kind == "c", *x.shape) for k in range(2)]

    def derivative(f, order):
        for t in directions[:order]:
            f = functools.partial(lambda f, t, x: md.jvp(f, (x,), (t,))[1], f, t)
        return md.vjp(f, x)[1](np.ones((), x.dtype)[()])[0]

    for order in range(3):
        actual, expected = (derivative(f, order) for f in (LA.det, product_of_permutations))
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_hessians_of_determinants():
    stack = np.stack([ZEROS, RANK2, REGULAR])
    expected = np.stack([md.hessian(product_of_permutations)(x) for x in stack])
    for hessian in (md.hessian(LA.det), md.jit(md.hessian(LA.det)), md.jacrev(md.grad(LA.det))):
        np.testing.assert_allclose(np.stack([hessian(x) for x in stack]), expected, atol=1e-12)
    np.testing.assert_allclose(md.vmap(md.hessian(LA.det))(stack), expected, atol=1e-12)
    assert np.isnan(md.grad(LA.det)(np.full((2, 2), np.nan))).all()


# ---------------------------------------------------------------- where there is a value, but no derivative

ORDERS = ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
FUNCTIONS: list[Callable] = [
    *(LA.det, LA.slogdet, LA.inv, LA.pinv, LA.eig, LA.eigh, LA.eigvals, LA.eigvalsh, LA.cond, LA.norm),
    *(LA.svd, LA.svdvals, LA.qr, LA.cholesky, LA.matrix_rank, functools.partial(LA.svd, full_matrices=False)),
    *(functools.partial(f, **{p: o}) for f, p in ((LA.norm, "ord"), (LA.cond, "p")) for o in ORDERS if o != "nuc"),
    *(functools.partial(LA.norm, ord=o, axis=-1) for o in (0, 1, 2, 3, -1, np.inf, -np.inf)),
    *(functools.partial(LA.qr, mode=mode) for mode in ("complete", "r")),
    *(functools.partial(LA.matrix_power, n=n) for n in (-1, 0, 3)),
    functools.partial(LA.norm, ord="nuc"),
    lambda x: LA.solve(x, np.ones((x.shape[-1], 2))),
    lambda x: LA.lstsq(x, np.ones(x.shape[-2]))[::2],  # residuals are of another shape for dependent columns
]
A_STACK = np.stack([np.zeros((2, 2)), np.diag([2.0, 3.0])])
MATRICES = [
    *(np.zeros(shape) for shape in ((1, 1), (2, 2), (3, 2), (2, 3), (0, 0), (0, 2), (2, 0), (0, 2, 2))),
    *(np.ones(shape, dtype) for shape in ((2, 2), (3, 2), (2, 3)) for dtype in (float, complex)),
    np.array([[1.0, 2, 3], [2, 4, 6], [1, 0, 1]]),  # of rank 2
    np.array([[0.0, 1], [0, 0]]),
    np.outer(np.arange(3.0), np.arange(1.0, 3.0)),
    np.diag([1.0, 2.0**-40]),
    np.array([[1.0, 0], [2, 0], [3, 0]]),
    A_STACK,
    np.full((2, 2), np.nan),
    np.zeros((2, 2), complex),
]


def parts(out: Any) -> list:
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("function", FUNCTIONS)
@each("x", MATRICES)
def test_what_has_a_value_has_derivatives_that_run(function, x):
    f = lambda x: parts(function(x))  # noqa: E731
    try:
        expected = f(x)
    except (LA.LinAlgError, ValueError):
        return
    try:
        result, tangents = md.jvp(f, (x,), (np.ones_like(x),))
    except LA.LinAlgError:  # of NaN, some LAPACKs find singular values and no singular vectors
        assert np.isnan(x).any()
        return
    pull = md.vjp(f, x)[1]
    integers = lambda y: np.zeros(np.shape(y), md.values.dtypes.float0)  # noqa: E731
    cotangents = [np.ones_like(y) if np.asarray(y).dtype.kind in "fc" else integers(y) for y in result]
    assert [np.shape(t) for t in (*tangents, *pull(cotangents))] == [*map(np.shape, expected), x.shape]
    for results in (result, [y[0] for y in md.vmap(f)(x[None])]):
        for y, z in zip(results, expected, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_derivatives_at_singular_matrices_are_nan_and_others_of_a_stack_are_not():
    gradient = md.vmap(md.grad(lambda x: LA.slogdet(x)[1]))(A_STACK)
    assert np.isnan(gradient[0]).all()
    np.testing.assert_allclose(gradient[1], np.diag([1 / 2, 1 / 3]))
    r = md.jvp(lambda x: LA.qr(x, "r"), (np.zeros((2, 2)),), (np.ones((2, 2)),))[1]
    assert np.isnan(r).any()
    assert LA.cond(np.ones((2, 2)), 1) == md.jit(LA.cond, static_argnums=1)(np.ones((2, 2)), 1) == np.inf


def test_solutions_are_not_linear_in_the_matrix():
    with pytest.raises(TypeError):
        md.linear_transpose(lambda a: np.linalg.solve(a, np.ones(2)), np.eye(2))(np.ones(2))
