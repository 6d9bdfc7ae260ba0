"""Determinants, and what has a value but no derivative; `matrices.md` shows more that smooth points cannot say."""

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


def draw(seed: int, is_complex: bool, *shape: int) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((2, *shape))
    return numbers[0] + 1j * numbers[1] if is_complex else numbers[0]


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
