"""Derivatives at ties and corners: right, or NaN with a warning at the user's line, and never finite and wrong."""

import contextlib
import runpy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg

import minidiff as md
from minidiff.scipy import linalg
from tests.checks.samples import check_each

LA: Any = np.linalg
RANDOM = np.random.default_rng(0)
C = RANDOM.normal(size=(4, 4))
I = np.eye(4)  # noqa: E741


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


def gradient(f: Callable, x: Any) -> tuple[Any, bool]:
    """The gradient, and whether it is NaN, of which there is a warning then, and else none."""
    with caught() as messages:
        g = md.grad(f)(x)
    is_nan = bool(np.isnan(g).any())
    assert is_nan == bool(messages), [str(m.message) for m in messages]
    assert all(m.filename == __file__ for m in messages)
    return g, is_nan


def check(f: Callable, x: Any, refused: bool) -> None:
    g, is_nan = gradient(f, x)
    assert is_nan == refused
    if not refused:
        np.testing.assert_allclose(g, differences(f, x), atol=1e-6)


# ---------------------------------------------------------------- eigh

TIED = {
    "identity": I,
    "complex identity": I + 0j,
    "zeros": np.zeros((4, 4)),
    "diagonal": np.diag([1.0, 1.0, 2.0, 3.0]),
    "rotated": with_values([1.0, 1.0, 2.0, 3.0]),
    "two pairs": with_values([1.0, 1.0, 2.0, 2.0]),
    "three": with_values([-1.0, -1.0, -1.0, 2.0]),
    "complex": with_values([1.0, 1.0, 2.0, 3.0], True),
    "nearly": np.diag([1.0, 1.0 + 1e-15, 2.0, 3.0]),
    "far": 1e8 * with_values([1.0, 1.0, 2.0, 3.0]),
}


def of_pairs(f: Callable) -> Callable:
    return lambda x: f(*LA.eigh(hermitian(x)))


def total(x: Any) -> Any:
    return np.real(np.sum(C[: x.shape[-2], : x.shape[-1]] * x))


#: Of the values and vectors: functions of the matrix, of which the rule cannot know the derivative.
REFUSED = {
    "exp": lambda w, v: total(v * np.exp(w / 9) @ adjoint(v)),
    "scaled": lambda w, v: 1e-6 * total(v * np.exp(w / 9) @ adjoint(v)),
    "one element": lambda w, v: np.real((v * np.exp(w / 9) @ adjoint(v))[0, 1]),
    "by an inverse": lambda w, v: total(v * np.exp(w / 9) @ LA.inv(v)),
    "a component": lambda w, v: np.real(v[0, 0]),
}
#: What does not depend on how equal values part.
RIGHT = {
    "sum": lambda w, v: np.sum(np.exp(w / 9)),
    "reconstruction": lambda w, v: np.sum(np.abs(v * w @ adjoint(v)) ** 2) / 9,
    "unitarity": lambda w, v: np.sum(np.abs(v @ adjoint(v) - 1) ** 2),
}


@pytest.mark.parametrize("name", [n for n in TIED if n != "far"])
def test_functions_of_values_and_vectors(name):
    x = TIED[name]
    check_each((k, lambda f=f: check(of_pairs(f), x, True)) for k, f in REFUSED.items())
    check_each((k, lambda f=f: check(of_pairs(f), x, False)) for k, f in RIGHT.items())


@pytest.mark.parametrize("name", ["identity", "complex identity"])
def test_a_function_that_is_0_for_equal_values(name):
    """Its cotangents of vectors are 0, and those of values are 0 in the basis of the coordinate axes."""
    check(of_pairs(lambda w, v: np.sum(np.abs(v * np.log(w) @ adjoint(v) - np.fliplr(I)) ** 2)), TIED[name], True)


@pytest.mark.parametrize("name", TIED)
def test_residuals_of_reconstructions(name):
    x = TIED[name]
    g, is_nan = gradient(lambda x: np.sum(np.abs(of_pairs(lambda w, v: v * w @ adjoint(v))(x) - hermitian(x)) ** 2), x)
    assert not is_nan and abs(g).max() <= 1e-12 * max(1.0, abs(x).max())


@pytest.mark.parametrize("name", ["diagonal", "rotated", "two pairs", "complex", "nearly"])
def test_projectors_on_spaces_of_equal_values(name):
    projector = of_pairs(lambda w, v: total(v[:, :2] @ adjoint(v[:, :2])))
    check(projector, TIED[name], False)
    check(lambda x: projector(x) + np.sum(np.log(of_pairs(lambda w, v: w)(x))), TIED[name], False)
    check(of_pairs(lambda w, v: total(v[:, :1] @ adjoint(v[:, :1]))), TIED[name], True)


def test_forward_mode():
    f = of_pairs(lambda w, v: v * np.exp(w) @ adjoint(v))
    swap = np.fliplr(I)
    with caught() as messages:
        out = md.jvp(f, (I,), (swap,))[1]
        compiled = md.jit(lambda x: md.jvp(f, (x,), (swap,))[1])(I)
    assert np.isnan(out).any() and np.isnan(compiled).any() and messages
    np.testing.assert_allclose(md.jvp(f, (I,), (np.diag([1.0, 2.0, 3.0, 4.0]),))[1], np.e * np.diag([1.0, 2, 3, 4]))
    with caught():
        np.testing.assert_allclose(md.jvp(LA.eigh, (I,), (swap,))[1].eigenvalues, np.zeros(4))
    _, moved = md.linearize(f, np.diag([1.0, 1.0, 2.0, 3.0]))
    with caught():
        assert np.isnan(moved(np.diag([1.0, 2.0, 0.0, 0.0]))).any()
    assert np.isfinite(moved(np.diag([2.0, 2.0, 1.0, 0.0]))).all()


def test_values_that_are_nearly_equal():
    """Rounding, divided by the distance of the values, is all that is lost."""
    for gap in (1e-12, 1e-9, 1e-6, 1e-3):
        x = np.diag([1.0, 1.0 + gap, 2.0])
        actual, is_nan = gradient(of_pairs(lambda w, v: np.sum(C[:3, :3] * (v * np.exp(w) @ v.T))), x)
        expected = scipy.linalg.expm_frechet(x, hermitian(C[:3, :3]))[1]
        assert not is_nan
        np.testing.assert_allclose(actual, expected, atol=1e-8 + 1e-14 / gap)


def test_ties_in_other_transformations():
    f = of_pairs(lambda w, v: np.sum(C[:2, :2] * (v * np.log(w) @ v.T)))
    x, regular = np.eye(2), np.diag([1.0, 2.0])
    with caught() as messages:
        stack = md.vmap(md.grad(f))(np.stack([x, regular, x]))
        assert np.isnan(stack).all((1, 2)).tolist() == [True, False, True]
        for g in (md.jit(md.grad(f)), md.grad(md.jit(f)), md.grad(md.checkpoint(f))):
            assert np.isnan(g(x)).all()
            np.testing.assert_allclose(g(regular), stack[1])
        in_loop = lambda x: md.scan(lambda c, _: (c, f(c)), x, None, length=2)[1].sum()  # noqa: E731
        assert np.isnan(md.grad(in_loop)(x)).all()
        np.testing.assert_allclose(md.grad(in_loop)(regular), 2 * stack[1])
        assert np.isnan(md.grad(f)(x.astype("f4"))).all()
    text = (
        "eigh: eigenvalues 0 and 1 are equal (1), .* it is NaN.*md.scipy.linalg.expm, sqrtm, logm, and matrix_function"
    )
    with pytest.warns(RuntimeWarning, match=text.replace("(1)", r"\(1\)")):
        md.grad(f)(x)
    assert {m.filename for m in messages} == {__file__}


def test_second_derivatives_at_ties():
    x, t = np.diag([1.0, 1.0, 2.0]), hermitian(C[:3, :3])
    spectral = lambda x: np.sum(np.exp(LA.eigvalsh(x)))  # noqa: E731
    with caught() as messages:
        for g in (md.hessian(spectral), md.jacrev(md.grad(spectral))):
            assert np.isnan(g(x)).any()
    assert messages
    simple = np.diag([1.0, 2.0, 4.0])
    expected = scipy.linalg.expm_frechet(simple, t)[1]
    np.testing.assert_allclose(md.jvp(md.grad(spectral), (simple,), (t,))[1], expected, rtol=1e-10)


# ---------------------------------------------------------------- eig


def test_eig():
    of = lambda f: lambda x: np.real(np.sum(C[:3, :3] * f(*LA.eig(x))))  # noqa: E731
    similar = C[:3, :3] @ np.diag([1.0, 1.0, 2.0]) @ LA.inv(C[:3, :3])
    for x in (np.eye(3), np.diag([1.0, 2.0, 1.0]), similar):
        check(of(lambda w, v: v * w**2 @ LA.inv(v)), x, True)
        check(of(lambda w, v: np.sum(w**3)), x, False)
    p, g = np.diag([0.0, 1.0, 0.0]), C[:3, :3]
    actual, _ = gradient(of(lambda w, v: v[:, 1:2] @ LA.inv(v)[1:2]), np.diag([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(actual, p @ g @ (np.eye(3) - p) + (np.eye(3) - p) @ g @ p, atol=1e-13)


# ---------------------------------------------------------------- svd

SINGULAR = {
    "identity": np.eye(3),
    "pair": rectangle(3, 3, [2.0, 2.0, 1.0]),
    "complex": rectangle(3, 3, [2.0, 2.0, 1.0], True),
    "tall": rectangle(4, 2, [2.0, 2.0]),
    "wide": rectangle(2, 4, [2.0, 2.0], True),
    "part of the identity": np.eye(4, 2),
}
DEFICIENT = {
    "two zeros": rectangle(3, 3, [2.0, 0.0, 0.0]),
    "complex zero": rectangle(3, 3, [2.0, 1.0, 0.0], True),
    "tall and dependent": rectangle(4, 2, [2.0, 0.0]),
    "ones": np.ones((3, 2)),
    "zeros": np.zeros((3, 2)),
}


def of_factors(f: Callable, full: bool = False) -> Callable:
    def g(x):
        u, s, vh = LA.svd(x, full_matrices=full)
        return total(f(u[:, : s.size], s, vh[: s.size]))

    return g


@pytest.mark.parametrize("full", [False, True])
def test_singular_values(full):
    samples = {**SINGULAR, **DEFICIENT}
    polar, exp = (lambda u, s, vh: u @ vh), (lambda u, s, vh: u * np.exp(s) @ vh)
    check_each((n, lambda x=x: check(of_factors(polar, full), x, False)) for n, x in SINGULAR.items())
    check_each((n, lambda x=x: check(of_factors(polar, full), x, True)) for n, x in DEFICIENT.items())
    check_each((n, lambda x=x: check(of_factors(exp, full), x, True)) for n, x in samples.items())
    again = lambda u, s, vh: u * s @ vh  # noqa: E731

    def residual(x):
        u, s, vh = LA.svd(x, full_matrices=full)
        return np.sum(np.abs(again(u[:, : s.size], s, vh[: s.size]) - x) ** 2)

    check_each((n, lambda x=x: check(residual, x, False)) for n, x in samples.items())
    check_each((n, lambda x=x: check(of_factors(again, full), x, True)) for n, x in DEFICIENT.items())
    check(of_factors(lambda u, s, vh: u[:, :1] * s[:1] @ vh[:1], full), DEFICIENT["ones"], False)
    check(of_factors(again, full), np.diag([2.0, 1.0, 0.0]), False)


# ---------------------------------------------------------------- ways out


def test_functions_of_matrices_at_ties():
    t = C[:3, :3]
    for x in (np.eye(3), np.diag([1.0, 1.0, 2.0]), with_values([1.0, 1.0, 3.0])):
        for f, g in ((linalg.expm, linalg.logm), (lambda x: x @ x, linalg.sqrtm)):
            np.testing.assert_allclose(f(g(x)), x, atol=1e-12)
            np.testing.assert_allclose(md.jvp(lambda x, f=f, g=g: f(g(x)), (x,), (t,))[1], t, atol=1e-10)
        md.testing.check_grads(lambda x: linalg.polar(x)[0], (x,), order=2)
        md.testing.check_grads(lambda x: linalg.matrix_function(np.exp, np.exp, x), (x,), order=2)


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-10, 1e-5, 1e-2])
def test_divided_differences_do_not_cancel(gap):
    x, t, u = np.diag([1.0, 1.0 + gap, 2.0, 1.0 - gap]), hermitian(C), hermitian(C @ C)
    f = lambda x: linalg.matrix_function(np.exp, np.exp, x)  # noqa: E731
    np.testing.assert_allclose(f(x), linalg.expm(x), rtol=1e-13)
    np.testing.assert_allclose(md.jvp(f, (x,), (t,))[1], scipy.linalg.expm_frechet(x, t)[1], rtol=1e-12)
    second = [md.jvp(lambda x, f=f: md.jvp(f, (x,), (t,))[1], (x,), (u,))[1] for f in (f, linalg.expm)]
    np.testing.assert_allclose(*second, rtol=1e-10, atol=1e-11)
    hessians = [md.hessian(lambda x, f=f: np.sum(u * f(hermitian(x))))(x) for f in (f, linalg.expm)]
    np.testing.assert_allclose(*hessians, rtol=1e-10, atol=1e-11)


def test_functions_of_stacks_and_complex_matrices():
    f = lambda x: linalg.matrix_function(np.log, lambda w: 1 / w, x)  # noqa: E731
    stack = np.stack([np.eye(3), with_values([1.0, 1.0, 2.0]), with_values([1.0, 2.0, 3.0])])
    expected = np.stack([scipy.linalg.logm(x) for x in stack])
    for g in (f, md.vmap(f), md.jit(f)):
        np.testing.assert_allclose(g(stack), expected, atol=1e-13)
    md.testing.check_grads(f, (with_values([1.0, 1.0, 2.0], True),), order=2)
    with pytest.raises(TypeError, match="has first and second derivatives only"):
        md.grad(md.grad(md.grad(lambda t: np.sum(f(np.eye(2) * t)))))(2.0)
    with pytest.raises(TypeError, match="closes over t, a traced value of type"):
        md.grad(lambda t: np.sum(linalg.matrix_function(lambda w: t * w, lambda w: t, np.eye(2))))(2.0)


def test_real_roots_and_logarithms():
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    for f in (linalg.sqrtm, linalg.logm):
        plain = getattr(scipy.linalg, f.__name__)
        for x in (np.eye(2), turn, -np.eye(2)):
            assert f(x).dtype == plain(x).dtype == md.jvp(f, (x,), (x,))[0].dtype
            np.testing.assert_allclose(f(x), plain(x), atol=1e-14)
        assert f(np.eye(2, dtype="f4")).dtype == np.float32
        assert md.jit(f)(turn).dtype == float
        with pytest.warns(RuntimeWarning, match=f"{f.__name__} of a real matrix has no real value.*astype"):
            assert np.isnan(md.jit(f)(-np.eye(2))).all()
        np.testing.assert_allclose(md.jit(f)(-np.eye(2) + 0j), plain(-np.eye(2)), atol=1e-14)
    np.testing.assert_allclose(md.grad(lambda x: linalg.sqrtm(x)[0, 1])(np.eye(2)), [[0, 0.5], [0, 0]])


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_polar(shape, side):
    x = RANDOM.normal(size=shape)
    for actual, expected in zip(linalg.polar(x, side), scipy.linalg.polar(x, side)):
        np.testing.assert_allclose(actual, expected, atol=1e-13)
    with pytest.warns(RuntimeWarning, match="polar: a singular value is 0"):
        assert np.isnan(md.grad(lambda x: linalg.polar(x)[0].sum())(0 * x)).all()


def test_a_side_of_polar():
    with pytest.raises(ValueError, match="polar: side must be 'right' or 'left', got 'up'"):
        linalg.polar(np.eye(2), "up")


# ---------------------------------------------------------------- conventions at 0

Z = np.zeros(2)
#: Functions whose first derivative at a point is 0 by convention, and a smooth function of the same values.
CORNERS = {
    "norm": (lambda x: LA.norm(x) ** 2, lambda x: np.sum(x * x), Z),
    "a stack of norms": (
        lambda x: np.sum(LA.norm(x, axis=1) ** 2),
        lambda x: np.sum(x * x),
        np.ones((2, 2)) * [[0], [1]],
    ),
    "norm 3": (lambda x: LA.norm(x, 3) ** 3, lambda x: np.sum(np.abs(x) ** 3), Z),
    "frobenius": (lambda x: LA.norm(x, "fro") ** 2, lambda x: np.sum(x * x), np.zeros((2, 2))),
    "spectral": (lambda x: LA.norm(x, 2) ** 2, lambda x: x[0, 0] ** 2, np.zeros((1, 2))),
    "nuclear": (lambda x: LA.norm(x, "nuc") ** 2, None, np.diag([2.0, 0.0])),
    "std": (lambda x: np.std(x) ** 2, np.var, np.ones(2)),
    "hypot": (lambda x: np.hypot(x[0], x[1]) ** 2, lambda x: np.sum(x * x), Z),
    "abs": (lambda x: np.sum(np.abs(x * (1 + 1j)) ** 2), lambda x: 2 * np.sum(x * x), Z),
    "arctan2": (lambda x: x[0] * np.arctan2(x[0], x[1]), None, Z),
    "kernel": (lambda x: np.exp(-(LA.norm(x - x[::-1]) ** 2)), lambda x: np.exp(-np.sum((x - x[::-1]) ** 2)), Z),
}


@pytest.mark.parametrize("name", CORNERS)
def test_the_derivative_of_a_convention(name):
    f, smooth, x = CORNERS[name]
    second = [md.hessian, lambda f: md.jit(md.hessian(f)), lambda f: md.jacrev(md.grad(f))]
    assert np.isfinite(md.grad(f)(x)).all()
    for derivative in second:
        with caught() as messages:
            out = derivative(f)(x)
        assert np.isnan(out).any() and messages and {m.category for m in messages} == {RuntimeWarning}
    if smooth is not None:
        assert np.isfinite(md.hessian(smooth)(x)).all()
        np.testing.assert_allclose(md.grad(f)(x), md.grad(smooth)(x), atol=1e-12)


def test_corners_warn_at_the_users_line():
    with caught() as messages:
        md.hvp(lambda x: LA.norm(x) ** 2, (Z,), (Z,))
    assert [(m.filename, "np.sum(x * x) for norm(x) ** 2" in str(m.message)) for m in messages] == [(__file__, True)]


def test_other_points_have_no_warning():
    x = np.array([3.0, -4.0])
    with caught() as messages:
        np.testing.assert_allclose(md.hessian(lambda x: LA.norm(x) ** 2)(x), 2 * np.eye(2), atol=1e-14)
        np.testing.assert_allclose(md.hessian(lambda x: np.sum(np.std(x[:, None], axis=1)))(x), np.zeros((2, 2)))
    assert not messages


def test_exported_programs_warn(tmp_path):
    """A file of NumPy alone has `warnings.warn` in place of the library's function."""
    f = of_pairs(lambda w, v: np.sum(C * (v * np.exp(w) @ v.T)))
    path = tmp_path / "gradient.py"
    md.export(md.grad(f))(I).save(path)
    program = runpy.run_path(str(path))
    assert "warnings.warn" in path.read_text()
    with caught() as messages:
        assert np.isnan(program["_program"](I)).all()
    assert "eigh: eigenvalues 0 and 1 are equal" in str(messages[0].message)
