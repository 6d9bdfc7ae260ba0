"""Derivatives at ties and corners: right, or NaN with a warning at the user's line, and never finite and wrong."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg

import minidiff as md
from minidiff.scipy import linalg
from tests.checks.samples import each

LA: Any = np.linalg
RANDOM = np.random.default_rng(0)
C, I = RANDOM.normal(size=(4, 4)), np.eye(4)  # noqa: E741
C3, SWAP = C[:3, :3], np.fliplr(I)


def unitary(n: int, is_complex: bool = False) -> Any:
    x = RANDOM.normal(size=(n, n))
    return LA.qr(x + 1j * RANDOM.normal(size=(n, n)) if is_complex else x)[0]


def adjoint(x: Any) -> Any:
    return np.conjugate(np.swapaxes(x, -1, -2))


def hermitian(x: Any) -> Any:
    return 0.5 * (x + adjoint(x))


def with_values(w: list, is_complex: bool = False) -> Any:
    u = unitary(len(w), is_complex)
    return hermitian(u * np.array(w) @ adjoint(u))


def rectangle(m: int, n: int, s: list, is_complex: bool = False) -> Any:
    u, v = unitary(m, is_complex)[:, : len(s)], unitary(n, is_complex)[:, : len(s)]
    return u * np.array(s) @ adjoint(v)


@contextlib.contextmanager
def caught():
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        yield messages


def differences(f: Callable, x: Any, h: float = 1e-5) -> Any:
    """The gradient by differences of real functions, also in complex numbers."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        for d in (1, 1j)[: 1 + (x.dtype.kind == "c")]:
            e = np.zeros_like(x)
            e[i] = d * h
            out[i] += np.conj(d) * (f(x + e) - f(x - e)) / (2 * h)
    return out


def gradient(f: Callable, x: Any) -> Any:
    """The gradient, which is NaN if and only if there is a warning, of the user's line."""
    with caught() as messages:
        g = md.grad(f)(x)
    assert bool(np.isnan(g).any()) == bool(messages), [str(m.message) for m in messages]
    assert all(m.filename == __file__ for m in messages)
    return g


# ---------------------------------------------------------------- gradients that are refused, and those that are right

ROTATED, ALL = with_values([1.0, 1.0, 2.0, 3.0]), [I, I + 0j, 0 * I, with_values([-1.0, -1.0, -1.0, 2.0])]
PAIRS = [np.diag([1.0, 1.0, 2.0, 3.0]), ROTATED, with_values([1.0, 1.0, 2.0, 2.0])]
PAIRS += [with_values([1.0, 1.0, 2.0, 3.0], True), np.diag([1.0, 1.0 + 1e-15, 2.0, 3.0])]
TIED = ALL + PAIRS
NOT_DIAGONALIZED = [np.eye(3), np.diag([1.0, 2.0, 1.0]), C3 @ np.diag([1.0, 1.0, 2.0]) @ LA.inv(C3)]
SINGULAR = [np.eye(3), np.eye(4, 2), rectangle(4, 2, [2.0, 2.0]), rectangle(2, 4, [2.0, 2.0], True)]
SINGULAR += [rectangle(3, 3, [2.0, 2.0, 1.0], z) for z in (False, True)]
DEFICIENT = [np.ones((3, 2)), np.zeros((3, 2)), rectangle(3, 3, [2.0, 0.0, 0.0]), rectangle(4, 2, [2.0, 0.0])]
DEFICIENT += [rectangle(3, 3, [2.0, 1.0, 0.0], True)]


def of_pairs(f: Callable) -> Callable:
    return lambda x: f(*LA.eigh(hermitian(x)))


def total(x: Any) -> Any:
    return np.real(np.sum(C[: x.shape[-2], : x.shape[-1]] * x))


def of_eig(f: Callable) -> Callable:
    return lambda x: total(f(*LA.eig(x)))


def of_factors(f: Callable, full: bool) -> Callable:
    def g(x):
        u, s, vh = LA.svd(x, full_matrices=full)
        return total(f(u[:, : s.size], s, vh[: s.size]))

    return g


def residual(full: bool) -> Callable:
    def g(x):
        u, s, vh = LA.svd(x, full_matrices=full)
        return np.sum(np.abs(u[:, : s.size] * s @ vh[: s.size] - x) ** 2)

    return g


def projector(w: Any, v: Any) -> Any:
    return total(v[:, :2] @ adjoint(v[:, :2]))


#: Functions of the values and vectors of a Hermitian matrix whose derivative the rule cannot know.
REFUSED = [
    lambda w, v: total(v * np.exp(w / 9) @ adjoint(v)),
    lambda w, v: 1e-6 * total(v * np.exp(w / 9) @ adjoint(v)),
    lambda w, v: np.real((v * np.exp(w / 9) @ adjoint(v))[0, 1]),
    lambda w, v: total(v * np.exp(w / 9) @ LA.inv(v)),
    lambda w, v: np.real(v[0, 0]),
]
#: What does not depend on how equal values part.
RIGHT = [
    lambda w, v: np.sum(np.exp(w / 9)),
    lambda w, v: np.sum(np.abs(v * w @ adjoint(v)) ** 2) / 9,
    lambda w, v: np.sum(np.abs(v @ adjoint(v) - 1) ** 2),
]
#: Its cotangents of vectors are 0, and those of values are 0 in the basis of the coordinate axes.
ZERO = of_pairs(lambda w, v: np.sum(np.abs(v * np.log(w) @ adjoint(v) - SWAP) ** 2))


def exp(u: Any, s: Any, vh: Any) -> Any:
    return u * np.exp(s) @ vh


def again(u: Any, s: Any, vh: Any) -> Any:
    return u * s @ vh


#: A function, its argument, and whether its gradient is refused.
CASES = [
    *((of_pairs(f), x, True) for f in REFUSED for x in TIED),
    *((of_pairs(f), x, False) for f in RIGHT for x in TIED),
    *((ZERO, x, True) for x in (I, I + 0j)),
    *((of_pairs(projector), x, False) for x in PAIRS),
    *((of_pairs(lambda w, v: projector(w, v) + np.sum(np.log(w))), x, False) for x in PAIRS),
    *((of_pairs(lambda w, v: total(v[:, :1] @ adjoint(v[:, :1]))), x, True) for x in PAIRS),
    *((of_eig(lambda w, v: v * w**2 @ LA.inv(v)), x, True) for x in NOT_DIAGONALIZED),
    *((of_eig(lambda w, v: np.sum(w**3)[None, None]), x, False) for x in NOT_DIAGONALIZED),
    *((of_factors(lambda u, s, vh: u @ vh, full), x, False) for full in (False, True) for x in SINGULAR),
    *((of_factors(lambda u, s, vh: u @ vh, full), x, True) for full in (False, True) for x in DEFICIENT),
    *((of_factors(exp, full), x, True) for full in (False, True) for x in SINGULAR + DEFICIENT),
    *((of_factors(again, full), x, True) for full in (False, True) for x in DEFICIENT),
    *((of_factors(again, full), np.diag([2.0, 1.0, 0.0]), False) for full in (False, True)),
    *((residual(full), x, False) for full in (False, True) for x in SINGULAR + DEFICIENT),
    *((of_factors(lambda u, s, vh: u[:, :1] * s[:1] @ vh[:1], full), np.ones((3, 2)), False) for full in (False, True)),
]


@each("f, x, refused", CASES)
def test_gradients_at_ties(f, x, refused):
    g = gradient(f, x)
    assert bool(np.isnan(g).any()) == refused
    if not refused:
        np.testing.assert_allclose(g, differences(f, x), atol=1e-6)


@each("x", [*TIED, 1e8 * ROTATED])
def test_residuals_of_reconstructions(x):
    g = gradient(lambda x: np.sum(np.abs(of_pairs(lambda w, v: v * w @ adjoint(v))(x) - hermitian(x)) ** 2), x)
    assert abs(g).max() <= 1e-12 * max(1.0, abs(x).max())


def test_a_projector_of_a_general_matrix():
    p, q = np.diag([0.0, 1.0, 0.0]), np.diag([1.0, 0.0, 1.0])
    actual = gradient(of_eig(lambda w, v: v[:, 1:2] @ LA.inv(v)[1:2]), np.diag([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(actual, p @ C3 @ q + q @ C3 @ p, atol=1e-13)


@each("gap", [1e-12, 1e-9, 1e-6, 1e-3])
def test_values_that_are_nearly_equal_lose_rounding_divided_by_their_distance(gap):
    x = np.diag([1.0, 1.0 + gap, 2.0])
    actual = gradient(of_pairs(lambda w, v: np.sum(C3 * (v * np.exp(w) @ v.T))), x)
    np.testing.assert_allclose(actual, scipy.linalg.expm_frechet(x, hermitian(C3))[1], atol=1e-8 + 1e-14 / gap)


# ---------------------------------------------------------------- functions of matrices, which have derivatives at ties


@each("x", [np.eye(3), np.diag([1.0, 1.0, 2.0]), with_values([1.0, 1.0, 3.0]), with_values([1.0, 1.0, 2.0], True)])
def test_functions_of_matrices_at_ties(x):
    for f, g in ((linalg.expm, linalg.logm), (lambda x: x @ x, linalg.sqrtm)):
        value, tangent = md.jvp(lambda x, f=f, g=g: f(g(x)), (x,), (C3.astype(x.dtype),))
        np.testing.assert_allclose(value, x, atol=1e-12)
        np.testing.assert_allclose(tangent, C3, atol=1e-10)
    md.testing.check_grads(lambda x: linalg.polar(x)[0], (x,), order=2)
    md.testing.check_grads(lambda x: linalg.matrix_function(np.exp, np.exp, x), (x,), order=2)


@each("gap", [0.0, 1e-15, 1e-10, 1e-5, 1e-2])
def test_divided_differences_do_not_cancel(gap):
    x, t, u = np.diag([1.0, 1.0 + gap, 2.0, 1.0 - gap]), hermitian(C), hermitian(C @ C)
    f = lambda x: linalg.matrix_function(np.exp, np.exp, x)  # noqa: E731
    np.testing.assert_allclose(f(x), linalg.expm(x), rtol=1e-13)
    np.testing.assert_allclose(md.jvp(f, (x,), (t,))[1], scipy.linalg.expm_frechet(x, t)[1], rtol=1e-12)
    for second in (
        lambda f: md.jvp(lambda x: md.jvp(f, (x,), (t,))[1], (x,), (u,))[1],
        lambda f: md.hessian(lambda x: np.sum(u * f(hermitian(x))))(x),
    ):
        np.testing.assert_allclose(second(f), second(linalg.expm), rtol=1e-10, atol=1e-11)


log = of_pairs(lambda w, v: np.sum(C[:2, :2] * (v * np.log(w) @ v.T)))
#: Derivatives at a tie or a corner.
WARNINGS = [
    *(md.jit(md.grad(log)), md.grad(md.jit(log)), md.grad(md.checkpoint(log))),
    lambda x: md.vmap(md.grad(log))(x[None]),
    md.grad(lambda x: md.scan(lambda c, _: (c, log(c)), x, None, length=2)[1].sum()),
    md.hessian(lambda x: LA.norm(x - I[:2, :2]) ** 2),
    md.jit(md.hessian(lambda x: np.std(x - I[:2, :2]) ** 2)),
]


@each("derivative", WARNINGS)
def test_warnings_are_of_the_users_line(derivative):
    with caught() as messages:
        assert np.isnan(derivative(np.eye(2))).any()
    assert {m.filename for m in messages} == {__file__}
